"""Published weights on the command line: random numbers in the released layout, a tiny CLIP, MSCOCO's form, errors."""

import json
from functools import partial

import pytest
import torch
from PIL import Image
from test_oblique_topology_released import SMALL, release
from transformers import CLIPConfig, CLIPModel

from common.evaluation import coco
from oblique_topology import published

SPECIAL = {0: "[PAD]", 100: "[UNK]", 101: "[CLS]", 102: "[SEP]", 103: "[MASK]"}
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = [SPECIAL.get(number, f"[unused{number}]") for number in range(104)] + [*LETTERS, *(f"##{a}" for a in LETTERS)]
SCENES = ["data.num_test=6", "data.num_labelled=8", "data.image_size=32"]


@pytest.fixture
def vocabulary(tmp_path):
    words = [*WORDS, *(f"word{number}" for number in range(SMALL.words - len(WORDS)))]
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    return f"data.vocabulary={tmp_path / 'vocab.txt'}"


@pytest.fixture
def released(tmp_path):
    torch.manual_seed(0)
    torch.save(release(SMALL, 8, 3).state_dict(), tmp_path / "multi.pt")
    return tmp_path / "multi.pt"


def evaluated(tmp_path, monkeypatch, *arguments):
    output = tmp_path / "out.json"
    heads = [] if "clip" in arguments else ["--heads", "2,1"]
    monkeypatch.setattr("sys.argv", ["published.py", "--output", str(output), *heads, *map(str, arguments)])
    published.main()
    return json.loads(output.read_text(encoding="utf-8"))


def test_a_released_file_is_evaluated_as_a_row_is(tmp_path, monkeypatch, vocabulary, released):
    results = evaluated(tmp_path, monkeypatch, "--checkpoint", released, vocabulary, *SCENES)
    assert (results["layout"], results["geometry"]) == ("released", "oblique")
    assert results["training_data"] == "multi.pt, published"
    assert results["evaluations"].keys() >= {"imagenet", "imagenet_r", "test", "second_test", "linear_probe"}
    assert results["evaluations"]["test"]["protocol"]["num_images"] == 6
    assert results["evaluations"]["imagenet"]["protocol"]["preprocessing"]["mean"][0] == pytest.approx(0.48145466)


def test_mscocos_files_make_it_table_7(tmp_path, monkeypatch, vocabulary, released):
    images = []
    for number in range(4):
        Image.new("RGB", (32, 32), (60 * number, 0, 0)).save(tmp_path / f"{number}.jpg")
        sentences = [{"raw": "ab" * (number + 1), "sentid": 5 * number + k} for k in range(5)]
        picture = {"filename": f"{number}.jpg", "split": "test", "cocoid": number, "imgid": number}
        images.append({**picture, "sentences": sentences})
    (tmp_path / "coco.json").write_text(json.dumps({"dataset": "coco", "images": images}), encoding="utf-8")
    files = [f"coco.root={tmp_path}", "coco.test=coco.json#test", "coco.images=."]
    monkeypatch.setattr(coco, "NUM_IMAGES", 4)
    monkeypatch.setattr(coco, "results_of_parts", partial(coco.results_of_parts, fold_size=2))
    results = evaluated(tmp_path, monkeypatch, "--checkpoint", released, vocabulary, *files)
    assert results["evaluations"].keys() == {"coco_5k", "coco_1k"}
    assert results["evaluations"]["coco_5k"]["protocol"]["num_images"] == 4


def test_a_clip_of_transformers_is_evaluated_on_the_sphere(tmp_path, monkeypatch):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 49_408, "bos_token_id": 49_406, "eos_token_id": 49_407}
    vision = {**sizes, "image_size": 32, "patch_size": 16}
    torch.manual_seed(0)
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).save_pretrained(tmp_path / "clip")
    results = evaluated(tmp_path, monkeypatch, "--checkpoint", tmp_path / "clip", "--layout", "clip", *SCENES)
    assert (results["layout"], results["geometry"]) == ("clip", "sphere")
    assert 0 <= results["evaluations"]["test"]["metrics"]["i2t_recall_at_1"] <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layout", "timm"], r"layout 'timm'; expected one of: clip, released"),
        (["--checkpoint", "nowhere.pt"], r"nowhere\.pt does not exist; layout released takes a file"),
        (["coco.cxc=sits.csv"], r"coco\.cxc=sits\.csv without coco\.test, the file of the test pictures"),
        (["method.geometry=sphere"], r"method\.geometry=sphere: published weights bring their own"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, monkeypatch, vocabulary, released, arguments, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        evaluated(tmp_path, monkeypatch, "--checkpoint", released, vocabulary, *arguments)


def test_another_vocabulary_is_refused(tmp_path, monkeypatch, released):
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in WORDS), encoding="utf-8")
    with pytest.raises(ValueError, match=r"data\.vocabulary has 156 ids, the text tower of these weights 200"):
        evaluated(tmp_path, monkeypatch, "--checkpoint", released, f"data.vocabulary={tmp_path / 'vocab.txt'}")
