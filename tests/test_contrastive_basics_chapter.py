"""The chapter sentence by sentence: equations against loops, statements that can be proved, and its claims.yaml."""

import ast
import inspect
import itertools
import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from common.base.places import ROOT
from common.evaluation.retrieval import Positives, recall_at_k, retrieval_metrics, retrieval_ranks
from common.geometry import Sphere, inner_product_similarity, unit
from common.info_nce import contrastive_loss, info_nce, symmetric_info_nce
from common.late_interaction import late_interaction
from common.report.claims.decide import measured_at_every_scale
from common.report.claims.ours import our_cells
from common.report.claims.read import HOLDS, load_claims, load_paper_tables
from common.report.claims.verdict import NEEDS, NOT_RUN
from common.run.kept_memory import bytes_kept_for_backward
from contrastive_basics.measurements import sub_batch_statistics
from contrastive_basics.toys import NUM_PIXELS, NUM_WORDS, PairWorld, generator, seeded, toy_encoder
from contrastive_basics.vision.simsiam import simsiam_loss

PAPER = ROOT / "contrastive_basics"
PRINTED = load_paper_tables(PAPER / "paper_tables.yaml")
CLAIMS = {claim.id: claim for claim in load_claims(PAPER / "claims.yaml", PRINTED)}
REAL = {  # experiments and rows with trained towers, which may or may not have been run
    "trained_here": {"C16-trained", "C22"},
    "negatives_scenes": {"C20-scenes", "C20-scenes-queue"},
    "by_batch_scenes": {"C20-scenes-steps", "C20-scenes-rate"},
    "groups_scenes": {"C20-scenes-groups"},
    "groups_flickr8k": {"C20-flickr8k-groups"},
    "negatives_flickr8k": {"C20-flickr8k", "C20-flickr8k-queue"},
    "self_supervised, SimSiam, no predictor": {"C5-pictures"},
}


