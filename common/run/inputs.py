"""What a run trains on: samples in order, as tensors on the device."""

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator

from common.data.batches import Batch, TrainingView, training_batches
from common.data.order import BatchPositions, SampleOrder
from common.data.pairs import (
    EvaluationSets,
    Pairs,
    image_transform,
    lost_at_open,
    open_evaluation_sets,
    open_validation_pairs,
)
from common.data.text import build_tokenizer, tokenizer_from_json
from common.data.tokenizer import Tokenizer
from common.data.transforms import ImageTransform, normalize
from common.run.checkpoint import Checkpoint


@dataclass(frozen=True)
class TrainingData:
    """What a run trains and is evaluated on, and how pixels and words become tensors.

    pairs: the training set. order: which sample stands at which position.
    tokenizer, transform: the same for training and evaluation; a checkpoint carries both.
    validation_pairs: ranked during training; None where run.evaluate_every is 0.
    evaluation_sets: of the end, opened now so that a missing one is known at once.
    """

    pairs: Pairs
    order: SampleOrder
    tokenizer: Tokenizer
    transform: ImageTransform
    validation_pairs: Pairs | None
    evaluation_sets: EvaluationSets

    @property
    def description(self) -> str:
        """The training set in one line, for every result."""
        return f"{self.pairs.name}, {len(self.pairs)} pictures ({self.pairs.fingerprint[:8]})"

    def lost_at_open(self) -> list:
        """Samples that opening alone showed to be broken."""
        return lost_at_open(self.pairs, *self.evaluation_sets.retrieval.values())


def open_training_data(config: Any, pairs: Pairs, checkpoint: Checkpoint | None) -> TrainingData:
    """Everything but the training set itself, which the run's folder depends on and which is open already.

    Args:
        config: of the run.
        pairs: the training set that config.data names.
        checkpoint: brings the tokenizer of a run that goes on; None = a fresh run.
    """
    data, run = config.data, config.run
    if checkpoint is None:
        tokenizer = build_tokenizer(data, pairs)
    else:
        tokenizer = tokenizer_from_json(checkpoint.state["tokenizer"])
    return TrainingData(
        pairs=pairs,
        order=SampleOrder(len(pairs), config.optim.global_batch_size, run.seed),
        tokenizer=tokenizer,
        transform=image_transform(data),
        validation_pairs=open_validation_pairs(data) if run.evaluate_every else None,
        evaluation_sets=open_evaluation_sets(data),
    )


def batches_from(first_step: int, config: Any, training: TrainingData, accelerator: Accelerator):
    """Loader of this process's share of every global batch from a step on; the order depends on the seed alone."""
    view = TrainingView(
        training.pairs, training.order, training.transform, training.tokenizer, config.data.context_length
    )
    positions = BatchPositions(
        training.order, first_step, config.optim.steps, accelerator.process_index, accelerator.num_processes
    )
    return training_batches(view, positions, config.run.num_workers, pin_memory=accelerator.device.type == "cuda")


def as_inputs(batch: Batch, transform: ImageTransform, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(batch, 3, size, size) normalised pixels and (batch, context_length) ids, on the device."""
    images = normalize(batch.images.to(device, non_blocking=True), transform.mean, transform.std)
    return images, batch.token_ids.to(device, non_blocking=True)
