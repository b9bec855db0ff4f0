"""Configs: precedence, and error messages that name file, key, value and what is accepted."""

import dataclasses
import pickle
import re
import typing
from functools import partial

import pytest
import yaml
from refusals import refused
from runs import called

from common.base.arguments import rows_of
from common.base.config import (
    SCALES,
    ConfigError,
    entry_arguments,
    from_dict,
    load_config,
    load_row,
    notes_of_row,
    override,
    row_file,
    to_dict,
)
from common.base.fields import home_expanded, settings_of
from common.base.places import ROOT
from common.base.settings import TAKEN_BY, DataConfig, MixedSet, OptimConfig
from common.base.vision_settings import VisionDataConfig
from common.tiled import KERNELS
from contrastive_basics.config import Config as BasicsConfig
from contrastive_basics.config import PublicConfig
from contrastive_basics.vision.config import VisionConfig
from euclip.config import Config as EuclipConfig
from euclip.hierarchies import HierarchyFiles
from geomm.config import Config as GeommConfig
from geomm.downstream.config import TaskConfig
from geomm.ground import RefcocoFiles
from geomm.lookalikes import SugarCrepeFiles
from oblique_topology.coco_table import CocoFiles
from oblique_topology.config import Config

FOLDER = ROOT / "oblique_topology"
TRAIN_PY = partial(entry_arguments, "", FOLDER / "train.py", Config, "table2_clip.yaml")
SCALE_FILES = sorted(ROOT.glob("*/configs/scale_*.yaml"))