def double(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def embeddings(batch, dim=8, noise=0.8):
    """Pairs that belong together without being equal."""
    images = double(batch, dim)
    return unit(images), unit(images + noise * double(batch, dim, seed=1))


# ---- 0.1.1 Vision ---------------------------------------------------------------------------------------------------


def test_a_constant_representation_minimises_the_loss_without_negatives():
    def without_negatives(first, second):
        return float(simsiam_loss(first, second, first, second, stop_gradient=False))

    constant = double(1, 5).expand(20, 5)
    assert without_negatives(constant, constant) == pytest.approx(-1, abs=1e-15)
    for seed in range(100):
        assert without_negatives(double(20, 5, seed=seed), double(20, 5, seed=1000 + seed)) > -1
    # and it stays there: the gradient vanishes
    first, second = constant.clone().requires_grad_(), constant.clone().requires_grad_()
    simsiam_loss(first, second, first, second, stop_gradient=False).backward()
    assert first.grad.abs().max() < 1e-16


# ---- 0.1.2 Vision-Language ------------------------------------------------------------------------------------------


def test_eq1_the_product_of_normalised_vectors_is_the_cosine_and_zero_has_none():
    first, second = double(50, 7), 1e3 * double(40, 7, seed=1)
    cosines = inner_product_similarity(unit(first), unit(second))
    expected = F.cosine_similarity(first[:, None], second[None], dim=2)
    torch.testing.assert_close(cosines, expected, rtol=0, atol=1e-14)
    single = inner_product_similarity(unit(first.float()), unit(second.float()))
    torch.testing.assert_close(single.double(), expected, rtol=0, atol=1e-6)
    zero = inner_product_similarity(unit(torch.zeros(1, 7)), unit(second.float()))
    assert torch.equal(zero, torch.zeros(1, 40))


def test_eq5_one_product_holds_all_cosines_and_the_positives_on_its_diagonal():
    images, texts = double(6, 4), double(6, 4, seed=1)
    cosines = inner_product_similarity(unit(images), unit(texts))
    assert cosines.shape == (6, 6)
    for i, j in itertools.product(range(6), repeat=2):
        length = math.hypot(*images[i].tolist()) * math.hypot(*texts[j].tolist())
        dot = sum(a * b for a, b in zip(images[i].tolist(), texts[j].tolist()))
        assert float(cosines[i, j]) == pytest.approx(dot / length, abs=1e-14)


def test_eq6_is_a_softmax_over_rows_and_eq7_over_columns():
    logits = torch.tensor([[2.0, 1.0], [0.0, 3.0]], dtype=torch.float64)
    diagonal = torch.arange(2)
    over_rows = (math.log(1 + math.exp(1 - 2)) + math.log(1 + math.exp(0 - 3))) / 2
    over_columns = (math.log(1 + math.exp(0 - 2)) + math.log(1 + math.exp(1 - 3))) / 2
    assert over_rows != pytest.approx(over_columns, abs=0.01)
    assert float(info_nce(logits, diagonal)) == pytest.approx(over_rows, abs=1e-15)
    assert float(info_nce(logits.T, diagonal)) == pytest.approx(over_columns, abs=1e-15)
    assert float(symmetric_info_nce(logits)) == pytest.approx((over_rows + over_columns) / 2, abs=1e-15)


def test_a_batch_of_256_is_a_choice_among_256():
    equal = torch.full_like(inner_product_similarity(*embeddings(256)), 0.7).requires_grad_()
    assert equal.shape == (256, 256)
    loss = symmetric_info_nce(equal)
    assert float(loss.detach()) == pytest.approx(5.5452, abs=5e-5)
    loss.backward()  # every row and column shares its mass between one positive and 255 negatives
    negatives = ~torch.eye(256, dtype=torch.bool)
    assert torch.equal(equal.grad > 0, negatives)
    torch.testing.assert_close(equal.grad[negatives], torch.full((256 * 255,), 1 / 256**2, dtype=torch.float64))


def test_eq8_is_symmetric_and_its_gradient_is_softmax_minus_positives():
    images, texts = embeddings(12)
    scale = torch.tensor(5.0, dtype=torch.float64)
    there = contrastive_loss(images, texts, Sphere(), scale)
    back = contrastive_loss(texts, images, Sphere(), scale)
    assert float(there) == pytest.approx(float(back), abs=1e-14)
    logits, positives = double(12, 12).requires_grad_(), torch.eye(12, dtype=torch.float64)
    symmetric_info_nce(logits).backward()
    expected = (logits.softmax(dim=1) - positives + logits.softmax(dim=0) - positives) / (2 * 12)
    torch.testing.assert_close(logits.grad, expected.detach(), rtol=1e-12, atol=1e-16)


def test_a_sub_batch_is_never_harder_than_the_batch_on_the_same_features():
    def by_query(logits):
        partners = torch.arange(len(logits))
        return F.cross_entropy(logits, partners, reduction="none"), logits.argmax(dim=1) != partners

    logits = 10 * inner_product_similarity(*embeddings(64))
    losses, wrong = by_query(logits)
    assert 0 < int(wrong.sum()) < 64
    for size, seed in itertools.product((2, 8, 32), range(20)):
        part = torch.randperm(64, generator=torch.Generator().manual_seed(seed))[:size]
        of_part, wrong_in_part = by_query(logits[part][:, part])
        assert (of_part < losses[part]).all()  # query by query, not only on average
        assert not (wrong_in_part & ~wrong[part]).any()


def test_the_expected_hardest_negative_rises_with_their_number():
    cosines = inner_product_similarity(*embeddings(8, dim=4))
    expected = []
    for size in range(2, 9):  # the mean over all sub-batches of a size, none left out
        parts = [torch.tensor(part) for part in itertools.combinations(range(8), size)]
        statistics = [sub_batch_statistics(cosines[part][:, part], torch.tensor(1.0)) for part in parts]
        expected.append(np.mean([of_part["hardest_negative"] for of_part in statistics]))
    assert (np.diff(expected) > 0).all()
    # in closed form: of all sets of n of a query's 7 negatives, C(k, n - 1) have the one above k others as the hardest
    sides = (cosines.numpy(), cosines.T.numpy())
    ascending = np.sort([np.delete(row, i) for side in sides for i, row in enumerate(side)], axis=1)
    for number, hardest in enumerate(expected, start=1):
        shares = [math.comb(k, number - 1) / math.comb(7, number) for k in range(7)]
        assert hardest == pytest.approx(float((ascending @ shares).mean()), abs=1e-14)


def test_averaging_micro_batches_is_an_easier_task_than_the_batch():
    images, texts = embeddings(64)
    scale = torch.tensor(10.0, dtype=torch.float64)
    full = float(contrastive_loss(images, texts, Sphere(), scale))
    averages = [
        np.mean(
            [float(contrastive_loss(*part, Sphere(), scale)) for part in zip(images.split(size), texts.split(size))]
        )
        for size in (2, 8, 16, 32)
    ]
    assert (np.diff([*averages, full]) > 0.1).all()


def test_a_larger_batch_keeps_more_memory_for_backward():
    world, encoders = PairWorld.drawn(0), [seeded(lambda n=n: toy_encoder(n), 0) for n in (NUM_PIXELS, NUM_WORDS)]
    weights = [parameter for encoder in encoders for parameter in encoder.parameters()]

    def kept(batch):
        def loss():
            sides = [unit(encoder(side)) for encoder, side in zip(encoders, world.pairs(batch, generator(0)))]
            return contrastive_loss(*sides, Sphere(), torch.tensor(10.0))

        return bytes_kept_for_backward(loss, weights)

    # bytes are a + b B + c B^2
    quadratic, linear, _ = np.polyfit((256, 512, 1024), [kept(batch) for batch in (256, 512, 1024)], 2)
    assert quadratic >= 4 * 2 - 1e-6  # at least one matrix of logits for each direction
    assert linear >= 4 * 2 * (128 + 128 + 32) - 1e-3  # of every pair, the layers of both towers


def test_late_interaction_costs_as_many_products_more_as_there_are_pairs_of_tokens():
    tokens, words, dim = 14, 11, 16
    image_tokens, text_tokens = unit(double(6, tokens, dim)), unit(double(5, words, dim, seed=1))

    def operations(compare):
        with FlopCounterMode(display=False) as counter:
            compare()
        return counter.get_total_flops()

    whole = operations(lambda: inner_product_similarity(image_tokens[:, 0], text_tokens[:, 0]))
    assert whole == 2 * 6 * 5 * dim
    assert operations(lambda: late_interaction(image_tokens, text_tokens)) == whole * tokens * words


# ---- 0.1.3 Vision-Language Retrieval --------------------------------------------------------------------------------


def test_retrieval_takes_embeddings_and_a_map_of_ids_and_no_model():
    images, owners = torch.eye(3), torch.tensor([0, 0, 1, 1, 2, 2])
    metrics = retrieval_metrics(retrieval_ranks(images @ images[owners].T, owners))
    assert metrics["i2t_recall_at_1"] == metrics["t2i_recall_at_1"] == 1.0
    assert set(inspect.signature(retrieval_ranks).parameters) == {"scores", "positives", "rows", "text_scores"}
    source = (ROOT / "common" / "evaluation" / "retrieval.py").read_text(encoding="utf-8")
    imported = [node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    assert "common.evaluation.rank_loops" in imported
    assert not [name for name in imported if name.startswith(("common.encoders", "common.methods", "common.data"))]


def test_recall_at_1_of_one_to_one_pairs_is_accuracy():
    for seed in range(20):
        scores = double(30, 30, seed=seed) + 2 * torch.eye(30, dtype=torch.float64)
        ranks = retrieval_ranks(scores, torch.arange(30))
        for direction, matrix in ((ranks.image_to_text, scores), (ranks.text_to_image, scores.T)):
            accuracy = float((matrix.argmax(dim=1) == torch.arange(30)).double().mean())
            assert 0 < accuracy < 1
            assert recall_at_k(direction, 1) == pytest.approx(accuracy, abs=1e-15)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**16))
