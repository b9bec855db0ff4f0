"""COCO's 5,000 Karpathy test images under four protocols: 5K, 1K, CxC, ECCV Caption.

    coco_5k  all captions, one ranking
    coco_1k  mean over five folds of 1,000 consecutive images, every fold ranked by itself
    cxc      recalls by the positives of Crisscrossed Captions: pairs that people scored 3 or more
    eccv     mAP@R, R-Precision and R@1 by the positives of ECCV Caption

All but the first use the first five captions of each image (nine images have more).
"""

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from common.base.provenance import hash_of
from common.data.pairs import Pairs
from common.data.text_files import read_json_object, read_text
from common.evaluation.arrays import labels_of
from common.evaluation.embed import CaptionRule, Encoder, ScoreParts, embed_pairs, retrieval_evaluation
from common.evaluation.protocol import TIE_RULE, Evaluation, mean_of_folds
from common.evaluation.retrieval import (
    Part,
    Positives,
    hits_by_image,
    means,
    precision_chance_level,
    precisions_of_parts,
    ranks_of_parts,
)

CXC_SCORE = 3.0  # a pair is positive from here on
CAPTIONS = 5  # per image, in all protocols but 5K
NUM_IMAGES = 5000  # of the Karpathy test split
FOLD_SIZE = 1000
# ECCV Caption names these two, which are sixth captions and not among its 25,000; its package lets them count in R
_SIXTH_CAPTIONS = frozenset({144675, 467259})
_CXC_HEADER = ["caption", "image", "agg_score", "sampling_method"]


@dataclass(frozen=True)
class Relation:
    """Right captions of an image and right images of a caption, by COCO's ids; queries are the keys.

    key: of its evaluation. title: in the protocol. metrics: "precision" = mAP@R and R-Precision.
    outside: captions that are no candidates but count in the R of their images.
    """

    key: str
    title: str
    metrics: Literal["recall", "precision"]
    captions_of_image: dict[int, list[int]]
    images_of_caption: dict[int, list[int]]
    outside: frozenset[int] = frozenset()


def read_cxc(path: Path, score: float = CXC_SCORE) -> Relation:
    """The positives of Crisscrossed Captions, from sits_test.csv or sits_val.csv, plain or gzip.

    Only the score counts: 29 original COCO pairs of the test file fall below 3 and are no positives.
    """
    lines = csv.reader(io.StringIO(read_text(path)))
    if (header := next(lines, None)) != _CXC_HEADER:
        raise ValueError(
            f"{path}, line 1: {str(header)[:200]}; expected: the header {','.join(_CXC_HEADER)} (a sits file of CxC)"
        )
    captions_of_image: dict[int, list[int]] = {}
    images_of_caption: dict[int, list[int]] = {}
    for number, line in enumerate(lines, start=2):
        try:
            caption, image, text = line[:3]
            caption_id = int(caption.rpartition(":sentid:")[2])
            image_id = int(image.rpartition("_")[2].removesuffix(".jpg"))
            value = float(text)
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}: {','.join(line)[:200]}; expected: COCO_val2014:sentid:<id>,"
                "COCO_val2014_<id>.jpg,<score>,<method>"
            ) from error
        if value >= score and image_id not in images_of_caption.setdefault(caption_id, []):
            images_of_caption[caption_id].append(image_id)
            captions_of_image.setdefault(image_id, []).append(caption_id)
    images_of_caption = {caption_id: images for caption_id, images in images_of_caption.items() if images}
    return Relation("cxc", f"Crisscrossed Captions, score >= {score:g}", "recall", captions_of_image, images_of_caption)


def read_eccv(folder: Path) -> Relation:
    """The positives of ECCV Caption: eccv_image_to_caption.json and eccv_caption_to_image.json, plain or gzip."""
    return Relation(
        "eccv",
        "ECCV Caption",
        "precision",
        read_id_lists(folder / "eccv_image_to_caption.json"),
        read_id_lists(folder / "eccv_caption_to_image.json"),
        outside=_SIXTH_CAPTIONS,
    )


