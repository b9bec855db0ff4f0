"""Evaluations that tests/test_common_retrieval.py makes in one process and in several, as JSON."""

import json
from dataclasses import asdict, replace

import numpy as np
import torch
from torch import nn
from toys import ListedPictures, encoder_of

import common.evaluation.embed as embed
from common.data.scenes import SceneDataset, scene_words
from common.data.tokenizer import WordTokenizer
from common.distributed import rank, world_size
from common.evaluation.coco import Relation, _positives, coco_results
from common.evaluation.embed import evaluate_retrieval
from common.evaluation.rerank import evaluate_two_stage, two_stage_ranks
from common.evaluation.retrieval import Positives, retrieval_ranks


class MeanOfWords(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.words = nn.Embedding(size, 24)

    def forward(self, token_ids):
        return self.words(token_ids).mean(dim=1)


def tiny_encoder():
    torch.manual_seed(0)
    tokenizer = WordTokenizer.from_words(scene_words())
    image_tower = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 24))
    text_tower = MeanOfWords(tokenizer.vocabulary_size)
    return encoder_of(image_tower, text_tower, tokenizer, size=16, context_length=16, batch_size=8)


def scenes_of_which_two_are_torn():
    scenes = SceneDataset(split="test", size=70, image_size=16)
    return ListedPictures(map(scenes.picture, range(70)), scenes.captions, broken=(3, 69))


def match_of(embedded):
    images, texts = embedded.images[:, :8], embedded.texts[:, :8]
    return lambda rows, columns: (images[rows] * texts[columns]).sum(dim=1)


def broken_match_of(embedded):
    def match(rows, columns):
        logits = (rows * 1.0).where((rows != 67) | (columns != 300), torch.nan)
        return logits + 0 * columns

    return match


def message_of(function, *arguments, **more):
    try:
        function(*arguments, **more)
    except ValueError as error:
        return str(error)
    return "no error"


def evaluations():
    encoder, pairs = tiny_encoder(), scenes_of_which_two_are_torn()
    results = {"retrieval": asdict(evaluate_retrieval(encoder, pairs))}
    bounded = replace(encoder, ranking_gb=1e-6)
    results["retrieval in parts"] = asdict(evaluate_retrieval(bounded, pairs))
    for more, one in (("", encoder), (" in parts", bounded)):
        stages = evaluate_two_stage(one, pairs, match_of, 10, pairs_at_once=32)
        results |= {f"{stage}{more}": asdict(evaluation) for stage, evaluation in stages.items()}

    generator = torch.Generator().manual_seed(1)
    owners = torch.arange(20).repeat_interleave(5)
    scores = torch.randn(20, 100, generator=generator).round()  # with ties
    scores[owners, torch.arange(100)] += 1
    rows = torch.arange(20)[rank() :: world_size()]
    right = {image: list(range(1000 + image, 1100, 7)) for image in range(0, 20, 3)}
    images_of = {1000 + text: sorted({text // 5, text % 20}) for text in range(0, 100, 4)}
    relations = [Relation("cxc", "x", "recall", right, images_of), Relation("eccv", "y", "precision", right, images_of)]
    actual = coco_results(
        scores[rows], range(20), range(1000, 1100), owners, relations, rows=rows, fold_size=4, text_scores=-scores[rows]
    )
    results["coco"] = {key: asdict(one) for key, one in actual.items()}

    actual = retrieval_ranks(scores[rows], _positives(relations[0], np.arange(20), np.arange(1000, 1100)), rows=rows)
    results["ranks"] = actual.image_to_text.tolist(), actual.text_to_image.tolist()
    logits = torch.randn(20, 100, generator=generator)
    actual = two_stage_ranks(scores, owners, lambda i, j: logits[i, j], 20, pairs_at_once=60).matched
    results["matched ranks"] = actual.image_to_text.tolist(), actual.text_to_image.tolist()

    bad = scores[rows].clone()
    bad[rows == 19, :2] = torch.nan  # on one process only; the others must not wait for it
    results["not finite"] = message_of(retrieval_ranks, bad, Positives.from_owners(owners, 20), rows=rows)
    results["match not finite"] = message_of(
        evaluate_two_stage, encoder, pairs, broken_match_of, len(pairs) - 2, pairs_at_once=2000
    )
    return results


def evaluations_as_json() -> str:
    """All of them, every rank's the same."""
    embed._ROWS_AT_ONCE = 16  # several tiles of scores from few pictures
    return json.dumps(evaluations(), indent=1)
