"""Configs: precedence, and error messages that name file, key, value and what is accepted."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from common.run.config import ConfigError, from_dict, load_config, load_row, override, to_dict
from oblique_topology.config import Config

FOLDER = Path(__file__).resolve().parents[1] / "oblique_topology"


def write(tmp_path, text, name="row.yaml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_later_files_win_and_overrides_win_over_files(tmp_path):
    scale = write(tmp_path, "optim: {steps: 10, warmup_steps: 3}\nmodel: {image: {width: 64}}", "scale.yaml")
    row = write(tmp_path, "optim: {steps: 20}")
    config = load_config(Config, [scale, row], ["optim.warmup_steps=4", "model.image.layers=7"])
    assert (config.optim.steps, config.optim.warmup_steps) == (20, 4)
    assert (config.model.image.width, config.model.image.layers) == (64, 7)
    assert config.optim.beta1 == 0.9


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("optim: {learning_rat: 0.1}", ["row.yaml", "optim.learning_rat", "did you mean optim.learning_rate"]),
        ("optimiser: {steps: 1}", ["row.yaml", "'optimiser'", "optim"]),
        ("optim: {steps: many}", ["row.yaml", "optim.steps = 'many'", "a whole number"]),
        ("optim: {steps: 1.5}", ["optim.steps = 1.5", "a whole number"]),
        ("optim: {steps: true}", ["optim.steps = True", "a whole number"]),
        ("optim: {steps: 0}", ["optim.steps = 0", ">= 1"]),
        ("optim: {learning_rate: 5e-4}", ["optim.learning_rate = '5e-4'", "5.0e-4"]),
        ("optim: {learning_rate: .nan}", ["optim.learning_rate = nan", "a finite number"]),
        ("optim: {learning_rate: 0.0}", ["optim.learning_rate = 0.0", "> 0"]),
        ("optim: 3", ["optim is a section, got 3"]),
        ("data: {source: web}", ["data.source = 'web'", "scenes, shards"]),
        ("data: {crop_scale: [0.5]}", ["data.crop_scale = [0.5]", "a list of 2 numbers"]),
        ("method: {geometry: torus}", ["method.geometry = 'torus'", "sphere"]),
        ("method: {logit_scale_min: 5.0, logit_scale_max: 2.0}", ["row.yaml", "logit_scale_min = 5.0", "2.0"]),
        ("run: {mixed_precision: no}", ["run.mixed_precision = False", "no, bf16"]),
        ("- a\n- b", ["row.yaml", "a mapping of sections"]),
        ("optim: {steps: 1", ["row.yaml", "not valid YAML"]),
    ],
)
def test_bad_configs_are_named(tmp_path, text, parts):
    with pytest.raises(ConfigError) as error:
        load_config(Config, [write(tmp_path, text)])
    for part in parts:
        assert part in str(error.value), str(error.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("optim.steps", "not of the form section.key=value"),
        ("optim=3", "optim is a section"),
        ("optim.stepz=3", "did you mean optim.steps"),
        ("optim.steps=[", "no YAML"),
        ("run.seed=-1", "run.seed = -1; accepted: >= 0"),
    ],
)
def test_bad_overrides_are_named(text, part):
    with pytest.raises(ConfigError, match="command line") as error:
        load_config(Config, [], [text])
    assert part in str(error.value)


def test_a_missing_file_lists_those_that_are_there():
    with pytest.raises(ConfigError, match=r"table99\.yaml: no such config file; in .*table2_clip\.yaml"):
        load_row(Config, FOLDER, FOLDER / "configs" / "table99.yaml", "demo")


def test_an_unknown_scale_lists_the_known_ones():
    with pytest.raises(ConfigError, match="'huge' is unknown; accepted: smoke, demo, photos, paper"):
        load_row(Config, FOLDER, FOLDER / "configs" / "table2_clip.yaml", "huge")


def test_null_zero_and_text_survive():
    config = load_config(
        Config, [], ["method.logit_scale_max=null", "optim.weight_decay=0", "data.root=2024", "data.train=a: b.tar"]
    )
    assert config.method.logit_scale_max is None
    assert config.optim.weight_decay == 0.0
    assert isinstance(config.optim.weight_decay, float)
    assert config.data.root == "2024"
    assert config.data.train == "a: b.tar"


def test_a_config_survives_yaml_and_back():
    config = load_config(Config, [], ["data.crop_scale=[0.5, 1]", "run.seed=3"])
    assert from_dict(Config, yaml.safe_load(yaml.safe_dump(to_dict(config))), "saved") == config


def test_override_changes_a_copy():
    config = Config()
    changed = override(config, ["run.seed=5"])
    assert (config.run.seed, changed.run.seed) == (0, 5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.run.seed = 1