def read_id_lists(path: Path) -> dict[int, list[int]]:
    """A JSON object {"id": [ids]}, from the file or its .gz."""
    file = path if path.exists() else path.with_name(path.name + ".gz")
    content = read_json_object(file)
    for key, values in content.items():
        whole = isinstance(values, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in values)
        if not key.isdecimal() or not whole:
            raise ValueError(f"{file}: {key!r}: {str(values)[:60]}; expected: an id with a list of ids")
    return {int(key): values for key, values in content.items()}


def check_coco(pairs: Pairs, relations: Sequence[Relation]) -> None:
    """Before training: ValueError where `evaluate_coco` has no protocol."""
    if len(pairs) != NUM_IMAGES:
        raise ValueError(f"{pairs.name}: {len(pairs)} images; expected: the {NUM_IMAGES} of Karpathy's test split")
    images, captions = _ids_of(pairs)
    five = np.array([number for numbers in captions for number in numbers[:CAPTIONS]])
    for relation in relations:
        _positives(relation, np.array(images), five)


def _ids_of(pairs: Pairs) -> tuple[list[int], list[list[int]]]:
    # COCO's number of each image, and those of its captions
    images, captions = [], []
    for index in range(len(pairs)):
        image, ids, count = pairs.image_id(index), pairs.caption_ids(index), len(pairs.captions(index))
        if not image.isdecimal():
            raise ValueError(f"{pairs.name}: image {image!r}; expected: COCO's number of each image")
        are_numbers = ids is not None and all(str(number).isdecimal() for number in ids)
        if not are_numbers or len(ids) != count or count < CAPTIONS:
            raise ValueError(
                f"{pairs.name}: image {image} has {count} captions and the ids {ids}; expected: {CAPTIONS} captions or "
                "more, and COCO's number of each"
            )
        images.append(int(image))
        captions.append([int(number) for number in ids])
    return images, captions


def evaluate_coco(
    encoder: Encoder,
    pairs: Pairs,
    relations: Sequence[Relation],
    rule: CaptionRule = CaptionRule(),  # noqa: B008
) -> dict[str, Evaluation]:
    """All protocols from one pass over the images; each process ranks its share.

    Args:
        pairs: the test split, with COCO's image_id(index) and caption_ids(index).
        rule: its `per_image` concerns coco_5k; the others need five.
    Returns:
        "coco_5k", "coco_1k" and the key of each relation -> Evaluation.
    Raises:
        ValueError: missing ids or unreadable images.
    """
    images, captions = _ids_of(pairs)
    embedded = embed_pairs(encoder, pairs, rule)
    image_ids = [images[index] for index in embedded.indices]
    used = zip(embedded.indices, embedded.captions_of)
    caption_ids = [number for index, texts in used for number in captions[index][: len(texts)]]
    parts = ScoreParts(encoder, embedded.images, embedded.texts)
    results = results_of_parts(
        parts, parts.dtype, image_ids, caption_ids, embedded.text_to_image, relations, shared=True
    )
    plain = Positives.from_owners(embedded.text_to_image, len(image_ids))
    protocol = embedded.protocol(encoder, plain, parts.dtype)
    return {
        key: Evaluation(result.metrics, protocol | result.protocol, result.chance, result.hits)
        for key, result in results.items()
    }