def write(tmp_path, text, name="row.yaml"):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_later_files_win_and_overrides_win_over_files(tmp_path):
    scale = write(tmp_path, "optim: {steps: 10, warmup_steps: 3}\nmodel: {image: {width: 64}}", "scale.yaml")
    row = write(tmp_path, "optim: {steps: 20}")
    config = load_config(Config, [scale, row], ["optim.warmup_steps=4", "model.image.layers=7"])
    assert (config.optim.steps, config.optim.warmup_steps, config.optim.beta1) == (20, 4, 0.9)
    assert (config.model.image.width, config.model.image.layers) == (64, 7)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("optim: {learning_rat: 0.1}", ["row.yaml", "optim.learning_rat", "did you mean optim.learning_rate"]),
        ("optimiser: {steps: 1}", ["row.yaml", "'optimiser'", "optim"]),
        ("optim: {steps: many}", ["row.yaml", "optim.steps = 'many'", "a whole number"]),
        ("optim: {steps: true}", ["optim.steps = 'true'", "a whole number"]),
        ("optim: {steps: 0}", ["optim.steps = 0", ">= 1"]),
        ("optim: {steps: 1.5e0}", ["optim.steps = '1.5e0'", "a whole number"]),
        ("optim: {learning_rate: .nan}", ["optim.learning_rate = '.nan'", "a finite number"]),
        ("optim: {learning_rate: nan}", ["optim.learning_rate = nan", "a finite number"]),
        ("model: {final_layer_norm: 1}", ["model.final_layer_norm = '1'", "true or false"]),
        ("optim: {learning_rate: 0.0}", ["optim.learning_rate = 0.0", "> 0"]),
        ("optim: 3", ["optim is a section, got '3'"]),
        ("data: {num_test: 25, gallery: 10}", ["data.num_test = 25", "data.gallery = 10", "gallery=null"]),
        ("data: {source: web}", ["data.source = 'web'", "scenes, shards"]),
        ("data: {crop_scale: [0.9, 0.5]}", ["row.yaml: data.crop_scale = ", "; expected: smallest and largest share"]),
        ("data: {crop_scale: [0.5, 1.01]}", ["row.yaml: data.crop_scale = ", "; expected: smallest and largest share"]),
        ("data: {crop_scale: [0.5]}", ["data.crop_scale = ['0.5']", "a list of 2 numbers"]),
        ("data: {source: tsv, caption_column: [a, b]}", ["data.caption_column = ['a', 'b']; expected: text"]),
        ("data: {source: tsv, root: [a, b]}", ["data.root = ['a', 'b']; expected: text"]),
        ("method: {geometry: torus}", ["method.geometry = 'torus'", "sphere"]),
        ("method: {logit_scale_min: 5.0, logit_scale_max: 2.0}", ["row.yaml", "logit_scale_min = 5.0", "2.0"]),
        ("model: {image: {width: 12, heads: 5}}", ["model.image.heads = 5", "image.width = 12", "1, 2, 3, 4, 6, 12"]),
        ("model: {text: {mlp_ratio: 0.001}}", ["model.text.mlp_ratio = 0.001", "at least 0.0078"]),
        ("model: {patch_size: 7}", ["data.image_size = 48", "model.patch_size = 7", "expected: 42 or 49"]),
        ("model: {patch_size: 64}", ["data.image_size = 48", "model.patch_size = 64; expected: 64"]),
        ("model: {patch_dropout: 0.99}", ["model.patch_dropout = 0.99 leaves none of the 36", "0.0278 to 0.972"]),
        ("model: {patch_dropout: 0.01}", ["model.patch_dropout = 0.01 leaves 36 of the 36", "0, or 0.0278 to 0.972"]),
        ("optim: {steps: 5, warmup_steps: 6}", ["row.yaml", "warmup_steps = 6", "optim.steps = 5", "at most 5"]),
        (
            "optim: {warmup_steps: 0, warmup_from: 1e-5}",
            ["optim.warmup_from = 1e-05 with", "warmup_steps = 0", "expected: 0"],
        ),
        ("run: {mixed_precision: false}", ["run.mixed_precision = 'false'", "no, bf16"]),
        (
            "optim: {steps: 1}\nrun: {seed: 1}\noptim: {beta1: 0.5}",
            ["row.yaml: not valid YAML: optim occurs", "lines 1 and 3"],
        ),
        (
            "data:\n mixture:\n - {weight: 1}\n - {root: a,\n    root: b}",
            ["row.yaml: not valid YAML: root occurs", "lines 4 and 5"],
        ),
        ("optim: {steps: \xff}", ["row.yaml: optim.steps = '\xff'"]),
        ("- a\n- b", ["row.yaml", "a mapping of sections"]),
        ("# method:\n#   geometry: sphere", ["row.yaml: nothing in it sets a value", "{} for the defaults"]),
        ("optim: {steps: 1", ["row.yaml", "not valid YAML"]),
    ],
)
def test_bad_configs_are_named(tmp_path, text, parts):
    all_parts = "(?s)" + "".join(f"(?=.*{re.escape(part)})" for part in parts)
    refused((all_parts, lambda: load_config(Config, [write(tmp_path, text)])), error=ConfigError)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("optim.steps", "not of the form section.key=value"),
        ("optim=3", "optim is a section"),
        ("optim.stepz=3", "did you mean optim.steps"),
        ("optim.lr=1e-4", "did you mean optim.learning_rate?"),
        ("method.temperature=0.07", "did you mean method.logit_scale_"),
        ("optim.steps=[", "no YAML"),
        ("run.seed=-1", "run.seed = -1; expected: >= 0"),
        (f"model.image.width={10**21}", "model.image.width = 1000000000000000000000; expected: <= 65536"),
        ("optim={steps: 3}", "optim is a section, got '{steps: 3}'; expected: keys and values, as in {steps, "),
        ("optim.steps.x=3", "unknown key 'optim.steps.x'; did you mean optim.steps?"),
        ("data.mixture=[{root: a, root: b}]", "root occurs twice"),
        ("model.text.lock=-1", "model.text.lock = '-1'; expected one of: all, >= 0"),
        ("model.image.stem.views=null", "views = None; expected one of: centre, mirror, a whole number"),
        ("data.crop_scale=[a, b]", "data.crop_scale[0] = 'a'; expected: a finite number"),
        ("data.mixture=[{weight: 0}]", "data.mixture[0]: weight = 0.0; expected: > 0"),
        ("data.mixture=[{}, {trian: x}]", "data.mixture[1]: unknown key 'trian'; did you mean train?"),
        (
            "data.mixture=[a.tsv]",
            "data.mixture[0] is a section, got 'a.tsv'; expected: keys and values, as in {weight, ",
        ),
        ("data.mixture=a.tsv", "data.mixture = 'a.tsv'; expected: a list"),
        (
            "data.mixture=[{}, {source: shards, num_train: 5}]",
            "data.mixture, set 2: data.num_train = 5 has no effect with data",
        ),
        # of a network that nothing names
        ("model.image.stem.weights=my.safetensors", "'my.safetensors' has no effect with model.image.stem.name = none"),
        (
            "model.image.stem.trainable=true",
            "trainable = True has no effect with model.image.stem.name = none; expected: model.image.stem.name = a "
            "network, or the default, False",
        ),
        ("model.image.stem.views=mirror", "views = 'mirror' has no effect with model.image.stem.name"),
        ("model.text.stem.layers=3", "layers = 3 has no effect with model.text.stem.weights"),
    ],
)
def test_bad_overrides_are_named(text, part):
    refused((f"(?s)command line.*{re.escape(part)}", lambda: load_config(Config, [], [text])), error=ConfigError)


