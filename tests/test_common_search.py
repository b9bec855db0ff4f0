"""make search: the grid, its widening, the rule of equal trials, what is written, and that no test set is touched."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import scripts.search
from common.base.config import ConfigError
from common.base.provenance import ROOT
from common.reproduce import search
from common.reproduce.command import SEARCH_SEEDS, reproduce_main
from common.reproduce.rows import Job
from common.reproduce.search import Axis, Trial, axes_of, best_of, equivalent, grid, write_search
from common.run.log import read_log
from contrastive_basics.reproduce import EVERY_ROW
from geomm.reproduce import CODE as GEOMM
from geomm.reproduce import EVERY_ROW as GEOMM_ROWS

RATE = "optim.learning_rate"


def job_of(row: str) -> Job:
    return Job(EVERY_ROW.of(f"{row}.yaml"), f"{row}.yaml", "smoke", 0, (), Path("runs"))


def searched_of(rows, *texts: str) -> search.Searched:
    return search.run_search({row: job_of(row) for row in rows}, axes_of(texts)[0])


@pytest.fixture
def scored(monkeypatch):
    """Replaces training by a score: (row, values of the settings) -> mean recall. Returns the jobs that ran."""
    jobs_run = []

    def use(score):
        def run(jobs):
            jobs_run.extend(jobs)
            return {job: found_of(job) for job in jobs}

        def found_of(job):
            values = dict(text.split("=", 1) for text in job.settings)
            value = score(Path(job.row).stem, {key: float(number) for key, number in values.items()})
            if value is None:
                return None
            metrics = {"scenes/val": {"mean_recall": value + 0.001 * (job.seed - SEARCH_SEEDS[0])}}
            return SimpleNamespace(validation=metrics, files=SimpleNamespace(folder="run"))

        monkeypatch.setattr(search, "_run", run)
        return jobs_run

    return use


def peak_at(*optima: float):
    """Scores that fall with the distance from an optimum on the log scale, by the row's place."""
    rows = ("table1_ours", "beyond_sigmoid")
    return lambda row, values: 0.9 - abs(math.log10(values[RATE] / optima[rows.index(row)])) / 10


def test_a_best_value_at_the_edge_widens_the_grid_of_all_rows_by_its_ratio(scored):
    jobs = scored(peak_at(1e-3, 3e-2))  # the first row's optimum lies in the grid, the second row's beyond it
    searched = searched_of(("table1_ours", "beyond_sigmoid"), f"{RATE}=3e-4,1e-3,3e-3")
    assert [axis.values for axis in searched.axes] == [("3e-4", "1e-3", "3e-3", "0.009", "0.027")]
    assert best_of(searched.trials["table1_ours"]).settings == (f"{RATE}=1e-3",)
    assert best_of(searched.trials["beyond_sigmoid"]).settings == (f"{RATE}=0.027",)
    assert searched.notes == (f"beyond_sigmoid: its best {RATE} lies at the high edge of the grid",)
    # as many trials for one row as for the other, each setting with each seed once
    assert len(jobs) == len(set(jobs)) == 2 * 5 * len(SEARCH_SEEDS)
    for row in ("table1_ours", "beyond_sigmoid"):
        tried = {(job.settings, job.seed) for job in jobs if job.row == f"{row}.yaml"}
        assert tried == {(chosen, seed) for chosen in grid(searched.axes) for seed in SEARCH_SEEDS}
        assert [trial.settings for trial in searched.trials[row]] == grid(searched.axes)


def test_a_widened_value_that_a_row_refuses_is_noted(scored):
    scored(lambda row, values: values["optim.beta1"])
    searched = searched_of(("table1_ours",), "optim.beta1=0.5,0.9")
    assert searched.axes[0].values == ("0.5", "0.9")
    assert "optim.beta1: the grid could not grow at its high edge" in searched.notes[0]


def test_a_widened_value_that_another_setting_forbids_is_noted(scored):
    scored(lambda row, values: -values[RATE])
    final = "optim.final_learning_rate"
    searched = searched_of(("table1_ours",), f"{RATE}=3e-4,1e-3", f"{final}=1e-4,3e-4")
    assert [axis.values[0] for axis in searched.axes if axis.key == RATE] == ["3e-4"]
    assert any(note.startswith(f"{RATE}: the grid could not grow at its low edge: ") for note in searched.notes)


