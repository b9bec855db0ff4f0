"""curves.png of a run: what is drawn, when, and that no failure to draw ends the training."""

import json
from unittest.mock import Mock

import numpy as np
import pytest
from killed_run import killed_after
from matplotlib.figure import Figure
from PIL import Image
from runs import lines, row_config, trained

from common.run import curves
from common.run.guards import NonFiniteLoss
from common.run.log import read_log, recall_at_1, validated_recall

plot_run = curves.plot_run  # tests/conftest.py replaces it while the files of tests run


def run(folder, *overrides, resume=False):
    settings = ["run.log_every=1", "run.evaluate_every=0", "run.test=false", *overrides]
    config = row_config("oblique_topology", "table2_clip", *settings)
    return trained("oblique_topology", config, folder, resume, row="table2_clip", scale="smoke", seed=0)


@pytest.fixture
def titles(monkeypatch):
    """Of the drawings that a run asks for."""
    asked = []
    monkeypatch.setattr(curves, "plot_run", lambda records, path, title: asked.append((path.name, title)))
    return asked


def titles_of(*steps):
    return [("curves.png", f"table2_clip, scale smoke, seed 0: step {step} of 6") for step in steps]


def train_line(step, loss, **more):
    return {"event": "train", "step": step, "loss": loss, "learning_rate": 0.1 / step, **more}


def evaluate_line(step, data, **metrics):
    return {"event": "evaluate", "step": step, "data": data, "metrics": metrics}


@pytest.fixture
def panels(tmp_path, monkeypatch):
    """records -> label of each panel's y axis -> the points of each of its lines."""
    made = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **options: made.append(figure))  # takes half a second

    def draw(records):
        plot_run(records, tmp_path / "curves.png", "a title")
        axes = [axis for axis in made[-1].axes if axis.axison]
        return {axis.get_ylabel(): [line.get_xydata().tolist() for line in axis.lines] for axis in axes}

    return draw


def test_loss_scalars_validation_and_learning_rate_are_drawn_and_the_loss_with_its_chance_level(panels):
    drawn = panels([
        train_line(2, 3.0, loss_over_chance=1.5, logit_scale=14.0, curvature=1.0, gradient_norm_curvature=0.1),
        evaluate_line(2, "val", i2t_recall_at_1=0.25, chance_i2t_recall_at_1=0.1, rsum=1.0),
        evaluate_line(2, "task", accuracy=0.5),
        train_line(4, 1.0, loss_over_chance=0.5, logit_scale=15.0, curvature=1.5, accuracy=0.1),
        evaluate_line(4, "val", i2t_recall_at_1=0.75, chance_i2t_recall_at_1=0.1, rsum=1.0),
        evaluate_line(4, "task", accuracy=0.25),
    ])  # fmt: skip
    chance = [[0, 2.0], [1, 2.0]]  # over the whole width
    assert drawn == {
        "loss (nats)": [[[2, 3.0], [4, 1.0]], chance],
        "logit scale (multiplier)": [[[2, 14.0], [4, 15.0]]],
        "curvature": [[[2, 1.0], [4, 1.5]]],
        "validation i2t R@1 (percent)": [[[2, 25.0], [4, 75.0]]],
        "validation accuracy (percent)": [[[2, 50.0], [4, 25.0]]],
        "learning rate": [[[2, 0.05], [4, 0.025]]],
    }


def test_a_loss_with_further_terms_has_its_contrastive_part_beside_it(panels):
    drawn = panels([train_line(k, 2.0 + k, contrastive_loss=float(k), loss_over_chance=k / 4) for k in (1, 2, 3)])
    assert drawn["loss (nats)"] == [[[1, 3], [2, 4], [3, 5]]]
    assert drawn["contrastive part of the loss (nats)"] == [[[1, 1], [2, 2], [3, 3]], [[0, 4], [1, 4]]]


def test_a_run_without_chance_level_scalars_or_validation_has_two_panels(panels):
    drawn = panels([train_line(1, -0.5), train_line(2, "nan"), train_line(3, -0.9)])
    assert list(drawn) == ["loss", "learning rate"]  # of no unit: SimSiam's loss is a cosine
    assert np.isnan(drawn["loss"][0][1][1])
    assert panels([train_line(1, -0.5)])["loss"] == [[[1, -0.5]]]  # a run of one log line has curves.png, too


def test_a_log_without_a_step_has_no_curves(tmp_path):
    assert plot_run([evaluate_line(0, "val", acc1=1.0)], tmp_path / "curves.png", "t") is None
    assert not list(tmp_path.iterdir())


def test_a_run_draws_at_each_validation_at_its_end_and_where_it_stops(tmp_path, titles):
    files = run(tmp_path / "validated", "run.evaluate_every=2", "run.save_every=2", "run.keep_checkpoints=3")
    assert titles == titles_of(2, 4, 6)
    with Image.open(plot_run(read_log(files.log), files.curves, "a title")) as picture:
        assert picture.width >= 800
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 50
    titles.clear()
    run(killed_after(4, files, tmp_path / "killed"), "run.evaluate_every=4", "run.save_every=2", resume=True)
    assert titles == titles_of(6)
    titles.clear()
    with pytest.raises(NonFiniteLoss):
        run(tmp_path / "diverged", "optim.learning_rate=1.0e+30", "optim.max_gradient_norm=null")
    assert titles in [titles_of(step) for step in (1, 2, 3, 4)]


def test_a_failure_to_draw_is_logged_once_and_ends_no_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(curves, "plot_run", Mock(side_effect=OSError("no room")))
    files = run(tmp_path, "run.evaluate_every=1", "optim.steps=3")
    (warning,) = lines(files, "warning")
    assert warning["step"] == 1
    assert warning["text"].startswith(f"cannot draw {files.curves}: OSError('no room')")
    assert capsys.readouterr().err.count("cannot draw") == 1
    assert files.validation.is_file()


def test_validated_recall_is_the_mean_of_both_directions_of_each_validation_of_pairs(tmp_path):
    both = {"i2t_recall_at_1": 0.2, "t2i_recall_at_1": 0.5}
    lines = [train_line(1, 1.0), evaluate_line(2, "classes", acc1=0.9), evaluate_line(4, "val", **both)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert validated_recall(tmp_path / "log.jsonl") == [(4, pytest.approx(35))]
    assert recall_at_1(both) == pytest.approx(35)