def test_a_missing_file_and_an_unknown_scale_list_those_that_are_there():
    configs = FOLDER / "configs"
    refused(
        (
            r"table99\.yaml: no such config file; in .*table2_clip\.yaml",
            lambda: load_row(Config, FOLDER, configs / "table99.yaml", "demo"),
        ),
        (
            "'huge' is unknown; expected one of: smoke, demo, photos, photos_scratch, paper",
            lambda: load_row(Config, FOLDER, configs / "table2_clip.yaml", "huge"),
        ),
        error=ConfigError,
    )


def at_a_scale(tmp_path, rows, overrides=(), row="optim: {steps: 20, warmup_steps: 2}"):
    """Of a row ablation_ob_64, whose scale's file ends in the text `rows`."""
    (tmp_path / "configs").mkdir(exist_ok=True)
    write(tmp_path, f"optim: {{steps: 10, warmup_steps: 1}}\nrun: {{seed: 1}}\n{rows}", "configs/scale_demo.yaml")
    return load_row(Config, tmp_path, write(tmp_path, row, "ablation_ob_64.yaml"), "demo", list(overrides))


def test_what_a_scale_says_of_rows_wins_over_the_row_and_a_longer_beginning_over_a_shorter_one(tmp_path):
    rows = """rows:
  ablation_ob: {optim: {steps: 40}, model: {patch_size: 8}}
  table2 ablation: {optim: {steps: 30, warmup_steps: 3, beta1: 0.5}}
  ablation: {optim: {beta1: 0.6}}
  ablation_o ob 64 ablation_ob_64_8 table2: {optim: {steps: 50}}"""
    config = at_a_scale(tmp_path, rows)
    assert (config.optim.steps, config.optim.warmup_steps, config.optim.beta1) == (40, 3, 0.6)
    assert (config.model.patch_size, config.run.seed) == (8, 1)
    assert at_a_scale(tmp_path, rows, ["optim.steps=60"]).optim.steps == 60
    assert at_a_scale(tmp_path, f"{rows}\n  ablation_ob_64: {{optim: {{steps: 70}}}}").optim.steps == 70
    assert at_a_scale(tmp_path, "").optim.steps == 20


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("row", ["table4_euclip", "b16_euclip", "table4_clip"])
def test_a_copied_row_names_what_the_scale_sets_for_the_original_alone(tmp_path, row, scale):
    folder = ROOT / "euclip"
    file, copy = folder / f"configs/{row}.yaml", tmp_path / "mine.yaml"
    copy.write_text(file.read_text())
    original = load_row(EuclipConfig, folder, file, scale)
    notes = "; ".join(notes_of_row(EuclipConfig, folder, copy, scale))
    missing = re.findall(r"(\w+\.\w+=[^\s,;]+)", notes.partition("also sets")[2])
    assert load_row(EuclipConfig, folder, copy, scale, missing) == original
    assert bool(notes) == (load_row(EuclipConfig, folder, copy, scale) != original)
    changed = re.findall(
        r"sets (\S+)=(\S+) for \w+; its own file has ([^\s;]+)",
        "; ".join(notes_of_row(EuclipConfig, folder, file, scale)),
    )
    for key, now, before in changed:
        section, name = key.split(".")
        value = getattr(getattr(original, section), name)
        assert (value, value != float(before)) == (float(now), True)
    assert bool(changed) == (row.endswith("_euclip") and scale not in ("smoke", "paper"))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            "rows: {ablation: {optim: {stepz: 1}}}",
            r"rows\.ablation: unknown key 'optim\.stepz'; did you mean optim\.steps",
        ),
        ("rows: {lit ablation: {optim: {steps: 0}}}", r"rows\.lit ablation: optim\.steps = 0; expected: >= 1"),
        ("rows: {ablation: {rows: {}}}", r"rows\.ablation: unknown key 'rows'"),
        ("rows: {ablation: {optim: 3}}", r"rows\.ablation: optim is a section, got '3'"),
        ("rows: {other: 3}", r"rows\.other is a mapping of sections, got '3'"),
        ("rows:\n  ablation:\n", r"rows\.ablation is a mapping of sections, got None"),
        ("rows:\n", "rows is a section, got None; expected: beginnings of names"),
        ("rows: [ablation]", r"rows is a section, got \['ablation'\]"),
        ("rows: {ablation: {}, ablation: {}}", "not valid YAML: ablation occurs twice, in lines 3 and 3"),
    ],
)
def test_what_a_scale_says_of_rows_in_a_wrong_way_is_named_with_file_and_place(tmp_path, rows, message):
    refused((rf"configs/scale_demo\.yaml: {message}", lambda: at_a_scale(tmp_path, rows)), error=ConfigError)