@pytest.mark.parametrize(
    ("setting", "sign", "values"),
    [
        ("optim.steps=3,4", 1, ("3", "4", "5", "6")),
        ("optim.weight_decay=1,2", -1, ("0.25", "0.5", "1", "2")),  # a real number, however it is typed
        ("optim.weight_decay=0,1", -1, ("0", "1")),
    ],
)
def test_a_grid_grows_by_values_of_its_settings_type_or_says_that_it_cannot(scored, setting, sign, values):
    key, _, typed = setting.partition("=")
    scored(lambda row, of_trial: sign * of_trial[key])
    searched = searched_of(("table1_ours",), setting)
    assert searched.axes[0].values == values
    assert any("could not grow at its low edge, for want of a ratio" in note for note in searched.notes) == (
        values == tuple(typed.split(","))
    )


def test_only_the_axis_whose_edge_is_best_grows(scored):
    scored(lambda row, values: values[RATE] - abs(values["optim.weight_decay"] - 0.1))
    searched = searched_of(("table1_ours",), f"{RATE}=1e-3,2e-3", "optim.weight_decay=0.05,0.1,0.2")
    assert [axis.values for axis in searched.axes] == [("1e-3", "2e-3", "0.004", "0.008"), ("0.05", "0.1", "0.2")]
    assert len(searched.trials["table1_ours"]) == 12


def test_a_diverged_run_is_a_trial_and_never_chosen(scored):
    scored(lambda row, values: None if values[RATE] > 1e-3 else values[RATE])
    searched = searched_of(("table1_ours",), f"{RATE}=5e-4,1e-3,2e-3")
    assert best_of(searched.trials["table1_ours"]).settings == (f"{RATE}=1e-3",)
    assert searched.trials["table1_ours"][2].values == (None, None, None)
    assert searched.axes[0].values == ("5e-4", "1e-3", "2e-3")


@pytest.mark.parametrize(
    ("values", "end", "is_whole", "new"),
    [
        (("1e-3", "3e-3", "1e-2"), "high", False, "0.0333"),
        (("1e-3", "3e-3", "1e-2"), "low", False, "0.000333"),
        (("100", "200"), "high", True, "400"),
        (("-20", "-10"), "low", True, "-40"),
        (("3", "4"), "low", True, "2"),
        (("1", "2"), "low", False, "0.5"),
    ],
)
def test_the_new_value_has_the_ratio_of_the_two_at_the_edge(values, end, is_whole, new):
    wider = Axis("a.b", values).widened(end, is_whole)
    assert set(wider.values) == {*values, new}
    assert list(wider.values) == sorted(wider.values, key=float)


def test_zero_has_no_ratio_and_words_have_no_edge():
    axis = Axis("a.b", ("0", "0.1"))
    assert axis.widened("low", False) == axis
    layers = Axis("a.b", ("1", "3"))  # the ratio leads to 0, another kind of tower
    assert layers.widened("low", True) == layers
    close = Axis("a.b", ("0.9990", "0.9995"))  # 0.9985 has three digits as 0.999
    assert close.widened("low", False) == close
    assert Axis("a.b", ("sphere", "oblique")).edges("sphere") == set()
    assert Axis("a.b", ("1e-2", "0.003")).edges("0.003") == {"low"}


def test_equivalent_settings_are_within_one_standard_error_of_the_best():
    random = np.random.default_rng(0)
    for _ in range(50):
        values = random.normal(0.5, 0.02, (7, 3)) + random.normal(0, 0.02, (7, 1))
        trials = [Trial((f"a.b={number}",), tuple(of_trial)) for number, of_trial in enumerate(values.tolist())]
        means = values.mean(axis=1)
        error = values[means.argmax()].std(ddof=1) / np.sqrt(3)
        expected = {(f"a.b={number}",) for number in np.flatnonzero(means >= means.max() - error)}
        assert {trial.settings for trial in equivalent(trials)} == expected
        assert best_of(trials).settings == (f"a.b={means.argmax()}",)


def test_values_are_separated_by_commas_outside_of_brackets():
    axes, fixed = axes_of(["data.crop_scale=[0.5, 1.0],[0.8, 1.0],null", "optim.steps=9", "a.b=x,y"])
    assert [(axis.key, axis.values) for axis in axes] == [
        ("data.crop_scale", ("[0.5, 1.0]", "[0.8, 1.0]", "null")),
        ("a.b", ("x", "y")),
    ]
    assert fixed == ("optim.steps=9",)


