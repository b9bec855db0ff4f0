"""Hybrid towers: a pre-trained network's features in the place of patches (Dosovitskiy et al. 2021)."""

import json
import shutil
from collections import Counter

import pytest
import timm
import torch
from accelerate import Accelerator
from processes import as_launched, in_processes
from refusals import refused
from runs import logged, row_config
from safetensors.torch import save_file

from common.data.pairs import open_training_pairs
from common.data.transforms import CLIP_MEAN, CLIP_STD
from common.encoders.stem import Stem, StemError
from common.encoders.vision import VisionTransformer
from common.encoders.weights import Weights, fill_
from common.run.checkpoint import last_checkpoint
from common.run.folder import RunFiles
from common.run.launch import launched_accelerator
from euclip import evaluate
from euclip.train import train
from scripts import publish

SIZE = 64
SMALL = ("optim.steps=3", "optim.warmup_steps=0", "run.evaluate_every=0", "data.num_train=24", "data.num_test=8",
         "data.num_labelled=8", "optim.global_batch_size=16")  # fmt: skip
TINY = ("test_efficientnet", "test_mambaout", "test_resnet", "test_vit")  # of timm's, made for tests


def saved(name, folder):
    """A network of timm's with its head and random weights, saved in its layout."""
    torch.manual_seed(3)
    network = timm.create_model(name).eval()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(network.state_dict(), folder / "model.safetensors")
    return network


def pixels(count=3):
    return torch.rand(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))


def as_clip(pictures):
    mean, std = (torch.tensor(element).view(3, 1, 1) for element in (CLIP_MEAN, CLIP_STD))
    return (pictures - mean) / std


def hybrid(stem):
    torch.manual_seed(0)
    size = stem.image_size
    return VisionTransformer(size, size // stem.grid, 24, 2, 2, projection_dim=16, stem=stem)


@pytest.mark.parametrize("name", TINY)
def test_features_are_those_of_timm_for_pictures_normalised_its_way(name, tmp_path):
    network = saved(name, tmp_path / name)
    if name == "test_vit":
        network.set_input_size(img_size=(SIZE, SIZE))
    reference = network.pretrained_cfg
    normalised = (pixels() - torch.tensor(reference["mean"]).view(3, 1, 1)) / torch.tensor(reference["std"]).view(
        3, 1, 1
    )
    with torch.no_grad():
        wanted = network.forward_features(normalised)
    if name == "test_vit":
        wanted = wanted[:, 1:].transpose(1, 2).reshape(3, 64, 4, 4)
    if name == "test_mambaout":  # channels last
        wanted = wanted.movedim(3, 1)
    for weights in (tmp_path / name, tmp_path / name / "model.safetensors"):
        stem = Stem(name, SIZE)
        at_random = stem.fingerprint()
        stem.load_(str(weights))
        assert stem.fingerprint() != at_random
        torch.testing.assert_close(stem(as_clip(pixels())), wanted, rtol=1e-4, atol=1e-4)
        assert wanted.shape[1:] == (stem.channels, stem.grid, stem.grid)


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_a_tower_starts_from_one_whose_stem_had_pictures_of_another_size(name, tmp_path):
    saved(name, tmp_path)
    source, tower = hybrid(Stem(name, SIZE)), hybrid(Stem(name, 2 * SIZE))
    source.stem.load_(str(tmp_path))
    before = source.stem(as_clip(pixels()))
    assert {element for element, _ in tower.named_parameters()} == set(
        fill_(tower, Weights("a run", source), "model.init")
    )
    torch.testing.assert_close(source.stem(as_clip(pixels())), before, rtol=0, atol=0)
    if name == "test_vit":
        source.stem.network.set_input_size(img_size=(2 * SIZE, 2 * SIZE))
    pictures = as_clip(torch.rand(2, 3, 2 * SIZE, 2 * SIZE))
    torch.testing.assert_close(tower.stem(pictures), source.stem(pictures), rtol=1e-4, atol=1e-4)


def test_a_training_picture_loses_whole_channels_and_a_test_picture_none():
    stem = Stem("test_efficientnet", SIZE, dropout=0.3)
    tower = hybrid(stem)
    kept = torch.rand(40, stem.channels, stem.grid, stem.grid) + 1
    torch.testing.assert_close(stem.drop_channels(stem.places(kept), training=False), kept, rtol=0, atol=0)
    share = (stem.drop_channels(stem.places(kept), training=True) / kept).flatten(2)
    lost = share[..., 0] == 0
    torch.testing.assert_close(share, torch.where(lost, 0.0, 1 / 0.7)[..., None].expand_as(share))
    assert lost.float().mean().item() == pytest.approx(0.3, abs=0.05)
    assert not torch.equal(tower.train()(kept), tower(kept))
    torch.testing.assert_close(tower.eval()(kept), tower(kept), rtol=0, atol=0)


def test_a_stem_that_is_held_still_moves_in_nothing_and_one_that_trains_does():
    for trainable in (False, True):
        tower = hybrid(Stem("test_efficientnet", SIZE, trainable)).train()
        before = {name: tensor.clone() for name, tensor in tower.state_dict().items()}
        optimizer = torch.optim.SGD([element for element in tower.parameters() if element.requires_grad], lr=0.1)
        tower(as_clip(pixels(8))).square().sum().backward()
        optimizer.step()
        moved = {name for name, tensor in tower.state_dict().items() if not torch.equal(tensor, before[name])}
        assert any(name.startswith("stem.") for name in moved) == trainable
        assert "patch_embedding.weight" in moved


@pytest.mark.parametrize("name", ["mobilenetv3_small_050", "test_convnext", "test_resnet"])
def test_what_trains_in_a_stem_has_a_gradient(name):
    with torch.no_grad():  # as where weights are exported
        stem = Stem(name, SIZE, trainable=True)
    stem(pixels()).square().sum().backward()
    of_weights = dict(stem.named_parameters())
    assert [name for name, weight in of_weights.items() if weight.requires_grad != (weight.grad is not None)] == []
    unused = {name for name, weight in of_weights.items() if weight.grad is None}
    assert {name.split(".")[1] for name in unused} <= {"conv_head", "norm_head", "head"}
    assert bool(unused) == (name != "test_resnet")


def test_bfloat16_leaves_a_stem_in_float32():
    stem = Stem("test_resnet", SIZE)
    with torch.autocast("cpu", torch.bfloat16):
        actual = stem(as_clip(pixels()))
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, stem(as_clip(pixels())), rtol=0, atol=0)


