"""timm's config.json beside a stem: every configuration that timm ships is read as timm reads it, or refused by key."""

import dataclasses
import json
import math

import pytest
import timm
import torch
from refusals import refused
from safetensors.torch import load_file, save_file
from test_common_stem import SIZE, as_clip, pixels, saved
from timm.data import resolve_data_config
from timm.models._hub import save_config_for_hf
from timm.models._registry import _model_pretrained_cfgs, _module_to_models

from common.encoders.stem import Stem, StemError
from common.encoders.stem_configuration import (
    CHANGES_NOTHING,
    HONOURED,
    OF_THE_FILE,
    colours_beside,
    read_configuration,
)

COLOURS = {"mean": [0.1, 0.6, 0.3], "std": [0.9, 0.2, 0.4]}


def write(folder, name, overrides=None, **of_the_file):
    """A config.json as timm writes it, with other values."""
    save_config_for_hf(timm.create_model(name), folder / "config.json")
    content = json.loads((folder / "config.json").read_text())
    content["pretrained_cfg"] |= overrides or {}
    of_the_file["model_args"] = content.get("model_args", {}) | of_the_file.get("model_args", {})
    (folder / "config.json").write_text(json.dumps(content | of_the_file))


def of_timm(folder):
    """What timm itself makes of a folder: features of pictures normalised as its configuration says."""
    network = timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=0).eval()
    data = resolve_data_config(pretrained_cfg=network.pretrained_cfg)
    mean, std = (torch.tensor(data[key]).view(3, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        return network.forward_features((pixels() - mean) / std)


def test_the_table_has_every_key_that_timm_knows_and_writes(tmp_path):
    assert {field.name for field in dataclasses.fields(timm.models.PretrainedCfg)} == HONOURED | CHANGES_NOTHING
    assert not HONOURED & CHANGES_NOTHING
    write(tmp_path, "test_vit")
    content = json.loads((tmp_path / "config.json").read_text())
    assert content.keys() <= OF_THE_FILE
    assert content["pretrained_cfg"].keys() <= HONOURED | CHANGES_NOTHING


def test_all_configurations_of_timm_have_the_colours_that_timm_gives_them(tmp_path):
    file = tmp_path / "config.json"
    assert len(_model_pretrained_cfgs) > 1000
    for number, (tagged, overrides) in enumerate(_model_pretrained_cfgs.items()):
        content, name = overrides.to_dict(), tagged.partition(".")[0]
        content = content if number % 2 else {"pretrained_cfg": content}  # the older form and that of today
        file.write_text(json.dumps(content | {"architecture": name}))
        read = timm.models.PretrainedCfg(**read_configuration(file, tagged)["pretrained_cfg"])
        wanted = resolve_data_config(pretrained_cfg=json.loads(json.dumps(overrides.to_dict())))
        assert (list(read.mean), list(read.std)) == (wanted["mean"], wanted["std"]), tagged
        assert list(read.input_size) == wanted["input_size"], tagged


def test_features_are_those_of_timm_with_the_colours_of_the_folder(tmp_path):
    name = "test_resnet"
    saved(name, tmp_path)
    write(tmp_path, name, COLOURS)
    wanted = of_timm(tmp_path)
    for weights in (tmp_path, tmp_path / "model.safetensors"):
        stem = Stem(name, SIZE)
        stem.load_(str(weights))
        features = stem(as_clip(pixels()))
        torch.testing.assert_close(features, wanted, rtol=1e-4, atol=1e-4)
        assert stem.colours == tuple(map(tuple, COLOURS.values()))
    # a run builds the network with these colours before it fills it
    assert colours_beside(name, str(tmp_path)) == stem.colours
    built = Stem(name, SIZE, colours=stem.colours)
    built.load_(str(tmp_path))
    torch.testing.assert_close(built(as_clip(pixels())), features, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("overrides", "of_the_file"),
    [
        ({"crop_pct": 0.5, "interpolation": "nearest", "crop_mode": "squash", "test_input_size": [3, 96, 96]}, {}),
        ({"num_classes": 3, "label_offset": 1, "pool_size": [1, 1], "tag": "mine", "license": "mit"}, {}),
        ({}, {"num_classes": 3, "num_features": 5, "global_pool": "max", "label_names": ["a"]}),
        ({}, {"model_args": {"drop_rate": 0.5, "in_chans": 3, "global_pool": "max"}}),
    ],
)
def test_keys_that_change_nothing_do_so_for_timm_and_here(tmp_path, overrides, of_the_file):
    name = "test_resnet"
    saved(name, tmp_path)
    stem = Stem(name, SIZE)
    stem.load_(str(tmp_path))
    plain = stem(as_clip(pixels()))
    write(tmp_path, name, overrides, **of_the_file)
    torch.testing.assert_close(of_timm(tmp_path), plain, rtol=1e-4, atol=1e-4)
    stem.load_(str(tmp_path))
    torch.testing.assert_close(stem(as_clip(pixels())), plain, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("overrides", "of_the_file", "message"),
    [
        ({"mean": None}, {}, r"mean = None; expected: three numbers"),
        ({"mean": [0.5]}, {}, r"mean = \[0.5\]; expected: three numbers"),
        ({"mean": [math.nan] * 3}, {}, r"mean = \[nan, nan, nan\]; expected: three numbers"),
        ({"std": [0.5, 0.5, 0]}, {}, r"std = \[0.5, 0.5, 0\]; expected: three numbers above 0"),
        ({"input_size": [1, 64, 64]}, {}, r"input_size = \[1, 64, 64\]; expected: \[3, height, width\]"),
        ({"new_key": 7}, {}, r"pretrained_cfg.new_key = 7 is not known"),
        ({}, {"rescale": 7}, r"config.json: rescale = 7 is not known"),
        ({}, {"architecture": "test_resnet"}, r"architecture = 'test_resnet', model.image.stem.name = test_vit"),
        ({}, {"model_args": {"in_chans": 1}}, r"model_args.in_chans = 1; expected: 3"),
        ({}, {"model_args": {"global_pool": "avg"}}, r"model_args.global_pool = 'avg'; expected: the network as"),
        ({}, {"model_args": {"pos_embed": "none"}}, r"model_args.pos_embed = 'none'; expected: the network as"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_key(tmp_path, overrides, of_the_file, message):
    saved("test_vit", tmp_path)
    write(tmp_path, "test_vit", overrides, **of_the_file)
    refused((message, lambda: Stem("test_vit", SIZE).load_(str(tmp_path))), error=StemError)


def test_stated_colours_hold_for_a_bare_file_and_must_agree_with_a_configuration(tmp_path):
    saved("test_resnet", tmp_path)
    stated = ((0.2, 0.2, 0.2), (0.5, 0.5, 0.5))
    stem = Stem("test_resnet", SIZE, colours=stated)
    stem.load_(str(tmp_path))
    assert stem.colours == stated
    usual = Stem("test_resnet", SIZE)
    usual.load_(str(tmp_path))
    assert usual.fingerprint() != stem.fingerprint()
    write(tmp_path, "test_resnet", COLOURS)
    unlike = r"model.image.stem.mean, std = \(\(0.2, .*config.json has \(\(0.1, 0.6, 0.3\)"
    refused(
        (unlike, lambda: stem.load_(str(tmp_path))),
        ("std = None; expected: three numbers above 0", lambda: Stem("test_resnet", SIZE, colours=(stated[0], None))),
        error=StemError,
    )


def test_a_bare_file_of_a_name_with_several_colours_is_asked_for_them(tmp_path):
    name = "mobilenetv4_conv_small"
    saved(name, tmp_path)
    file = (tmp_path / "model.safetensors").rename(tmp_path / "mine.safetensors")
    message = r"does not state the mean and std of its training, .*mobilenetv4_conv_small\..*mean \(0\."
    refused((message, lambda: Stem(name, SIZE).load_(str(file))), error=StemError)
    tagged = timm.list_models(f"{name}.*", pretrained=True)[-1]
    stem = Stem(tagged, SIZE)
    stem.load_(str(file))
    assert stem.colours[0] == tuple(timm.get_pretrained_cfg(tagged).mean)


@pytest.mark.parametrize(("tensor", "value"), [("bn1.running_var", math.nan), ("bn1.running_var", -1.0),
                                                ("conv1.weight", math.inf)])  # fmt: skip
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, tensor, value):
    network = saved("test_resnet", tmp_path)
    name = next(name for name in network.state_dict() if name.endswith(tensor))
    state = load_file(tmp_path / "model.safetensors")
    state[name].view(-1)[0] = value
    save_file(state, tmp_path / "model.safetensors")
    message = rf"not finite, or variances below 0: {name}"
    refused((message, lambda: Stem("test_resnet", SIZE).load_(str(tmp_path))), error=StemError)


@pytest.mark.slow
@pytest.mark.parametrize("module", sorted(_module_to_models))
def test_a_small_network_of_each_family_gives_timms_features_or_is_refused(module):
    small, large = ("tiny", "small", "nano", "atto", "_t"), ("large", "huge", "giant", "base", "xl", "7b")
    name = min(
        timm.list_models(module=module),
        key=lambda name: (not any(word in name for word in small), any(word in name for word in large), len(name)),
    )
    overrides = timm.get_pretrained_cfg(name)
    size = overrides.input_size[-1]
    with torch.device("meta"):
        millions = sum(tensor.numel() for tensor in timm.create_model(name).parameters()) / 1e6
    if size > 320 or millions > 100:
        pytest.skip(f"{name} takes {size} pixels and has {millions:.0f} million parameters")
    try:
        stem = Stem(name, size)
    except StemError:
        return
    pictures = torch.rand(1, 3, size, size)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (overrides.mean, overrides.std))
    normalised = (pictures - mean) / std
    with torch.no_grad():
        wanted = stem.network.forward_features(normalised)
        if wanted.ndim == 3 and wanted.shape[1] > 1:  # places in timm's own order
            options = {"indices": 1, "norm": module != "hiera", "intermediates_only": True, "output_fmt": "NCHW"}
            wanted = stem.network.forward_intermediates(normalised, **options)[-1]
    wanted = wanted.transpose(1, 2)[..., None] if wanted.ndim == 3 else wanted  # pit: its class token only
    if wanted.shape[1] != stem.channels:
        wanted = wanted.movedim(3, 1)
    # random weights let numbers grow without bound
    torch.testing.assert_close(stem(as_clip(pictures)), wanted, rtol=1e-3, atol=1e-3 * wanted.abs().max().item())
