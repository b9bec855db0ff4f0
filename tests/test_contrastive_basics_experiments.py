"""Toy worlds and the experiments on them: functions of a seed, hand-made cases, thresholds."""

import math
from types import SimpleNamespace

import pytest
import torch
from plotted import read_plotted
from runs import values_of

from common.base.config import ConfigError
from common.base.places import ROOT
from common.info_nce import symmetric_info_nce
from common.report.formats import write_table
from common.report.table import read_table
from common.reproduce.command import Command
from common.run.kept_memory import bytes_kept_for_backward
from contrastive_basics import experiments
from contrastive_basics.measurements import (
    OBJECTIVES,
    BatchSettings,
    FloorSettings,
    PairSettings,
    ViewSettings,
    few_candidates,
    loss_with_few_negatives,
    measure_batch_sizes,
    measure_loss_floor,
    pair_statistics,
    sub_batch_statistics,
    train_on_pairs,
    train_on_views,
    view_statistics,
)
from contrastive_basics.toys import ClassWorld, generator, toy_encoder

COMMITTED = ROOT / "results" / "contrastive_basics"
FEW_STEPS = ViewSettings(steps=3, batch=16, queue=32, bank=60, queries=30, measure_at=(0,))
PARTS = {
    "collapse": ["collapse"],
    "temperature": ["temperature"],
    "negatives": ["negatives", "negatives_queue"],
    "loss_floor": ["loss_floor"],
    "batch_size": ["batch_size"],
}


