"""One table of a run and of weights from elsewhere: the numbers of each by itself, and what is refused."""

import csv
import json
from functools import partial
from types import SimpleNamespace

import open_clip
import pytest
import torch
import yaml
from PIL import Image
from refusals import refused
from runs import called, row_config, trained
from safetensors.torch import save_file

from common.base.config import ConfigError
from common.base.places import ROOT
from common.evaluation.protocol import HEADLINES
from common.run.evaluation import save_answer
from euclip import published
from scripts import evaluate, evaluate_table
from scripts.evaluate_table import Number, table_text

SMALL = ("data.num_test=8", "data.num_labelled=8", "run.num_workers=0")
TRAINED = ("optim.steps=2", "optim.warmup_steps=0", "run.evaluate_every=0", "run.save_every=1", *SMALL)
LABEL = "my_euclip/seed0"
TINY = {"width": 32, "layers": 1}


evaluated = partial(called, evaluate.main)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A smoke run of EuCLIP."""
    config = row_config("euclip", "table4_euclip", *TRAINED)
    return trained("euclip", config, tmp_path_factory.mktemp("run") / "my_euclip" / "seed0").folder


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """A folder of open_clip with random weights."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("weights") / "stranger"
    folder.mkdir()
    content = {
        "embed_dim": 16,
        "vision_cfg": {**TINY, "head_width": 16, "image_size": 32, "patch_size": 16},
        "text_cfg": {**TINY, "heads": 2, "context_length": 16, "vocab_size": 49_408},
    }
    save_file(open_clip.CLIP(**content).state_dict(), folder / "open_clip_model.safetensors")
    pixels = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "resize_mode": "shortest"}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": content, "preprocess_cfg": pixels}))
    return folder


def numbers_in(evaluation, task):
    """(data, metric) -> value of the evaluations of a task."""
    return {
        (result["protocol"]["data"], metric): value
        for result in evaluation["evaluations"].values()
        for metric, value in result["metrics"].items()
        if result["protocol"]["task"] == task
    }


