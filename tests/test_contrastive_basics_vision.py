"""SimCLR, MoCo and SimSiam as the training loop sees them: losses against loops, the order of a step, heads, groups."""

import copy
import math
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from given_features import GivenFeatures, ReadsFeatures
from processes import in_processes
from refusals import refused
from torch import nn

from common.base.config import ConfigError, load_config
from common.base.settings import SgdConfig
from common.base.vision_settings import VisionEvaluationConfig, VisionModelConfig
from common.diagnosis import collapse_statistics
from common.distributed import rank
from common.methods.momentum_contrast import SplitBatchNorm
from common.methods.self_supervised import RandomWeights, build_backbone, share_buffers
from common.run.picture_evaluation import evaluate_all, monitor, projection_statistics
from common.run.pretraining import _prepare
from common.run.schedule import build_sgd, set_sgd_rates
from contrastive_basics.vision.config import VisionConfig, VisionMethodConfig
from contrastive_basics.vision.methods import build_method, simclr_head

METHODS = {
    "simclr": VisionMethodConfig("simclr", logit_scale=2.0, head_dim=6),
    "moco_v1": VisionMethodConfig("moco_v1", logit_scale=10.0, head_dim=6, queue_size=20, ema_momentum=0.9),
    "moco_v2": VisionMethodConfig("moco_v2", logit_scale=5.0, head_dim=6, queue_size=20, ema_momentum=0.9),
    "moco_v3": VisionMethodConfig("moco_v3", logit_scale=5.0, head_dim=6, ema_momentum=0.9),
    "simsiam": VisionMethodConfig("simsiam"),
    "supervised": VisionMethodConfig("supervised"),
    "random_weights": VisionMethodConfig("random_weights"),
}
PARTS = {"training": slice(0, 40), "test": slice(40, 60)}
MODEL = VisionModelConfig(width=2, blocks=(1, 1, 1, 1), zero_init_residual=False)
BATCH = 8


def built(name, seed=0, **changes):
    torch.manual_seed(seed)
    config = VisionConfig(model=MODEL, method=replace(METHODS[name], **changes))
    return build_method(config, num_classes=3, seed=seed).train()


def two_views(seed=1, batch=BATCH):
    draws = torch.Generator().manual_seed(seed)
    return torch.rand(batch, 3, 16, 16, generator=draws), torch.rand(batch, 3, 16, 16, generator=draws)


# ---- losses against formulas ----------------------------------------------------------------------------------------


def unit(features):
    return F.normalize(features, dim=1)


def cross_entropy(queries, candidates, scale, positives):
    return F.cross_entropy(scale * unit(queries) @ unit(candidates).T, positives)


def simclr(model, first, second, labels):
    z = unit(model.encoder(torch.cat([first, second])))
    others = ~torch.eye(2 * BATCH, dtype=torch.bool)
    partner = (2.0 * z @ z.roll(BATCH, 0).T).diagonal()
    return ((2.0 * z @ z.T).exp() * others).sum(dim=1).log().mean() - partner.mean()


def moco(model, first, second, labels, scale=10.0):
    """The keys of other queries are no candidates."""
    queries, keys = model.encoder(first), model.contrast.momentum_encoder(second)
    of_queue = scale * unit(queries) @ model.contrast.pool.queue.features.T
    positives = scale * (unit(queries) * unit(keys)).sum(dim=1, keepdim=True)
    return (torch.cat([positives, of_queue], dim=1).logsumexp(dim=1) - positives[:, 0]).mean()


def moco_v2_both_ways(model, first, second, labels):
    return (moco(model, first, second, None, 5.0) + moco(model, second, first, None, 5.0)) / 2


def moco_v3(model, first, second, labels):
    contrast, targets = model.contrast, torch.arange(BATCH)
    queries = [contrast.predictor(model.encoder(views)) for views in (first, second)]
    keys = [contrast.momentum_encoder(views) for views in (second, first)]
    return sum(2 / 5 * cross_entropy(q, k, 5.0, targets) for q, k in zip(queries, keys))


