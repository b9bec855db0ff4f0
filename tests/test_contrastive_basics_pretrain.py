"""Self-supervised training end to end: every method, exact resume, data, collapse in the log, the table."""

import json
import math
import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from killed_run import assert_same_to_the_last_bit, killed_after, records
from PIL import Image
from refusals import refused
from runs import called, lines, logged, weights
from torch import nn

from common.base.config import ConfigError, load_row
from common.base.provenance import ROOT
from common.data.order import SampleOrder, seed_of
from common.data.transforms import normalize
from common.data.views import TwoViews
from common.report.table import MEASURED
from common.reproduce.command import Command
from common.run.checkpoint import CheckpointError, last_checkpoint
from common.run.folder import RunFiles
from common.run.pictures import (
    ROLES,
    SomePictures,
    evaluation_transform,
    open_test_set,
    open_training_set,
    view_recipes,
)
from common.run.schedule import build_sgd, set_sgd_rates
from contrastive_basics import evaluate_pictures
from contrastive_basics.figures import NUM_VIEWED, figure1, viewed_pictures
from contrastive_basics.pretrain import SCALE_FILES, pretrain, reevaluate
from contrastive_basics.vision.config import VisionConfig
from contrastive_basics.vision.methods import build_method
from contrastive_basics.vision.tables import CODE, SCALES, _panels, self_supervised

FOLDER = ROOT / "contrastive_basics"
ROWS = {
    row["config"][len("vision_") : -len(".yaml")]: row["method"] for row in CODE.printed("self_supervised")["beyond"]
}
SELF_SUPERVISED = [name for name in ROWS if name not in ("random_weights", "supervised")]
SHORT_END = ("evaluation.probe_epochs=5", "data.num_test=20", "run.evaluate_every=0")


def config_of(name, *overrides, scale="smoke"):
    return load_row(
        VisionConfig, FOLDER, FOLDER / "configs" / f"vision_{name}.yaml", scale, list(overrides), SCALE_FILES
    )


@pytest.mark.parametrize(("width", "memory_format"), [(4, torch.contiguous_format), (8, torch.channels_last)])
def test_convolutions_of_few_channels_do_not_have_them_last(width, memory_format):
    """Else oneDNN ends the process on a CPU without AVX-512; on others nothing shows."""
    model = build_method(config_of("simclr", f"model.width={width}"), 10, 0)
    weights = [
        module.weight for module in model.modules() if isinstance(module, nn.Conv2d) and module.kernel_size > (1, 1)
    ]
    assert weights
    assert all(weight.is_contiguous(memory_format=memory_format) for weight in weights)


def run(folder, name, *overrides, resume=False, training_set=None):
    config = config_of(name, "run.log_every=1", *overrides)
    files = RunFiles(folder)
    training_set = open_training_set(config.data) if training_set is None else training_set
    pretrain(config, training_set, files, resume, Accelerator(cpu=True), "test")
    return files


# ---- every method ---------------------------------------------------------------------------------------------------


def command(folder, *overrides, scale="smoke", seeds=(0,)):
    return Command("self_supervised", scale, seeds, overrides, folder, folder / "results")


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory):
    """Every method trained, as the table wants them."""
    folder = tmp_path_factory.mktemp("outputs")
    return folder, self_supervised(command(folder))


def run_in(folder, name, seed=0):
    return RunFiles(next((folder / "runs" / "contrastive_basics").glob(f"vision_{name}-*/seed{seed}")))


