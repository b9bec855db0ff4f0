"""scripts/compare.py: seeds are one line, unlike protocols share no column, differences are paired over test images."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import yaml
from runs import called, row_config, trained
from scipy import stats

from common.base.config import ConfigError
from common.base.files import write_json
from common.base.provenance import hash_of
from common.report.table import from_json, read_table, to_json
from scripts import compare
from scripts.publish import publish

NUM_IMAGES = 60


def evaluation(hits, **protocol):
    """What an evaluation's two files hold: of a labelled set, one hit or miss per picture."""
    protocol_of_set = {"task": "zero_shot", "data": "pets", "fingerprint": "0123456789", "num_images": len(hits)}
    protocol_of_set |= {"preprocessing": {"size": 48}, **protocol}
    result = {"metrics": {"acc1": float(np.mean(hits))}, "chance": {"acc1": 0.5}, "protocol": protocol_of_set}
    facts = {"paper": "euclip", "step": 9, "training_data": "photos, published", "training_revision": "abc"}
    facts |= {"hardware": "a CPU", "evaluation_code": {"a.py": "code", "b.py": "only here"}}
    return {**facts, "evaluations": {"pets": result}}, {"pets": {"acc1": [[float(hit)] for hit in hits]}}


def write_run(folder, seed, hits, row=1, facts=(), **protocol):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"method": {"row": row}, "run": {"seed": seed}}))
    content, hits_of_roles = evaluation(hits, **protocol)
    content |= {"seed": seed, "weights": None, **dict(facts)}
    write_json(folder / "evaluation.json", content | {"hash": hash_of([content, hits_of_roles])})
    write_json(folder / "hits.json", hits_of_roles)
    return folder


def compared(tmp_path, *arguments):
    called(compare.main, *arguments, "--output", tmp_path / "out")
    (file,) = (tmp_path / "out" / "comparisons").glob("*/compare.json")
    assert file.with_suffix(".png").stat().st_size > 1_000
    return read_table(file)


@pytest.fixture
def hits():
    return np.random.default_rng(0).random((4, NUM_IMAGES)) < [[0.3], [0.5], [0.5], [0.8]]


def test_seeds_are_one_line_and_published_weights_another_with_mcnemars_p_value(tmp_path, hits):
    for k, key in enumerate(("0a1b", "4e5f")):  # another seed is another folder
        write_run(tmp_path / f"mine-demo-{key}" / f"seed{k}", k, hits[k + 1])
    other = write_run(tmp_path / "other-demo-2c3d" / "seed0", 0, hits[0], row=2)
    for name, content in zip(("clip.json", "clip_hits.json"), evaluation(hits[3], preprocessing={"size": 224})):
        (tmp_path / name).write_text(json.dumps(content))
    table = compared(tmp_path, other / "evaluation.json", tmp_path / "mine-demo-*", tmp_path / "clip.json")
    assert [row.method for row in table.rows] == ["other, demo", "mine, demo", "photos, published"]
    one, mine, published = (row.ours["pets/acc1"] for row in table.rows)
    assert (one.mean, published.mean) == pytest.approx((100 * hits[0].mean(), 100 * hits[3].mean()))
    assert mine.values == pytest.approx(tuple(100 * hits[1:3].mean(axis=1)))
    assert (mine.seeds, mine.interval_kind) == ((0, 1), "95 % over seeds and test pictures")
    won, lost = (hits[3] & ~hits[0]).sum(), (hits[0] & ~hits[3]).sum()
    p = stats.binomtest(int(won), int(won + lost)).pvalue
    gain = 100 * (hits[3].mean() - hits[0].mean())
    note = next(note for note in table.notes if note.startswith("pets acc: photos, published less other, demo: "))
    assert f": {gain:+.1f} [" in note
    assert note.endswith(f"p {p:.2g}")
    assert any("preprocessing.size is 224 for photos, published, 48 for other, demo" in note for note in table.notes)


def test_seeds_in_another_precision_are_another_line(tmp_path, hits):
    for seed, precision in enumerate(("no", "no", "bf16")):
        write_run(tmp_path / f"mine-demo-{seed}a" / f"seed{seed}", seed, hits[seed], facts={"precision": precision})
    table = compared(tmp_path, *(tmp_path / f"mine-demo-{seed}a" for seed in range(3)))
    one, other = table.rows
    folders = "mine-demo-0a/seed0, mine-demo-1a/seed1"
    assert f"mine, demo is {folders}: precision no" in table.notes
    assert "mine, demo (2) is mine-demo-2a/seed2: precision bf16" in table.notes
    assert [row.ours["pets/acc1"].seeds for row in (one, other)] == [(0, 1), (2,)]


@pytest.fixture
def two_runs(tmp_path, hits):
    return [write_run(tmp_path / name / "seed0", 0, hits[0], row=name) for name in "ab"]


def test_unlike_protocols_share_no_column_and_the_note_says_why(tmp_path, two_runs, hits):
    third = write_run(tmp_path / "c" / "seed0", 0, hits[1], row="c", prompt_average="scores")
    table = compared(tmp_path, *two_runs, third)
    assert [row.method for row in table.rows] == ["a", "b"]
    assert 'pets: c shares no column with a: prompt_average is "scores", there absent' in table.notes
    with pytest.raises(ConfigError, match=r"have a number of one protocol\. pets: c shares no"):
        compared(tmp_path, two_runs[0], third)
    other = json.loads((third / "evaluation.json").read_text())
    other["evaluations"] = {"cars": other["evaluations"]["pets"]}
    (tmp_path / "cars.json").write_text(json.dumps(other))
    (tmp_path / "cars_hits.json").write_text(json.dumps({"cars": {}}))
    with pytest.raises(ConfigError, match=r"of one protocol\. No test set is that of two of them"):
        compared(tmp_path, two_runs[0], tmp_path / "cars.json")


