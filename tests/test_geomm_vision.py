"""geomm/vision: SwAV against the published loops, prototypes as a graph, MoCo v2 with the pool, processes, resumes."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import SmokeParts
from killed_run import resumed_after
from processes import in_processes
from scipy.sparse.csgraph import shortest_path
from torch import nn

from common.base.config import ConfigError, load_row
from common.base.provenance import ROOT
from common.distributed import rank
from common.geometry import unit
from common.info_nce import info_nce
from common.logit_scale import LogitScale
from common.methods.self_supervised import with_head
from common.report.table import from_json
from common.run.checkpoint import last_checkpoint, open_checkpoint
from common.run.folder import RunFiles
from common.run.log import read_log
from common.run.pictures import open_training_set
from common.run.schedule import build_sgd
from geomm.geodesic import geodesic_similarity
from geomm.pretrain import SCALE_FILES, pretrain
from geomm.vision.config import VisionConfig
from geomm.vision.methods import build_method
from geomm.vision.swav import Prototypes, Swav, sinkhorn

FOLDER = ROOT / "geomm"
BATCH, DIM, PROTOTYPES, SCALE = 8, 6, 12, 10.0


def config_of(name, *overrides, scale="smoke"):
    file = FOLDER / "configs" / f"vision_{name}.yaml"
    return load_row(VisionConfig, FOLDER, file, scale, list(overrides), SCALE_FILES)


def settings(**changes):
    """Of the distance, with as few neighbours as leave a graph with gaps."""
    sizes = {"num_prototypes": PROTOTYPES, "num_neighbors": 3, "num_attached": 3}
    named = [f"method.{key}={value}" for key, value in {**sizes, **changes}.items()]
    return config_of("swav_geo", *named).method


def views(seed, count=2, batch=BATCH):
    draws = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, 3, 4, 4, generator=draws).double() for _ in range(count)]


def swav(queue=0, frozen=0, seed=0, **changes):
    """SwAV on an encoder that compares nothing within a batch."""
    torch.manual_seed(seed)
    encoder = with_head(nn.Sequential(nn.Flatten(), nn.Linear(48, 10), nn.Tanh()), nn.Linear(10, DIM))
    prototypes, scale = Prototypes(PROTOTYPES, DIM, settings(**changes)), LogitScale(SCALE, None, trainable=False)
    return Swav(encoder, prototypes, scale, 20.0, 3, frozen, queue).double()


def published_codes(scores, epsilon=0.05, iterations=3):
    """The loop of SwAV's code, (rows, prototypes) -> the same shape."""
    shares = np.exp(scores / epsilon).T
    shares = shares / shares.sum()
    for _ in range(iterations):
        shares = shares / shares.sum(axis=1, keepdims=True) / len(shares)
        shares = shares / shares.sum(axis=0, keepdims=True) / shares.shape[1]
    return (shares * shares.shape[1]).T


def test_codes_are_those_of_the_published_loop_and_finite_where_it_divides_nothing_by_nothing():
    scores = unit(torch.randn(20, DIM).double()) @ unit(torch.randn(7, DIM).double()).T
    np.testing.assert_allclose(sinkhorn(scores, 20.0, 3), published_codes(scores.numpy()), rtol=1e-10)
    shared = sinkhorn(scores, 20.0, 200)
    torch.testing.assert_close(shared.sum(dim=0), torch.full((7,), 20 / 7).double(), rtol=1e-3, atol=0)
    empty = torch.ones(20, 7)
    empty[:, 3] = -1.0  # exp(-200) is no number above 0 in float32
    with np.errstate(invalid="ignore"):
        assert np.isnan(published_codes(empty.numpy(), 0.01)).any()
    codes = sinkhorn(empty, 100.0, 3)
    assert codes.isfinite().all()
    torch.testing.assert_close(codes.sum(dim=1), torch.ones(20))


@pytest.mark.parametrize(("small", "queue"), [(0, 0), (3, 0), (0, 16), (1, 12)])
def test_the_loss_is_the_swapped_prediction_written_as_loops(small, queue):
    model, seen = swav(queue, distance="cosine"), views(1, 2 + small)
    past = [views(10 + step) for step in range(2)]
    for pair in past:  # 16 pictures, of which a shorter queue keeps the newest
        model.insert(model(*pair).keys)
    with torch.no_grad():
        z = [unit(model.encoder(view)) for view in seen]
        weight = model.prototypes.weight
        before = [torch.cat([unit(model.encoder(pair[side])) for pair in past]) for side in (0, 1)]
        total, terms = 0.0, 0
        for view in (0, 1):
            rows = torch.cat([z[view], before[view][len(before[view]) - queue :]])
            codes = published_codes((rows @ weight.T).numpy())[:BATCH]
            for other in range(2 + small):
                if other != view:
                    logits = SCALE * (z[other] @ weight.T).numpy()
                    log_softmax = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
                    total, terms = total - (codes * log_softmax).sum(axis=1).mean(), terms + 1
    loss, keys = model(seen[0], seen[1], None, None, *seen[2:])
    assert loss.item() == pytest.approx(total / terms, rel=1e-6)  # 1/T is kept in float32
    assert (keys is None) == (queue == 0)