def test_what_is_no_stem_is_refused(tmp_path):
    saved("test_resnet", tmp_path)
    stem, reference = Stem("test_efficientnet", SIZE), saved("test_efficientnet", tmp_path / "own").state_dict()
    save_file(
        {name: reference[name] for name in reference if name != "conv_stem.weight"}, tmp_path / "less.safetensors"
    )
    save_file({**reference, "another": torch.ones(1)}, tmp_path / "more.safetensors")
    refused(
        ("no network 'test_eficientnet'; did you mean test_efficientnet", lambda: Stem("test_eficientnet", SIZE)),
        ("they belong to another network", lambda: stem.load_(str(tmp_path))),
        (r"missing \['conv_stem.weight'\], not taken \[\]", lambda: stem.load_(str(tmp_path / "less.safetensors"))),
        (r"missing \[\], not taken \['another'\]", lambda: stem.load_(str(tmp_path / "more.safetensors"))),
        ("holds no weights; expected: a file in timm's layout", lambda: stem.load_(str(tmp_path / "nowhere"))),
        (r"on the hub: .*; expected: .*WEIGHTS=<folder>\) with test_efficientnet/model.safe", lambda: stem.load_("")),
        ("pit_ti_224 returns 1 tokens, no square grid", lambda: Stem("pit_ti_224", 224)),
        error=StemError,
    )
    places = r"makes 2 x 2 places of 64 pixels, .*; expected: patches of 32"
    refused((places, lambda: VisionTransformer(SIZE, 16, 24, 2, 2, projection_dim=16, stem=stem)))


def test_of_raw_and_averaged_weights_a_stem_takes_the_averaged_ones(tmp_path):
    raw = saved("test_efficientnet", tmp_path).state_dict()
    averaged = {name: value + 1 for name, value in raw.items()}
    torch.save({"state_dict": raw, "state_dict_ema": averaged}, tmp_path / "both.pt")
    stem = Stem("test_efficientnet", SIZE, colours=(CLIP_MEAN, CLIP_STD))
    stem.load_(str(tmp_path / "both.pt"))
    assert all(torch.equal(value, averaged[name]) for name, value in stem.network.state_dict().items())


def hybrid_run(folder, weights, *overrides, resume=False, accelerator=None):
    """EuCLIP's main row at smoke scale on a stem: its losses and evaluation."""
    stem = {"name": "test_efficientnet", "weights": weights}
    settings = [f"model.image.stem.{key}={value}" for key, value in stem.items()]
    settings += ["data.image_size=64", "model.patch_size=32", "run.log_every=1", *SMALL, *overrides]
    config, files = row_config("euclip", "table4_euclip", *settings), RunFiles(folder)
    train(config, open_training_pairs(config.data, 0), files, resume, accelerator or Accelerator(cpu=True), "test")
    return logged(files), json.loads(files.evaluation.read_text())["evaluations"]


def stem_of(run):
    tensors = last_checkpoint(run / "checkpoints").model_tensors()
    return {name: tensor for name, tensor in tensors.items() if ".stem." in name}