def test_only_a_scale_file_may_hold_rows(tmp_path):
    refused(
        (
            r"ablation_ob_64\.yaml: unknown key 'rows'",
            lambda: at_a_scale(tmp_path, "", row="rows: {ablation: {optim: {steps: 3}}}"),
        ),
        ("command line: unknown key 'rows'", lambda: at_a_scale(tmp_path, "", ["rows={}"])),
        (r"command line: unknown key 'rows\.ablation'", lambda: at_a_scale(tmp_path, "", ["rows.ablation={}"])),
        error=ConfigError,
    )


@pytest.mark.parametrize("file", SCALE_FILES, ids=[str(file.relative_to(ROOT)) for file in SCALE_FILES])
def test_a_scale_file_is_read_and_names_beginnings_of_rows_that_are_there(file):
    """A file of another name, and an entry with a misspelt beginning, would be passed over without a word."""
    assert file.stem.removeprefix("scale_").removeprefix("vision_") in SCALES
    names = yaml.safe_load(file.read_text(encoding="utf-8")).get("rows", {})
    words = [row.split("_") for row in rows_of(file.parents[1])]
    beginnings = {"_".join(entry[: count + 1]) for entry in words for count in range(len(entry))}
    assert all(entry.split() and set(entry.split()) <= beginnings for entry in names), f"{names.keys()}"


def test_weights_that_a_scale_names_are_those_of_a_user_on_the_hub():
    named = [re.findall(r"(?:vocabulary|weights): (\w[^\s}]*)", file.read_text("utf-8")) for file in SCALE_FILES]
    assert {name for names in named for name in names} == {"sentence-transformers/all-MiniLM-L6-v2"}


