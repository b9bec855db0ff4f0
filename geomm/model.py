"""GeoMM's models: the base methods of `common/methods`, whose pools compare by a geodesic distance."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.base.config import ConfigError
from common.data.order import SampleOrder
from common.data.tokenizer import Tokenizer
from common.encoders.from_config import (
    bidirectional_text_transformer,
    causal_text_transformer,
    not_in_tensors,
    vision_transformer,
)
from common.encoders.fusion import FusionTransformer, MaskedLanguageHead
from common.encoders.vision import interpolate_positions
from common.encoders.weights import load_bert_, read_bert
from common.geometry import Sphere
from common.logit_scale import LogitScale
from common.methods.albef import (
    NOT_MASKED,
    Albef,
    FusedEncoders,
    ProjectedTowers,
    QueueClip,
    mask_words,
    replaceable_words,
)
from common.methods.tcl import Tcl
from common.oblique import Oblique
from common.pool import image_and_text_pools
from common.run.checkpoint import named_checkpoint
from common.scalars import clamp_scalars_
from geomm.config import Config
from geomm.grouping import Grouping
from geomm.mafa import Discriminator, Mafa
from geomm.pool import GeodesicPool

OF_TOWERS = tuple(
    f"encoders.{part}." for part in ("image_tower", "text_tower", "image_projection", "text_projection")
)  # and the temperature


def mask_id_of(tokenizer: Tokenizer) -> int:
    """Id of the mask token: the tokenizer's, or one behind its last."""
    return getattr(tokenizer, "mask_id", tokenizer.vocabulary_size)


class WordMask:
    """Masks words of a step. They are drawn on the host, which then knows their number without a wait."""

    def __init__(self, tokenizer: Tokenizer, probability: float, device: torch.device) -> None:
        self.mask_id, self.probability, self.device = mask_id_of(tokenizer), probability, device
        self.kept_ids = (tokenizer.pad_id, tokenizer.cls_id)  # never masked
        no_words = (tokenizer.pad_id, tokenizer.cls_id, tokenizer.end_id, self.mask_id)
        self.words = replaceable_words(tokenizer.vocabulary_size, no_words, "cpu")

    def __call__(self, token_ids: torch.Tensor) -> tuple[tuple[torch.Tensor | None, ...], dict[str, int]]:
        """(masked ids, word targets) on the device, and their `num_words`; (None, None) with probability 0.

        Args:
            token_ids: (batch, length), on the host.
        """
        if not self.probability:
            return (None, None), {}
        masked = mask_words(token_ids, self.words, self.mask_id, self.kept_ids, self.probability)
        num_words = int((masked[1] != NOT_MASKED).sum())
        return tuple(ids.to(self.device, non_blocking=True) for ids in masked), {"num_words": num_words}


BASES = {"clip": QueueClip, "albef": Albef, "tcl": Tcl, "mafa": Mafa}
TRAINING_ONLY = ("discriminator.", "grouping.")  # parts of a MAFA that only training has


def build_encoders(config: Config, tokenizer: Tokenizer) -> ProjectedTowers:
    """Towers with projections and, if the base has them, fusion and head of masked words; random weights."""
    data, model, method = config.data, config.model, config.method
    num_ids = max(tokenizer.vocabulary_size, mask_id_of(tokenizer) + 1)
    # ALBEF's towers keep the scheme of their fusion layers
    scheme = "clip_image" if method.base == "clip" else "scaled"
    image_tower = vision_transformer(data, model, projected=False, initialisation=scheme)
    if method.causal_text:
        text_tower = causal_text_transformer(data, model, tokenizer, projected=False)
    else:
        text_tower = bidirectional_text_transformer(data, model, tokenizer, projected=False, vocabulary_size=num_ids)
        if model.text.layers:  # BERT ends in the LayerNorm of its last layer
            text_tower.final_norm = nn.Identity()
    towers = image_tower, text_tower
    if method.base == "clip":
        return ProjectedTowers(*towers, model.embedding_dim, method.projection_bias)
    text = model.text
    fusion = FusionTransformer(
        text.width, model.image.width, method.fusion_layers, text.heads, text.mlp_ratio, dropout=text.dropout
    )
    word_head = MaskedLanguageHead(text.width, num_ids, text.stem.width)
    return FusedEncoders(*towers, fusion, word_head, model.embedding_dim)