@pytest.mark.parametrize("name", ROWS)
def test_every_method_runs_end_to_end_and_writes_what_came_out(name, reproduced):
    files = run_in(reproduced[0], name)
    evaluation = json.loads(files.evaluation.read_text())
    assert set(evaluation["evaluations"]) == set(ROLES)
    for role in ("knn", "linear_probe"):
        result = evaluation["evaluations"][role]
        assert result["chance"]["acc1"] == pytest.approx(0.1)
        hits = json.loads(files.hits.read_text())[role]["acc1"]
        assert len(hits) == 40
        assert sum(hit for (hit,) in hits) / 40 == pytest.approx(result["metrics"]["acc1"])
    assert evaluation["evaluations"]["knn"]["protocol"]["feature_dim"] == 32  # of the backbone, not of the head
    collapse = evaluation["evaluations"]["collapse"]["metrics"]
    assert 0 < collapse["channel_std"] < 32**-0.5 + 1e-6
    steps = 0 if name == "random_weights" else 6
    assert evaluation["step"] == last_checkpoint(files.checkpoints).state["step"] == steps
    logged, followed = records(files, "train"), records(files, "evaluate")
    assert [record["step"] for record in logged] == [2, 4, 6][: steps // 2]
    assert [record["step"] for record in followed] == [3, 6][: steps // 3]
    for record in logged:
        assert {"projection_channel_std", "projection_mean_cosine", "projection_effective_rank"} <= set(record)
        assert record["samples_seen"] == 16 * record["step"]
    for record in followed:
        assert {*record["metrics"]} == {"knn_acc1", "chance_knn_acc1", "channel_std", "mean_cosine", "effective_rank"}


def test_random_weights_are_those_that_the_seed_draws_and_the_table_has_every_seed(reproduced):
    folder, spreads = reproduced[0], []
    rows = ("vision_random_weights", "vision_simclr")
    (table,) = self_supervised(replace(command(folder, seeds=(0, 1)), rows=rows))
    for seed in (0, 1):
        torch.manual_seed(seed)
        drawn = build_method(config_of("random_weights"), 10, seed).state_dict()
        files = run_in(folder, "random_weights", seed)
        saved = weights(files)
        assert saved.keys() == drawn.keys()
        assert all(torch.equal(saved[name], tensor) for name, tensor in drawn.items())
        spreads.append(json.loads(files.evaluation.read_text())["evaluations"]["collapse"]["metrics"]["channel_std"])
    cell = table.rows[0].ours["channel_std"]
    assert (cell.seeds, cell.values) == ((0, 1), pytest.approx(spreads))
    assert cell.interval is not None


@pytest.mark.parametrize("name", ["moco_v2", "moco_v3", "simsiam"])
def test_the_loop_is_its_parts_one_after_the_other(name, tmp_path):
    settings = (*SHORT_END, "optim.steps=4", "optim.learning_rate=1.0", *["method.queue_size=24"] * (name == "moco_v2"))
    files, config = run(tmp_path, name, *settings), config_of(name, *settings)
    views = TwoViews(open_training_set(config.data), SampleOrder(96, 16, 0), view_recipes(config), 16)
    torch.manual_seed(0)
    model = build_method(config, 10, 0).train()
    optimizer, expected = build_sgd(model, config.optim, model.predictor_parameters()), []
    mean, std = evaluation_transform(config).mean, evaluation_transform(config).std
    for step in range(4):
        batch = views.__getitems__(list(range(16 * step, 16 * step + 16)))
        pair = [normalize(pixels, mean, std) for pixels in (batch.first_views, batch.second_views)]
        ema_momentum = {"moco_v2": 0.99, "moco_v3": 1 - 0.01 * (1 + math.cos(math.pi * step / 4)) / 2}.get(name)
        model.update_momentum_encoder(ema_momentum)
        loss, keys = model(*pair, batch.labels, seed_of(0, step))
        loss.backward()
        set_sgd_rates(optimizer, step, config.optim)
        optimizer.step()
        optimizer.zero_grad()
        model.insert(keys)
        expected.append(loss.item())
    assert logged(files) == pytest.approx(expected, rel=1e-5)
    trained = model.state_dict()
    for key, tensor in weights(files).items():
        assert torch.allclose(tensor.float(), trained[key].float(), atol=1e-5), key


# ---- resume ---------------------------------------------------------------------------------------------------------


def test_killed_after_a_step_and_resumed_a_run_is_the_unbroken_one_bit_for_bit(tmp_path):
    """With a loader's worker, too; the queue has wrapped, with a remainder."""
    settings = (*SHORT_END, "optim.steps=8", "run.evaluate_every=4", "run.save_every=3", "run.keep_checkpoints=3",
                "optim.learning_rate=0.5", "method.queue_size=50")  # fmt: skip
    unbroken = run(tmp_path / "unbroken", "moco_v2", *settings)
    assert len(set(logged(unbroken))) == 8
    broken = killed_after(3, unbroken, tmp_path / "broken")
    resumed = run(broken, "moco_v2", *settings, "run.num_workers=1", resume=True)
    assert_same_to_the_last_bit(unbroken, resumed)
    assert resumed.evaluation.is_file()
    tensors = weights(unbroken)
    assert int(tensors["contrast.pool.queue.pointer"]) == 8 * 16 % 50
    assert int(tensors["contrast.pool.queue.fill_level"]) == 50
    for part in ("backbone.stem.0.weight", "backbone.stem.1.running_mean", "head.0.weight"):
        momentum = tensors[f"contrast.momentum_encoder.encoder.{part}"]
        assert not torch.equal(tensors[f"contrast.encoder.{part}"], momentum)
    refused(
        (
            r"holds a run of another config: optim.steps 8 -> 9",
            lambda: run(broken, "moco_v2", *settings, "optim.steps=9", resume=True),
        ),
        ("add --resume to continue", lambda: run(broken, "moco_v2", *settings)),
        error=ConfigError,
    )


# ---- data -----------------------------------------------------------------------------------------------------------


def class_folders(root, classes=("cat", "dog"), per_class=(24, 12)):
    """train/CLASS/*.png and test/CLASS/*.png of noise in the class's colour."""
    draws = np.random.default_rng(0)
    for part, count in zip(("train", "test"), per_class):
        for label, name in enumerate(classes):
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = draws.integers(0, 128, (20, 24, 3), dtype=np.uint8)
                pixels[..., label] += 127
                Image.fromarray(pixels).save(root / part / name / f"{number}.png")
    return root


def test_class_folders_give_the_table_at_photos_scale_and_a_broken_picture_is_replaced_and_named(tmp_path, capsys):
    root = class_folders(tmp_path / "animals")
    (root / "train" / "cat" / "3.png").write_bytes(b"\x89PNG not really")
    small = (
        f"data.root={root}", "data.max_broken_share=0.5", "data.image_size=16", "model.width=4", "optim.steps=3",
        "optim.global_batch_size=16", "run.num_workers=0", "run.evaluate_every=3", "evaluation.probe_epochs=5",
        "evaluation.monitor_queries=10",
    )  # fmt: skip
    two = replace(
        command(tmp_path / "outputs", *small, scale="photos"), rows=("vision_random_weights", "vision_moco_v2")
    )
    (table,) = self_supervised(two)
    capsys.readouterr()
    assert self_supervised(two)[0].rows == table.rows
    assert capsys.readouterr().out.count("found in") == 2  # though there is no validation set
    assert table.data.startswith("animals-train, 48 pictures")
    assert all(cell.data.startswith("animals-test (") for row in table.rows for cell in row.ours.values())
    assert table.rows[1].ours["knn_acc1"].chance == pytest.approx(50.0)
    assert table.rows[1].ours["knn_acc1"].interval is not None  # one seed: over test pictures
    files = run_in(tmp_path / "outputs", "moco_v2")
    evaluation = json.loads(files.evaluation.read_text())
    protocol = evaluation["evaluations"]["knn"]["protocol"]
    assert (protocol["data"], protocol["num_images"], protocol["num_classes"]) == ("animals-test", 24, 2)
    assert protocol["bank_size"] == 47
    named = [sample for record in lines(files, "broken") for sample in record["samples"]]
    assert named
    assert all("3.png" in sample for sample in named)
    assert str(tmp_path) not in json.dumps(evaluation) + table.command  # results are shared


def test_folders_that_do_not_fit_are_refused_with_what_is_wrong(tmp_path):
    root = class_folders(tmp_path / "animals", per_class=(3, 2))
    settings = ("data.source=folders", f"data.root={root}")

    def opened(open_set, *more):
        return lambda: open_set(config_of("simclr", *settings, *more).data)

    refused(
        ("global_batch_size = 16 is larger than the training set of 6", lambda: run(tmp_path, "simclr", *settings)),
        (r"data.test: .* are not apart; expected: two", opened(open_test_set, "data.test=train")),
        (r"data.test: .* are not apart; expected: two", opened(open_test_set, "data.test=.")),
    )
    refused(("nowhere: no such folder", opened(open_training_set, "data.train=nowhere")), error=FileNotFoundError)
    (root / "test" / "dog").rename(root / "test" / "wolf")
    refused(("without a folder: dog; without a class: wolf", opened(open_test_set)))


def test_torchvisions_cifar10_is_read_by_its_path(tmp_path, monkeypatch):
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *arguments: True)
    base = tmp_path / "cifar-10-batches-py"
    base.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)
    for name in ("test_batch", *(f"data_batch_{number}" for number in range(1, 6))):
        (base / name).write_bytes(pickle.dumps({"data": pixels, "labels": [0, 3, 5, 9]}))
    (base / "batches.meta").write_bytes(pickle.dumps({"label_names": [*"01", "bird", "cat", *"456789"]}))
    data = config_of("simclr", "data.source=cifar10", f"data.root={tmp_path}").data
    training_set = open_training_set(data)
    with pytest.raises(FileNotFoundError, match=r"CIFAR-10 cannot be read: .*expected: cifar-10-batches-py in this f"):
        open_test_set(config_of("simclr", "data.source=cifar10", f"data.root={tmp_path / 'nowhere'}").data)
    test_set = open_test_set(data)
    assert (len(training_set), len(test_set), training_set.class_names[3]) == (20, 4, "cat")
    batch = TwoViews(training_set, SampleOrder(20, 4, 0), view_recipes(config_of("simclr")), 32).__getitems__([0, 1])
    assert batch.first_views.shape == (2, 3, 32, 32)


