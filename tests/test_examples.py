"""docs/library.md and examples/: what the page shows is in the files, and the files do what they say."""

import base64
import copy
import importlib
import io
import json
import math
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import transformers
from PIL import Image
from plotted import read_plotted
from processes import in_processes
from safetensors.torch import save_file
from tars import write_tar

from common.base.provenance import ROOT
from common.data.bert_tokenizer import SPECIAL_TOKENS
from common.encoders.two_towers import TwoTowers
from common.geometry import Sphere, clamp_scalars_
from common.info_nce import contrastive_loss
from common.logit_scale import LogitScale
from common.oblique import Oblique
from euclip.geometry import Elliptic, Euclidean, Hyperbolic
from oblique_topology.geometry import L2, ObliqueGeodesic

PAGE = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
# as the page's table has them
GEOMETRIES = [Sphere(), Oblique(8), ObliqueGeodesic(8), L2(), Elliptic(), Euclidean(squared=False)]
GEOMETRIES += [Euclidean(squared=True), Hyperbolic(32, squared=False), Hyperbolic(32, squared=True)]


def example(name: str):
    return importlib.import_module(f"examples.{name}")


def test_the_page_shows_what_the_examples_hold():
    files = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")}
    shown = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(shown) >= 10
    for block in shown:
        assert any(block in text for text in files.values()), block
    for name, text in files.items():
        if "__main__" in text:
            assert f"examples/{name}" in PAGE
            assert re.search(rf"-m examples\.{name.removesuffix('.py')}[ \n]", text), f"{name} names its command"
    imports = {geometry.__class__.__name__: geometry.__class__.__module__ for geometry in GEOMETRIES}
    assert all(re.search(rf"\| `{name}\(.*\)` \| `{module}` \|", PAGE) for name, module in imports.items())


# the others' gradients: tests/test_geometries.py
QUICK = ("sphere", "oblique_geodesic", "hyperbolic")


@pytest.mark.parametrize(
    "geometry",
    [geometry if geometry.name in QUICK else pytest.param(geometry, marks=pytest.mark.slow) for geometry in GEOMETRIES],
    ids=lambda geometry: geometry.name,
)
def test_the_loop_trains_with_every_geometry_from_the_start_that_the_page_names(geometry, capsys):
    squared = getattr(geometry, "squared", False)
    losses = example("loop").main(geometry, LogitScale(1.0 if squared else 1 / 0.07))
    assert losses[-1] < 0.7 * math.log(64)
    assert all(math.isfinite(loss) for loss in losses)


@pytest.mark.parametrize("name", ["around_open_clip", "around_transformers", "in_lightning"])
def test_other_libraries_models_learn_under_our_geometries(name):
    losses = example(name).main()
    assert losses[-1] < 0.7 * losses[0]


def losses_of_plain_loop(model, features, batches) -> list[float]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": parameter, "weight_decay": 0.1 if parameter.ndim >= 2 else 0.0} for parameter in trained]
    optimizer, losses = torch.optim.AdamW(groups, lr=1e-3), []
    for batch in batches:
        images, texts = features(model, *batch)
        images, texts = model.geometry.embed_image(images), model.geometry.embed_text(texts)
        loss = contrastive_loss(images, texts, model.geometry, model.logit_scale())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clamp_scalars_([*model.logit_scale.scalars(), *model.geometry.scalars()])
        losses.append(loss.item())
    return losses


def test_the_trainer_of_transformers_gives_the_losses_of_a_plain_loop(tmp_path, monkeypatch):
    module, batches = example("in_trainer"), []
    monkeypatch.setattr(module, "outputs", lambda: tmp_path)
    # it meets a bound within the first steps, so that a missing clamp changes the losses
    model = module.ContrastiveCLIP(module.tiny_clip(), Hyperbolic(32, squared=False), LogitScale(9.0, 8.99, 9.01))
    at_start = copy.deepcopy(model)
    model.register_forward_pre_hook(lambda _, __, batch: batches.append([*batch.values()]), with_kwargs=True)
    samples = [{"pixel_values": torch.randn(3, 16, 16), "input_ids": torch.randint(1, 48, (8,))} for _ in range(40)]
    sizes = {"per_device_train_batch_size": 8, "max_steps": 12, "use_cpu": True}
    losses = module.fit(model, samples, learning_rate=1e-3, weight_decay=0.1, **sizes)
    expected = losses_of_plain_loop(at_start, lambda of, *batch: module.features(of.clip, *batch), batches)
    assert losses == pytest.approx(expected, rel=0, abs=1e-6)


def test_lightning_gives_the_losses_of_a_plain_loop():
    module, batches = example("in_lightning"), ([], [])
    towers = [torch.nn.Linear(16, 32), torch.nn.Linear(16, 32)]
    model = TwoTowers(*towers, Hyperbolic(32, squared=False), LogitScale(9.0, 8.99, 9.01))
    at_start = copy.deepcopy(model)
    for tower, inputs in zip(towers, batches):
        tower.register_forward_pre_hook(lambda _, batch, inputs=inputs: inputs.append(*batch))
    samples = torch.utils.data.TensorDataset(torch.randn(320, 16), torch.randn(320, 16))
    losses = module.fit(model, samples, steps=12)
    expected = losses_of_plain_loop(
        at_start, lambda of, images, texts: (of.image_tower(images), of.text_tower(texts)), zip(*batches)
    )
    assert losses == pytest.approx(expected, rel=0, abs=1e-6)