def test_numbers_and_words_are_read_as_their_field_means_them(tmp_path):
    words = {
        "optim.learning_rate": ("1e-4", 1e-4), "optim.steps": ("1e3", 1000), "run.mixed_precision": ("no", "no"),
        "run.seed": ("010", 10), "data.root": ("2024", "2024"), "data.train": ("off", "off"),
        "data.source": ("tsv", "tsv"), "data.crop_scale": ("[5e-1, 1]", (0.5, 1.0)),
        "model.final_layer_norm": ("no", False), "method.logit_scale_max": ("~", None),
        "optim.weight_decay": ("0", 0.0),
    }  # fmt: skip
    row = {}
    for key, (text, _) in words.items():
        row.setdefault(key.partition(".")[0], []).append(f"  {key.partition('.')[2]}: {text}\n")
    file = write(tmp_path, "".join(f"{section}:\n{''.join(lines)}" for section, lines in row.items()))
    overrides = [f"{key}={text}" for key, (text, _) in words.items()]
    for config in (load_config(Config, [file]), load_config(Config, [], overrides)):
        plain = to_dict(config)
        for key, (_, value) in words.items():
            section, name = key.split(".")
            assert plain[section][name] == (list(value) if isinstance(value, tuple) else value), key
            assert type(getattr(getattr(config, section), name)) is type(value), key
    assert load_config(Config, [], ["data.labelled=a: b"]).data.labelled == "a: b"


def test_a_row_is_read_by_its_name_and_a_mistyped_one_has_a_nearest(tmp_path, monkeypatch):
    file = FOLDER / "configs" / "table2_multi.yaml"
    assert {row_file(FOLDER, name) for name in ("table2_multi", "table2_multi.yaml", str(file))} == {file}
    nearest = r"table2_mutli: no such .*; did you mean table2_multi\?$"
    refused((nearest, lambda: row_file(FOLDER, "table2_mutli")), error=ConfigError)
    monkeypatch.chdir(tmp_path)
    custom_row = write(tmp_path, "", "table2_multi.yaml")
    assert row_file(FOLDER, "table2_multi.yaml").resolve() == custom_row  # a file that is there is meant


def test_a_run_has_the_whole_name_of_its_row_also_with_a_dot(tmp_path):
    row = write(tmp_path / "configs", (FOLDER / "configs" / "table2_clip.yaml").read_text(), "tau_0.07.yaml")
    write(row.parent, (FOLDER / "configs" / "scale_demo.yaml").read_text(), "scale_demo.yaml")
    main = partial(entry_arguments, "", tmp_path / "train.py", Config, "table2_clip.yaml")
    names = ("tau_0.07", "tau_0.07.yaml", row)
    assert {called(main, "--config", name)[1].row for name in names} == {"tau_0.07"}


def test_what_a_source_does_not_take_is_refused_with_those_that_do(tmp_path):
    scale = write(tmp_path, "data: {source: shards, train: '*.tar'}", "scale.yaml")
    row = write(tmp_path, "data: {caption_column: title}")
    no_effect = (
        f"^{row}, {scale}: data.caption_column = 'title' has no effect with data.source = shards; expected: "
        "data.source = tsv or hugging_face, or the default, ''$"
    )
    refused(
        (no_effect, lambda: load_config(Config, [scale, row])),
        (
            "data.train = 'x' with data.source = scenes; expected one of: train, train_crowded",
            lambda: load_config(Config, [], ["data.train=x"]),
        ),
        error=ConfigError,
    )
    assert load_config(Config, [], ["data.source=karpathy", "data.num_test=1000"]).data.num_test == 1000  # the default


def test_every_source_takes_what_the_table_says():
    values = dict.fromkeys(("val", "test", "second_test", "images", "image_column", "caption_column"), "x")
    numbers = ("min_word_count", "max_words", "num_train", "num_test", "gallery", "num_labelled", "stream_buffer")
    values |= dict.fromkeys(numbers, 9) | dict.fromkeys(("caption_noise", "ambiguity", "val_share"), 0.9)
    values |= {"num_captions": 4, "augmentation": "tcl"}
    assert set(TAKEN_BY) == set(values)
    for source in ("scenes", "shards", "karpathy", "tsv", "hugging_face"):
        taken = {name: value for name, value in values.items() if source in TAKEN_BY[name]}
        assert to_dict(DataConfig(source=source, **taken)).items() >= taken.items()
        for name in values.keys() - taken.keys():
            no_effect = f"^data.{name} = .* has no effect with data.source = {source}"
            refused((no_effect, partial(DataConfig, source=source, **{name: values[name]})))