def test_views_of_a_batch_are_functions_of_seed_and_position():
    config = config_of("moco_v2")
    pictures, recipes = open_training_set(config.data), view_recipes(config)
    views = TwoViews(pictures, SampleOrder(96, 16, 7), recipes, 16)
    whole = views.__getitems__([40, 3, 95])
    assert not torch.equal(whole.first_views, whole.second_views)
    for place, position in enumerate([40, 3, 95]):
        single = views.__getitems__([position])
        assert torch.equal(single.first_views[0], whole.first_views[place])
        assert torch.equal(single.second_views[0], whole.second_views[place])
    indices = [int(views.order.epochs_and_indices(np.array([position]))[1][0]) for position in range(2 * 96)]
    assert indices[:96] != indices[96:]  # the order is new in every epoch, and so are the views of a picture
    again = views.__getitems__([96 + indices[96:].index(indices[40])])
    assert not torch.equal(again.first_views[0], whole.first_views[0])


def test_the_pictures_that_are_followed_are_different_ones_of_all_classes():
    pictures = open_training_set(config_of("simclr").data)
    some = SomePictures(pictures, 40)
    first, again = ([part[index]["image_id"] for index in range(40)] for part in (some, SomePictures(pictures, 40)))
    assert first == again == list(dict.fromkeys(first))
    assert len({some.label(index) for index in range(40)}) >= 8  # not the first classes of a sorted folder
    assert all(some[index]["label"] == some.label(index) for index in range(40))
    whole = SomePictures(pictures, 1000)
    assert {whole[index]["image_id"] for index in range(96)} == {pictures[index]["image_id"] for index in range(96)}
    assert len(whole) == 96