@pytest.mark.parametrize("attach", ["nearest", "knn", "knn_local", "knn_local_st"])
def test_prototypes_are_compared_along_their_graph(attach):
    prototypes = swav(attach=attach).prototypes
    assert prototypes.rebuild(0)
    assert not prototypes.rebuild(1)  # within a period
    centers = prototypes.weight.detach()
    angles = np.arccos((centers @ centers.T).clamp(-1, 1).numpy())
    edges = np.full_like(angles, np.inf)
    for row in range(PROTOTYPES):
        near = np.argsort(angles[row] + 9 * (np.arange(PROTOTYPES) == row))[:3]
        edges[row, near] = edges[near, row] = angles[row, near]
    paths = shortest_path(np.where(np.isinf(edges), 0, edges), method="D", directed=False)
    queries = unit(torch.randn(5, DIM).double()).requires_grad_()
    to_query = np.arccos((queries.detach() @ centers.T).numpy())
    expected = np.empty((5, PROTOTYPES))
    for row, lengths in enumerate(to_query):
        doors = np.argsort(lengths)[: 1 if attach == "nearest" else 3]
        expected[row] = np.cos(np.minimum(np.min(lengths[doors, None] + paths[doors], axis=0), 4 * np.pi) / 4)
    similarity = prototypes.similarity(queries)
    np.testing.assert_allclose(similarity.detach(), expected, rtol=0, atol=1e-7)
    if attach.endswith("_st"):
        weights = torch.randn(5, PROTOTYPES).double()
        ours = torch.autograd.grad((similarity * weights).sum(), (queries, prototypes.weight))
        cosine = torch.autograd.grad((queries @ prototypes.weight.T * weights).sum(), (queries, prototypes.weight))
        torch.testing.assert_close(ours, cosine)


@pytest.mark.parametrize("attach", ["knn_local", "knn_local_st"])
def test_codes_and_predictions_are_of_the_same_distance_times_the_factor_from_its_step_on(attach):
    model = swav(attach=attach, scale_factor=4.0, geodesic_from_step=1)
    plain = swav(attach=attach, geodesic_from_step=1)
    queries = unit(torch.randn(5, DIM).double()).requires_grad_()
    for step, factor in ((0, 1.0), (1, 4.0)):
        for one in (model, plain):
            one.start_step(step)
        similarity, expected = (one.prototypes.similarity(queries) for one in (model, plain))
        torch.testing.assert_close(similarity, factor * expected)
        slopes, of_plain = (torch.autograd.grad(one.sum(), queries)[0] for one in (similarity, expected))
        torch.testing.assert_close(slopes, of_plain * (1.0 if attach.endswith("_st") else factor))
        codes = model.codes([queries.detach()])[0]
        np.testing.assert_allclose(codes, published_codes(factor * expected.detach().numpy()), rtol=1e-8)
    assert swav(distance="cosine", scale_factor=4.0).prototypes.factor == 1.0  # before the first step


@pytest.fixture
def pretrained(monkeypatch):
    """A run of which only the training counts: (config, folder, resume) -> its files."""
    monkeypatch.setattr("common.run.pretraining.evaluate_all", lambda *arguments: {})
    monkeypatch.setattr("common.run.pretraining.save_evaluations", lambda *arguments: None)

    def run(config, folder, resume=False):
        pretrain(config, open_training_set(config.data), RunFiles(folder), resume, Accelerator(cpu=True))
        return RunFiles(folder)

    return run