def test_a_setting_with_one_value_and_several_has_the_one_where_the_row_starts():
    (axis,), fixed = axes_of(["optim.steps=9", "optim.steps=7,6"])
    job = Job(GEOMM, "clip.yaml", "smoke", 1000, fixed, Path("runs"), (f"{axis.key}={axis.values[0]}",))
    (start,) = job.parents().values()
    assert (job.config().optim.steps, start.config().optim.steps) == (6, 9)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["optim.steps=9"], "no setting with several values"),
        (["optim.steps"], "not of the form"),
        (["optim.steps=9,9.0"], "a value twice"),
        (["optim.steps=9,8", "optim.steps=7,6"], "names a setting twice"),
        (["optim.steps=9", "optim.steps=8", "optim.warmup_steps=7,6"], "names a setting twice"),
        (["optim.steps=9,,8"], "has an empty value or an open bracket"),
        (["data.crop_scale=[0.5, 1.0"], "has an empty value or an open bracket"),
    ],
)
def test_a_grid_that_is_none_is_refused(texts, message):
    with pytest.raises(ConfigError, match=message):
        axes_of(texts)


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ("beyond_sigmoid table1_our", f"{RATE}=1,2", "did you mean table1_ours"),
        ("assigned_albef", f"{RATE}=1,2", "assigned_albef has no validation set, by which a search could choose"),
        ("table1_ours", "run.log_every=1,2", "changes no weights"),
        ("table1_ours", "optim.lr=1,2", "did you mean optim.learning_rate"),
        ("table1_ours", f"{RATE}=-1,1e-3", RATE),
        ("table1_ours", f"{RATE}=1,2 run.seed=7", "run.seed cannot be overridden"),
        ("table1_ours", "run.seed=1,2", "run.seed cannot be overridden"),  # trials would be the same runs
        ("table1_ours", f"{RATE}=1 {RATE}=2,3", f"{RATE}=1 is for what table1_ours starts from, and it starts from no"),
    ],
)
def test_a_wrong_search_trains_nothing(tmp_path, rows, settings, message):
    paper = "geomm" if rows.startswith("assigned") else "contrastive_basics"
    arguments = [paper, "--rows", rows, "--set", settings, "--scale", "smoke", "--output", str(tmp_path)]
    with pytest.raises(ConfigError, match=message):
        scripts.search.main(arguments)
    assert not (tmp_path / "runs").exists()


def test_the_command_of_a_search_has_no_path_of_this_machine(tmp_path, monkeypatch):
    commands, overrides = [], []
    monkeypatch.setattr(scripts.search, "run_search", lambda jobs, _: overrides.extend(jobs["table1_ours"].overrides))
    monkeypatch.setattr(scripts.search, "content_of", lambda _, command: sys.exit(commands.append(command)))
    settings = f"{RATE}=1e-3,3e-3 'data.labelled=/sets/a b' data.source=karpathy"
    arguments = ["contrastive_basics", "--rows", "table1_ours", "--scale", "smoke", "--set", settings, "--data", "/x"]
    with pytest.raises(SystemExit):
        scripts.search.main([*arguments, "--output", str(tmp_path)])
    places, named = " DATA=<folder>", "data.labelled=<path> data.source=karpathy"
    assert commands[0].endswith(f'SCALE=smoke{places} ROWS="table1_ours" SET="{RATE}=1e-3,3e-3 {named}"')
    assert "data.root=/x" in overrides