def test_methods_differ_in_augmentation_and_pixel_scale():
    for name in ROWS:
        published = view_recipes(config_of(name, "data.views=imagenet"))
        assert published[0].crop_scale[0] == {"simclr": 0.08, "supervised": 0.08, "random_weights": 0.08}.get(name, 0.2)
        assert (published[0] != published[1]) == (name == "moco_v3")
        for views in ("imagenet", "cifar10"):
            config = config_of(name, f"data.views={views}")
            transform, recipes = evaluation_transform(config), view_recipes(config)
            assert {(recipe.mean, recipe.std) for recipe in recipes} == {(transform.mean, transform.std)}
            distorted = [recipe.jitter_probability > 0 and recipe.grey_probability > 0 for recipe in recipes]
            assert distorted == [name in SELF_SUPERVISED] * 2  # two views of one picture must not share its colours
        assert [recipe.crop_scale for recipe in view_recipes(config_of(name, "data.smallest_crop=0.5"))] == [
            (0.5, 1.0)
        ] * 2
        assert all(recipe.blur_probability == 0 for recipe in view_recipes(config_of(name)))


def test_every_row_has_a_config_that_loads_at_every_scale():
    for name in ROWS:
        for scale in (*SCALES, "paper"):
            on_pictures = scale in ("photos", "paper")
            config = config_of(name, *["data.root=/data/pictures"] * on_pictures, scale=scale)
            assert config.method.name == ("simsiam" if name.startswith("simsiam_") else name)
            assert (config.data.source == "folders") == on_pictures


# ---- the table ------------------------------------------------------------------------------------------------------


def test_the_table_has_every_method(reproduced):
    folder, (table,) = reproduced
    assert [column.key for column in table.columns][:3] == ["knn_acc1", "linear_probe_acc1", "channel_std"]
    for (name, label), row in zip(ROWS.items(), table.rows, strict=True):
        assert (row.method, row.status, row.paper) == (label, MEASURED, {})
        evaluations = json.loads(run_in(folder, name).evaluation.read_text())["evaluations"]
        for role in ("knn", "linear_probe"):
            assert row.ours[f"{role}_acc1"].values == pytest.approx((100 * evaluations[role]["metrics"]["acc1"],))
        assert row.ours["channel_std"].values == pytest.approx((evaluations["collapse"]["metrics"]["channel_std"],))
    curves = folder / "results" / "contrastive_basics" / "self_supervised" / "smoke" / "self_supervised_curves.png"
    plotted = curves.with_name("self_supervised_curves_plotted.json").read_text()
    assert '"kNN accuracy on scenes/vtab/shape, 20 of them",' in plotted  # the table's is of all of them


