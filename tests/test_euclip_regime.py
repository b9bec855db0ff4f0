"""The regime part: its test by hand, its grid and shared runs, where embeddings lie, and the part end to end."""

import math
from pathlib import Path

import pytest
import torch
from conftest import SmokeParts
from plotted import read_plotted
from runs import values_of

from common.reproduce.rows import run_row
from common.run.folder import run_files
from common.run.guards import NonFiniteLoss
from euclip import regime, stability
from euclip.distributions import Sample
from euclip.geometry import Euclidean
from euclip.regime import Cell, grid, misses, placement
from euclip.reproduce import CODE

FEW = (
    "optim.steps=2", "optim.warmup_steps=0", "optim.global_batch_size=16", "data.num_train=24", "data.num_val=8",
    "data.num_test=8", "data.num_labelled=4", "run.save_every=0", "run.log_every=1",
)  # fmt: skip
# the trial of the paper's regime on photographs: a start at 1/0.07, 400 steps
ENTAILED = {
    "root_norm": 1.18, "image_distance": 2.0, "text_distance": 0.9, "entailment_start": 1.6, "entailment_end": 0.4,
}  # fmt: skip
PLAIN = {"root_norm": 0.42, "image_distance": 1.4, "text_distance": 1.2, "recall": 14.85}
COSINE = {"recall": 14.3}


def test_rows_in_the_regime_of_the_paper_miss_nothing():
    assert misses(ENTAILED, PLAIN, COSINE) == []
    assert misses(ENTAILED) == []
    assert misses(ENTAILED | {"root_norm": 1.235}, PLAIN | {"root_norm": 0.3022}) == []
    assert misses(ENTAILED, PLAIN, {"recall": PLAIN["recall"] + regime.RECALL_BELOW_COSINE}) == []


@pytest.mark.parametrize(
    ("entailed", "plain", "cosine", "message"),
    [
        ({"root_norm": 3.8}, {}, {}, "root norm with entailment is 3.8, not in [0.6, 2.5]"),
        ({"root_norm": 0.59}, {}, {}, "root norm with entailment is 0.59, not in [0.6, 2.5]"),
        ({}, {"root_norm": 0.61}, {}, "root norm without entailment is 0.61, not in [0, 0.6]"),
        ({"image_distance": 1.3}, {}, {}, "mean distance of images is 1.3 with entailment, 1.4 without"),
        ({"text_distance": 1.3}, {}, {}, "mean distance of texts is 1.3 with entailment, 1.2 without"),
        ({"entailment_end": 1.7}, {}, {}, "entailment loss goes from 1.6 to 1.7"),
        ({"entailment_end": 0.0}, {}, {}, "entailment loss goes from 1.6 to 0"),
        ({}, {}, {"recall": 15.9}, "R@1 is 14.8 without entailment, 15.9 % with the cosine"),
    ],
)
def test_one_number_outside_is_named(entailed, plain, cosine, message):
    assert misses(ENTAILED | entailed, PLAIN | plain, COSINE | cosine) == [message]


def test_the_grid_has_all_settings_and_on_scenes_its_corners():
    cells = grid(400, 39.0, longer=True, only_corners=False)
    assert len({cell.key for cell in cells}) == len(cells) == 5 * 3 * 2 * 2
    assert set(grid(400, 39.0, longer=False, only_corners=False)) == {cell for cell in cells if cell.steps == 400}
    corners = grid(1200, 13.0, longer=False, only_corners=True)
    assert len(corners) == 5 * 2 * 2
    assert {(cell.start, cell.rate, cell.steps) for cell in corners} == {
        (start, rate, 1200) for start in ("small", "large") for rate in (1.0, 13.0)
    }
    assert len(grid(6, 1.0, longer=True, only_corners=False)) == 5 * 3 * 2  # a rate of 1 once


def folder(row, *overrides):
    config = CODE.config(row, "photos", overrides)
    return run_files(CODE.name, Path(row).stem, "photos", config, "pairs", Path("runs")).folder


def test_settings_of_the_stability_part_are_runs_of_the_grid_where_both_have_them():
    by_folder = {folder(cell.row, *cell.overrides): cell for cell in grid(400, 39.0, longer=True, only_corners=False)}
    assert len(by_folder) == 60
    shared = {}
    for setting in stability.SETTINGS.values():
        of_setting = folder(setting.row, stability.start_at(setting.start))
        if of_setting in by_folder:
            shared[setting.key] = by_folder[of_setting]
    assert shared == {
        "meru": Cell("meru", "large", 39.0, 400),
        "lambda_0": Cell("lambda_0", "one", 39.0, 400),
        "lambda_01": Cell("lambda_01", "small", 39.0, 400),
        "large_start": Cell("lambda_0", "large", 39.0, 400),
        "large_start_entailment": Cell("lambda_01", "large", 39.0, 400),
    }