def test_pictures_move_into_their_cones():
    missed = example("entailment").main()
    assert missed[-1] < 0.5 * missed[0]


def test_pools_of_both_distances_teach_the_same_loop():
    recalls = example("geodesic_pool").main()
    assert min(recalls.values()) > 50
    assert recalls["geodesic"] != recalls["cosine"]  # there was a graph


def test_one_sphere_is_the_cosine():
    torch.testing.assert_close(*example("class_tokens").main())


def test_two_processes_give_the_losses_of_one():
    single = example("several_processes").main()
    assert single[-1] < single[0]
    for losses in in_processes(2, example("several_processes").main):
        assert losses == pytest.approx(single, rel=1e-5)


def test_several_processes_may_be_one(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    runpy.run_path(str(ROOT / "examples" / "several_processes.py"), run_name="__main__")
    assert capsys.readouterr().out.startswith("1 processes: losses ")


def test_user_embeddings_are_ranked_and_classified():
    metrics = example("own_embeddings").main()
    assert 0.2 < metrics["i2t_recall_at_1"] < 1
    assert 0.5 < metrics["accuracy"] <= 1


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A folder of weights by name, both small and random: a network of timm's, a BERT with its vocabulary."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("weights")
    (folder / "test_efficientnet").mkdir()
    save_file(timm.create_model("test_efficientnet").state_dict(), folder / "test_efficientnet" / "model.safetensors")
    words = [*SPECIAL_TOKENS, "a", "red", "green", "blue", "picture"]
    bert = transformers.BertConfig(
        vocab_size=len(words), hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=40
    )
    transformers.BertModel(bert).save_pretrained(folder / "all-MiniLM-L6-v2")
    (folder / "all-MiniLM-L6-v2" / "vocab.txt").write_text("\n".join(words) + "\n")
    return folder


COLOURS = {"red": (220, 30, 30), "green": (30, 220, 30), "blue": (30, 30, 220)}


def painted(number: int) -> tuple[str, bytes]:
    """A colour's name, and a PNG of it with noise."""
    name, stream = list(COLOURS)[number % 3], io.BytesIO()
    noise = np.random.default_rng(number).integers(-30, 30, (40, 48, 3))
    Image.fromarray((np.array(COLOURS[name]) + noise).clip(0, 255).astype(np.uint8)).save(stream, "PNG")
    return name, stream.getvalue()


def test_geometries_are_compared_on_locked_features(weights, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("common.run.inputs.outputs", lambda: tmp_path / "outputs")
    for split, numbers in (("train", range(24)), ("test", range(24, 27))):
        samples = {}
        for number in numbers:
            name, png = painted(number)
            samples[str(number)] = {"png": png, "json": json.dumps({"captions": [f"a {name} picture", name]}).encode()}
        write_tar(tmp_path / f"{split}.tar", samples)
    arguments = ["--data", str(tmp_path), "--weights", str(weights), "--image-stem", "test_efficientnet"]
    compare, geometries = example("compare_geometries"), ["sphere", "oblique_geodesic", "hyperbolic"]
    monkeypatch.setattr(example("frozen_features"), "SIZE", 64)
    arguments += ["--output", str(tmp_path / "plots"), "--seeds", "1", "--steps", "40"]
    runs = compare.main([*arguments, "--only", *geometries])
    assert [*runs] == [(name, learned) for name in geometries for learned in (True, False)]
    assert min(compare.last_recalls(of_seeds)[0][0] for of_seeds in runs.values()) > 80  # chance level: 33
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:-1]] == geometries
    # what is drawn is what was measured, and the printed files exist
    assert lines[-1].startswith("saved: ")
    files = [Path(name) for name in lines[-1].removeprefix("saved: ").split(", ")]
    assert [file.name for file in files] == ["comparison.json", "recalls.png", "courses.png"]
    rows = json.loads(files[0].read_text())["rows"]
    points = read_plotted(files[1])
    assert len(points) == 2 * len(rows)
    for row, point in zip(rows, points):  # text to image comes first
        assert (row["geometry"], row["runs"][0]["recalls"][-1][1]) == (point["geometry"], pytest.approx(point["mean"]))
    assert {point["panel"] for point in read_plotted(files[2])} >= {"Loss", "R@1 on the test set, text to image"}
    sizes = {file.stem.partition("-")[0]: file.stat().st_size for file in tmp_path.rglob("*.npy")}
    assert sizes["train"] - sizes["test"] == 21 * 2 * timm.create_model("test_efficientnet").num_features