def test_a_run_and_a_stranger_have_the_numbers_that_each_has_by_itself(run, stranger, tmp_path, capsys):
    evaluated(stranger, run, "--csv", tmp_path / "table.csv")
    screen = capsys.readouterr().out
    with (tmp_path / "table.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert list(rows[0]) == ["model", "data", "metric", "value", "chance", "protocol", "n"]
    image_size = yaml.safe_load((run / "config.yaml").read_text())["data"]["image_size"]
    evaluated(stranger, "--json", f"data.image_size={image_size}", *SMALL)
    separate = {"stranger": json.loads(capsys.readouterr().out)}
    separate[LABEL] = json.loads((run / "evaluation.json").read_text())
    assert {row["model"] for row in rows} == set(separate)
    for model, evaluation in separate.items():
        for task in ("retrieval", "zero_shot"):
            table = {
                (row["data"].partition(" (")[0], row["metric"].partition("/")[2]): float(row["value"])
                for row in rows
                if row["model"] == model and row["metric"].startswith(f"{task}/")
            }
            assert table
            assert table.items() <= numbers_in(evaluation, task).items()
    # the screen has the headlines, a column for each model
    header, *lines, _ = screen.splitlines()
    assert header.split() == ["data", "metric", "unit", "chance", "stranger", LABEL]
    shown = [row for row in rows if row["metric"].partition("/")[2] in HEADLINES]
    assert len(lines) == len({(row["data"], row["metric"]) for row in shown}) < len(shown)
    assert all(json.loads(row["protocol"])["task"] == row["metric"].partition("/")[0] for row in rows)
    assert {row["n"] for row in rows} == {"8"}


def test_numbers_share_a_line_by_protocol_and_only_shares_are_in_percent():
    recall = Number("a", "d", "retrieval/i2t_recall_at_1", 0.25, 0.01, '{"tie_rule": "low", "view": "squeeze"}', 8)
    walk = Number("a", "d", "hierarchy/walk_captions", 2.75, "", '{"chains": "all"}', "")
    others = [number._replace(model="b", value=number.value / 2) for number in (recall, walk)]
    table = [line.split() for line in table_text([recall, walk, *others]).splitlines()]
    assert table[1:] == [
        ["d", "retrieval/i2t_recall_at_1", "percent", "1.0", "25.0", "12.5"],
        ["d", "hierarchy/walk_captions", "captions", "2.75", "1.38"],
    ]
    lost = recall._replace(protocol='{"tie_rule": "low", "view": "squeeze", "unreadable_images": 3}')
    assert table_text([lost]).splitlines()[1].endswith("25.0  left out: 3 broken or surplus files or rows")
    resized = others[0]._replace(protocol='{"tie_rule": "low", "view": "squeeze", "preprocessing": {"size": 8}}')
    assert len(table_text([recall, resized]).splitlines()) == 2
    other_protocol = others[0]._replace(protocol='{"tie_rule": "low", "view": "crop", "preprocessing": {"size": 8}}')
    lines = table_text([recall, other_protocol]).splitlines()[1:]
    assert [line.split()[-3:] for line in lines] == [["25.0", "view", '"squeeze"'], ["12.5", "view", '"crop"']]


def test_the_other_tasks_have_numbers_of_both(run, stranger, capsys):
    evaluated(run, stranger, "--tasks", "probe,knn,hierarchy", "--json")
    numbers = json.loads(capsys.readouterr().out)
    for model in ("stranger", LABEL):
        metrics = {number["metric"]: number for number in numbers if number["model"] == model}
        for metric in ("linear_probe/acc1", "knn/acc1", "hierarchy/generic_nearer"):
            assert 0 <= metrics[metric]["value"] <= 1
            assert 0 < metrics[metric]["chance"] <= 0.5
        # only EuCLIP has cones
        assert ("hierarchy/text_inside" in metrics) == (model != "stranger")


def test_the_label_of_a_run_says_where_it_stands_if_it_is_not_finished(run, capsys):
    evaluated(run, run / "checkpoints" / "step-00000001", "--tasks", "retrieval", "--json")
    labels = {number["model"] for number in json.loads(capsys.readouterr().out)}
    assert labels == {LABEL, "checkpoints/step-00000001 (step 1 of 2)"}


def test_the_numbers_are_printed_where_the_csv_file_cannot_be_written(tmp_path, monkeypatch, capsys):
    number = evaluate_table.Number("a", "pets", "zero_shot/acc1", 0.5, 0.1, "{}", 8)
    monkeypatch.setattr(evaluate_table, "open_evaluation_sets", lambda data: SimpleNamespace(zero_shot={}))
    model = evaluate_table.Model("a", SimpleNamespace(data=None), None, True)
    monkeypatch.setattr(evaluate_table, "open_models", lambda options, overrides: [model])
    monkeypatch.setattr(evaluate_table, "check_tasks", lambda *arguments: None)
    monkeypatch.setattr(evaluate_table, "evaluate_model", lambda *arguments: [number])
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        called(evaluate_table.main, "a", "--csv", tmp_path / "file" / "table.csv")
    assert "50.0" in capsys.readouterr().out


def test_the_hierarchy_needs_a_root(tmp_path):
    config = row_config("contrastive_basics", "table1_late_interaction", *TRAINED, "run.test=false")
    trained("contrastive_basics", config, tmp_path)
    with pytest.raises(ConfigError, match=r"--tasks hierarchy: geometry late_interaction of .* has no root"):
        evaluated(tmp_path, "--tasks", "hierarchy")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "retrievl"], "--tasks retrievl: no task 'retrievl'; expected one of: .*; did you mean retrieval"),
        (["--tasks", ""], "--tasks : no task ''; expected one of: retrieval, "),
        (
            ["--tasks", "probe", "PHOTOS"],
            "--tasks probe: the data are missing; expected .*labelled=.*imagenet_train",
        ),
        (
            ["--tasks", "zero_shot", "PHOTOS"],
            "--tasks zero_shot: the data are missing; expected data.root=<folder>",
        ),
        (["--tasks", "hierarchy", "PHOTOS"], "--tasks hierarchy: the data are missing; expected data.second_test=<sh"),
        (["--tasks", "retrieval", "STRANGER"], "a model is named twice: "),
    ],
)
def test_what_a_task_needs_is_named(words, message, stranger, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    named = {"STRANGER": [str(stranger)], "PHOTOS": photos(tmp_path)}
    with pytest.raises(ConfigError, match=message):
        evaluated(stranger, *(each for word in words for each in named.get(word, [word])))


@pytest.mark.parametrize(
    "option",
    ["--geometry=euclidean_squared", "--geometry=sphere", "--layout=open_clip", "--activation=quick_gelu", "--heads=1"],
)
def test_a_run_refuses_options_of_weights_from_elsewhere(option, run):
    message = rf"{option.partition('=')[0]} has no effect on .*my_euclip.*, a run"
    refused(
        (message, lambda: called(evaluate_table.main, run, option)),
        (message, lambda: called(published.main, "--checkpoint", run, option)),
        error=ConfigError,
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--output", "{tmp}"], "--output: {tmp} is a folder; expected a file"),
        (["--csv", "{tmp}"], "--csv: {tmp} is a folder; expected a file"),
        (["--output", "{tmp}/a.json", "--json"], "--json: not allowed with argument --output"),
    ],
)
def test_an_output_that_would_be_lost_is_refused_before_the_evaluation(more, message, run, tmp_path, capsys):
    with pytest.raises(SystemExit):
        evaluated(run, *(text.format(tmp=tmp_path) for text in more), *SMALL)
    assert message.format(tmp=tmp_path) in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def photos(folder):
    """A table of one picture, without labelled sets: the settings of its data."""
    Image.new("RGB", (32, 32)).save(folder / "a.jpg")
    (folder / "photos.tsv").write_text("filepath\ttitle\na.jpg\ta cat\n")
    return ["data.source=tsv", f"data.root={folder}", "data.test=photos.tsv"]