def coco_results(
    scores: torch.Tensor,
    image_ids: Sequence[int],
    caption_ids: Sequence[int],
    text_to_image: torch.Tensor,
    relations: Sequence[Relation] = (),
    *,
    rows: torch.Tensor | None = None,
    text_scores: torch.Tensor | None = None,
    fold_size: int = FOLD_SIZE,
) -> dict[str, Evaluation]:
    """The protocols from scores and ids.

    Args:
        scores, rows, text_scores: as in `retrieval_ranks`, with all captions of each image.
        image_ids, caption_ids: COCO's, in the order of images and texts.
        text_to_image: (num_texts,) row of each caption's image.
        fold_size: images of a fold of "1K"; divides num_images.
    Returns:
        As `evaluate_coco`; the protocols have what is known here.
    Raises:
        ValueError: repeated ids, unknown ids in a relation, an image with fewer than five captions, folds that do not
            divide the images; and as `retrieval_ranks`.
    """
    part = Part.of(scores, len(image_ids), rows, text_scores)
    return results_of_parts(
        [part], part.scores.dtype, image_ids, caption_ids, text_to_image, relations, fold_size, shared=rows is not None
    )


def results_of_parts(
    parts: Iterable[Part],
    score_dtype: torch.dtype,
    image_ids: Sequence[int],
    caption_ids: Sequence[int],
    text_to_image: torch.Tensor,
    relations: Sequence[Relation],
    fold_size: int = FOLD_SIZE,
    *,
    shared: bool,
) -> dict[str, Evaluation]:
    """`coco_results` of parts; shared as in `ranks_of_parts`."""
    images, captions = np.asarray(image_ids, np.int64), np.asarray(caption_ids, np.int64)
    text_to_image = labels_of(text_to_image, "text_to_image").cpu()
    owners = text_to_image.numpy()
    for name, ids, count in (("image", images, None), ("caption", captions, len(owners))):
        if count is not None and len(ids) != count:
            raise ValueError(f"{len(ids)} {name} ids for {count} captions")
        unique, times = np.unique(ids, return_counts=True)
        if (times > 1).any():
            raise ValueError(f"{name} id {unique[times > 1][0]} occurs {times[times > 1][0]} times; expected: once")
    if not len(images) or len(images) % fold_size:
        raise ValueError(
            f"{len(images)} images make no folds of {fold_size}; the protocols need the whole Karpathy split of 5,000"
        )

    counts = np.bincount(owners, minlength=len(images))
    protocol = {
        "ids_hash": hashlib.sha256(json.dumps([images.tolist(), captions.tolist()]).encode()).hexdigest()[:16],
        "captions_per_image": int(counts[0]) if (counts == counts[0]).all() else "all",
        "positives": "own captions",
        "candidates": "all",
        "score_dtype": str(score_dtype).removeprefix("torch."),
        "tie_rule": TIE_RULE,
    }
    plain = Positives.from_owners(text_to_image, len(images))
    results = {"coco_5k": _by_recall(parts, shared, plain, text_to_image, protocol)}

    # all protocols but 5K are defined on the first five captions of every image
    five = _first_captions(owners, images)
    protocol |= {"captions_per_image": CAPTIONS}
    if len(five) < len(owners):
        parts, text_to_image, captions = _Columns(parts, five), text_to_image[five], captions[five]
    results["coco_1k"] = _by_folds(parts, shared, text_to_image, len(images), fold_size, protocol)
    evaluate = {"recall": _by_recall, "precision": _by_precision}
    for relation in relations:
        positives = _positives(relation, images, captions)
        stated = {
            "positives": relation.title,
            "positives_hash": hash_of([array.tolist() for array in astuple(positives)]),
        }
        results[relation.key] = evaluate[relation.metrics](parts, shared, positives, text_to_image, protocol | stated)
    return results


@dataclass(frozen=True)
class _Columns:
    # Parts with some of their columns.

    parts: Iterable[Part]
    columns: np.ndarray

    def __iter__(self) -> Iterator[Part]:
        for part in self.parts:
            yield _cut(part, slice(None), self.columns)


def _cut(part: Part, rows: Any, columns: Any) -> Part:
    # Some rows and columns of a part; a copy, because the memory of a part is reused.
    tables = (None if table is None else table[rows][:, columns] for table in part[1:])
    return Part(part.rows[rows], *tables)