def test_recall_does_not_fall_with_k_and_there_are_six(num_images, captions, levels, seed):
    draws = torch.Generator().manual_seed(seed)
    num_texts = num_images * captions
    scores = torch.randint(levels, (num_images, num_texts), generator=draws).float()  # with ties
    ranks = retrieval_ranks(scores, torch.arange(num_texts) // captions)
    metrics = retrieval_metrics(ranks)
    for direction, of_queries, candidates in (
        ("i2t", ranks.image_to_text, num_texts),
        ("t2i", ranks.text_to_image, num_images),
    ):
        recalls = [recall_at_k(of_queries, k) for k in range(1, candidates + 1)]
        assert (np.diff(recalls) >= 0).all()
        assert recalls[-1] == 1.0
        six = [metrics[f"{direction}_recall_at_{k}"] for k in (1, 5, 10)]
        assert six == sorted(six)
    assert sum(bool(re.fullmatch(r"(i2t|t2i)_recall_at_(1|5|10)", name)) for name in metrics) == 6


def test_text_retrieval_asks_with_images_and_image_retrieval_with_captions():
    # image 0 has five captions, image 1 has one
    scores = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.9, 0.5], [0.2, 0.3, 0.4, 0.5, 0.6, 0.8]])
    owners = torch.tensor([0, 0, 0, 0, 0, 1])
    metrics = retrieval_metrics(retrieval_ranks(scores, owners))
    assert metrics["i2t_recall_at_1"] == 1.0  # both images find one of theirs
    assert metrics["t2i_recall_at_1"] == pytest.approx(2 / 6)  # only the fifth and sixth caption find theirs
    swapped = Positives.from_lists([[owner] for owner in owners.tolist()], [[0, 1, 2, 3, 4], [5]])
    metrics = retrieval_metrics(retrieval_ranks(scores.T.contiguous(), swapped))
    assert metrics["i2t_recall_at_1"] == pytest.approx(2 / 6)
    assert metrics["t2i_recall_at_1"] == 1.0


# ---- claims.yaml ----------------------------------------------------------------------------------------------------


def test_claims_on_toy_worlds_hold_and_the_others_say_what_they_wait_for(committed_tables):
    tables = [entry.table for entry in committed_tables if entry.table.paper == PAPER.name and not entry.changed]
    ours = our_cells(tables)
    measured = {f"{table.table_id}, {row.method}" for table in tables for row in table.rows}
    measured |= {table.experiment for table in tables}
    verdicts = {name: measured_at_every_scale(claim, PRINTED, ours)[0].verdict for name, claim in CLAIMS.items()}
    assert {name for name, verdict in verdicts.items() if verdict == NEEDS} == {"C27", "C28"}
    waiting = set().union(*(names for experiment, names in REAL.items() if experiment not in measured))
    assert {name for name, verdict in verdicts.items() if verdict == NOT_RUN} == waiting
    for name in ("C1", "C2", "C4", "C5", "C16", "C20", "C20-queue"):
        assert verdicts[name] == HOLDS, name