def test_a_number_of_validation_pictures_does_not_outlive_its_source(tmp_path):
    scale = write(tmp_path, "data: {source: scenes, num_val: 20}", "scale.yaml")
    assert load_config(Config, [scale]).data.validation_size == 20
    assert load_config(Config, [scale], ["data.source=shards"]).data.validation_size is None
    assert load_config(Config, [scale], ["data.source=shards", "data.num_val=7"]).data.validation_size == 7


NO_PATHS = {
    "source", "image_column", "caption_column", "name", "row", "discriminator", "task", "caption_prefix", "part",
}  # fmt: skip
CONFIGS = [Config, BasicsConfig, PublicConfig, EuclipConfig, GeommConfig, TaskConfig, VisionConfig, RefcocoFiles,
           SugarCrepeFiles, CocoFiles, HierarchyFiles]  # fmt: skip


@pytest.mark.parametrize(
    "config_class", CONFIGS, ids=lambda config_class: f"{config_class.__module__}.{config_class.__name__}"
)
def test_every_setting_that_names_a_path_says_so(config_class):
    texts = {key: item for key, item in settings_of(config_class).items() if item.hint in (str, str | None)}
    for key, item in texts.items():
        assert item.read is home_expanded or key.rpartition(".")[2] in NO_PATHS, key


def test_the_home_folder_is_known_in_paths_and_is_no_part_of_a_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = ["data.root=~/x", "data.mixture=[{root: ~/x, train: ~/x, images: ~/x}]"]
    data = load_config(Config, [], ["data.source=hugging_face", *paths, "data.train=~draft.tsv"]).data
    one_set = [getattr(data.mixture[0], key) for key in ("root", "train", "images")]
    assert [data.root, *one_set, data.train] == [*[str(tmp_path / "x")] * 4, "~draft.tsv"]
    _, arguments = called(TRAIN_PY, "--output-dir=~/run")
    assert arguments.output_dir == tmp_path / "run"


def test_a_set_of_a_mixture_is_the_data_section_with_some_keys_replaced(tmp_path):
    row = write(
        tmp_path,
        "data:\n  source: tsv\n  root: /data\n  train: a.tsv\n  caption_column: text\n  mixture:\n"
        "    - {weight: 3}\n    - {train: b.tsv, root: b}\n    - {source: shards, root: /c, weight: 0.5}\n",
    )
    config = load_config(Config, [row])
    assert from_dict(Config, yaml.safe_load(yaml.safe_dump(to_dict(config))), "saved") == config
    common = {"source": "tsv", "root": "/data", "caption_column": "text"}
    assert [part.as_data(config.data) for part in config.data.mixture] == [
        DataConfig(train="a.tsv", **common), DataConfig(train="b.tsv", **common | {"root": "/data/b"}),
        DataConfig(source="shards", root="/c"),
    ]  # fmt: skip
    given = load_config(Config, [], ["data.mixture=[{source: tsv, train: x}, {weight: 2}]"])
    assert given.data.mixture[1].weight == 2.0


def test_what_a_tokenizer_does_not_take_is_refused_or_set_back(tmp_path):
    scale = write(tmp_path, "data: {source: shards, min_word_count: 5, max_words: 90}", "scale.yaml")
    no_effect = "data.max_words = 70 has no effect with data.tokenizer = clip_bpe; expected: data.tokenizer = words"
    set_too = ["data.tokenizer=clip_bpe", "data.max_words=70"]
    refused((no_effect, lambda: load_config(Config, [scale], set_too)), error=ConfigError)
    assert load_config(Config, [scale]).data.max_words == 90
    chosen = load_config(Config, [scale], ["data.tokenizer=clip_bpe"]).data
    assert chosen == DataConfig(source="shards", tokenizer="clip_bpe")