def _by_recall(parts, shared, positives, text_to_image, protocol) -> Evaluation:
    ranks = ranks_of_parts(parts, positives, shared=shared)
    return retrieval_evaluation(ranks, positives, text_to_image, protocol | _counts(positives))


def _by_precision(parts, shared, positives, text_to_image, protocol) -> Evaluation:
    precisions = precisions_of_parts(parts, positives, shared=shared)
    hits = hits_by_image(precisions, text_to_image, positives.num_images)
    return Evaluation(means(precisions), protocol | _counts(positives), precision_chance_level(positives), hits)


def _by_folds(parts, shared, text_to_image, num_images, fold_size, protocol) -> Evaluation:
    # Mean over folds of consecutive images, whose captions are the only candidates.
    starts = range(0, num_images, fold_size)
    columns = [
        ((text_to_image >= start) & (text_to_image < start + fold_size)).nonzero().squeeze(1) for start in starts
    ]
    of_fold: list[list[Part]] = [[] for _ in starts]  # the scores within a fold: 1 / folds of all
    for part in parts:
        for start, captions, cut in zip(starts, columns, of_fold):
            places = ((part.rows >= start) & (part.rows < start + fold_size)).nonzero().squeeze(1)
            rows, *tables = _cut(part, places, captions)
            cut.append(Part(rows - start, *tables))
    folds = []
    for start, captions, cut in zip(starts, columns, of_fold):
        owners = text_to_image[captions] - start
        folds.append(_by_recall(cut, shared, Positives.from_owners(owners, fold_size), owners, protocol))
    return mean_of_folds(folds, f"own fold of {fold_size} images")


def _counts(positives: Positives) -> dict[str, int]:
    return {
        "num_images": positives.num_images,
        "num_texts": positives.num_texts,
        "num_image_queries": len(positives.query_images),
        "num_text_queries": len(positives.query_texts),
    }


def _first_captions(owners: np.ndarray, image_ids: np.ndarray) -> np.ndarray:
    # Columns of the first five captions of each image, ascending.
    order = np.argsort(owners, kind="stable")
    counts = np.bincount(owners, minlength=len(image_ids))
    few = np.flatnonzero(counts < CAPTIONS)
    if len(few):
        raise ValueError(
            f"image {image_ids[few[0]]} has {counts[few[0]]} captions; COCO 1K, CxC and ECCV Caption need {CAPTIONS}"
        )
    place = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)  # within its image
    return np.sort(order[place < CAPTIONS])


def _positives(relation: Relation, image_ids: np.ndarray, caption_ids: np.ndarray) -> Positives:
    # From ids to rows and columns. A missing id is an error, but for captions that the relation excepts.
    row_of = {int(one): row for row, one in enumerate(image_ids)}
    column_of = {int(one): column for column, one in enumerate(caption_ids)}

    def place(kind: str, one: int) -> int:
        places = row_of if kind == "image" else column_of
        if one not in places:
            raise ValueError(
                f"{relation.title} names {kind} {one}, which is not among the {len(row_of)} images and "
                f"{len(column_of)} captions: another split, or not the first {CAPTIONS} captions of each image"
            )
        return places[one]

    excepted = relation.outside - column_of.keys()
    texts_of_image: list[list[int]] = [[] for _ in row_of]
    images_of_text: list[list[int]] = [[] for _ in column_of]
    texts_outside = [0] * len(row_of)
    for image, captions in relation.captions_of_image.items():
        row, inside = place("image", image), [one for one in captions if one not in excepted]
        texts_of_image[row] = [place("caption", one) for one in inside]
        texts_outside[row] = len(captions) - len(inside)
    for caption, images in relation.images_of_caption.items():
        images_of_text[place("caption", caption)] = [place("image", one) for one in images]
    return Positives.from_lists(texts_of_image, images_of_text, texts_outside)
