"""scripts/label_files.py: the two text files of a labelled set."""

import json

import numpy as np
import open_clip
import pytest
from PIL import Image
from refusals import refused
from timm.data import ImageNetInfo

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
    source = ["--source", str(prompts), "--dataset", "pets", "--order", "sorted"]
    main([str(labelled / "pets"), *source])
    few = [str(labelled / "few_pets"), *source, "--among", str(labelled / "pets")]
    main(few)
    sets = open_labelled_sets(labelled)
    assert sets["pets"].class_names == ["cat", "dog", "emu"]
    assert sets["few_pets"].class_names == ["cat", "emu"]
    assert sets["pets"].templates == sets["few_pets"].templates == ["a photo of a {}.", "a drawing of a {}."]
    refused((f"{CLASS_NAMES_FILE} exists already", lambda: main(few)))


def test_names_of_another_set_are_refused_and_those_of_the_folders_take_their_order(tmp_path, prompts):
    pictures(tmp_path / "cifar10" / "test", ["airplane", "automobile", "bird"])
    message = r"cifar10 has 3 class folders \(airplane, .* for 1000 names .*; expected one each\. --source folders"
    with pytest.warns(UserWarning, match="missile"), pytest.raises(ValueError, match=message):
        main([str(tmp_path / "cifar10")])
    assert not list((tmp_path / "cifar10").glob("*.txt"))
    prompts.write_text(json.dumps({"zoo": {"classes": ["Guinea pig", "emu", "boa"], "templates": ["a {}."]}}))
    pictures(tmp_path / "zoo", ["guinea_pig", "boa", "emu"])
    main([str(tmp_path / "zoo"), "--source", str(prompts), "--dataset", "zoo"])
    assert (tmp_path / "zoo" / CLASS_NAMES_FILE).read_text() == "boa\nemu\nGuinea pig\n"


def test_class_folders_can_be_the_names(tmp_path):
    pictures(tmp_path / "fruit" / "test", ["red_apple", "fig", "Banana"])
    main([str(tmp_path / "fruit"), "--source", "folders"])
    fruit = open_labelled_sets(tmp_path)["fruit"]
    assert (fruit.class_names, fruit.templates) == (["Banana", "fig", "red apple"], ["a photo of a {}."])
    refused(
        ("none has no class folders", lambda: main([str(tmp_path / "none"), "--source", "folders"])),
        ("no --dataset", lambda: main([str(tmp_path / "fruit"), "--source", "folders", "--order", "sorted"])),
    )


def test_folders_that_do_not_fit_are_named(tmp_path, prompts):
    arguments = ["--source", str(prompts), "--dataset", "pets", "--among", str(tmp_path / "all"), "--order", "sorted"]
    pictures(tmp_path / "all", ["n1", "n2"])
    pictures(tmp_path / "some", ["n1", "n9"])
    words = r"all has 2 class folders \(n1, n2, ...\) for 3 names \(cat, dog, emu"
    refused((words, lambda: main([str(tmp_path / "some"), *arguments])))
    pictures(tmp_path / "all", ["n3"])
    refused(
        ("all has no class folder 'n9'", lambda: main([str(tmp_path / "some"), *arguments])),
        ("none has no class folders", lambda: main([str(tmp_path / "none"), *arguments])),
        (f"{prompts} has no data set ''", lambda: main([str(tmp_path / "x"), "--source", str(prompts)])),
        ("--dataset pets needs --source FILE.json", lambda: main([str(tmp_path / "x"), "--dataset", "pets"])),
        (
            "--order sorted: .*x has no class folders",
            lambda: main([str(tmp_path / "x"), *arguments[:4], *arguments[6:]]),
        ),
    )
    assert not (tmp_path / "x").exists()


NAMES = list(open_clip.IMAGENET_CLASSNAMES)


def lines_of(folder):
    return (folder / CLASS_NAMES_FILE).read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    ("folders", "wanted"),
    [
        (ImageNetInfo().label_names(), NAMES),
        (["n01440764", "n07753592", "n04557648"], ["tench", "water bottle", "banana"]),  # sorted by id
    ],
)
@pytest.mark.filterwarnings("ignore:.*missile")
def test_folders_of_imagenet_get_their_names_by_wordnet_id(tmp_path, folders, wanted):
    for name in folders:
        (tmp_path / "imagenet_v2" / name).mkdir(parents=True)
    main([str(tmp_path / "imagenet_v2")])
    assert lines_of(tmp_path / "imagenet_v2") == wanted
    assert len((tmp_path / "imagenet_v2" / TEMPLATES_FILE).read_text(encoding="utf-8").splitlines()) == 80


def test_numbered_folders_have_the_labels_of_their_numbers(tmp_path, prompts):
    names = [f"animal {letter}" for letter in "abcdefghijkl"]
    prompts.write_text(json.dumps({"zoo": {"classes": names, "templates": ["a {}."]}}))
    pictures(tmp_path / "labelled" / "zoo", map(str, range(12)))
    main([str(tmp_path / "labelled" / "zoo"), "--source", str(prompts), "--dataset", "zoo"])
    zoo = open_labelled_sets(tmp_path / "labelled")["zoo"]
    assert [zoo.class_names[zoo.label(row)] for row in range(12)] == [
        names[int(zoo[row]["image_id"].partition("/")[0])] for row in range(12)
    ]


@pytest.mark.parametrize("folders", [["1", "2", "3"], ["n00000001", "n00000002", "n00000003"], ["cat", "dog", "rhea"]])
def test_without_evidence_the_first_pairs_are_shown_and_the_order_can_be_stated(tmp_path, prompts, folders):
    pictures(tmp_path / "pets", folders)
    arguments = [str(tmp_path / "pets"), "--source", str(prompts), "--dataset", "pets"]
    first_pairs = rf"{folders[0]} = 'cat', {folders[1]} = 'dog', .*give --order sorted, else"
    refused((first_pairs, lambda: main(arguments)))
    order = tmp_path / "order.txt"
    order.write_text("\n".join(folders[1:]))
    less = r"has 2 lines .* for 3 names and 3 class folders"
    refused((less, lambda: main([*arguments, "--order", str(order)])))
    order.write_text("\n".join(folders[::-1]))
    main([*arguments, "--order", str(order)])
    assert lines_of(tmp_path / "pets") == ["emu", "dog", "cat"]


def test_an_order_that_gives_two_names_to_one_folder_is_refused(tmp_path, prompts):
    pictures(tmp_path / "pets", ["1", "2"])
    (tmp_path / "order.txt").write_text("1\n2\n1\n")  # cat and emu
    arguments = ["--source", str(prompts), "--dataset", "pets", "--order", str(tmp_path / "order.txt")]
    words = r"has 3 lines .* for 3 names and 2 class folders"
    refused((words, lambda: main([str(tmp_path / "pets"), *arguments])))
