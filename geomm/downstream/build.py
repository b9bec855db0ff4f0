"""Builds the model of a task's row, and fills it with its first weights."""

from functools import partial

import torch

from common.base.config import ConfigError
from common.data.tokenizer import Tokenizer
from common.evaluation.annotated import ENTAILMENT_LABELS
from geomm.downstream.config import NUM_PICTURES, TaskConfig
from geomm.downstream.models import (
    NUM_ASSIGNMENTS,
    AnswerDecoder,
    Answering,
    Classification,
    FusedReader,
    TaskModel,
    TextAssignment,
    classifier,
)
from geomm.model import build_encoders, fill_, tensors_of_run

# an ALBEF's parts by the names of an `AnswerDecoder` that starts from them
_OF_DECODER = {
    "encoders.text_tower.token_embedding.": "encoders.head.token_embedding.",
    "encoders.text_tower.position_embedding": "encoders.head.position_embedding",
    "encoders.text_tower.input_norm.": "encoders.head.input_norm.",
    "encoders.fusion.transformer.": "encoders.head.transformer.",
    "encoders.word_head.": "encoders.head.word_head.",
}
NUM_CLASSES = {"visual_entailment": len(ENTAILMENT_LABELS), "nlvr2": 2}
_BLOCK = "encoders.fusion.transformer.blocks."


def build_task_model(config: TaskConfig, tokenizer: Tokenizer) -> TaskModel:
    """The model of a row with random weights."""
    albef = build_encoders(config, tokenizer)
    text_tower, fusion, task, width = albef.text_tower, albef.fusion, config.data.task, config.model.text.width
    read = partial(FusedReader, albef.image_tower, text_tower)
    if task == "vqa":
        return Answering(read(fusion, AnswerDecoder(text_tower, fusion, albef.word_head)))
    fusion = fusion.doubled() if task in NUM_PICTURES else fusion
    if task == "text_assignment":
        return TextAssignment(read(fusion, torch.nn.Linear(width, NUM_ASSIGNMENTS)), config.model.embedding_dim)
    return Classification(read(fusion, classifier(width, NUM_CLASSES[task])))


def start_(model: TaskModel, config: TaskConfig) -> dict[str, int]:
    """Fills a model with weights of the run that its row starts from, in place.

    Args:
        model: unwrapped.
        config: start.run is the folder of a finished run, of an ALBEF or of text assignment.
    Returns:
        As `geomm.model.start_`.
    Raises:
        ConfigError: that run has other sizes or settings of a tower, or lacks a part.
    """
    # a doubled fusion takes each layer twice, a decoder of answers takes the fusion's layers
    tensors = tensors_of_run(config, model.encoders.image_tower)
    if config.data.task in NUM_PICTURES:
        tensors = _doubled(tensors, 2 * config.method.fusion_layers, config.start.run)
    needed = ["encoders.image_tower.", "encoders.text_tower.", "encoders.fusion."]
    if config.data.task == "vqa":
        of_decoder = {
            new + name.removeprefix(old): tensor
            for old, new in _OF_DECODER.items()
            for name, tensor in tensors.items()
            if name.startswith(old)
        }
        tensors = {name: tensors[name] for name in tensors if not name.startswith("encoders.head.")} | of_decoder
        needed.append("encoders.head.")
    if config.data.task == "text_assignment":
        needed.append("encoders.image_projection.")
    taken = {name: tensor for name, tensor in tensors.items() if name.startswith(tuple(needed))}
    return fill_(model, taken, tuple(needed), f"start.run = {config.start.run}")


def _doubled(tensors: dict[str, torch.Tensor], layers: int, run: str) -> dict[str, torch.Tensor]:
    """Each layer of an ALBEF's fusion under the names of its two copies; a doubled fusion is not changed.

    Raises:
        ConfigError: another number of layers.
    """
    present = 1 + max(
        (int(name[len(_BLOCK) :].split(".")[0]) for name in tensors if name.startswith(_BLOCK)), default=-1
    )
    if present == layers:
        return tensors
    if 2 * present != layers:
        raise ConfigError(
            f"start.run = {run} has {present} fusion layers, a fusion with two pictures {layers}; expected: a run of "
            f"{layers // 2}, or of text assignment with {layers}, as method.fusion_layers = {layers // 2} says"
        )
    doubled = {}
    for name, tensor in tensors.items():
        if name.startswith(_BLOCK):
            number, _, rest = name[len(_BLOCK) :].partition(".")
            doubled |= {f"{_BLOCK}{2 * int(number) + second}.{rest}": tensor for second in (0, 1)}
        else:
            doubled[name] = tensor
    return doubled