def test_embeddings_lie_where_loops_over_the_formulas_find_them():
    draws = torch.Generator().manual_seed(3)
    images, noise = (torch.randn(size, 5, generator=draws, dtype=torch.float64) for size in (6, 12))
    of_image = torch.arange(6).repeat_interleave(2)
    texts = (images[of_image] + noise) / 4
    numbers = placement(Euclidean(squared=True), Sample("s", images, texts, of_image, None))

    mean = [(images[:, k].sum() / 6 + texts[:, k].sum() / 12).item() / 2 for k in range(5)]
    assert numbers["root_norm"] == pytest.approx(math.hypot(*mean))
    assert numbers["image_distance"] == pytest.approx(sum(math.hypot(*row) for row in images.tolist()) / 6)
    assert numbers["text_distance"] == pytest.approx(sum(math.hypot(*row) for row in texts.tolist()) / 12)
    for radius, name in ((0.3, "cone_share_03"), (0.8, "cone_share_08")):
        inside = 0
        for text, place in zip(texts.tolist(), of_image.tolist()):
            image = images[place].tolist()
            away = [y - x for x, y in zip(text, image)]
            cosine = sum(map(math.prod, zip(away, text))) / math.hypot(*away) / math.hypot(*text)
            inside += math.acos(cosine) <= math.asin(min(1, radius / math.hypot(*text)))
        assert 0 < inside < 12
        assert numbers[name] == pytest.approx(inside / 12)


def test_curves_of_runs_that_another_part_trained_are_named_where_they_have_fewer_points(tmp_path, monkeypatch):
    cells = [Cell("clip", "large", 1.0, 4)]
    monkeypatch.setattr(regime, "grid", lambda *arguments, **options: cells)
    parts, every = SmokeParts("euclip", tmp_path, FEW), Cell.overrides
    notes = []
    for validated in (4, 1):  # the second call finds the runs of the first
        monkeypatch.setattr(
            Cell, "overrides", property(lambda cell, n=validated: (*every.fget(cell)[:3], f"run.evaluate_every={n}"))
        )
        notes.append(regime.FEWER_POINTS in (parts("regime") / "regime.md").read_text(encoding="utf-8"))
    monkeypatch.setattr(Cell, "overrides", every)
    notes.append(
        regime.FEWER_POINTS in (SmokeParts("euclip", tmp_path / "own", FEW)("regime") / "regime.md").read_text()
    )
    assert notes == [True, True, False]


def test_the_part_reports_its_cells_leaves_out_what_diverged_and_draws_recall(tmp_path, monkeypatch):
    cells = [Cell(geometry, "large", 1.0, 2) for geometry in ("clip", "lambda_0", "lambda_01", "meru")]
    monkeypatch.setattr(regime, "grid", lambda *arguments, **options: cells)

    def meru_diverges(job):
        if job.row == "table4_meru.yaml":
            raise NonFiniteLoss("loss is nan")
        return run_row(job)

    monkeypatch.setattr(stability, "run_row", meru_diverges)
    results = SmokeParts("euclip", tmp_path, FEW)("regime")
    values = values_of(results / "regime.json")
    clip, lambda_0, lambda_01, meru = (cell.key for cell in cells)
    assert not any(name.startswith(meru) for name in values)
    assert {name.removeprefix(f"{lambda_01}_") for name in values if name.startswith(lambda_01)} == set(regime.COLUMNS)
    (inside,) = values[f"{lambda_01}_in_regime"]
    numbers = {key: {name: values[f"{key}_{name}"][0] for name in regime.COLUMNS if f"{key}_{name}" in values}
               for key in (clip, lambda_0, lambda_01)}  # fmt: skip
    missed = misses(numbers[lambda_01], numbers[lambda_0], numbers[clip])
    assert inside == float(not missed)
    text = (results / "regime.md").read_text(encoding="utf-8")
    assert all(reason in text for reason in missed)
    drawn = read_plotted(results / "regime_recall.png")
    assert {(row["panel"], row["x"]) for row in drawn} == {
        (f"R@1 on validation images: {regime.GEOMETRIES[cell.geometry][0]}, 2 steps", step)
        for cell in cells[:3]
        for step in (1, 2)
    }
