"""MAFA: batches of like samples as a value, positives that a discriminator finds, targets, processes, resumes."""

import itertools
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from killed_run import resumed_after
from processes import in_processes
from refusals import refused
from runs import logged, row_config, trained, weights
from sklearn.metrics import precision_recall_curve
from test_common_albef import DIM, masked_batch, tiny_albef, tiny_batch

from common.base.config import ConfigError
from common.data.order import SampleOrder
from common.data.pairs import open_training_pairs
from common.data.scenes.statements import describes
from common.data.tokenizer import WordTokenizer
from common.distributed import rank
from common.geometry import unit
from common.reproduce.rows import Job, run_row
from common.run.checkpoint import last_checkpoint, open_checkpoint
from geomm.evaluate import load_encoder
from geomm.finetune import CODE as TASKS
from geomm.grouping import GroupedOrder, Grouping, chain
from geomm.mafa import Discriminator, Mafa, Mined, mined, negatives, smoothed_targets
from geomm.mining import of_epoch, precision_at_recall, shares, truth_of
from geomm.model import build_model, start_discriminator_
from geomm.pool import GeodesicPool
from geomm.train import CODE, open_data

FEW = ("optim.steps=4", "optim.warmup_steps=0", "data.num_val=16", "data.num_test=16", "run.evaluate_every=0",
       "run.save_every=0")  # fmt: skip


config_of = partial(row_config, "geomm")


def draw(seed, *shape):
    return unit(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)))


# ---- batches of like samples ----------------------------------------------------------------------------------------


def test_a_chain_goes_from_picture_to_caption_and_from_caption_to_picture():
    images, texts = draw(0, 40, 5), draw(1, 40, 5)
    expected, unused = [0], set(range(1, 40))
    while unused:
        last = expected[-1]
        of_image = len(expected) % 2
        near = {k: float(images[last] @ texts[k] if of_image else texts[last] @ images[k]) for k in unused}
        expected.append(max(near, key=near.get))
        unused.remove(expected[-1])
    assert chain(images, texts).tolist() == expected


def epochs_of(count, num_samples=70, batch=8, num_epochs=3):
    """Orders of the first epochs, each process having its share of every batch's features, which grow old."""
    order = GroupedOrder(num_samples, batch, 5)
    grouping = Grouping(order, 4, queue_size=20, span=12)
    features, orders = (draw(2, num_samples, 4), draw(3, num_samples, 4)), []
    steps = order.samples_per_epoch // batch
    for step in range(num_epochs * steps):
        orders.append(order.indices_of(step))
        shift, places = draw(100 + step, batch, 4), torch.from_numpy(orders[-1])
        embeddings = [unit(side[places] + 0.1 * shift).chunk(count)[rank()] for side in features]
        assert grouping.collect(orders[-1], *embeddings) == ((step + 1) % steps == 0)
        order.follow(grouping)
    return np.array(orders).reshape(num_epochs, -1), grouping.state_dict()


def test_every_epoch_has_a_sample_once_and_those_that_it_left_out_stand_in_the_next():
    orders, _ = epochs_of(1)
    assert np.array_equal(orders[0], SampleOrder(70, 8, 5).epochs_and_indices(np.arange(64))[1])
    for before, after in itertools.pairwise(orders):
        assert len(set(after)) == 64
        assert set(range(70)) - set(before) <= set(after)
    assert not np.array_equal(orders[1], orders[2])


def test_batches_hold_what_is_alike():
    """Sixteen kinds of samples: a batch holds one or two of them."""
    kinds = torch.arange(256) % 16
    centers, order = draw(4, 16, 12), GroupedOrder(256, 16, 0)
    grouping = Grouping(order, 12, queue_size=128, span=128)

    def alike(step):
        kind = kinds[order.indices_of(step)]
        return ((kind[:, None] == kind).sum() - 16).item() / 240

    assert np.mean([alike(step) for step in range(16)]) < 0.1  # shuffled
    for step in range(16):
        seen = centers[kinds[order.indices_of(step)]]
        grouping.collect(order.indices_of(step), *(unit(seen + 0.1 * draw(step, 16, 12)) for _ in "it"))
    order.follow(grouping)
    assert np.mean([alike(step) for step in range(16, 32)]) > 0.4  # eight of a kind and eight of another: 7 / 15
    with pytest.raises(ValueError, match=r"positions of epochs \[2\]; known is the order of 1"):
        order.indices_of(32)


