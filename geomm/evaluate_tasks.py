"""Evaluates a fine-tuned model: VQA accuracy, accuracy of entailment labels and of statements on two pictures.

python geomm/evaluate_tasks.py --checkpoint outputs/runs/geomm/<run>/seed0
"""

import sys
import warnings
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from common.base.provenance import hash_of
from common.data.broken import BrokenSample
from common.data.loader import Loader
from common.distributed import is_main_process
from common.evaluation.annotated import (
    best_answers,
    entailment_metrics,
    nlvr2_metrics,
    vqa_metrics,
    vqa_score,
)
from common.evaluation.embed import Encoder, batches_here, check_readable, evaluation_mode, in_order, with_bar
from common.evaluation.protocol import Evaluation
from common.run.evaluation import TrainedModels, evaluate_main
from common.run.launch import run_or_explain
from geomm.downstream.build import build_task_model
from geomm.downstream.config import NUM_PICTURES, TaskConfig
from geomm.downstream.data import WORDS, Altered, encoded_answers, open_test_sets, pictures_of

DECIDES = "evaluation"

PAPER = "geomm"
SCRIPT = Path(__file__).name
UNREADABLE = -1  # prediction for an item with an unreadable image


def evaluate_all(config: TaskConfig, encoder: Encoder, sets: dict[str, Altered]) -> dict[str, Evaluation]:
    """Every set by role. Call on every process."""
    return {role: evaluate_task(config, encoder, items) for role, items in sets.items()}


def evaluate_task(config: TaskConfig, encoder: Encoder, items: Altered) -> Evaluation:
    """The task's metrics on one set, "accuracy" among them, and their chance level. Unreadable items are left out.

    The chance level is that of the most frequent class, or listed answer, of this set.

    Raises:
        TooManyBroken: see `check_readable`.
        ValueError: no item can be read.
    """
    task, k_test = config.data.task, min(config.method.k_test, len(items.answers))
    more = (encoded_answers(encoder.tokenizer, [*items.answers]).to(encoder.device), k_test) if task == "vqa" else ()
    places = predictions(encoder, items, task, *more)
    check_readable(items, torch.tensor(places) != UNREADABLE, encoder.max_broken_share)
    lost = places.count(UNREADABLE) + len(items.broken_at_open)
    rows = [row for row, place in zip(_rows(items), places) if place != UNREADABLE]
    places = [place for place in places if place != UNREADABLE]
    if not rows:
        raise ValueError(f"{items.name}: none of its {len(items)} items can be read; expected: at least one")
    protocol: dict[str, Any] = {
        "task": task,
        "data": items.name,
        "fingerprint": items.fingerprint,
        "num_images": len(rows),
        "unreadable_images": lost,
        "preprocessing": encoder.preprocessing,
    }
    if task == "vqa":
        protocol |= {"num_answers": len(items.answers), "answers": hash_of(items.answers), "k_test": k_test}
        return vqa_evaluation([items.answers[place] for place in places], rows, items, protocol)
    labels = [row["label"] for row in rows]
    if task == "nlvr2":
        identifiers = [row["identifier"] for row in rows if "identifier" in row]
        whole = len(identifiers) == len(rows)
        if not whole and config.data.source != "scenes" and is_main_process():  # scenes have no consistency
            warnings.warn(
                f"{items.name}: {len(rows) - len(identifiers)} of {len(rows)} rows have no identifier, so consistency "
                "is left out; expected in each: identifier = split-set-pair-sentence, e.g. dev-850-0-1",
                stacklevel=2,
            )
        metrics = nlvr2_metrics(places, labels, identifiers if whole else None)
    else:
        metrics = entailment_metrics(places, labels)
    most = Counter(labels).most_common(1)[0][1] / len(labels)
    hits = [[float(place == label)] for place, label in zip(places, labels)]
    return Evaluation(metrics, protocol, {"accuracy": most}, {"accuracy": hits})


def vqa_evaluation(
    predicted: list[str | None], rows: list[dict[str, Any]], items: Altered, protocol: dict[str, Any]
) -> Evaluation:
    """VQA accuracy, also per type of answer; "best attainable" with the closed list; chance of its commonest answer."""
    answers = {number: row["answers"] for number, row in enumerate(rows)}
    types = {number: row["answer_type"] for number, row in enumerate(rows)}
    metrics = vqa_metrics(dict(enumerate(predicted)), answers, types)
    best = best_answers([*answers.values()], items.answers)
    metrics["best attainable"] = vqa_metrics(dict(enumerate(best)), answers, types)["accuracy"]
    counts = Counter(answer for of_item in answers.values() for answer in of_item)
    guess = max(items.answers, key=lambda answer: counts[answer])
    hits = [[vqa_score(answer, of_item)] for answer, of_item in zip(predicted, answers.values())]
    chance = {"accuracy": fmean(vqa_score(guess, of_item) for of_item in answers.values())}
    return Evaluation(metrics, protocol, chance, {"accuracy": hits})


def _rows(items: Altered) -> list[dict[str, Any]]:
    """The annotations of the items, without decoding images if the set allows it."""
    row = getattr(items.items, "row", items.items.__getitem__)
    return [row(index) for index in range(len(items))]


@torch.no_grad()
def predictions(encoder: Encoder, items: Altered, task: str, *more: Any) -> list[int]:
    """The model's `predict` for each item, in order, for any batch size; `UNREADABLE` if an image cannot be read.

    Args:
        task: of TaskData.
        more: further arguments of `predict`.
    """
    size = min(encoder.batch_size, max(len(items), 1))
    batches = batches_here(len(items), size)
    loader = Loader(_Inputs(items, encoder, task), items.name, encoder.num_workers, batch_sampler=batches)
    parts = []
    with evaluation_mode(encoder.model):
        for images, token_ids, readable in with_bar(loader, items.name):
            inputs = encoder.transform.inputs(images.flatten(0, 1).to(encoder.device)).unflatten(0, images.shape[:2])
            places = encoder.model.predict(inputs, token_ids.to(encoder.device), *more)
            parts.append(torch.where(readable.to(encoder.device), places, UNREADABLE))
    return in_order(parts, size, len(items)).tolist()


class _Inputs(torch.utils.data.Dataset):
    """Items as inputs of a model; an item with an unreadable image is black and marked."""

    def __init__(self, items: Altered, encoder: Encoder, task: str) -> None:
        self.items, self.encoder, self.task = items, encoder, task

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
        transform, words = self.encoder.transform, WORDS[self.task]
        try:
            item, readable = self.items[index], True
            pictures = [transform.eval(picture) for picture in pictures_of(item)]
        except BrokenSample:
            item, readable = {words: ""}, False
            pictures = [transform.blank] * NUM_PICTURES.get(self.task, 1)
        ids = self.encoder.tokenizer.encode([item[words]], self.encoder.context_length)[0]
        return torch.stack(pictures), ids, readable


MODELS = TrainedModels(PAPER, TaskConfig, build_task_model, evaluate_all, "task", open_test_sets, SCRIPT)
reevaluate = MODELS.reevaluate  # (checkpoint, config, files, accelerator)


def main() -> None:
    evaluate_main(__doc__, MODELS)


if __name__ == "__main__":
    run_or_explain(main)