def test_the_factor_is_written_into_mocos_pool_at_the_first_graph_and_the_log_has_the_level_of_chance(
    pretrained, tmp_path
):
    few = ("run.evaluate_every=6", "run.log_every=1", "data.num_test=20", "run.save_every=1", "run.keep_checkpoints=6")
    for name, count in (("moco_v2_geo", 40), ("swav_geo", 7)):
        files = pretrained(config_of(name, *few, "method.scale_factor=3.0"), tmp_path / name)
        lines = read_log(files.log)
        steps = [line for line in lines if line["event"] == "train"]
        # the pool is full after 3 steps of 16; before, a step has fewer candidates
        stated = [line for line in steps if "loss_over_chance" in line]
        assert [line["step"] for line in stated] == ([4, 5, 6] if name == "moco_v2_geo" else [1, 2, 3, 4, 5, 6])
        assert [line["loss_over_chance"] for line in stated] == pytest.approx(
            [line["loss"] / np.log(count) for line in stated]
        )
        (last,) = [line["metrics"] for line in lines if line["event"] == "evaluate"]
        assert last["chance_knn_acc1"] == pytest.approx(0.1)
        if name == "moco_v2_geo":
            checkpoints = [open_checkpoint(path).model_tensors() for path in sorted(files.checkpoints.glob("step-*"))]
            factors = [tensors["contrast.pool.scale_factor"].item() for tensors in checkpoints]
            graphs = [bool(tensors["contrast.pool.has_graph"]) for tensors in checkpoints]
            assert factors == [3.0 * has_graph for has_graph in graphs]
            assert set(graphs) == {False, True}


def test_prototypes_stand_still_to_the_last_bit_while_frozen_and_on_the_sphere_afterwards():
    model = swav(frozen=2)
    optimizer = build_sgd(model, config_of("swav", "optim.learning_rate=1.0", "optim.weight_decay=0.1").optim)
    start, weights = model.prototypes.weight.detach().clone(), []
    for step in range(4):
        model.start_step(step)
        weights.append(model.prototypes.weight.detach().clone())
        model(*views(step)).loss.backward()
        model.hold(step)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(weights[2], start)  # after two steps
    assert not torch.equal(weights[3], start)
    torch.testing.assert_close(weights[3].norm(dim=1), torch.ones(PROTOTYPES).double())


def moco(**changes):
    named = [f"method.{key}={value}" for key, value in {"batch_norm_parts": 2, **changes}.items()]
    torch.manual_seed(3)
    return build_method(config_of("moco_v2_geo", *named), 10, 0).train()


def pictures(seed, batch=16):
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, 16, 16, generator=draws), torch.randn(batch, 3, 16, 16, generator=draws)


@pytest.mark.parametrize("symmetric", [False, True])
def test_moco_meets_its_keys_where_they_will_be_written_and_in_the_order_of_its_queries(symmetric):
    """Over the end of the ring, with keys that were computed in shuffled parts."""
    model = moco(symmetric=symmetric, shuffle_keys=True)
    pool, inserted = model.contrast.pool, ()
    for step in (0, 1):
        if step:  # the ring of 40 is full, and the next keys go over its end
            for part in unit(torch.randn(72 - len(inserted), pool.queue.features.shape[1])).chunk(2):
                pool.insert(part)
        model.start_step(step)
        first, second = pictures(step)
        one = copy.deepcopy(model).contrast
        with torch.no_grad():
            queries = [unit(one.encoder(views)) for views in (first, second)][: 1 + symmetric]
            keys = [one.encode_keys(views, 7 + step) for views in (second, first)][: 1 + symmetric]
        step_loss, inserted = copy.deepcopy(model)(first, second, None, 7 + step)
        losses = []
        for query, key in zip(queries, keys):  # of a direction no view meets itself
            written = copy.deepcopy(pool)
            columns = written.insert(key)
            graph, rows = written.graph(), written.queue.rows()
            assert (graph is None) == (step == 0) == bool(columns[0] < columns[-1])
            similarity = query @ rows.T if graph is None else geodesic_similarity(query, rows, graph, num_attached=2)
            losses.append(info_nce(5.0 * similarity, columns).item())
        assert step_loss.item() == pytest.approx(sum(losses) / len(losses), rel=1e-4)
        torch.testing.assert_close(inserted, torch.cat(keys), rtol=0, atol=1e-5)
        model.insert(inserted)