# ---- positives and negatives ----------------------------------------------------------------------------------------


def test_a_positive_is_no_negative_and_what_is_in_doubt_is_neither():
    similarity = torch.tensor([[9.0, 3, 2, 1], [3, 9, 1, 2], [1, 3, 9, 2], [2, 1, 3, 9]])
    judged = torch.tensor([0.9, 0.6, 0.4, 0.8])
    verdicts = mined(similarity, lambda others: judged)
    assert verdicts.hardest.tolist() == [1, 0, 1, 2]
    assert verdicts.is_positive.tolist() == [True, False, False, False]
    nobody = Mined(verdicts.hardest, torch.zeros(4, dtype=torch.bool), None)
    assert negatives(similarity, verdicts, nobody).tolist() == [2, 3, 1, 0]
    other = Mined(torch.tensor([2, 0, 0, 1]), torch.tensor([False, True, True, True]), None)  # 0-1, 0-2, 1-3
    assert negatives(similarity, verdicts, other).tolist() == [3, 2, 1, 0]
    other = Mined(torch.tensor([1, 0, 0, 0]), torch.ones(4, dtype=torch.bool), None)  # all of 0's: the second hardest
    assert negatives(similarity, verdicts, other)[0] == 2
    assert negatives(similarity, verdicts, other, torch.tensor(0.1))[0] == 2
    torch.manual_seed(0)
    drawn = torch.stack([negatives(similarity, verdicts, nobody, torch.tensor(0.5)) for _ in range(2000)])
    shares = torch.stack([(drawn == column).float().mean(dim=0) for column in range(4)], dim=1)
    allowed = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 1], [1, 1, 0, 0]]).bool()
    expected = (0.5 * similarity).where(allowed, -torch.inf).softmax(dim=1)
    torch.testing.assert_close(shares, expected, atol=0.05, rtol=0.0)
    with pytest.raises(ValueError, match="batch of 2; expected: 3 or more"):
        mined(similarity[:2, :2], lambda others: judged)


def targets_of(count):
    """Of a process's share of eight samples, against a pool at the end of its ring."""
    pool = GeodesicPool(20, 6, distance="cosine", branching=(2,), num_neighbors=1)
    stored, keys, queries = (draw(seed, rows, 6).chunk(count)[rank()] for seed, rows in enumerate((16, 8, 8)))
    pool.insert(stored)
    candidates, size = pool.open(keys), 8 // count
    nobody = Mined(torch.ones(size, dtype=torch.int64), torch.zeros(size, dtype=torch.bool), None)
    some = Mined((torch.arange(size) + 1) % size, torch.arange(size) % 2 == 0, None)
    similarity = candidates.similarity(queries)
    return [
        smoothed_targets(candidates, verdicts, similarity, share) for verdicts in (nobody, some) for share in (0.0, 0.5)
    ]


def in_a_process():
    return *epochs_of(2), targets_of(2)


def test_two_processes_have_the_order_and_the_targets_of_one():
    (orders, state), (first, second) = epochs_of(1), in_processes(2, in_a_process)
    for order, saved, _ in (first, second):
        assert np.array_equal(order, orders)
        assert all(torch.equal(saved[name], value) for name, value in state.items())
    for single, *parts in zip(targets_of(1), first[2], second[2]):
        torch.testing.assert_close(torch.cat(parts), single)