def test_the_curves_are_of_the_pictures_that_the_log_names(tmp_path):
    """A small training set without a validation set gives a tenth of itself, fewer than evaluation.monitor_queries."""
    (tmp_path / "log.jsonl").write_text(
        '{"event": "evaluate", "step": 2, "data": "pets-train, 6 of them", "metrics": {"knn_acc1": 0.5}}\n'
    )
    of_log = SimpleNamespace(
        files=SimpleNamespace(log=tmp_path / "log.jsonl"),
        evaluations={"knn": {"protocol": {"num_images": 500, "bank_size": 60}}},
    )
    (panel,) = _panels({"SimCLR": [of_log]})
    assert (panel.title, panel.curves) == ("kNN accuracy on pets-train, 6 of them", {"SimCLR": [(2, [50.0])]})


def test_figure_1_separates_views_of_a_picture_from_those_of_two(reproduced):
    folder, _ = reproduced
    (table,) = figure1(Command("figure1", "smoke", (0,), (), folder, folder / "results"))
    assert [row.method for row in table.rows] == list(ROWS.values())
    for row in table.rows:
        of_pairs, other = (np.array(row.ours[key].values) for key in ("pair_cosine", "other_cosine"))
        assert (of_pairs > other).all()
        assert -1 <= other.min() < of_pairs.max() <= 1 + 1e-6
    (plotted,) = folder.glob("results/contrastive_basics/figure1/smoke/figure1_views_plotted.json")
    series = json.loads(plotted.read_text())
    assert len(series) == 2 * len(ROWS)
    assert all(sum(line["percent"]) == pytest.approx(100, abs=0.01) for line in series)


def test_figure_1_looks_at_all_classes_of_a_set_that_lists_one_after_the_other():
    pictures = viewed_pictures([{"image": number // 400} for number in range(4_000)])
    assert (len(pictures), set(pictures)) == (NUM_VIEWED, set(range(10)))


def test_a_second_call_trains_nothing_and_makes_a_lost_evaluation_again(reproduced, capsys):
    folder, (table,) = reproduced
    run_in(folder, "simsiam").evaluation.unlink()
    (again,) = self_supervised(command(folder))
    printed = capsys.readouterr().out
    assert printed.count("found in") == len(ROWS) - 1
    assert printed.count("evaluating the checkpoint again") == 1
    assert [row.ours for row in again.rows] == [row.ours for row in table.rows]


def test_a_command_evaluates_a_checkpoint_as_its_training_did_and_on_pictures_of_other_classes(reproduced, tmp_path):
    checkpoint, output = run_in(reproduced[0], "supervised").checkpoints, tmp_path / "evaluation.json"
    trained = json.loads(run_in(reproduced[0], "supervised").evaluation.read_text())["evaluations"]

    def evaluated(*words):
        called(evaluate_pictures.main, "--checkpoint", last_checkpoint(checkpoint).path, "--output", output, *words)
        return json.loads(output.read_text())["evaluations"]

    assert evaluated() == trained
    counted = evaluated("data.task=vtab/count", "evaluation.neighbours=3")["knn"]
    assert (counted["protocol"]["num_classes"], counted["protocol"]["neighbours"]) == (4, 3)
    assert trained["knn"]["protocol"]["num_classes"] == 10
    refused(
        ("optim.steps=3 would change a trained model; expected data", lambda: evaluated("optim.steps=3")),
        ("data.views=imagenet would change .* without data.image_size", lambda: evaluated("data.views=imagenet")),
    )


def test_a_checkpoint_of_something_else_is_not_evaluated(reproduced, tmp_path):
    checkpoint = last_checkpoint(run_in(reproduced[0], "simsiam").checkpoints)
    checkpoint.state.pop("kind")
    with pytest.raises(CheckpointError, match=r"/train\.py, .*; run: python contrastive_basics/evaluate\.py"):
        reevaluate(checkpoint, config_of("simsiam"), RunFiles(tmp_path), Accelerator(cpu=True))


def test_the_cache_knows_the_training_set_and_the_test_set():
    data = config_of("simclr").data
    (test,) = {test_set.fingerprint for test_set in CODE.open_tests(data).values()}
    assert set(CODE.open_tests(data)) == set(ROLES)
    assert test != CODE.open_training(data, 0).fingerprint
    more = config_of("simclr", "data.num_test=41").data
    assert {test_set.fingerprint for test_set in CODE.open_tests(more).values()} != {test}
    assert CODE.open_training(more, 0).fingerprint == CODE.open_training(data, 1).fingerprint