def kept_files(folder):
    """Set of pictures -> how many files hold its features."""
    return Counter(file.name.rpartition("-")[0] for file in (folder / "outputs" / "features").glob("*.npy"))


def of_one_of_two(folder):
    as_launched()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.run.inputs.outputs", lambda: folder / "outputs")
        hybrid_run(folder / "two", folder / "weights", accelerator=launched_accelerator())


def test_training_on_kept_features_is_training_on_pictures_on_two_processes_as_on_one(tmp_path, monkeypatch):
    saved("test_efficientnet", tmp_path / "weights")
    in_processes(2, of_one_of_two, tmp_path)
    assert kept_files(tmp_path)["scenes-train"] == 1
    monkeypatch.setattr("common.run.inputs.outputs", lambda: tmp_path / "own" / "outputs")
    kept, kept_evaluation = hybrid_run(tmp_path / "one", tmp_path / "weights")
    for name in ("loss", "gradient_norm"):
        of_one, of_two = (logged(RunFiles(tmp_path / run), name) for run in ("one", "two"))
        assert len(of_one) == 3
        assert of_two == pytest.approx(of_one, rel=1e-4)
    kept_sets = kept_files(tmp_path / "own")
    assert kept_sets["scenes-train"] == kept_sets["scenes-test"] == 1
    computed, evaluation = hybrid_run(tmp_path / "computed", tmp_path / "weights", "model.image.stem.cache_gb=0")
    assert kept == pytest.approx(computed, rel=2e-3)  # float16 on disk
    assert kept_evaluation.keys() == evaluation.keys()
    assert kept_evaluation["test"]["protocol"] == evaluation["test"]["protocol"]


@pytest.mark.slow
def test_a_published_hybrid_gives_the_same_numbers_without_its_weights_at_hand(tmp_path, monkeypatch):
    saved("test_efficientnet", tmp_path / "weights")
    colours = {"mean": [0.1, 0.6, 0.3], "std": [0.9, 0.2, 0.4]}
    (tmp_path / "weights" / "config.json").write_text(json.dumps({"architecture": "test_efficientnet", **colours}))
    monkeypatch.setattr("common.run.inputs.outputs", lambda: tmp_path / "outputs")
    run, folder, answer = tmp_path / "row-smoke-0123abcd" / "seed0", tmp_path / "mine", tmp_path / "answer.json"
    _, measured = hybrid_run(run, tmp_path / "weights")
    shutil.rmtree(tmp_path / "weights")
    stem = last_checkpoint(run / "checkpoints").state["config"]["model"]["image"]["stem"]
    assert {key: stem[key] for key in colours} == colours
    for main, arguments in (
        (publish.main, ["--run", run, "--licence", "mit", "--output", folder]),
        (evaluate.main, ["--checkpoint", folder, "--output", answer]),
    ):
        monkeypatch.setattr("sys.argv", ["script.py", *map(str, arguments)])
        main()
    actual = json.loads(answer.read_text())["evaluations"]
    assert actual.keys() == measured.keys()
    assert all(actual[name]["metrics"] == element["metrics"] for name, element in measured.items())


def test_a_hybrid_run_goes_on_to_the_same_losses_and_is_what_another_starts_from(tmp_path, monkeypatch):
    network = saved("test_efficientnet", tmp_path / "weights")
    monkeypatch.setattr("common.run.inputs.outputs", lambda: tmp_path / "outputs")
    often = ("run.save_every=1", "run.keep_checkpoints=3", "model.image.stem.views=mirror")
    whole, _ = hybrid_run(tmp_path / "run", tmp_path / "weights", *often)
    assert (kept_files(tmp_path)["scenes-train"], kept_files(tmp_path)["scenes-test"]) == (2, 1)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000003")
    again, _ = hybrid_run(tmp_path / "run", tmp_path / "weights", *often, resume=True)
    assert again[-1] == whole[-1]
    # whose stem has trained, and needs no weights of its own
    hybrid_run(tmp_path / "tuned", tmp_path / "weights", "model.image.stem.trainable=true")
    child, _ = hybrid_run(tmp_path / "child", "", f"model.init={tmp_path / 'tuned'}")
    assert child[0] < whole[0]
    untuned, tuned, held = (stem_of(tmp_path / name) for name in ("run", "tuned", "child"))
    assert torch.equal(untuned["image_tower.stem.network.conv_stem.weight"], network.conv_stem.weight)
    assert any(not torch.equal(untuned[name], tuned[name]) for name in tuned)
    assert all(torch.equal(held[name], tuned[name]) for name in tuned)
    assert last_checkpoint(tmp_path / "child" / "checkpoints").state["initial_weights"].keys() == {"model.init"}
    with pytest.raises(ValueError, match=r"model.image.stem.name = , in the weights test_efficientnet"):
        hybrid_run(tmp_path / "none", "", f"model.init={tmp_path / 'run'}", "model.image.stem.name=")