def test_another_source_sets_back_what_only_the_one_before_took(tmp_path):
    scale = write(tmp_path, "data: {num_train: 20, num_test: 30, image_size: 32}", "scale.yaml")
    row = write(tmp_path, "data: {crop_scale: [0.5, 0.5]}")
    chosen = load_config(Config, [scale, row], ["data.source=shards", "data.train=x.tar"])
    assert chosen.data == DataConfig(source="shards", train="x.tar", image_size=32, crop_scale=(0.5, 0.5))
    back = override(chosen, ["data.source=scenes", "data.num_test=40"])
    assert back.data == DataConfig(num_test=40, image_size=32, crop_scale=(0.5, 0.5))
    together = ["data.source=shards", "data.num_test=50"]
    refused((r"data\.num_test = 50 has no effect", lambda: load_config(Config, [scale], together)), error=ConfigError)
    assert override(chosen, ["data.source=karpathy", "data.test=x.json"]).data.train == ""  # a shard is no JSON file


def test_another_source_sets_back_the_names_of_the_one_before(tmp_path):
    text = 'data: {source: karpathy, root: d, train: x.json, val: "x.json#val", images: p, labelled: l, max_words: 9}'
    scale = write(tmp_path, text, "scale.yaml")
    kept = {"root": "d", "labelled": "l", "max_words": 9}
    expected = DataConfig(source="tsv", train="x.tsv", **kept)
    assert load_config(Config, [scale], ["data.source=tsv", "data.train=x.tsv"]).data == expected
    assert load_config(Config, [scale, write(tmp_path, "data: {source: tsv, train: x.tsv}")]).data == expected
    same = load_config(Config, [scale], ["data.source=karpathy", "data.test=y.json"]).data
    assert same == DataConfig(
        source="karpathy", train="x.json", val="x.json#val", test="y.json", images="p", **kept
    )  # the same source keeps them
    mixed = load_config(Config, [scale], ["data.source=tsv", "data.mixture=[{train: a.tsv}, {train: b.tsv}]"])
    assert override(mixed, ["data.source=scenes"]).data.mixture == ()
    named_first = write(tmp_path, "data: {train: x.tsv}", "named.yaml")
    assert load_config(Config, [named_first], ["data.source=tsv"]).data.train == "x.tsv"


@pytest.mark.parametrize("change", ["loss_bf16_product=true", "loss_kernel=triton"])
def test_what_needs_tiles_is_refused_without_them(change):
    without = rf"optim\.{change.replace('=', ' = ')} with optim\.loss_tile = 0; expected: tiles"
    refused((without, lambda: override(Config(), [f"optim.{change}"])), error=ConfigError)
    assert override(Config(), [f"optim.{change}", "optim.loss_tile=8"]).optim.tiles["tile"] == 8


def test_kernels_of_the_loss_are_those_of_the_setting():
    assert typing.get_args(typing.get_type_hints(OptimConfig)["loss_kernel"]) == KERNELS


def test_other_data_sections_have_other_sources(tmp_path):
    folders = write(tmp_path, "data: {source: folders, root: /x, train: mine}")
    config = load_config(VisionConfig, [folders], ["data.source=folders", "data.val=dev"])
    assert (config.data.train, config.data.val) == ("mine", "dev")
    scenes = write(tmp_path, "data: {source: scenes, num_train: 96, num_test: 40}", "scenes.yaml")
    cifar10 = ["data.source=cifar10", "data.root=/x"]
    assert load_config(VisionConfig, [scenes], cifar10).data == VisionDataConfig("cifar10", "/x")
    refused(
        (
            "data.num_train = 9 has no effect with data.source = folders; expected: data.source = scenes, or the def",
            lambda: load_config(VisionConfig, [folders], ["data.num_train=9"]),
        ),
        ("data.train = 'mine' has no effect", lambda: load_config(VisionConfig, [], [*cifar10, "data.train=mine"])),
        ("data.test = 'x' has no effect", lambda: load_config(VisionConfig, [scenes], ["data.test=x"])),
        error=ConfigError,
    )