def simsiam(model, first, second, labels):
    z = [model.encoder(views) for views in (first, second)]
    p = [model.siamese.predictor(one) for one in z]
    return -sum((unit(one) * unit(other)).sum(dim=1).mean() for one, other in ((p[0], z[1]), (p[1], z[0]))) / 2


def supervised(model, first, second, labels):
    return F.cross_entropy(model.classifier(model.encoder(first)), labels)


@pytest.mark.parametrize("formula", [simclr, moco, moco_v2_both_ways, moco_v3, simsiam, supervised])
def test_a_methods_loss_is_its_formula_writes_no_queue_and_labels_reach_only_supervision(formula):
    name = {"moco": "moco_v1", "moco_v2_both_ways": "moco_v2"}.get(formula.__name__, formula.__name__)
    with_queue = name in ("moco_v1", "moco_v2")
    options = {"symmetric": formula is moco_v2_both_ways, "shuffle_keys": False} if with_queue else {}
    model, (first, second), labels = built(name, **options), two_views(), torch.arange(BATCH) % 3
    with torch.no_grad():
        expected = formula(copy.deepcopy(model), first, second, labels)
        step = copy.deepcopy(model)(first, second, labels)
        of_other_labels = copy.deepcopy(model)(first, second, (labels + 1) % 3)
    assert step.loss.item() == pytest.approx(expected.item(), abs=1e-5)
    assert (of_other_labels.loss.item() == step.loss.item()) == (name != "supervised")
    assert (step.keys is not None) == with_queue
    if with_queue:
        queue = model.contrast.pool.queue.features.clone()
        keys = model(first, second).keys
        assert not keys.requires_grad
        assert torch.equal(model.contrast.pool.queue.features, queue)  # the loop inserts


@pytest.mark.parametrize("stop_gradient", [True, False])
@pytest.mark.parametrize("predictor", [True, False])
def test_simsiams_controls_change_the_gradient_as_their_formula_does(stop_gradient, predictor):
    model = built("simsiam", stop_gradient=stop_gradient, predictor=predictor)
    formula, views = copy.deepcopy(model), two_views()
    model(*views).loss.backward()
    z = [formula.encoder(view) for view in views]
    p = [formula.siamese.predictor(one) for one in z] if predictor else z
    targets = [one.detach() for one in z] if stop_gradient else z
    (-sum((unit(p[k]) * unit(targets[1 - k])).sum(dim=1).mean() for k in (0, 1)) / 2).backward()
    assert bool(model.predictor_parameters()) == predictor
    for (name, weight), expected in zip(model.named_parameters(), formula.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, expected.grad, rtol=1e-4, atol=1e-6, msg=name)


# ---- one step of MoCo ------------------------------------------------------------------------------------------------


def test_moco_steps_are_those_of_the_published_order():
    """Query, then momentum update, then key, logits from a clone, enqueue, backward, step: against theirs with ours."""
    model = built("moco_v2", shuffle_keys=False)
    optimizer = build_sgd(model, SgdConfig(learning_rate=3.0, global_batch_size=BATCH, weight_decay=0.01))
    query, key = copy.deepcopy(model.encoder), copy.deepcopy(model.encoder).requires_grad_(False)
    queue, pointer, velocity = model.contrast.pool.queue.features.clone(), 0, {}
    for step in range(4):  # 32 keys into 20 places
        first, second = two_views(seed=step)
        # ours, as the loop has it
        model.update_momentum_encoder(0.9)
        loss, keys = model(first, second)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.insert(keys)
        # the published order, with nothing of ours but the network
        q = F.normalize(query(first), dim=1)
        with torch.no_grad():
            for slow, fast in zip(key.parameters(), query.parameters()):
                slow.copy_(0.9 * slow + 0.1 * fast)
            k = F.normalize(key(second), dim=1)
        logits = 5.0 * torch.cat([(q * k).sum(dim=1, keepdim=True), q @ queue.clone().T], dim=1)
        for place, row in enumerate(k):
            queue[(pointer + place) % 20] = row
        pointer = (pointer + BATCH) % 20
        expected = F.cross_entropy(logits, torch.zeros(BATCH, dtype=torch.long))
        expected.backward()
        with torch.no_grad():
            for name, parameter in query.named_parameters():
                gradient = parameter.grad + 0.01 * parameter
                velocity[name] = 0.9 * velocity[name] + gradient if name in velocity else gradient
                parameter -= 3.0 * BATCH / 256 * velocity[name]
                parameter.grad = None
        assert float(loss) == pytest.approx(float(expected), rel=1e-4)
        assert torch.allclose(model.contrast.pool.queue.features, queue, atol=1e-4)
        assert int(model.contrast.pool.queue.pointer) == pointer
    momentum = model.contrast.momentum_encoder.encoder
    for ours, theirs in ((model.encoder, query), (momentum, key)):
        for (name, one), other in zip(ours.state_dict().items(), theirs.state_dict().values()):
            assert torch.allclose(one.float(), other.float(), atol=1e-3, rtol=1e-3), name
    assert not torch.allclose(momentum.backbone.stem[0].weight, model.encoder.backbone.stem[0].weight, atol=1e-3)