def test_without_labelled_sets_the_table_holds_retrieval_alone(stranger, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate_table, "hierarchy_task", lambda *_: pytest.fail("opened for another task"))
    evaluated(stranger, "--csv", tmp_path / "table.csv", *photos(tmp_path))
    metrics = [line.split(",")[2] for line in (tmp_path / "table.csv").read_text().splitlines()[1:]]
    assert metrics
    assert all(metric.startswith("retrieval/") for metric in metrics)


@pytest.mark.parametrize(
    ("words", "table"),
    [
        (["run"], False),
        (["run", "data.num_test=4"], False),
        (["run", "--output", "a.json"], False),
        (["run", "other"], True),
        (["runs/lr=1e-3/seed0", "other=2/seed0"], True),
        (["run", "--tasks", "knn"], True),
        (["run", "--csv=a.csv"], True),
    ],
)
def test_several_models_or_tasks_give_a_table(words, table):
    assert evaluate.is_table(words) is table


def test_no_evaluation_replaces_that_of_other_heads_another_geometry_or_an_earlier_step(tmp_path, monkeypatch):
    monkeypatch.setattr("common.run.evaluation.outputs", lambda: tmp_path)
    read = {"layout": "open_clip", "geometry": "sphere", "heads": [2, 2], "step": 6}
    for changed in ({}, {"heads": [1, 2]}, {"geometry": "euclidean"}, {"step": 5}, {"layout": "meru"}, {}):
        content = {"paper": "euclip", "training_data": "x.pt", "evaluations": {}, **read, **changed}
        save_answer(content, {}, "x.pt", None)
    assert len(list((tmp_path / "evaluations" / "euclip").glob("x.pt-*_hits.json"))) == 5


def test_an_evaluation_is_printed_where_its_file_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    number = {"metrics": {"acc1": 0.625}, "chance": {}, "protocol": {"data": "pets", "fingerprint": "0a1b2c3d"}}
    content = {"paper": "euclip", "step": 6, "training_data": "x.pt", "evaluations": {"pets": number}}
    with pytest.raises(OSError):
        save_answer(content, {}, "x.pt", tmp_path / "file" / "answer.json")
    assert "pets: acc 62.5" in capsys.readouterr().out