@pytest.fixture(autouse=True)
def one_thread():
    """Small matrices are fastest so; and the ranking loops must leave it at that."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    assert torch.get_num_threads() == 1
    torch.set_num_threads(threads)


# ---- worlds ---------------------------------------------------------------------------------------------------------


def test_pictures_have_classes_and_a_view_loses_a_fifth_of_its_pixels():
    world, draws = ClassWorld.drawn(0), generator(0)
    pictures, labels = world.pictures(4000, draws)
    assert pictures.shape == (4000, 64)
    assert pictures.abs().max() <= 1
    assert set(labels.tolist()) == set(range(40))
    views = world.view(torch.ones(2000, 64), draws)
    assert float(views.mean()) == pytest.approx(0.8, abs=0.01)
    assert float(views.var()) == pytest.approx(0.8 * 0.2 + 0.4**2, abs=0.01)
    assert not torch.equal(world.view(pictures, draws), world.view(pictures, draws))


# ---- few negatives, sub-batches, memory -----------------------------------------------------------------------------


def test_few_candidates_are_the_positive_and_as_many_others_all_alike():
    draws, times = generator(0), torch.zeros(6, 6)
    for _ in range(3000):
        present = few_candidates(6, 2, draws)
        assert present.diagonal().all()
        assert (present.sum(dim=1) == 3).all()
        times += present
    shares = times[~torch.eye(6, dtype=torch.bool)] / 3000
    assert shares.min() > 2 / 5 - 0.05
    assert shares.max() < 2 / 5 + 0.05
    assert few_candidates(6, 5, draws).all()
    for impossible in (0, 6):
        with pytest.raises(ValueError, match=f"has 1 to 5 negatives a row, not {impossible}"):
            few_candidates(6, impossible, draws)


def test_the_loss_with_few_negatives_equals_loops_and_with_all_of_them_eq_8():
    logits = torch.randn(7, 7, generator=generator(0), dtype=torch.float64)
    torch.testing.assert_close(loss_with_few_negatives(logits, 6, generator(1)), symmetric_info_nce(logits))
    assert float(loss_with_few_negatives(torch.zeros(7, 7), 3, generator(1))) == pytest.approx(math.log(4), abs=1e-6)
    draws, total = generator(1), 0.0
    for matrix in (logits, logits.T):
        present = few_candidates(7, 3, draws)
        for i in range(7):
            kept = [math.exp(matrix[i, j]) for j in range(7) if present[i, j]]
            total += (math.log(sum(kept)) - float(matrix[i, i])) / 7
    assert float(loss_with_few_negatives(logits, 3, generator(1))) == pytest.approx(total / 2, abs=1e-14)


def test_statistics_of_a_sub_batch_equal_a_hand_made_case():
    cosines = torch.tensor([[0.9, 0.1, 0.2], [0.3, 0.4, 0.5], [0.0, 0.6, 0.7]])
    statistics = sub_batch_statistics(cosines, torch.tensor(2.0))
    # hardest of rows 0.2, 0.5, 0.6; of columns 0.3, 0.6, 0.5; wrong: row 1 and column 1
    hardest, loss = (0.2 + 0.5 + 0.6 + 0.3 + 0.6 + 0.5) / 6, float(symmetric_info_nce(2 * cosines))
    actual = [statistics[name] for name in ("hardest_negative", "error", "loss")]
    assert actual == pytest.approx([hardest, 100 * 2 / 6, loss])


def test_bytes_kept_for_backward_are_those_of_distinct_memory_without_weights():
    weight, inputs = torch.randn(5, requires_grad=True), torch.randn(100, 5)
    # of a product the factors are kept, of the exponential its result
    assert bytes_kept_for_backward(lambda: (inputs @ weight).exp().sum(), [weight]) == 4 * (100 * 5 + 100)
    inputs.requires_grad_()  # now its gradient needs the weight
    assert bytes_kept_for_backward(lambda: (inputs @ weight).exp().sum(), []) == 4 * (100 * 5 + 100 + 5)
    assert bytes_kept_for_backward(lambda: (inputs @ weight + inputs @ weight).exp().sum(), [weight]) == 4 * 600

    def with_a_dropped_part():
        for _ in range(20):
            (inputs @ weight).exp().sum()  # its graph is gone at once, its memory given out again
        return (inputs @ weight).exp().sum()

    assert {bytes_kept_for_backward(with_a_dropped_part, [weight]) for _ in range(20)} == {4 * 600}


# ---- measurements ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_training_on_views_is_a_function_of_the_seed(objective):
    state = torch.get_rng_state()
    run, again, other = (train_on_views(seed, objective, FEW_STEPS) for seed in (0, 0, 1))
    assert run == again
    assert run != other
    assert torch.equal(torch.get_rng_state(), state)
    assert [step for step, _ in run.course] == [0, 3]
    assert run.statistics == run.course[-1][1]
    assert run.course[0][1] != {k: v for k, v in run.statistics.items() if k != "loss"}  # it has moved
    assert run.course[0][1] == train_on_views(0, "nt_xent", FEW_STEPS).course[0][1]  # all start alike


def test_training_on_pairs_is_a_function_of_the_seed():
    settings = PairSettings(steps=3, batch=16, test_pairs=30, measure_at=(0,))
    state = torch.get_rng_state()
    run, again, other = (train_on_pairs(seed, settings, 0.07, True) for seed in (0, 0, 1))
    assert run == again
    assert run != other
    assert torch.equal(torch.get_rng_state(), state)
    assert run.course[0][1] == train_on_pairs(0, settings, 0.07, True, 3).course[0][1]
    assert run.course[0][1]["logit_scale"] == pytest.approx(1 / 0.07)
    assert run.statistics["logit_scale"] != run.course[0][1]["logit_scale"]
    frozen = train_on_pairs(0, settings, 0.07, False).statistics["logit_scale"]
    assert frozen == pytest.approx(1 / 0.07)


def test_statistics_of_views_use_the_running_averages_and_leave_them_as_they_are():
    encoder = toy_encoder(64, batch_norm=True).train()
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    view_statistics(encoder, ClassWorld.drawn(0), 0, FEW_STEPS)
    assert all(module.training for module in encoder.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in encoder.state_dict().items())


def test_statistics_of_pairs_equal_a_hand_made_case():
    def at(*degrees):  # of no matter what length
        radians = torch.tensor(degrees).deg2rad()
        return torch.stack([3 * radians.cos(), 3 * radians.sin()], dim=1)

    # both images find their text; of the texts the second one, at 20 degrees, is nearer to the first image
    world = SimpleNamespace(pairs=lambda count, draws: (at(0.0, 60.0), at(0.0, 20.0)))
    statistics = pair_statistics(torch.nn.Identity(), torch.nn.Identity(), world, 0, 2)
    assert (statistics["i2t_r1"], statistics["t2i_r1"]) == (100, 50)
    cosine = {degrees: math.cos(math.radians(degrees)) for degrees in (0, 20, 40, 60)}
    assert statistics["positive_cosine"] == pytest.approx((cosine[0] + cosine[40]) / 2)
    assert statistics["negative_cosine"] == pytest.approx((cosine[20] + cosine[60]) / 2)
    # of the images: their channels are (1, 0.5) and (0, 0.866)
    assert statistics["channel_std"] == pytest.approx((0.5 + math.sqrt(0.75)) / (2 * math.sqrt(2)))


def test_an_unknown_objective_names_the_known_ones():
    with pytest.raises(ValueError, match="'byol' is unknown; expected: positives_only, simsiam"):
        train_on_views(0, "byol", FEW_STEPS)


def test_only_positives_collapse_and_negatives_or_whole_simsiam_prevent_it():
    steps = {"positives_only": 200, "nt_xent": 200, "simsiam": 100, "no_stop_gradient": 100, "no_predictor": 100}
    statistics = {
        name: train_on_views(0, name, ViewSettings(steps=number, measure_at=())).statistics
        for name, number in steps.items()
    }
    for name in ("positives_only", "no_stop_gradient", "no_predictor"):
        assert statistics[name]["channel_std"] < 0.03
        assert statistics[name]["loss"] < -0.99 < 0.98 < statistics[name]["mean_cosine"]
    for name in ("nt_xent", "simsiam"):
        assert statistics[name]["channel_std"] > 0.10
        assert statistics[name]["mean_cosine"] < 0.5
    assert statistics["nt_xent"]["knn_accuracy"] > statistics["positives_only"]["knn_accuracy"] + 20
    assert statistics["nt_xent"]["positive_cosine"] - statistics["nt_xent"]["negative_cosine"] > 0.5
    assert statistics["no_stop_gradient"]["channel_std"] != pytest.approx(
        statistics["no_predictor"]["channel_std"], rel=1e-3
    )


def test_more_negatives_and_a_low_temperature_help_on_pairs():
    settings = PairSettings(steps=130, measure_at=())
    few, many = (train_on_pairs(0, settings, 0.07, True, number).statistics for number in (1, 63))
    assert many["i2t_r1"] - few["i2t_r1"] >= 8
    low, high, without = (train_on_pairs(0, settings, start, False).statistics for start in (0.07, 1.0, None))
    assert low["i2t_r1"] - high["i2t_r1"] >= 4
    assert high["loss"] > math.log(1 + 127 * math.exp(-1 - 1 / 127))  # the floor of Eq. 8 for 128 pairs at T = 1
    assert low["loss"] < 1
    assert without["i2t_r1"] < 20 < 60 < high["i2t_r1"]
    assert without["loss"] < -0.99


def test_free_vectors_reach_the_floor_and_do_not_go_below_it():
    numbers = measure_loss_floor(0, FloorSettings(steps=300, dim=32), (2, 16))
    for batch, floor in ((2, 0.1269), (16, 1.8185)):
        assert numbers[f"t1_optimum_{batch}"] == pytest.approx(floor, abs=5e-5)
        assert numbers[f"t1_separated_{batch}"] == pytest.approx(math.log(1 + (batch - 1) / math.e))
        assert -1e-6 < numbers[f"t1_reached_{batch}"] - numbers[f"t1_optimum_{batch}"] < 5e-3
        assert numbers[f"t1_negative_cosine_{batch}"] == pytest.approx(-1 / (batch - 1), abs=0.01)
        assert numbers[f"t007_reached_{batch}"] < 0.01


def test_larger_batches_are_harder_have_harder_negatives_and_cost_memory():
    numbers = measure_batch_sizes(0, BatchSettings(steps=30, test_pairs=256), (2, 16, 128))
    for name in ("loss", "error", "hardest_negative", "kept_mb"):
        assert numbers[f"{name}_2"] < numbers[f"{name}_16"] < numbers[f"{name}_128"]


# ---- parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", PARTS)
def test_a_part_gives_tables_and_draws_curves(tmp_path, part):
    seeds = (0,) if part in ("collapse", "negatives") else (0, 1)  # without and with intervals
    command = Command(part, "smoke", seeds, (), tmp_path, tmp_path / "results")
    tables = getattr(experiments, part)(command)
    assert [table.table_id for table in tables] == PARTS[part]
    for table in tables:
        assert table.seeds == seeds
        assert table.command == f"make reproduce-{part} PAPER=contrastive_basics SCALE=smoke SEEDS={len(seeds)}"
        assert str(tmp_path) not in repr(table)
        assert not any(row.paper for row in table.rows)
        # what claims refer to is there at every scale
        path, *_ = write_table(table, tmp_path / table.table_id)
        committed = values_of(COMMITTED / part / "demo" / f"{table.table_id}.json")
        assert values_of(path).keys() == committed.keys() != set()
        curves = tmp_path / "results" / "contrastive_basics" / part / "smoke" / f"{table.table_id}_curves.png"
        assert read_plotted(curves)


def test_parts_refuse_overrides_and_have_nothing_at_the_scales_of_photographs(tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"collapse is an experiment on a toy world .* got optim\.steps=2"):
        experiments.collapse(Command("collapse", "demo", (0,), ("optim.steps=2",), tmp_path, tmp_path))
    assert experiments.collapse(Command("collapse", "photos", (0,), ("data.root=/x",), tmp_path, tmp_path)) == []
    assert "collapse runs only at scale demo, smoke, not at photos: it is an experim" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


# ---- committed results ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("part", "name"), [(part, name) for part, names in PARTS.items() for name in names])
def test_a_committed_experiment_states_where_it_comes_from(part, name):
    table = read_table(COMMITTED / part / "demo" / f"{name}.json")
    assert (table.scale, len(table.seeds) >= 3) == ("demo", True)
    assert table.git_revision
    assert table.protocol["versions"]["torch"]