def test_keys_are_shuffled_by_the_steps_seed_and_parts_of_a_batch_have_separate_statistics():
    """What a shuffle does with one statistic or several: tests/test_common_momentum_contrast.py."""
    for shuffled in (True, False):
        model = built("moco_v1", batch_norm_parts=4, shuffle_keys=shuffled)
        one, again, other = (copy.deepcopy(model)(*two_views(), None, seed).keys for seed in (3, 3, 4))
        assert torch.equal(one, again)
        assert torch.allclose(one, other, atol=1e-3) != shuffled
    for encoder in (model.encoder, model.contrast.momentum_encoder):
        norms = {type(module) for module in encoder.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)}
        assert norms == {SplitBatchNorm}


# ---- heads and optimiser --------------------------------------------------------------------------------------------


def linear_shapes(module):
    return [(layer.in_features, layer.out_features) for layer in module.modules() if isinstance(layer, nn.Linear)]


def test_heads_on_a_resnet50_are_the_published_ones(monkeypatch):
    backbone = build_backbone(VisionModelConfig("resnet50"))
    assert backbone.output_dim == 2048
    assert float(backbone.layer1[0].bn3.weight.abs().max()) == 0.0  # residual blocks start as the identity
    headless = nn.Identity()
    headless.output_dim = 2048
    monkeypatch.setattr("contrastive_basics.vision.methods.build_backbone", lambda *given: headless)
    simclr, v1, v2, v3, simsiam = (
        build_method(VisionConfig(method=replace(METHODS[name], head_dim=head_dim)), 10, 0)
        for name, head_dim in (("simclr", 128), ("moco_v1", 128), ("moco_v2", 128), ("moco_v3", 256), ("simsiam", None))
    )
    for module, shapes in (
        (simclr.encoder, [(2048, 2048), (2048, 2048), (2048, 128)]),
        (v1.encoder, [(2048, 128)]),
        (v2.encoder, [(2048, 2048), (2048, 128)]),
        (v3.encoder, [(2048, 4096), (4096, 256)]),
        (v3.contrast.predictor, [(256, 4096), (4096, 256)]),
        (simsiam.encoder, [(2048, 2048)] * 3),
        (simsiam.siamese.predictor, [(2048, 512), (512, 2048)]),
    ):
        assert linear_shapes(module) == shapes


def test_simclrs_head_normalises_every_layer_and_never_shifts_the_last():
    torch.manual_seed(0)
    head = simclr_head(10, 4)
    assert [type(layer).__name__ for layer in head] == [
        "Linear", "BatchNorm1d", "ReLU", "Linear", "BatchNorm1d", "ReLU", "Linear", "BatchNorm1d",
    ]  # fmt: skip
    assert all(layer.bias is None for layer in head if isinstance(layer, nn.Linear))
    assert (head[-1].bias.requires_grad, head[-1].weight.requires_grad) == (False, True)
    assert not head[-1].bias.any()


