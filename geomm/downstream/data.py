"""Annotated images of a task by role, and training batches of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

from common.base.provenance import hash_of
from common.data.annotated import check_answer_list, open_annotated, read_answer_list
from common.data.batches import TrainingView
from common.data.broken import BrokenSample
from common.data.held_out import split_off
from common.data.order import SampleOrder, order_of, seed_of
from common.data.pairs import Pairs, image_transform, lost_at_open, open_training_pairs
from common.data.part import some_of
from common.data.scenes import AnnotationTask, annotation_task
from common.data.scenes.phrases import ANSWERS
from common.data.text import build_tokenizer, tokenizer_from_json, warn_of_unread_words
from common.data.tokenizer import Tokenizer
from common.data.transforms import ImageTransform
from common.run.checkpoint import Checkpoint, named_checkpoint
from common.run.inputs import described, tokenizer_of_start, validates
from geomm.downstream.config import TaskConfig, TaskData

WORDS = {"vqa": "question", "visual_entailment": "hypothesis", "nlvr2": "statement"}  # of an item, by task
PARTS = {"dev": 1, "test": 0}  # sets that are evaluated -> seed of their scenes
LONGEST_ANSWER = 12  # tokens, start and end included


def open_training_set(data: TaskData, seed: int) -> Any:
    """The training set of a row: captioned images for text assignment, else items of `common/data/annotated.py`.

    Raises:
        FileNotFoundError, ValueError: from the readers, or no training answer is in the list of answers.
    """
    if data.task == "text_assignment":
        return open_training_pairs(data, seed)
    opened = _open(data, "train", seed)
    if data.answers:
        check_answer_list((opened.row(index)["answers"] for index in range(len(opened))), listed(data), data.answers)
    return Altered(opened, data.blank)


def open_test_sets(data: TaskData) -> dict[str, "Altered"]:
    """The test sets of a row by role: "vqa_dev", "vqa_test", ..., for nlvr2 also "nlvr2_exchanged".

    The last is the test set with left and right exchanged. Text assignment has none; its log has the accuracy.
    """
    if data.task == "text_assignment":
        return {}
    answers = tuple(listed(data)) if data.task == "vqa" else ()
    sets = {
        f"{data.task}_{part}": Altered(_open(data, part, seed), data.blank, answers=answers)
        for part, seed in PARTS.items()
    }
    if data.task == "nlvr2":
        sets["nlvr2_exchanged"] = Altered(sets["nlvr2_test"].items, data.blank, exchanged=True)
    return sets


def open_validation_sets(data: TaskData) -> list["Altered"]:
    """Items that no run trains on and no table reports: drawn ones on scenes, of files the share data.val_share.

    Text assignment has none.

    Raises:
        ValueError: files, and data.val_share is 0: their dev and test parts are both reported.
    """
    if data.task == "text_assignment":
        return []
    if data.source != "scenes" and not data.val_share:
        raise ValueError(
            f"data.val_share = 0 with data.source = {data.source} and data.task = {data.task}: data.val is reported as "
            "dev, no other items are left for validation; expected data.val_share=0.05, or run.evaluate_every=0"
        )
    answers = tuple(listed(data)) if data.task == "vqa" else ()
    return [Altered(_open(data, "val", 0), data.blank, answers=answers)]


def listed(data: TaskData) -> list[str]:
    """The closed list of answers."""
    return read_answer_list(_below(data, data.answers)) if data.answers else list(ANSWERS)


def _open(data: TaskData, part: str, seed: int) -> Any:
    """The set of one part, "train", "val", "dev" or "test"; the seed is that of scenes."""
    if data.source == "scenes":
        drawn = part if part in ("train", "val") else "test"
        size = {"train": data.num_train, "val": data.num_val or data.num_test}.get(part, data.num_test)
        return annotation_task(data.task, size=size, image_size=data.image_size, seed=seed, part=drawn)
    key = {"train": "train", "val": "train", "dev": "val", "test": "test"}[part]
    named = getattr(data, key)
    if not named:
        raise ValueError(f"data.{key} is empty with data.source = {data.source}; expected: a file of annotations")
    path, _, answers = named.partition("+") if data.task == "vqa" else (named, "", "")
    opened = open_annotated(
        data.task,
        _below(data, path),
        images=_below(data, data.images) if data.images else None,
        answers=_below(data, answers) if answers else None,
        name=f"{data.task}-{part}",
        root=Path(data.root).expanduser() if data.root else None,
        max_broken_share=data.max_broken_share,
    )
    if key == "train" and data.val_share:
        split = split_off(opened, data.val_share)
        opened = some_of(split.validation, data.num_val) if part == "val" else split.training
    if data.task == "vqa" and part != "train":
        unconfirmed = sum(len(opened.row(index)["answers"]) < 2 for index in range(len(opened)))
        if unconfirmed:
            raise ValueError(
                f"data.{key} = {named}: {unconfirmed} of {len(opened)} questions have one answer; expected: at least "
                "two of each, as VQA accuracy is agreement with the other annotators"
            )
    return opened


def _below(data: TaskData, path: str) -> Path:
    return Path(data.root).expanduser() / Path(path).expanduser()


@dataclass(frozen=True)
class Altered:
    """Items with changes for an evaluation. blank: images are black. exchanged: left and right are exchanged.
    answers: the closed list.
    """

    items: Any
    blank: bool = False
    exchanged: bool = False
    answers: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the set, with its changes."""
        source = "scenes/" if isinstance(self.items, AnnotationTask) else ""
        changes = [", blank pictures"] * self.blank + [", pictures exchanged"] * self.exchanged
        return f"{source}{self.items.name}{''.join(changes)}"

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the set and its changes."""
        return hash_of([self.items.fingerprint, self.blank, self.exchanged, self.answers])

    @property
    def broken_at_open(self) -> list[BrokenSample]:
        """Samples of the set that were lost when it was opened."""
        return lost_at_open(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = dict(self.items[index])
        key = "images" if "images" in item else "image"
        if self.exchanged:
            item[key] = item[key][::-1]
        if self.blank:
            item[key] = [black(picture) for picture in item[key]] if key == "images" else black(item[key])
        return item


def black(picture: Image.Image | np.ndarray) -> Image.Image | np.ndarray:
    """A black image of the same size."""
    return np.zeros_like(picture) if isinstance(picture, np.ndarray) else Image.new("RGB", picture.size)


def pictures_of(item: dict[str, Any]) -> list[Any]:
    """The image of an item, or left and right."""
    return [*item["images"]] if "images" in item else [item["image"]]


def answer_weights(answers: Sequence[str]) -> dict[str, float]:
    """Each distinct answer's share of the annotators; they sum to 1."""
    return {answer: answers.count(answer) / len(answers) for answer in answers}


