"""MoCo v1 to v3: loops from the formulas, order of a step, shuffling, split statistics, two processes against one."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from processes import in_processes
from refusals import refused
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from common.distributed import mean_over_processes, rank, world_size
from common.encoders.resnet import NarrowResNet
from common.feature_queue import FeatureQueue
from common.geometry import Sphere, inner_product_similarity, unit
from common.logit_scale import LogitScale
from common.methods.momentum_contrast import (
    MomentumContrast,
    MomentumContrastV3,
    SplitBatchNorm,
    batch_norm_mlp,
    mlp_head,
    moco_loss,
    moco_v3_loss,
    shuffle_rows,
    unshuffle_rows,
)
from common.momentum import MomentumEncoder
from common.pool import QueueCandidates, QueuePool

BATCH, WIDTH, DIM, QUEUE = 6, 5, 4, 10


def pool_of(capacity, dim, start="random_rows"):
    return QueuePool(FeatureQueue(capacity, dim, start), inner_product_similarity, matched_key_only=True)


def moco_logits(queries, keys, rows, scale):
    """The positive is column 0."""
    return scale * QueueCandidates(inner_product_similarity, keys, rows, matched_key_only=True).similarity(queries)


def moco(symmetric=False, start="random_rows", temperature=0.2, trainable=False):
    torch.manual_seed(5)
    encoder = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), mlp_head(7, DIM))
    scale = LogitScale(1 / temperature, trainable=trainable)
    model = MomentumContrast(encoder, Sphere(), scale, pool_of(QUEUE, DIM, start), symmetric).double()
    apart(model)
    return model


def moco_v3(temperature=0.5, trainable=False):
    torch.manual_seed(5)
    encoder, predictor = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, DIM)), nn.Linear(DIM, DIM)
    model = MomentumContrastV3(encoder, predictor, Sphere(), LogitScale(1 / temperature, trainable=trainable)).double()
    apart(model)
    return model


def apart(model):
    """Momentum copies that differ from what they copy."""
    with torch.no_grad():
        for parameter in model.momentum_encoder.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))


def views(batch=BATCH):
    generator = torch.Generator().manual_seed(2)
    return tuple(torch.randn(batch, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))


def row_loss(logits, positive):
    """log sum_j exp l_j - l_positive, number by number."""
    return math.log(sum(math.exp(value) for value in logits)) - logits[positive]


# values


@torch.no_grad()
def loops_moco(model, query_views, key_views, scale):
    total = 0.0
    for query_view, key_view in zip(query_views, key_views):
        query, key = unit(model.encoder(query_view[None]))[0], unit(model.momentum_encoder.encoder(key_view[None]))[0]
        logits = [scale * float(query @ row) for row in (key, *model.pool.queue.rows())]
        total += row_loss(logits, 0)
    return total / len(query_views)


@pytest.mark.parametrize("start", ["random_rows", "fill_level"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_moco_equals_loops_written_from_the_formula(start, symmetric):
    model, (first, second) = moco(symmetric, start), views()
    model.insert(unit(torch.randn(3, DIM, dtype=torch.float64)))
    queries = 2 * BATCH if symmetric else BATCH
    logits, columns, keys = model(first, second)
    assert logits.shape == (queries, 1 + (QUEUE if start == "random_rows" else 3))
    assert columns.tolist() == [0] * queries
    directions = [(first, second), (second, first)][: 2 if symmetric else 1]
    expected = sum(loops_moco(model, *pair, float(model.logit_scale())) for pair in directions) / len(directions)
    for loss in (moco_loss(logits), moco_loss(logits, columns)):
        assert float(loss.detach()) == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(
        keys, unit(torch.cat([model.momentum_encoder(views) for _, views in directions])), rtol=1e-14, atol=0
    )
    slots = model.insert(keys).tolist()  # 9 rows are in 10 places, or 15
    assert slots == ([-1, -1, *range(5, QUEUE), 0, 1, 2, 3, 4] if symmetric else [3, 4, 5, 6, 7, 8])


@torch.no_grad()
def loops_moco_v3(model, first, second, temperature):
    total = 0.0
    for query_views, key_views in ((first, second), (second, first)):
        keys = [unit(model.momentum_encoder.encoder(view[None]))[0] for view in key_views]
        for i, view in enumerate(query_views):
            query = unit(model.predictor(model.encoder(view[None])))[0]
            logits = [float(query @ key) / temperature for key in keys]
            total += 2 * temperature * row_loss(logits, i) / len(query_views)
    return total


def test_moco_v3_equals_loops_written_from_the_formula():
    model, (first, second) = moco_v3(), views()
    loss = moco_v3_loss(*model(first, second), model.logit_scale())
    assert float(loss.detach()) == pytest.approx(
        loops_moco_v3(model, first, second, 1 / float(model.logit_scale())), rel=1e-12
    )


@pytest.mark.parametrize("temperature", [1.0, 0.07])
def test_a_constant_representation_is_at_chance(temperature):
    constant, scale = unit(torch.ones(4, 3, dtype=torch.float64)), torch.tensor(1 / temperature, dtype=torch.float64)
    queue = constant[:1].expand(65536, 3)
    logits = moco_logits(constant, constant, queue, scale)
    assert float(moco_loss(logits)) == pytest.approx(math.log(65537), abs=1e-12)
    batch = scale * inner_product_similarity(queue[:256], queue[:256])
    assert float(moco_v3_loss(batch, batch, scale)) == pytest.approx(4 * temperature * math.log(256), abs=1e-12)


def test_keys_and_queue_are_constants_even_if_they_came_with_a_graph():
    queries, keys, queue = (torch.randn(count, 3, requires_grad=True) for count in (4, 4, 6))
    moco_loss(moco_logits(queries, keys, queue, 1.0)).backward()
    assert queries.grad.abs().sum() > 0
    assert keys.grad is None
    assert queue.grad is None


# what gets a gradient, what moves, and when


def test_no_gradient_reaches_the_keys_and_every_online_parameter_gets_one():
    for model, trained in ((moco(), ("encoder",)), (moco_v3(), ("encoder", "predictor"))):
        if isinstance(model, MomentumContrast):
            moco_loss(model(*views())[0]).backward()
        else:
            moco_v3_loss(*model(*views()), model.logit_scale()).backward()
        for name, parameter in model.named_parameters():
            if name.split(".")[0] in trained:
                assert parameter.grad.abs().sum() > 0, name
            else:
                assert parameter.grad is None, name


def train_step(model, optimizer):
    model.update_momentum_encoder(0.9)
    logits, columns, keys = model(*views())
    optimizer.zero_grad()
    moco_loss(logits, columns).backward()
    optimizer.step()
    model.insert(keys)


def test_one_step_averages_with_the_query_encoder_of_before_the_optimiser_step():
    model = moco()
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1.0)
    online, momentum = copy.deepcopy(model.encoder), copy.deepcopy(model.momentum_encoder.encoder)
    train_step(model, optimizer)
    for old, before, after in zip(momentum.parameters(), online.parameters(), model.momentum_encoder.parameters()):
        torch.testing.assert_close(after.data, (0.9 * old + 0.1 * before).data, rtol=1e-13, atol=1e-15)
    assert not any(torch.equal(old, new) for old, new in zip(online.parameters(), model.encoder.parameters()))


def test_running_statistics_of_the_key_encoder_are_separate():
    encoder = nn.Sequential(nn.Linear(WIDTH, 7), nn.BatchNorm1d(7), nn.Linear(7, DIM))
    model = MomentumContrast(encoder, Sphere(), LogitScale(5.0, trainable=False), pool_of(QUEUE, DIM))
    first, second = (view.float() for view in views())
    model.update_momentum_encoder(0.0)
    model(first, second + 4)
    ours, theirs = model.momentum_encoder.encoder[1], model.encoder[1]
    torch.testing.assert_close(
        ours.running_mean, 0.1 * (second + 4).matmul(encoder[0].weight.T).add(encoder[0].bias).mean(0)
    )
    torch.testing.assert_close(
        theirs.running_mean, 0.1 * first.matmul(encoder[0].weight.T).add(encoder[0].bias).mean(0)
    )


# shuffling and split statistics


def test_unshuffle_undoes_shuffle_and_uses_no_global_randomness():
    rows = torch.arange(20.0)[:, None]
    state = torch.get_rng_state()
    shuffled = shuffle_rows(rows, 7)
    assert not torch.equal(shuffled, rows)
    assert torch.equal(shuffled.sort(dim=0).values, rows)
    assert torch.equal(unshuffle_rows(shuffled, 7), rows)
    assert not torch.equal(unshuffle_rows(shuffled, 8), rows)
    assert torch.equal(torch.get_rng_state(), state)


def test_shuffled_keys_are_those_of_the_views_in_their_order():
    model, (first, second) = moco(), views()
    plain_logits, _, plain = model(first, second)
    logits, _, keys = model(first, second, shuffle_seed=3)
    torch.testing.assert_close(keys, plain, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(logits, plain_logits, rtol=1e-13, atol=1e-15)


def test_with_split_statistics_a_key_shares_them_with_its_query_unless_shuffled():
    norm = SplitBatchNorm(WIDTH, 2).requires_grad_(False)
    model = MomentumContrast(norm, Sphere(), LogitScale(5.0), pool_of(QUEUE, WIDTH))
    rows = views(8)[0].float()
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    expected = torch.empty(8, WIDTH)
    for part in (order[:4], order[4:]):  # rows that were normalised together
        expected[part] = unit(F.batch_norm(rows[part], None, None, training=True))
    keys = model.encode_keys(rows, shuffle_seed=1)
    torch.testing.assert_close(keys, expected)
    assert (keys - model.encode_keys(rows)).abs().max() > 0.01


@pytest.mark.parametrize("shape", [(12, 5), (12, 5, 3, 2)])
def test_split_batch_norm_is_batch_norm_of_each_part(shape):
    plain = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    split = SplitBatchNorm(5, 3).double()
    nn.init.normal_(split.weight)
    nn.init.normal_(split.bias)
    parts = [plain(5).double() for _ in range(3)]
    for part in parts:
        part.load_state_dict(split.state_dict())
    for _ in range(3):
        features = 2 + 3 * torch.randn(shape, dtype=torch.float64)
        expected = torch.cat([part(chunk) for part, chunk in zip(parts, features.chunk(3))])
        torch.testing.assert_close(split(features), expected, rtol=1e-12, atol=1e-13)
    for name in ("running_mean", "running_var"):
        mean = torch.stack([getattr(part, name) for part in parts]).mean(dim=0)
        torch.testing.assert_close(getattr(split, name), mean, rtol=1e-12, atol=1e-13)
    assert int(split.num_batches_tracked) == 3
    split.eval()
    whole = plain(5).double().eval()
    whole.load_state_dict(split.state_dict())
    torch.testing.assert_close(split(features[:7]), whole(features[:7]), rtol=1e-12, atol=1e-13)


def test_split_batch_norm_fits_a_resnet_and_refuses_batches_that_do_not_split():
    tower = NarrowResNet(4, (1, 1), norm_layer=lambda channels: SplitBatchNorm(channels, 4))
    assert tower(torch.randn(8, 3, 8, 8)).shape == (8, 8)
    refused(("a batch of 6 does not split into 4 equal parts", lambda: tower(torch.randn(6, 3, 8, 8))))


# heads


def test_batch_normalised_heads_have_no_bias_and_projectors_end_without_scale_and_shift():
    projector, predictor = batch_norm_mlp(6, 3, 9, num_layers=3), batch_norm_mlp(3, 3, 9, final_batch_norm=False)
    hidden = ["Linear", "BatchNorm1d", "ReLU"]
    assert [type(layer).__name__ for layer in projector] == [*hidden, *hidden, "Linear", "BatchNorm1d"]
    assert [type(layer).__name__ for layer in predictor] == [*hidden, "Linear"]
    assert all(layer.bias is None for head in (projector, predictor) for layer in head if isinstance(layer, nn.Linear))
    assert (projector[1].affine, projector[-1].affine) == (True, False)
    assert predictor(projector(torch.randn(8, 6))).shape == (8, 3)


# two processes

KINDS = ("v2", "shuffled", "symmetric", "v3")


def loss_and_gradients(name):
    """Two steps' worth: keys of the first are in the queue of the second. The logit scale is trained here."""
    model = moco_v3(trainable=True) if name == "v3" else moco(name == "symmetric", trainable=True)
    share = slice(rank() * BATCH // world_size(), (rank() + 1) * BATCH // world_size())
    wrapped = model if world_size() == 1 else DistributedDataParallel(model, broadcast_buffers=False)
    first, second = (pictures[share] for pictures in views())
    if name == "v3":
        loss = moco_v3_loss(*wrapped(first, second), model.logit_scale())
    else:
        seed = 9 if name == "shuffled" else None
        keys = model(second, first, seed).keys
        model.insert(keys, torch.arange(BATCH)[share].repeat(len(keys) // len(first)))
        loss = moco_loss(wrapped(first, second, seed).logits)
    loss.backward()
    gradients = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
    return mean_over_processes(loss), gradients, model.state_dict()


def what_a_process_finds():
    rows = torch.arange(2.0 * BATCH)[:, None].chunk(world_size())[rank()]
    shuffled = shuffle_rows(rows, 4)
    report = {"shuffled rows": shuffled, "unshuffled rows": unshuffle_rows(shuffled, 4)}
    # a sharded copy follows a sharded module, see tests/test_sharding.py, and no whole one
    momentum = MomentumEncoder(nn.Linear(4, 6))
    fully_shard(momentum.encoder, mesh=init_device_mesh("cpu", (2,)))
    refused(("mixed torch.Tensor and DTensor", lambda: momentum.update_(nn.Linear(4, 6), 0.75)), error=RuntimeError)
    return report | {name: loss_and_gradients(name) for name in KINDS}


@pytest.fixture(scope="module")
def reports():
    """What each of two gloo processes found."""
    return in_processes(2, what_a_process_finds)


@pytest.mark.parametrize("name", KINDS)
def test_loss_and_every_gradient_of_two_processes_equal_one(reports, name):
    expected_loss, expected, state = loss_and_gradients(name)
    assert "logit_scale.log_logit_scale" in expected
    for report in reports:
        loss, actual, actual_state = report[name]
        torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
        assert actual.keys() == expected.keys()
        for key, gradient in expected.items():
            torch.testing.assert_close(actual[key], gradient, rtol=1e-12, atol=1e-12 * float(gradient.abs().max()))
        if name in ("v2", "shuffled"):
            for key in ("pool.queue.features", "pool.queue.ids"):
                torch.testing.assert_close(actual_state[key], state[key], rtol=1e-13, atol=1e-15)
    for key in reports[0][name][2]:
        assert torch.equal(reports[0][name][2][key], reports[1][name][2][key]), key


def test_shuffling_over_two_processes_is_one_permutation_of_the_global_batch(reports):
    rows = torch.arange(2.0 * BATCH)[:, None]
    assert torch.equal(torch.cat([report["shuffled rows"] for report in reports]), shuffle_rows(rows, 4))
    assert torch.equal(torch.cat([report["unshuffled rows"] for report in reports]), rows)