def test_norms_and_biases_decay_or_not_as_the_config_says():
    model = built("simclr")
    every = build_sgd(model, SgdConfig(weight_decay=0.1))
    assert [group["weight_decay"] for group in every.param_groups] == [0.1]
    matrices_only = build_sgd(model, SgdConfig(weight_decay=0.1, decay_vectors=False))
    decay_of = {id(p): group["weight_decay"] for group in matrices_only.param_groups for p in group["params"]}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert decay_of == {id(parameter): 0.1 if parameter.ndim >= 2 else 0.0 for parameter in trained}


def test_rates_warm_up_fall_by_a_cosine_scale_with_the_batch_and_the_predictors_stays():
    model = built("simsiam")
    optim = SgdConfig(
        steps=100, global_batch_size=512, learning_rate=0.05, warmup_share=0.1, constant_predictor_rate=True
    )
    optimizer = build_sgd(model, optim, model.predictor_parameters())
    predictor = {id(parameter) for parameter in model.siamese.predictor.parameters()}
    for step, expected in (
        (0, 0.1 / 11),
        (9, 0.1 * 10 / 11),
        (10, 0.1),
        (55, 0.05),
        (99, 0.05 * (1 + math.cos(math.pi * 89 / 90))),
    ):
        assert set_sgd_rates(optimizer, step, optim) == pytest.approx(expected)
        for group in optimizer.param_groups:
            is_predictor = {id(parameter) in predictor for parameter in group["params"]}
            assert len(is_predictor) == 1
            assert group["lr"] == pytest.approx(0.1 if is_predictor.pop() else expected)
    falling = build_sgd(model, replace(optim, constant_predictor_rate=False), model.predictor_parameters())
    set_sgd_rates(falling, 99, optim)
    assert len({group["lr"] for group in falling.param_groups}) == 1
    # a rate that falls all the same would go unnoticed
    message = r"constant_predictor_rate = true .* expected: false, or"
    others = built("moco_v3"), built("simclr")
    refused(*((message, partial(build_sgd, other, optim, other.predictor_parameters())) for other in others))


# ---- collapse -------------------------------------------------------------------------------------------------------


def test_the_monitor_tells_a_constant_encoder_from_a_spread_one():
    constant = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 3))
    nn.init.zeros_(constant[1].weight)
    collapsed = projection_statistics(RandomWeights(constant).train(), two_views()[0])
    assert collapsed == pytest.approx({"channel_std": 0.0, "mean_cosine": 1.0, "effective_rank": 1.0}, abs=1e-6)
    spread = torch.randn(64, 3, 16, 16)
    statistics = projection_statistics(RandomWeights(nn.Flatten()).train(), spread)
    assert statistics == pytest.approx(collapse_statistics(spread.flatten(1)))


def test_the_monitor_changes_nothing():
    model, (first, second) = built("moco_v2"), two_views()
    model(first, second)
    before = copy.deepcopy(model.state_dict())
    projection_statistics(model, first)
    assert all(module.training for module in model.modules())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


# ---- what is measured on frozen features ----------------------------------------------------------------------------


def test_the_evaluation_probes_directions_and_looks_for_collapse_on_the_test_set():
    config = VisionConfig(evaluation=VisionEvaluationConfig(neighbours=5, probe_epochs=5))
    draws = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 3
    features = F.one_hot(labels, 8) + torch.randn(60, 8, generator=draws)
    lengths = 2.0 ** torch.randint(-8, 9, (60, 1), generator=draws)  # powers of two, so that directions stay exact

    def evaluated(features):
        sets = [GivenFeatures(name, features[part], labels[part]) for name, part in PARTS.items()]
        return evaluate_all(config, RandomWeights(nn.Identity()), ReadsFeatures(), *sets)

    plain, scaled = evaluated(features), evaluated(features * lengths)
    assert plain["collapse"].metrics == collapse_statistics(features[PARTS["test"]])
    for role in ("knn", "linear_probe", "collapse"):
        assert scaled[role].metrics == plain[role].metrics, role
        assert scaled[role].hits == plain[role].hits, role