def test_a_step_is_its_parts_pair_by_pair():
    """Matching, words and contrast with what is mined, against loops over single pairs; pools at the end of a ring."""
    albef, (images, token_ids) = tiny_albef(), tiny_batch()
    pools = [GeodesicPool(10, DIM, distance="cosine", branching=(2,), num_neighbors=1) for _ in "it"]
    for seed, pool in enumerate(pools):
        pool.insert(draw(seed, 8, DIM))
    columns = torch.tensor([8, 9, 0, 1])
    model = Mafa(albef.encoders, albef.geometry, albef.logit_scale, *pools).double()
    model.momentum_encoders, model.matching_head = albef.momentum_encoders, albef.matching_head
    judge = torch.rand(4, 4, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    model.discriminator = lambda images, ids: lambda pictures, texts: judge[pictures, texts]
    masked_ids, word_targets = masked_batch(token_ids)
    step = model.encode_step(images, images, token_ids, None)
    verdicts, matched, hard, contrast = [], [(k, k) for k in range(4)], [], []
    for side, queries, candidates in (
        ("image", step.image_embeddings, step.text_candidates), ("text", step.text_embeddings, step.image_candidates),
    ):  # fmt: skip
        similarity = candidates.similarity(queries).detach()
        targets = torch.zeros_like(similarity)
        for row in range(4):
            near = sorted((k for k in range(4) if k != row), key=lambda k: -float(similarity[row, columns[k]]))
            pairs = [(row, k) if side == "image" else (k, row) for k in near]
            chance, positives = float(judge[pairs[0]]), [row]
            if chance > 0.8:
                matched.append(pairs[0])
                positives.append(near[0])
            verdicts.append("positive" if chance > 0.8 else "negative" if chance < 0.5 else "neither")
            hard.append(pairs if chance < 0.5 else pairs[1:])
            targets[row, columns[positives]] = 0.5 / len(positives)
            targets[row] += 0.5 / 10
        contrast.append(F.cross_entropy(model.logit_scale() * similarity, targets))
    assert set(verdicts) == {"positive", "negative", "neither"}
    others = [next(pair for pair in pairs if pair not in matched) for pairs in hard]
    matching, words = [], []
    for label, pairs in ((1, matched), (0, others)):
        for picture, text in pairs:
            seen = step.text_tokens[text, None], step.text_mask[text, None], step.image_tokens[picture, None]
            matching.append(-model.match(*seen).log_softmax(dim=1)[0, label])
    for picture, text in matched:
        seen = masked_ids[text, None], step.text_mask[text, None], step.image_tokens[picture, None]
        logits = model.encoders.word_logits(*seen)
        drawn = word_targets[text] >= 0
        words += (-logits[0, drawn].log_softmax(dim=1)[range(int(drawn.sum())), word_targets[text, drawn]]).unbind()
    losses = model(images, token_ids, masked_ids, word_targets, 0.5)
    for name, expected in (("contrast", contrast), ("matching", matching), ("words", words)):
        torch.testing.assert_close(losses.parts[name], torch.stack(expected).mean(), rtol=1e-9, atol=0, msg=name)
    assert losses.logged["mined"].item() == pytest.approx(verdicts.count("positive") / 8)


def test_a_discriminator_judges_as_the_albef_whose_weights_it_has_and_stays_as_it_is():
    albef, (images, token_ids) = tiny_albef().eval(), tiny_batch()
    judge = Discriminator(albef.encoders)
    judge.matching_head.load_state_dict(albef.matching_head.state_dict())
    judge = judge.double().train()
    assert not judge.encoders.training
    assert not any(parameter.requires_grad for parameter in judge.parameters())
    pictures, texts = torch.tensor([0, 3, 1]), torch.tensor([2, 3, 0])
    probabilities = judge(images, token_ids)(pictures, texts)
    for chance, picture, text in zip(probabilities, pictures, texts):
        tokens = albef.encoders.text_tokens(token_ids[text, None]), albef.encoders.text_mask(token_ids[text, None])
        logits = albef.match(*tokens, albef.encoders.image_tokens(images[picture, None]))
        torch.testing.assert_close(chance, logits.float().softmax(dim=1)[0, 1], rtol=1e-5, atol=1e-6)


def test_shares_are_counted_over_both_directions():
    truth = np.eye(4, dtype=bool)
    truth[1, 0] = truth[2, 3] = truth[0, 3] = True  # caption 0 fits picture 1, caption 3 pictures 2 and 0
    hardest = [np.array([1, 0, 3, 2]), np.array([1, 2, 0, 2])]  # of pictures, of captions
    called = [np.array([True, True, False, False]), np.array([True, False, False, False])]
    probability = [np.array([0.9, 0.8, 0.1, 0.2]), np.array([0.6, 0.1, 0.1, 0.1])]
    result = shares([truth], hardest, called, probability)
    counts = {"alike": 50, "hardest_true": 100 * 4 / 8, "mined": 100 * 3 / 8, "precision": 100 * 2 / 3, "recall": 50}
    assert result == pytest.approx(counts | {"precision_at_recall": result["precision_at_recall"]})
    assert result.keys() - shares([truth], hardest, [~np.ones(4, dtype=bool)] * 2, probability) == {"precision"}


@pytest.mark.parametrize("recall", [0.01, 0.2, 0.5, 1.0])
def test_precision_at_a_recall_is_that_of_the_curve(recall):
    rng = np.random.default_rng(0)
    for _ in range(20):
        is_true, scores = rng.random(60) < 0.2, rng.integers(0, 12, 60) / 12  # with ties
        is_true[0] = True
        precisions, recalls, _ = precision_recall_curve(is_true, scores)
        expected = precisions[np.flatnonzero(recalls >= recall)[-1]]  # recalls fall, thresholds rise
        assert precision_at_recall(is_true, scores, recall) == pytest.approx(expected)


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_the_truth_is_that_of_the_captions_that_training_takes(noise):
    config = config_of("mafa", "data.num_train=24", f"data.partner_noise={noise}")
    pairs = open_training_pairs(config.data, 3)
    training = open_data(config, pairs, None)
    positions = np.arange(16)
    indices = training.order.epochs_and_indices(positions)[1]
    partners = training.view.partners
    assert partners is None or partners.order is training.view.order is training.order  # of later epochs, too
    sources, drawn_at = (indices, positions) if partners is None else partners.of(positions)
    assert (sources != indices).any() == bool(noise)
    truth = truth_of(pairs, training.order.seed, drawn_at, sources, indices)
    batch = training.view.__getitems__(positions.tolist())
    for column, index in enumerate(sources.tolist()):
        ids = batch.token_ids[column, None]
        texts = [training.tokenizer.encode([text], config.data.context_length) for text in pairs.captions(index)]
        (statement,) = {pairs.statements(index)[k] for k, text in enumerate(texts) if torch.equal(text, ids)}
        for row, other in enumerate(indices.tolist()):
            assert truth[row, column] == describes(statement, pairs.scene(other))
    assert truth.diagonal().all() == (not noise)
    assert truth.sum() > 16 * (1 - noise)
    # a model and a discriminator that know the truth find all of it, in both directions
    exact, others = torch.from_numpy(truth).double(), [(truth & ~np.eye(16, dtype=bool)).any(axis) for axis in (0, 1)]
    oracle = SimpleNamespace(
        encode_image=lambda images: torch.eye(16).double(),
        encode_text=lambda token_ids: exact.T,
        discriminator=lambda *batch: lambda pictures, texts: exact[pictures, texts],
    )
    found = of_epoch(oracle, training, 0)
    assert found["precision"] == found["recall"] == found["precision_at_recall"] == 100
    assert found["batches"] == 1  # 24 pictures in batches of 16
    assert found["alike"] == 100 * others[0].mean()
    assert found["hardest_true"] == pytest.approx(100 * np.mean(others))


# ---- a run ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """MAFA from towers and a discriminator that are trained before it."""
    return run_row(Job(CODE, "mafa_geo.yaml", "smoke", 0, FEW, tmp_path_factory.mktemp("runs")))


def test_a_row_has_its_discriminator_trained_first_and_keeps_it_as_it_is(run):
    runs = {path.parent.name.rpartition("-smoke-")[0]: path for path in run.files.folder.parents[1].glob("*/seed0")}
    assert runs.keys() == {"towers", "albef", "finetuned_crowded_albef", "mafa_geo"}
    assert str(runs["finetuned_crowded_albef"]) == run.config.start.discriminator_run
    saved = weights(run.files)
    for name, tensor in last_checkpoint(runs["finetuned_crowded_albef"] / "checkpoints").model_tensors().items():
        if name.startswith(("encoders.", "matching_head.")):
            assert torch.equal(saved[f"discriminator.{name}"], tensor), name
    model = load_encoder(last_checkpoint(run.files.checkpoints), torch.device("cpu"))[1].model
    assert not any(name.startswith(("discriminator", "grouping")) for name in model.state_dict())


def test_what_says_where_a_row_starts_says_nothing_of_its_parents(tmp_path):
    for setting in ("run=/a/run", "discriminator_run=/a/run", "discriminator=finetuned_albef", "part=all", "row=albef"):
        parents = Job(CODE, "mafa.yaml", "smoke", 0, (f"start.{setting}", *FEW), tmp_path).parents()
        assert {parent.overrides for parent in parents.values()} == {FEW}, setting
    of_all = ("start.bert=/a/bert", *FEW)
    parents = Job(CODE, "mafa.yaml", "smoke", 0, of_all, tmp_path).parents()
    assert {parent.overrides for parent in parents.values()} == {of_all}


def test_a_row_s_parents_take_no_setting_that_only_tasks_have(tmp_path):
    settings = ("data.task=vqa", "data.blank=true", "optim.steps=4")
    (parent,) = Job(TASKS, "vqa_albef.yaml", "smoke", 0, settings, tmp_path).parents().values()
    assert (parent.row, parent.overrides) == ("albef.yaml", ("optim.steps=4",))
    parent.config()


@pytest.mark.usefixtures("not_evaluated")
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_killed_in_its_second_epoch_a_run_goes_on_to_the_last_bit(run, workers, tmp_path, monkeypatch):
    """Four steps an epoch; saved after seven, with an order that no seed tells and three quarters of the next one."""
    smoothings, drawn = [], []
    monkeypatch.setattr("geomm.mafa.smoothed_targets", lambda *a: smoothings.append(a[-1]) or smoothed_targets(*a))
    monkeypatch.setattr("geomm.mafa.negatives", lambda *a: drawn.append(float(a[-1])) or negatives(*a))
    start = [f"start.{key}={getattr(run.config.start, key)}" for key in ("run", "discriminator_run")]
    config = config_of("mafa", *FEW, *start, "data.num_train=19", "optim.global_batch_size=4", "optim.steps=9",
                       "run.save_every=7", f"run.num_workers={workers}", "method.group_span=8", "method.group_queue=8",
                       "run.keep_checkpoints=2", "method.hardest_negatives=false")  # fmt: skip
    unbroken = resumed_after(7, partial(trained, "geomm", config), tmp_path)
    assert smoothings == [0.0] * 2 * 4 + [0.5] * 2 * (5 + 2)  # none in the first epoch; two steps are made twice
    assert drawn[: 2 * 9] == [scale for scale in logged(unbroken, "logit_scale") for _ in "it"]
    middle = open_checkpoint(unbroken.checkpoints / "step-00000007").model_tensors()
    assert [int(middle[f"grouping.{name}"]) for name in ("epoch", "placed", "held")] == [1, 8, 4]
    assert int(weights(unbroken)["grouping.epoch"]) == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["start.discriminator="],
            "base = mafa with start.discriminator empty; expected: the row of a fine-tuned ALBEF",
        ),
        (["method.distillation=0.4"], "expected: method.targets = own"),
        (["method.mask_probability=0"], "method.mask_probability above 0"),
        (
            ["method.base=albef"],
            "group_queue = 32 has no effect with method.base = albef; expected: .* = mafa, or the default, 48000",
        ),
        (
            ["method.base=albef", "method.group_queue=48000", "method.group_span=1920"],
            "base = albef, which mines no positives; expected: nothing",
        ),
        (
            ["method.group_span=60"],
            r"method.group_span = 60 with optim.global_batch_size = 16 and method.base = mafa: a batch would mix two "
            r"chains of similar samples; expected: a multiple of the batch, such as 64",
        ),
        (["method.group_queue=40"], "method.group_queue = 40 with optim.global_batch_size = 16 and .* such as 32"),
    ],
)
def test_what_does_not_fit_is_refused_by_key(overrides, message):
    with pytest.raises(ConfigError, match=message):
        config_of("mafa", *overrides)


def test_a_discriminator_that_does_not_fit_is_refused(run, monkeypatch):
    towers = run.config.start.run
    config = config_of("mafa", *FEW, f"start.run={towers}", f"start.discriminator_run={towers}")
    without_row = config_of("mafa", *FEW, "start.row=", f"start.discriminator_run={towers}")
    pairs = open_training_pairs(config.data, 0)
    training = open_data(config, pairs, None)
    model = build_model(config, training.tokenizer, training.order)
    monkeypatch.setattr("common.run.inputs.build_tokenizer", lambda *_: WordTokenizer.from_words(["a", "red"]))
    refused(
        (
            r"discriminator_run = .* does not fit this row: no encoders.fusion",
            lambda: start_discriminator_(model, config),
        ),
        (
            "has other token ids than this run; expected: a run that starts from",
            lambda: open_data(without_row, pairs, None),
        ),
        error=ConfigError,
    )
