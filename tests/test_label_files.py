"""scripts/label_files.py: the two text files of a labelled set."""

import json

import numpy as np
import pytest
from PIL import Image

from common.data.labelled import CLASS_NAMES_FILE, TEMPLATES_FILE, open_labelled_sets
from scripts.label_files import main


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.json"
    content = {"pets": {"classes": ["cat", "dog", "emu"], "templates": ["a photo of a {}.", "a drawing of a {c}."]}}
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def pictures(root, folders):
    for folder in folders:
        (root / folder).mkdir(parents=True)
        Image.fromarray(np.zeros((4, 4, 3), dtype=np.uint8)).save(root / folder / "a.png")


def test_a_set_with_its_files_can_be_opened(tmp_path, prompts):
    labelled = tmp_path / "labelled"
    pictures(labelled / "pets" / "val", ["n1", "n2", "n3"])
    pictures(labelled / "few_pets", ["n1", "n3"])
    main([str(labelled / "pets"), "--source", str(prompts), "--dataset", "pets"])
    few = [str(labelled / "few_pets"), "--source", str(prompts), "--dataset", "pets", "--among", str(labelled / "pets")]
    main(few)
    sets = open_labelled_sets(labelled)
    assert sets["pets"].class_names == ["cat", "dog", "emu"]
    assert sets["few_pets"].class_names == ["cat", "emu"]
    assert sets["pets"].templates == sets["few_pets"].templates == ["a photo of a {}.", "a drawing of a {}."]
    with pytest.raises(ValueError, match=f"{CLASS_NAMES_FILE} is there already"):
        main(few)


def test_imagenets_names_and_templates_come_from_open_clip(tmp_path):
    pytest.importorskip("open_clip")
    with pytest.warns(UserWarning, match="missile"):
        main([str(tmp_path / "imagenet")])
    lines = {
        name: (tmp_path / "imagenet" / name).read_text(encoding="utf-8") for name in (CLASS_NAMES_FILE, TEMPLATES_FILE)
    }
    assert [text.count("\n") for text in lines.values()] == [1000, 80]
    assert lines[CLASS_NAMES_FILE].startswith("tench\n")


def test_names_of_another_set_are_refused_and_those_of_the_folders_take_their_order(tmp_path, prompts):
    pictures(tmp_path / "cifar10" / "test", ["airplane", "automobile", "bird"])
    message = r"cifar10 has 3 class folders \(airplane, .* for 1000 names \(tench, .*; accepted: one each"
    with pytest.warns(UserWarning, match="missile"), pytest.raises(ValueError, match=message):
        main([str(tmp_path / "cifar10")])
    assert not list((tmp_path / "cifar10").glob("*.txt"))
    prompts.write_text(json.dumps({"zoo": {"classes": ["Guinea pig", "emu", "boa"], "templates": ["a {}."]}}))
    pictures(tmp_path / "zoo", ["guinea_pig", "boa", "emu"])
    main([str(tmp_path / "zoo"), "--source", str(prompts), "--dataset", "zoo"])
    assert (tmp_path / "zoo" / CLASS_NAMES_FILE).read_text() == "boa\nemu\nGuinea pig\n"


def test_folders_that_do_not_fit_are_named(tmp_path, prompts):
    arguments = ["--source", str(prompts), "--dataset", "pets", "--among", str(tmp_path / "all")]
    pictures(tmp_path / "all", ["n1", "n2"])
    pictures(tmp_path / "some", ["n1", "n9"])
    with pytest.raises(ValueError, match=r"all has 2 class folders \(n1, n2, ...\) for 3 names \(cat, dog, emu"):
        main([str(tmp_path / "some"), *arguments])
    pictures(tmp_path / "all", ["n3"])
    with pytest.raises(ValueError, match="all has no class folder 'n9'"):
        main([str(tmp_path / "some"), *arguments])
    with pytest.raises(ValueError, match="none has no class folders"):
        main([str(tmp_path / "none"), *arguments])
    with pytest.raises(ValueError, match=f"{prompts} has no data set ''"):
        main([str(tmp_path / "x"), "--source", str(prompts)])