def test_a_search_end_to_end(tmp_path, capsys):
    settings = "model.final_layer_norm=true,false data.num_val=16 optim.steps=3 data.num_train=64"
    arguments = ["contrastive_basics", "--rows", "table1_ours", "--scale", "smoke", "--set", settings]
    arguments += ["--output", str(tmp_path)]
    scripts.search.main(arguments)
    (folder,) = (tmp_path / "results" / "contrastive_basics" / "search").iterdir()
    content = json.loads((folder / "search.json").read_text())
    assert "**Validation: no result.**" in (folder / "search.md").read_text()
    command = f'make search PAPER=contrastive_basics SCALE=smoke ROWS="table1_ours" SET="{settings}"'
    expected = {"status": "validation: no result", "seeds": [1000, 1001, 1002], "scale": "smoke", "command": command}
    assert expected.items() <= content.items()
    # each number is the mean recall of the last step's validation in the run's log; no test set was evaluated
    lines = [line for log in (tmp_path / "runs").glob("*/*/seed*/log.jsonl") for line in read_log(log)]
    recalls = [
        line["metrics"]["mean_recall"]
        for line in lines
        if line["event"] == "evaluate" and line["data"] == "scenes/val" and line["step"] == 3
    ]
    trials = [trial for row in content["rows"].values() for trial in row["trials"]]
    assert sorted(recalls) == sorted(value for trial in trials for value in trial["values"])
    assert not list((tmp_path / "runs").rglob("evaluation.json")) + list((tmp_path / "runs").rglob("hits.json"))
    assert {len(row["trials"]) for row in content["rows"].values()} == {2}
    for trial in trials:
        assert trial["mean"] == pytest.approx(np.mean(trial["values"]))
        assert trial["standard_error"] == pytest.approx(np.std(trial["values"], ddof=1) / np.sqrt(3))
    for of_row in content["rows"].values():
        assert of_row["equivalent"][0] == of_row["best"]
    # the same command finds its runs
    checkpoints = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("model.safetensors")}
    before = {path: path.read_text() for path in (tmp_path / "runs").rglob("validation.json")}
    scripts.search.main(arguments)
    assert "\ntable1_ours, seed 1000, final_layer_norm=true: found in " in capsys.readouterr().out
    again = json.loads((folder / "search.json").read_text())
    assert again | {"created": content["created"]} == content
    # of other data an earlier search stays
    of_others = json.dumps(content | {"training_data": "flickr/train, all 9"})
    (folder / "search.json").write_text(of_others)
    for _ in range(2):
        scripts.search.main(arguments)
    assert (folder / "search.json").read_text() == of_others
    first, second = sorted(path.name for path in folder.parent.iterdir())
    assert (first, second[:-6]) == (folder.name, f"{folder.name}-")
    # values that only the earlier grid had are named
    kept = content | {"grid": {"model.final_layer_norm": ["true"]}, "training_data": "flickr/train, all 9"}
    write_search(kept, tmp_path / "results", folder.name)
    assert "model.final_layer_norm=false; with these in SET" in (folder / "search.md").read_text()
    # another validation set: measured again on the weights that are there
    arguments[arguments.index(settings)] = settings.replace("num_val=16", "num_val=8")
    scripts.search.main(arguments)
    assert all(path.read_text() != text for path, text in before.items())
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("model.safetensors")} == checkpoints


def test_tables_never_use_the_seeds_of_a_search():
    with pytest.raises(ConfigError, match="at most 1000"):
        reproduce_main("", "contrastive_basics", {"table1": lambda command: []}, ["table1", "--seeds", "1001"])
    used = set()
    for file in (ROOT / "results").rglob("*.json"):
        if "search" not in file.relative_to(ROOT).parts:
            for seeds in re.findall(r'"seeds": \[([\d,\s]*)\]', file.read_text(encoding="utf-8")):
                used |= {int(seed) for seed in seeds.split(",") if seed.strip()}
    assert used
    assert not used & set(SEARCH_SEEDS)


def test_every_row_has_the_code_that_trains_it():
    assert EVERY_ROW.of("vision_moco_v2.yaml").scale_files == "scale_vision"
    assert EVERY_ROW.of("table1_ours.yaml").scale_files == "scale"
    modules = [GEOMM_ROWS.of(f"{row}.yaml").config_class.__module__ for row in ("clip", "nlvr2_albef", "vision_swav")]
    assert modules == ["geomm.config", "geomm.downstream.config", "geomm.vision.config"]


def test_make_refuses_settings_that_a_target_does_not_read():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    options = re.search(r"^OPTIONS .*\n(?:  .*\n)+", text, re.MULTILINE)[0]
    names = re.search(r"^SETTINGS = (.*) PY PYTHON VENV$", text, re.MULTILINE)[1].split()
    targets = ["rows", "report", "seeds", "compare", "map", "search", "benchmark", "reproduce", "reproduce-all"]
    for target in [*targets, "install", "test", "test-slow", "test-gpu", "lint", "format", "scenes", "device-work"]:
        recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", text, re.MULTILINE)[1].replace("$(OPTIONS)", options)
        command = ["make", "-n", "PY=python3", target, *(f"{name}=1" for name in names)]
        message = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stderr
        unread = " ".join(name for name in names if not re.search(rf"\b{name}\b", recipe))
        assert f"*** {unread} has no effect on make {target}; " in message, message


def test_make_takes_near_and_searched_from_its_command_only_and_0_is_no():
    def printed(*settings, **environment):
        command = ["make", "-n", "reproduce-table2", "PY=python3", *settings]
        ran = subprocess.run(
            command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=True
        )
        return [word for word in ran.stdout.split() if word in ("--near", "--searched", "--plan")]

    assert printed(NEAR="1", SEARCHED="1", PLAN="9") == printed("NEAR=0", "SEARCHED=0") == []
    assert printed("NEAR=1", "SEARCHED=1", "PLAN=9") == ["--plan", "--near", "--searched"]
    for word in ("NEAR=no", "SEARCHED=false", "NEAR=1 0 x"):
        with pytest.raises(subprocess.CalledProcessError) as refused:
            printed(word)
        assert f"{word}: expected 0 or 1" in refused.value.stderr
