"""Ranking in parts of bounded memory: the same ranks to the last bit for every geometry, ties included."""

from dataclasses import astuple, replace

import numpy as np
import pytest
import torch
from little_memory import at_most
from refusals import refused
from test_info_nce_matrix import DIM, GEOMETRIES
from torch.nn import Identity
from toys import encoder_of

import common.evaluation.embed as embed
from common.evaluation.coco import Relation, coco_results, results_of_parts
from common.evaluation.embed import ScoreParts
from common.evaluation.rerank import two_stage_of_parts, two_stage_ranks
from common.evaluation.retrieval import (
    Part,
    Positives,
    precisions_at_r,
    precisions_of_parts,
    ranks_of_parts,
    retrieval_ranks,
)
from common.late_interaction import LateInteraction

IMAGES, CAPTIONS = 44, 6
LITTLE = 1e-6  # GB, less than one tile
ALL_GEOMETRIES = {**GEOMETRIES, "late interaction": LateInteraction}


@pytest.fixture(params=ALL_GEOMETRIES)
def scored(request, monkeypatch):
    """Scores in one part and in several, of pictures and captions many of which occur twice or more."""
    monkeypatch.setattr(embed, "_ROWS_AT_ONCE", 8)
    geometry, generator = ALL_GEOMETRIES[request.param](), torch.Generator().manual_seed(0)
    shape = (3, DIM) if request.param == "late interaction" else (DIM,)
    images = torch.randn(IMAGES, *shape, generator=generator)
    images[25:], images[19:25] = images[:19], images[:6]  # the first six three times
    texts = images.repeat_interleave(CAPTIONS, dim=0) + torch.randn(IMAGES * CAPTIONS, *shape, generator=generator)
    texts[::4] = texts[1::4]
    with torch.no_grad():
        images, texts = geometry.embed_image(images), geometry.embed_text(texts)
    encoder = encoder_of(Identity(), Identity(), geometry=geometry)
    whole, parts = (ScoreParts(replace(encoder, ranking_gb=gb), images, texts) for gb in (1.0, LITTLE))
    assert (len(list(whole)), len(list(parts))) == (1, 6)
    return next(iter(whole)), parts


def assert_equal(one, other):
    for value, expected in zip(astuple(one), astuple(other), strict=True):
        if isinstance(value, dict):
            assert value.keys() == expected.keys()
            value, expected = (np.stack(list(tables.values())) for tables in (value, expected))
        np.testing.assert_array_equal(value, expected)


def test_ranks_precisions_two_stages_and_coco_in_parts_are_those_of_the_whole(scored):
    (rows, scores, text_scores), parts = scored
    owners = torch.arange(IMAGES).repeat_interleave(CAPTIONS)
    positives = Positives.from_owners(owners, IMAGES)
    expected, actual = retrieval_ranks(scores, owners, text_scores=text_scores), ranks_of_parts(parts, positives)
    assert_equal(actual, expected)
    assert actual.t2i_tied_share > 0.3
    rng = np.random.default_rng(0)
    few = Positives.from_lists(
        [rng.choice(len(owners), rng.integers(1, 9), False).tolist() for _ in range(IMAGES)],
        [[place, place + 25] if place < 19 else [place] for place in rng.integers(0, IMAGES, len(owners))],
    )
    assert_equal(ranks_of_parts(parts, few), retrieval_ranks(scores, few, text_scores=text_scores))
    assert_equal(precisions_of_parts(parts, few), precisions_at_r(scores, few, text_scores=text_scores))

    def match(images, texts):
        return ((images * 7 + texts * 3) % 5).double()

    expected = two_stage_ranks(scores, positives, match, 12, text_scores=text_scores)
    actual = two_stage_of_parts(parts, positives, match, 12)
    assert_equal(actual.contrastive, expected.contrastive)
    assert_equal(actual.matched, expected.matched)
    assert (actual.i2t_kept_share, actual.t2i_kept_share) == (expected.i2t_kept_share, expected.t2i_kept_share)
    relation = Relation("eccv", "y", "precision", {3: [4, 9], 40: [7]}, {4: [3, 12], 9: [43]})
    arguments = range(IMAGES), range(len(owners)), owners, [relation]
    of_parts = results_of_parts(parts, parts.dtype, *arguments, fold_size=11, shared=False)
    assert of_parts == coco_results(scores, *arguments, rows=rows, text_scores=text_scores, fold_size=11)


def test_a_set_that_takes_more_than_the_bound_is_ranked_within_it():
    encoder = replace(encoder_of(Identity(), Identity()), ranking_gb=0.03)
    images, owners = torch.randn(4_000, 8), torch.arange(4_000).repeat_interleave(5)
    texts = images[owners] + torch.randn(20_000, 8)
    positives = Positives.from_owners(owners, 4_000)
    ranks_of_parts([Part(torch.arange(2), torch.eye(2))], Positives.from_owners(torch.arange(2), 2))  # compiles
    with at_most(300):  # megabytes; all scores take 320, and what is computed with them 100
        parts = ScoreParts(encoder, images, texts)
        ranks = ranks_of_parts(parts, positives)
    assert parts.scores.nbytes <= 30e6
    assert ranks.text_to_image.float().mean() < 1_000


def test_parts_that_lack_an_image_or_hold_one_twice_are_refused():
    positives = Positives.from_owners(torch.arange(3), 3)
    part = Part(torch.tensor([0, 1]), torch.zeros(2, 3))
    other = Part(torch.tensor([1, 2]), torch.zeros(2, 3))
    refused(
        ("image 2 of the scores is held by 0 processes", lambda: ranks_of_parts([part], positives)),
        ("image 1 of the scores is held by 2 processes", lambda: ranks_of_parts([part, other], positives)),
    )