def test_training_pictures_vote_on_test_pictures_while_a_training_is_followed():
    config = VisionConfig(evaluation=VisionEvaluationConfig(neighbours=1))
    features, labels = torch.eye(6), torch.arange(6) % 3
    bank, queries = (
        GivenFeatures("bank", features, (labels + 1) % 3),
        GivenFeatures("queries", features[:4], labels[:4]),
    )
    model, encoder = RandomWeights(nn.Identity()), ReadsFeatures()
    assert monitor(model, encoder, bank, queries, config) == {"knn_acc1": 0.0, **collapse_statistics(features[:4])}
    bank = GivenFeatures("bank", features, torch.tensor([0, 1, 2, 1, 1, 1]))
    assert monitor(model, encoder, bank, queries, config)["knn_acc1"] == 0.75


# ---- several processes ----------------------------------------------------------------------------------------------


def a_step_in_two_processes():
    """Queue, and running statistics before and after they are shared, of one step on the own half of a batch."""
    model = built("moco_v2")
    model.update_momentum_encoder(0.9)
    model.insert(model(*(views.chunk(2)[rank()] for views in two_views()), None, 5).keys)
    before = model.encoder.backbone.stem[1].running_mean.clone()
    share_buffers(model)
    return model.contrast.pool.queue.features.clone(), before, model.encoder.backbone.stem[1].running_mean.clone()


def test_processes_keep_one_queue_and_share_their_statistics_when_asked():
    (queue, before, after), (other_queue, other_before, other_after) = in_processes(2, a_step_in_two_processes)
    assert torch.equal(queue, other_queue)
    assert not torch.equal(before, other_before)
    torch.testing.assert_close([after, other_after], [before] * 2, rtol=0, atol=0)  # the first process's


def test_what_needs_statistics_of_all_processes_is_refused_where_torch_has_none():
    several_cpus = SimpleNamespace(num_processes=2, device=torch.device("cpu"))
    message = r"over all processes, which torch can on GPUs only; expected one proc"
    models = [built(name) for name in ("simclr", "moco_v3", "simsiam")]
    calls = [partial(_prepare, several_cpus, model, build_sgd(model, SgdConfig())) for model in models]
    refused(*((message, call) for call in calls), error=ConfigError)


def test_synchronised_normalisation_keeps_the_optimisers_parameters_and_mocos_stays_per_process():
    several_gpus = SimpleNamespace(
        num_processes=2, device=torch.device("cuda"), prepare=lambda *both: both, distributed_type=""
    )
    for name, synchronised in (("simsiam", True), ("simclr", True), ("moco_v2", False), ("supervised", False)):
        model = built(name)
        optimizer = build_sgd(model, SgdConfig())
        prepared, _ = _prepare(several_gpus, model, optimizer)
        kinds = {type(module) for module in prepared.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)}
        assert (nn.SyncBatchNorm in kinds) == synchronised
        assert len(kinds) == 1 or not synchronised
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        assert held == {id(parameter) for parameter in prepared.parameters() if parameter.requires_grad}


# ---- config ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method.name=simclr"], "simclr needs method.logit_scale, which is null"),
        (
            ["method.name=simsiam", "method.queue_size=8"],
            "queue_size = 8 is no setting of simsiam; it has: stop_gradient, predictor",
        ),
        (
            ["method.name=simclr", "method.logit_scale=2", "method.head_dim=4", "method.symmetric=true"],
            "method.symmetric = True is no setting of simclr; it has: logit_scale, head_dim",
        ),
        (["method.name=byol"], "one of: simclr, moco_v1, moco_v2, moco_v3, simsiam, supervised, random_weights"),
        (["data.source=folders"], "data.source = folders needs data.root, the folder of the images"),
        (
            [
                "method.name=moco_v2", "method.logit_scale=2", "method.head_dim=4", "method.queue_size=8",
                "method.ema_momentum=0.9", "method.batch_norm_parts=3", "optim.global_batch_size=16",
            ],
            "optim.global_batch_size = 16 does not split into method.batch_norm_parts = 3 equal parts",
        ),
        (["model.blocks=[1,1]"], "expected: a list of 4 numbers"),
        (["model.blocks=[1,1,1,0]"], "expected: >= 1"),
        (["method.ema_momentum=1.5"], "expected: <= 1.0"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_used_says_what_would_be(overrides, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(VisionConfig, [], overrides)