@pytest.mark.parametrize("words", [["a", "it's"], ["a", "--set", "it's"]])
def test_an_open_quote_is_named(words, tmp_path):
    option = "SET" if "--set" in words else "RUNS"
    message = f"""^{option}=it's: No closing quotation; expected quotes as in a shell, as in {option}='"a b" c'$"""
    with pytest.raises(ValueError, match=message):
        compared(tmp_path, *words)


def test_json_prints_the_table_and_nothing_else(tmp_path, two_runs, capsys):
    table = compared(tmp_path, *two_runs, "--json")
    assert from_json(capsys.readouterr().out) == from_json(to_json(replace(table, hits_file="")))


def test_the_command_of_the_table_has_its_other_data(tmp_path, two_runs, monkeypatch):
    opened = compare.opened
    monkeypatch.setattr(compare, "opened", lambda name, overrides: opened(name, ()))  # as if evaluated on them
    monkeypatch.chdir(tmp_path)
    table = compared(tmp_path, two_runs[0], "b/seed0", "--set", "data.source=shards data.root=/data/flickr8k")
    assert table.command == 'make compare RUNS="a/seed0 b/seed0" SET="data.source=shards data.root=<path>"'


def test_the_numbers_are_printed_where_no_file_can_be_written(tmp_path, two_runs, hits, capsys):
    (tmp_path / "out").write_text("a file where the folder must be")
    with pytest.raises(OSError):
        compared(tmp_path, *two_runs)
    assert f"{100 * hits[0].mean():.1f}" in capsys.readouterr().out


@pytest.mark.parametrize(("paper", "unlike"), [("euclip", True), ("geomm", False)])
def test_code_that_evaluates_is_unlike_only_within_a_paper(paper, unlike, tmp_path, two_runs, hits):
    facts = {"paper": paper, "evaluation_code": {"a.py": "other"}}
    other = write_run(tmp_path / "c" / "seed0", 0, hits[1], row="c", facts=facts)
    notes = compared(tmp_path, two_runs[0], other).notes
    assert any("different versions of the code" in note for note in notes) == unlike


@pytest.mark.usefixtures("not_evaluated")
def test_a_checkpoint_is_evaluated_now_on_the_data_that_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("common.data.pairs.ZERO_SHOT_SETS", ("imagenet",))
    settings = ["optim.steps=2", "optim.warmup_steps=0", "run.save_every=1", "run.evaluate_every=0"]
    few = ["data.num_train=16", "data.num_test=4", "data.num_labelled=4", "optim.global_batch_size=8"]
    config = row_config("contrastive_basics", "table1_ours", *settings, *few)
    files = trained("contrastive_basics", config, tmp_path / "run")
    publish(files.folder, tmp_path / "published", "cc0-1.0")
    named = files.checkpoints / "step-00000001", files.folder, tmp_path / "published"
    table = compared(tmp_path, *named, "--set", "data.num_test=6")
    assert [row.method for row in table.rows] == ["run, step 1", "run", "published"]
    assert [cell.values for cell in table.rows[2].ours.values()] == [
        cell.values for cell in table.rows[1].ours.values()
    ]
    assert {row.ours["test/i2t_recall_at_1"].full_protocol["num_images"] for row in table.rows} == {6}
    shutil.copytree(files.folder, tmp_path / "stopped")
    shutil.rmtree(tmp_path / "stopped" / "checkpoints" / "step-00000002")
    table = compared(tmp_path / "again", tmp_path / "stopped", files.folder)
    assert [row.method for row in table.rows] == ["stopped, step 1", "run"]


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (["run/seed0", "ViT-B-32.pt"], r"ViT-B-32\.pt is no run; expected .* Published weights are evaluated first"),
        (["run/seed0", "run/seed0"], r"run: seed 0 is named twice"),
        (["run/seed0"], r"RUNS names 1 model; expected at least two"),
        (["run/seed0", "torn"], r"config\.yaml is torn; expected the resolved config of a run"),
        (["run/seed0", "torn.json"], r"torn\.json is no evaluation"),
        (["run/seed0", "changed"], r"changed is no whole checkpoint"),  # it would be evaluated again
        (["run/seed0", "alone.json"], r"alone\.json is no evaluation with its hits in alone_hits\.json beside it"),
    ],
)
def test_what_cannot_be_compared_is_named(tmp_path, hits, named, message):
    write_run(tmp_path / "run" / "seed0", 0, hits[0])
    (tmp_path / "alone.json").write_text(json.dumps(evaluation(hits[0])[0]))
    (write_run(tmp_path / "torn", 0, hits[0]) / "config.yaml").write_text("method: {row")
    (tmp_path / "torn.json").write_text('{"evalu')
    changed = write_run(tmp_path / "changed", 0, hits[0]) / "evaluation.json"
    changed.write_text(changed.read_text().replace('"acc1": 0', '"acc1": 7'))
    with pytest.raises(ValueError, match=message):  # a ConfigError, of a checkpoint its own
        compared(tmp_path, *(tmp_path / name for name in named))