@pytest.mark.parametrize(
    ("words", "resume"),
    [(["--resume"], "last"), (["--resume", "auto"], "auto")],
)
def test_resume_takes_no_override_for_its_value(words, resume):
    config, arguments = called(TRAIN_PY, *words, "optim.steps=70")
    assert (arguments.resume, config.optim.steps) == (resume, 70)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Of a user's script."""

    steps: int
    names: tuple[str, ...] = ()
    sizes: dict = dataclasses.field(default_factory=dict)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "missing key 'steps': no file sets it and it has no default"),
        (["steps=3", "names=x"], "command line: names = 'x'; expected: a list"),
        (["steps=3", "names=[a, null]"], r"command line: names\[1\] = None; expected: text"),
        (["steps=3", "sizes=x"], "command line: sizes = 'x'; expected: Input should be a valid dictionary"),
    ],
)
def test_settings_of_a_user_s_dataclass_are_checked_too(overrides, message):
    refused((f"^{message}$", lambda: load_config(Settings, [], overrides)), error=ConfigError)
    config = load_config(Settings, [], ["steps=3", "names=[a, b]", "sizes={a: 1}"])
    assert config == Settings(steps=3, names=("a", "b"), sizes={"a": "1"})


def test_a_config_that_was_read_is_the_dataclass_as_python_makes_it():
    config = load_config(Config, [], ["run.seed=5", "data.source=shards", "data.mixture=[{weight: 2}]"])
    made = Config(
        data=DataConfig(source="shards", mixture=(MixedSet(weight=2.0),)), run=dataclasses.replace(Config().run, seed=5)
    )
    assert config == made == pickle.loads(pickle.dumps(config))
    assert (hash(config), repr(config), vars(config).keys()) == (hash(made), repr(made), vars(made).keys())
    assert dataclasses.replace(config, run=Config().run) == dataclasses.replace(made, run=Config().run)


@pytest.mark.parametrize("change", ["model.image.stem.cache_gb=0", "model.image.stem.trainable=true"])
def test_views_of_a_stem_are_refused_where_no_features_are_cached(change):
    stem = ["model.image.stem.name=resnet18", "model.patch_size=8", "model.image.stem.views=mirror"]
    refused(
        ("views = mirror without cached features", lambda: load_config(Config, [], [*stem, change])), error=ConfigError
    )
    assert load_config(Config, [], stem).model.image.stem.views == "mirror"
    assert load_config(Config, [], [*stem[:2], change]).model.image.stem.views == "centre"


@pytest.mark.parametrize(("one", "other"), [("mean", "std"), ("std", "mean")])
def test_the_mean_of_a_stem_comes_with_its_standard_deviation(one, other):
    stem = ["model.image.stem.name=resnet18", "model.patch_size=8", f"model.image.stem.{one}=[0.5, 0.5, 0.5]"]
    message = rf"(?=.*stem.{one} = \[0.5, 0.5, 0.5\])(?=.*stem.{other} = null).*expected: both"
    refused((message, lambda: load_config(Config, [], stem)), error=ConfigError)
    assert load_config(Config, [], [*stem, f"model.image.stem.{other}=[0.2, 0.2, 0.2]"]).model.image.stem.std


def test_kept_features_take_no_augmentation():
    stem = ["data.source=shards", "model.image.stem.name=resnet18", "model.patch_size=8", "data.augmentation=albef"]
    cached = "data.augmentation = albef with cached features of a stem.*stem.cache_gb=0"
    refused((cached, lambda: load_config(Config, [], stem)), error=ConfigError)
    assert load_config(Config, [], [*stem, "model.image.stem.cache_gb=0"]).data.augmentation == "albef"