def build_model(config: Config, tokenizer: Tokenizer, order: SampleOrder | None = None) -> QueueClip:
    """The base method of a row with random weights.

    Both distances have the same pools, so that only the distance differs.

    Args:
        order: of the training samples, for MAFA's discriminator and grouping; None = only evaluation.
    """
    model, method = config.model, config.method
    base, encoders = BASES[method.base], build_encoders(config, tokenizer)
    scale = LogitScale.from_config(method)
    if method.distance == "oblique":
        geometry = Oblique(model.embedding_dim // method.num_spheres)
        pools = image_and_text_pools(geometry, method.queue_size, model.embedding_dim, "fill_level")
    else:
        geometry = Sphere()
        pools = [GeodesicPool.from_config(method, model.embedding_dim) for _ in ("images", "texts")]
    built = base(encoders, geometry, scale, *pools)
    if base is Mafa and order is not None:
        built.discriminator, built.hardest_negatives = Discriminator(encoders), method.hardest_negatives
        built.grouping = Grouping(order, model.embedding_dim, method.group_queue, method.group_span)
    return built


@torch.no_grad()
def start_(model: QueueClip, config: Config) -> dict[str, Any]:
    """Fills a model with weights of a BERT, then of the run that its row starts from, in place; the pools stay empty.

    Args:
        model: unwrapped.
        config: start.bert names a BERT, start.run is the folder of a finished run, start.part selects its parts.
    Returns:
        For the log: the number of tensors from each source, and of trained tensors that are new; a BERT's two dropouts,
        as model.text.dropout decides in training.
    Raises:
        ConfigError: that run has other sizes or settings of a tower, lacks a tower, or has a part that this row lacks.
        WeightsError: a BERT that does not fit.
    """
    start, facts = config.start, {}
    if start.bert:
        facts |= _start_from_bert_(model.encoders, start.bert)
    if not start.run:
        return facts
    tensors = tensors_of_run(config, model.image_tower)
    prefixes = [*OF_TOWERS, "logit_scale."] + (["encoders.", "matching_head."] if start.part == "all" else [])
    taken = {name: tensor for name, tensor in tensors.items() if name.startswith(tuple(prefixes))}
    facts |= fill_(model, taken, OF_TOWERS, f"start.run = {start.run}")
    model.logit_scale.log_logit_scale += math.log(start.scale_factor)
    clamp_scalars_(model.logit_scale.scalars())
    return facts


def start_discriminator_(model: Mafa, config: Config) -> dict[str, int]:
    """Fills a MAFA's discriminator with the weights of a fine-tuned ALBEF, in place; arguments as in `start_`.

    Raises:
        ConfigError: that run has other sizes or settings of a tower, or no matching head.
    """
    folder, judge, parts = config.start.discriminator_run, model.discriminator, ("encoders.", "matching_head.")
    tensors = tensors_of_run(config, judge.encoders.image_tower, "discriminator_run")
    taken = {name: tensor for name, tensor in tensors.items() if name.startswith(parts)}
    return fill_(judge, taken, parts, f"start.discriminator_run = {folder}")


def tensors_of_run(config: Config, image_tower: nn.Module, key: str = "run") -> dict[str, torch.Tensor]:
    """Weights of the run that `start.<key>` names; positions are resampled if its images had another size.

    Raises:
        ConfigError: it is another paper's, or a tower has another of the settings that its tensors do not show.
    """
    folder = getattr(config.start, key)
    checkpoint = named_checkpoint(Path(folder), f"start.{key}")
    if (paper := checkpoint.state["paper"]) != "geomm":
        raise ConfigError(f"start.{key} = {folder} was trained by {paper}; expected: a run of geomm")
    for side in ("image", "text"):
        ours = not_in_tensors(vars(getattr(config.model, side)))
        for name, theirs in not_in_tensors(checkpoint.state["config"]["model"].get(side, {})).items():
            if ours[name] != theirs:
                raise ConfigError(
                    f"model.{side}.{name} = {ours[name]} with start.{key} = {folder}, whose weights were trained with "
                    f"{theirs}; expected: model.{side}.{name} = {theirs}"
                )
    tensors, name = checkpoint.model_tensors(), "encoders.image_tower.position_embedding"
    grid = image_tower.image_size // image_tower.patch_size  # images may be larger than in the run, as in ALBEF
    if name in tensors:
        tensors[name] = interpolate_positions(tensors[name], image_tower.num_class_tokens, grid, antialias=False)
    return tensors


@torch.no_grad()
def fill_(model: nn.Module, taken: dict[str, torch.Tensor], needed: tuple[str, ...], source: str) -> dict[str, int]:
    """Writes weights of another run into a model; returns their number, as `start_`.

    Args:
        model: unwrapped.
        taken: weights by their names in the model.
        needed: prefixes of names that must all be among them.
        source: setting and folder, for messages.
    Raises:
        ConfigError: a weight has another shape, or is missing.
    """
    tensors = model.state_dict()
    unlike = [
        f"{name} {tuple(tensor.shape)} for {tuple(tensors[name].shape) if name in tensors else 'none'}"
        for name, tensor in taken.items()
        if name not in tensors or tensors[name].shape != tensor.shape
    ]
    missing = [name for name in tensors if name.startswith(needed) and name not in taken]
    if unlike or missing:
        problems = "; ".join([*unlike[:3], *(f"no {name}" for name in missing[:3])])
        raise ConfigError(f"{source} does not fit this row: {problems}")
    for name, tensor in taken.items():
        tensors[name].copy_(tensor)
    new = [name for name, parameter in model.named_parameters() if parameter.requires_grad and name not in taken]
    return {"filled": len(taken), "new": len(new)}


def _start_from_bert_(encoders: ProjectedTowers, name: str) -> dict[str, Any]:
    bert, layers = read_bert(name, "start.bert"), len(encoders.text_tower.transformer.blocks)
    fusion = getattr(encoders, "fusion", None)
    if fusion is None:  # the same text tower as with a fusion
        of_tower = bert.base_model.encoder
        of_tower.layer, bert.config.num_hidden_layers = of_tower.layer[:layers], len(of_tower.layer[:layers])
    head = getattr(encoders, "word_head", None) if hasattr(bert, "cls") else None
    load_bert_(bert, encoders.text_tower, fusion, head)
    dropout = [bert.config.hidden_dropout_prob, bert.config.attention_probs_dropout_prob]
    return {"of_bert": sum(1 for _ in bert.named_parameters()), "dropout_of_bert": dropout}


class Tokens(nn.Module):
    """All tokens of both towers instead of embeddings, as the fusion needs them."""

    def __init__(self, model: Albef) -> None:
        super().__init__()
        self.encoders, self.geometry = model.encoders, model.geometry

    def encode_image(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, 3, size, size) -> (batch, tokens, width)."""
        return self.encoders.image_tower.forward_tokens(images)

    def encode_text(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(batch, length) -> (batch, length, width)."""
        return self.encoders.text_tower.forward_tokens(token_ids)