def encoded_answers(tokenizer: Tokenizer, answers: list[str]) -> torch.Tensor:
    """(num_answers, length of the longest) ids, with end tokens."""
    ids = tokenizer.encode(answers, LONGEST_ANSWER)
    return ids[:, : int((ids == tokenizer.end_id).int().argmax(dim=1).max()) + 1]


class TaskBatch(NamedTuple):
    """One process's share of a global batch."""

    images: torch.Tensor  # (batch, pictures, 3, size, size) uint8
    token_ids: torch.Tensor  # (batch, context_length)
    targets: tuple[torch.Tensor, ...]  # further arguments of the model's forward pass
    broken: list[BrokenSample]  # items that could not be read and were replaced


class TaskView(Dataset):
    """Training items by position; a sample is a pure function of (seed, position).

    Args:
        view: of the set; reads samples and makes tensors of images. Both images of an item have the same crop.
        task: of TaskData.
    """

    def __init__(self, view: TrainingView, task: str) -> None:
        self.view, self.task = view, task

    def __len__(self) -> int:
        return len(self.view)

    def __getitems__(self, positions: list[int]) -> TaskBatch:
        if self.task == "text_assignment":
            pairs = self.view.__getitems__(positions)  # the model draws the targets
            return TaskBatch(pairs.images[:, None], pairs.token_ids, (), pairs.broken)
        view, broken, items, images = self.view, [], [], []
        indices = view.order.epochs_and_indices(np.asarray(positions))[1]
        for position, index in zip(positions, indices):
            seed = seed_of(view.order.seed, position)
            items.append(view.read(int(index), seed, broken))
            images.append(torch.stack([view.view(picture, seed) for picture in pictures_of(items[-1])]))
        token_ids = view.tokenizer.encode([item[WORDS[self.task]] for item in items], view.context_length)
        return TaskBatch(torch.stack(images), token_ids, self._targets(items), broken)

    def _targets(self, items: list[dict[str, Any]]) -> tuple[torch.Tensor, ...]:
        if self.task != "vqa":
            return (torch.tensor([item["label"] for item in items]),)
        weights = [answer_weights(item["answers"]) for item in items]
        answers = [answer for shares_of in weights for answer in shares_of]
        question_of = [row for row, shares_of in enumerate(weights) for _ in shares_of]
        shares = torch.tensor([share for shares_of in weights for share in shares_of.values()])
        return encoded_answers(self.view.tokenizer, answers), shares, torch.tensor(question_of)


@dataclass(frozen=True)
class TaskTraining:
    """The data of finetune.py; see `Training` in common/run/inputs.py."""

    items: Any
    order: SampleOrder
    view: TaskView
    tokenizer: Tokenizer
    transform: ImageTransform
    evaluation_sets: dict[str, Altered]
    validation_sets: list[Altered]
    cache: None = None  # no cached features

    @property
    def description(self) -> str:
        return described(self.items).replace("pictures (", "items (")

    def lost_at_open(self) -> list[BrokenSample]:
        return lost_at_open(self.items, *self.evaluation_sets.values())

    def with_features(self, model: nn.Module, config: TaskConfig, device: torch.device) -> "TaskTraining":
        return self  # the towers train

    def state(self, model: nn.Module) -> dict[str, Any]:
        tokenizer, transform = self.tokenizer.to_json(), self.transform.to_json()
        return {"kind": "task", "geometry": model.geometry.name, "tokenizer": tokenizer, "transform": transform}


def open_task_training(config: TaskConfig, items: Any | Pairs, checkpoint: Checkpoint | None) -> TaskTraining:
    """The data of a run, with the token ids of the run that it starts from."""
    data = config.data
    if checkpoint is None and config.start.run:
        checkpoint = named_checkpoint(Path(config.start.run), "start.run")
        tokenizer_of_start(data, checkpoint, f"start.run = {config.start.run}")
    tokenizer = (
        build_tokenizer(data, items) if checkpoint is None else tokenizer_from_json(checkpoint.state["tokenizer"])
    )
    warn_of_unread_words(tokenizer, data.context_length, items)
    order, transform = order_of(items, config.optim.global_batch_size, config.run.seed), image_transform(data)
    view = TrainingView(
        items, order, transform, tokenizer, data.context_length, augmentation=data.augmentation,
        partner_noise=data.partner_noise, partners_drawn=data.partners_drawn,
    )  # fmt: skip
    tests = open_test_sets(data) if config.run.test else {}
    validation = open_validation_sets(data) if validates(config.run) else []
    return TaskTraining(items, order, TaskView(view, data.task), tokenizer, transform, tests, validation)