def of_processes(count):
    """Loss and gradients of two steps of SwAV with a queue, this process's share of the batch; and the queue."""
    model, results = swav(queue=2 * BATCH), []
    share = slice(rank() * BATCH // count, (rank() + 1) * BATCH // count)
    for step in range(4):
        model.start_step(step)
        first, second = views(20 + step)
        loss, keys = model(first[share], second[share])
        model.insert(keys)
        gradients = torch.autograd.grad(
            loss, [parameter for parameter in model.parameters() if parameter.requires_grad]
        )
        results.append([loss.detach(), *gradients])
    return results, model.queue.features


def test_two_processes_are_one():
    one, (first, second) = of_processes(1), in_processes(2, of_processes, 2)
    for single, here, there in zip(one[0], first[0], second[0]):
        for expected, left, right in zip(single, here, there):
            torch.testing.assert_close((left + right) / 2, expected, rtol=1e-9, atol=1e-12)
    for queue in (first[1], second[1]):
        torch.testing.assert_close(queue, one[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["moco_v2_geo", "swav_geo"])
def test_a_run_goes_on_within_a_period_to_the_last_bit(name, pretrained, tmp_path):
    settings = ("method.small_views=1", "method.code_queue=24") if name == "swav_geo" else ()
    config = config_of(name, *settings, "method.graph_update_interval=3", "optim.steps=8", "run.save_every=7",
                       "run.evaluate_every=0", "run.log_every=1", "data.num_test=20")  # fmt: skip
    unbroken = resumed_after(7, partial(pretrained, config), tmp_path)
    whole = last_checkpoint(unbroken.checkpoints).model_tensors()
    assert whole["contrast.pool.has_graph" if name == "moco_v2_geo" else "prototypes.has_paths"]


def test_a_run_leaves_frozen_prototypes_as_they_are(pretrained, tmp_path):
    config = config_of("swav", "method.frozen_steps=3", "optim.steps=3", "run.save_every=1", "run.keep_checkpoints=3",
                       "run.evaluate_every=0", "data.num_test=20")  # fmt: skip
    paths = sorted(pretrained(config, tmp_path).checkpoints.glob("step-*"))
    first, *_, last = (open_checkpoint(path).model_tensors() for path in paths)
    assert torch.equal(first["prototypes.weight"], last["prototypes.weight"])
    assert not torch.equal(first["encoder.head.0.weight"], last["encoder.head.0.weight"])


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("moco_v2_geo", "method.ema_momentum=null", "ema_momentum = None with moco_v2; expected: a number"),
        ("swav", "method.ema_momentum=0.9", "ema_momentum = 0.9 with swav; expected: null"),
        ("moco_v2", "method.small_views=2", "small_views = 2 with moco_v2; expected: only with swav"),
        ("swav", "method.symmetric=true", "symmetric = True with swav; expected: only with moco_v2"),
        ("swav", "method.batch_norm_parts=2", "batch_norm_parts = 2 with swav; expected: only with moco_v2"),
        ("random_weights", "method.shuffle_keys=false", "with random_weights; expected: only with moco_v2"),
        ("moco_v2", "method.sinkhorn_scale=3", "sinkhorn_scale = 3.0 with moco_v2; expected: only with swav"),
        ("moco_v2_geo", "method.queue_size=81", r"optim.steps = 6: the first graph would be that of step 6 \("),
        ("swav_geo", "method.geodesic_from_step=6", r"step 6 \(method.geodesic_from_step = 6, "),
        ("moco_v2", "method.distance=oblique", "distance.*oblique.*cosine.*geodesic"),
        ("swav_geo", "method.num_neighbors=6", r"num_neighbors = 6 with method.num_prototypes = 7: a graph of 7 nodes"),
        ("moco_v2", "method.batch_norm_parts=3", "does not split into method.batch_norm_parts = 3"),
        ("moco_v2", "method.queue_size=4 method.branching=[2,2]", r"expected: at least the \d+ keys of a step"),
    ],
)
def test_what_does_not_fit_is_refused_by_key(name, override, message):
    with pytest.raises(ConfigError, match=message):
        config_of(name, *override.split())


def test_a_queue_that_both_views_fill_is_full_in_half_the_steps_and_swav_has_none():
    for name, overrides in (("moco_v2_geo", ["method.symmetric=true"]), ("swav_geo", [])):
        assert config_of(name, "method.queue_size=160", *overrides).method.distance == "geodesic"


def test_table_5_stands_beside_random_weights(tmp_path):
    few = ("optim.steps=4", "data.num_train=48", "data.num_test=20", "run.evaluate_every=0", "run.save_every=0")
    parts = SmokeParts("geomm", tmp_path, few)
    table = from_json((parts("table5") / "table5.json").read_text())
    assert [row.method for row in table.rows] == ["random weights", "MOCOv2", "Geo-MOCOv2", "SwAV", "Geo-SwAV"]
    for row in table.rows:
        assert row.ours["epochs_100"] is None  # of ResNet-50 on ImageNet
        assert 0 <= row.ours["linear_probe"].mean <= 100
        assert row.ours["knn"].chance == pytest.approx(10)
    graphs = from_json((parts("table5") / "table5_graphs.json").read_text())
    assert [row.method for row in graphs.rows] == ["Geo-MOCOv2", "Geo-SwAV"]
    assert {*graphs.rows[0].ours} == {"hops", "path_over_angle", "components", "unreachable_pairs"}