def test_user_photographs_are_searched_with_captions_and_without(weights, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("common.run.inputs.outputs", lambda: tmp_path / "outputs")
    search, photos = example("search_my_photos"), tmp_path / "\udcdcbung"  # Latin-1
    photos.mkdir()
    lines = ["path\tcaption"]
    for number in range(30):
        name, png = painted(number)
        (photos / f"{number}-{name}.png").write_bytes(png)
        if number < 24:
            (photos / f"{number}-{name}.txt").write_text(f"a {name} picture\n\n{name}  <i>\n")
            lines += [f"{number}-{name}.png\ta {name} picture", f"{number}-{name}.png\t{name} <i>"]
    (photos / "captions.tsv").write_text("\n".join(lines) + "\n")
    Image.fromarray(np.full((40, 48, 3), COLOURS["green"], np.uint8)).save(photos / "30-green.gif")
    (photos / "31.gif").write_bytes(b"GIF89a")
    (photos / "32.HEIC").write_bytes(b"of a telephone")
    beside = search.captioned(photos)
    assert "not searched: 1 .heic; expected: JPEG" in capsys.readouterr().out
    assert search.captioned(photos / "captions.tsv") == beside
    assert sorted(map(len, beside.values())) == [0] * 8 + [2] * 24

    arguments = [str(photos), "a red picture", "<b>blue", "--weights", str(weights), "--best", "9"]
    few = ["model.image.stem.views=centre", "data.image_size=64", "optim.steps=20", "optim.warmup_steps=0"]
    arguments += ["--output", str(tmp_path / "out"), "--set", "model.image.stem.name=test_efficientnet", *few]
    text = search.main(arguments).read_text(encoding="utf-8")
    printed = capsys.readouterr().out
    assert "cannot be read (1): " in printed
    assert "31.gif" in printed
    assert "31 pictures searched" in text
    red, blue = text.split("<h2>")[1:]
    assert re.findall(r"</b> \d+-(\w+)\.png", red) == ["red"] * 9
    assert re.findall(r"</b> \d+-(\w+)\.png", blue) == ["blue"] * 9
    assert "&lt;b&gt;blue" in blue
    assert not re.search(r"<script|https?://|<i>", text)
    pixels = np.array(Image.open(io.BytesIO(base64.b64decode(re.search(r"base64,([^\"]+)", red)[1]))))
    assert pixels.mean(axis=(0, 1)).argmax() == 0

    (run,) = (tmp_path / "out" / "runs").glob("*/*/seed0")
    embed = [str(run), "--texts", "a blue picture", "green", "--output", str(tmp_path / "embeddings.npz"), "--pictures"]
    saved = np.load(example("embed_pictures").main([*embed, *(str(path) for path in sorted(photos.glob("*-*.png")))]))
    assert "a blue picture: " in (printed := capsys.readouterr().out)
    assert "-blue.png, similarity " in printed
    np.testing.assert_allclose(saved["similarity"], saved["images"] @ saved["texts"].T, atol=1e-5)  # of the sphere
    with pytest.raises(ValueError, match=r"1 of 1 pictures cannot be read; the first: .*31\.gif: image cannot be"):
        example("embed_pictures").main([*embed, str(photos / "31.gif")])

    with monkeypatch.context() as patched:
        patched.setattr(search, "train", lambda *arguments: pytest.fail("trained again"))
        assert search.main(arguments).read_text(encoding="utf-8") == text
    # another caption of a test image: the same weights are evaluated again
    first = min(photos.glob("*.txt"))
    weights = {path: path.stat().st_mtime_ns for path in run.rglob("model.safetensors")}
    first.write_text(f"{first.read_text()}one caption more\n")
    assert "Of 7 captions" in search.main(arguments).read_text(encoding="utf-8")
    assert {path: path.stat().st_mtime_ns for path in run.rglob("model.safetensors")} == weights
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "a.png").write_bytes(painted(0)[1])
    with pytest.raises(ValueError, match=r"0 of 1 pictures have a caption; expected: a table"):
        search.main([str(tmp_path / "bare"), "red", "--output", str(tmp_path / "out")])


def test_damaged_exif_data_cost_no_thumbnail(tmp_path):
    # a width that is a text, which Pillow cannot write again, beside a turn
    entries = b"\x00\x01\x02\x00\x04\x00\x00\x00abc\x00", b"\x12\x01\x03\x00\x01\x00\x00\x00\x06\x00\x00\x00"
    exif = b"Exif\0\0II*\0\x08\0\0\0\x02\0" + b"".join(entries) + bytes(4)
    Image.new("RGB", (12, 8)).save(file := tmp_path / "photo.jpg", exif=exif)
    content = base64.b64decode(example("search_my_photos").thumbnail(file).partition(",")[2])
    assert Image.open(io.BytesIO(content)).size == (8, 12)


def test_a_table_that_loses_rows_says_so(tmp_path, capsys):
    (tmp_path / "0.png").write_bytes(painted(0)[1])
    (tmp_path / "x.tsv").write_text("0.png\ta\n1.png\tb\n")
    assert len(example("search_my_photos").captioned(tmp_path / "x.tsv")) == 1
    message = f"rows that cannot be used: 1; the first: {tmp_path / '1.png'}: missing image"
    assert capsys.readouterr().out.startswith(message)
