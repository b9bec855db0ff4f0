"""Initial weights of a run: `model.init`, `model.image.init`, `model.text.init`, and which of them are locked."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.base.config import ConfigError
from common.base.settings import DataConfig, ModelConfig
from common.data.text import tokenizer_from_json
from common.data.tokenizer import Tokenizer
from common.data.transforms import ImageTransform
from common.encoders.from_config import not_in_tensors
from common.encoders.sentence_encoder import check_pooling
from common.encoders.stem import Stem
from common.encoders.stem_configuration import Colours, StemError, colours_beside
from common.encoders.text_stem import PooledTextStem, TextStem
from common.encoders.transformer import Activation
from common.encoders.two_towers import bare_tower
from common.encoders.weights import (
    NOT_STATED,
    Heads,
    Weights,
    WeightsError,
    agreed_activation,
    fill_,
    lock_,
    read_source,
    settings_of,
    towers_of_sizes,
)
from common.geometry import clamp_scalars_
from common.run.checkpoint import Checkpoint
from common.run.sources import SIDES, named_sources, run_checkpoint, stems_to_load


def open_source(
    name: str, activation: Activation | None = None, key: str = "weights", heads: Heads = NOT_STATED
) -> Weights:
    """Weights of a run, a checkpoint, or what `read_source` reads."""
    checkpoint = run_checkpoint(name)
    return read_source(name, activation, key, heads) if checkpoint is None else _of_checkpoint(checkpoint, activation)


def _of_checkpoint(checkpoint: Checkpoint, activation: Activation | None) -> Weights:
    # Both towers, of the sizes that the tensors have; other settings come from the config.
    state, name = checkpoint.state, str(checkpoint.path)
    if state.get("kind") == "vision":
        raise WeightsError(f"{name} was written by pretrain.py and holds a ResNet; expected a run of two transformers")
    tokenizer = tokenizer_from_json(state["tokenizer"])
    # tensors give sizes; what leaves no trace in them comes from the config
    settings = {}
    for side in SIDES:
        config = state["config"]["model"][side]
        if not config["layers"]:
            raise WeightsError(f"{name} has no layers in its {side} tower; expected a run of two transformers")
        settings[side] = not_in_tensors(config)
        stem, data = config.get("stem", {}), state["config"]["data"]
        if stem.get("name"):
            colours = (stem["mean"], stem["std"]) if stem.get("mean") else None
            settings[side]["stem"] = Stem(stem["name"], data["image_size"], stem["trainable"], colours=colours)
        if side == "text" and stem.get("weights"):
            sizes = {name: stem[name] for name in ("width", "layers", "heads", "mlp_ratio")}
            sizes |= {"vocabulary_size": tokenizer.vocabulary_size, "end_id": tokenizer.end_id}
            settings[side]["stem"] = TextStem(stem["trainable"], context_length=data["context_length"], **sizes)
        agreed_activation(name, settings[side]["activation"], activation)
    # late interaction wraps its towers, and a momentum encoder beside them is no part of the weights
    tensors = {key.replace("_tower.tower.", "_tower."): value for key, value in checkpoint.model_tensors().items()}
    if not any(key.startswith("image_tower.") for key in tensors):
        raise WeightsError(
            f"{name} holds encoders with projections and pools of their own ({state['paper']}); expected a run of two "
            "towers: contrastive_basics, euclip or oblique_topology"
        )
    towers = towers_of_sizes(tensors, settings["image"], {**settings["text"], "end_id": tokenizer.end_id}, name)
    # assign: the towers were built on the meta device
    for side, tower in zip(SIDES, towers, strict=True):
        prefix = f"{side}_tower."
        side_tensors = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        tower.load_state_dict(side_tensors, assign=True)
    # scalars of logits and geometry; a run takes those that its model has and trains
    beside = {key: value for key, value in tensors.items() if not key.startswith(("image_tower.", "text_tower."))}
    pixels = dataclasses.replace(ImageTransform.from_json(state["transform"]), crop_scale=None, flip_probability=0.0)
    spheres = state["config"]["method"].get("num_spheres", 1)
    of_pair = {"geometry": state["geometry"], "num_spheres": spheres, "tokenizer": tokenizer.fingerprint}
    return Weights(name, towers[0].eval(), towers[1].eval(), beside, pixels=pixels, **of_pair)


@dataclasses.dataclass(frozen=True)
class InitialWeights:
    """Initial weights.

    of: side -> the setting that names its weights, and the weights; empty = random.
    text_stem: of the text tower's stem, if separate.
    """

    of: dict[str, tuple[str, Weights]]
    text_stem: Weights | None = None

    @classmethod
    def opened(cls, config: Any) -> "InitialWeights":
        # one file for both sides is read once
        read: dict[str | Path, Weights] = {}
        of = {}
        model = getattr(config, "model", None)
        named = named_sources(model)
        places = {side: _place(name) for side, (_, name) in named.items()}
        for side, (key, name) in named.items():
            activation = getattr(model, side).activation
            heads = {other: getattr(model, other).heads for other in named if places[other] == places[side]}
            if places[side] not in read:
                read[places[side]] = open_source(name, activation, key, heads)
            of[side] = key, read[places[side]]
        stem = stems_to_load(model).get("text")
        text_stem = None if stem is None else read_source(stem.weights, key="model.text.stem.weights")
        if text_stem is not None and text_stem.text_tower is None:
            raise StemError(
                f"model.text.stem.weights = {stem.weights} is no BERT; expected: a folder or hub name of one"
            )
        return cls(of, text_stem)

    def resolved(self, config: Any) -> Any:
        """The config; null settings take the values of the weights: activation, eps, kind, colours, stem sizes."""
        model = getattr(config, "model", None)
        stems = stems_to_load(model)
        if not self.of and not stems:
            return config
        if "image" in stems:
            model = _with_colours(model, colours_beside(model.image.stem.name, model.image.stem.weights))
        for side, (_, weights) in self.of.items():
            tower = getattr(weights, f"{side}_tower")
            stated = {} if tower is None else settings_of(tower)
            section = getattr(model, side)
            values = {name: stated.get(f"model.{side}.{name}") for name in ("activation", "norm_eps")}
            missing = {name: value for name, value in values.items() if getattr(section, name) is None}
            model = dataclasses.replace(model, **{side: dataclasses.replace(section, **missing)})
            if side == "image" and model.image_kind is None:
                model = dataclasses.replace(model, image_kind=stated.get("model.image_kind"))
            if side == "image" and getattr(tower, "stem", None) is not None:
                model = _with_colours(model, tower.stem.stated)
        # a text stem is part of the weights of model.init, or has separate weights
        bert = self.text_stem and self.text_stem.text_tower
        if "text" in self.of and self.of["text"][1].text_tower is not None:
            bert = getattr(self.of["text"][1].text_tower.stem, "network", None)
        if bert is not None and model.text.stem.weights:
            stem, stated = model.text.stem, settings_of(bert)
            sizes = {name: stated[f"model.text.{name}"] for name in ("layers", "width", "heads", "mlp_ratio")}
            sizes = {name: value for name, value in sizes.items() if getattr(stem, name) is None}
            text = dataclasses.replace(model.text, stem=dataclasses.replace(stem, **sizes))
            model = dataclasses.replace(model, text=text)
        return dataclasses.replace(config, model=model)

    def load_stems_(self, model: nn.Module, config: Any, tokenizer: Tokenizer | None) -> None:
        stems = stems_to_load(getattr(config, "model", None))
        if "image" in stems:
            bare_tower(model.image_tower).stem.load_(stems["image"].weights)
        if "text" in stems:
            tokenizer.check_beside(stems["text"].weights, "model.text.stem.weights")
            tower = bare_tower(model.text_tower)
            if isinstance(tower, PooledTextStem):
                check_pooling(stems["text"].weights)
            tower.stem.load_(self.text_stem.source, self.text_stem.text_tower)

    @torch.no_grad()
    def start_(self, model: nn.Module, config: Any, tokenizer: Tokenizer) -> dict[str, Any]:
        """Fills both towers and locks what the config locks, in place; returns facts for the log.

        A momentum encoder is copied later. If both sides come from one source of the same geometry, the scalars of
        logits and geometry continue from there too, inside their bounds.
        """
        facts: dict[str, Any] = {}
        unfit = []
        is_pair = len(self.of) == 2 and len({id(weights) for _, weights in self.of.values()}) == 1
        for side, (key, weights) in self.of.items():
            tower = bare_tower(getattr(model, f"{side}_tower"))
            if side == "text" and weights.tokenizer not in (None, tokenizer.fingerprint):
                raise WeightsError(
                    f"{key} = {weights.source} has another tokenizer than data.tokenizer = {config.data.tokenizer}, "
                    f"data.vocabulary = {config.data.vocabulary!r}; expected both as in the config of that run"
                )
            if side == "text" and weights.tokenizer is None:
                tokenizer.check_beside(weights.source, key)
            # what the weights lack (a projection, positions of another length) keeps its random values
            # a projection outside of its tower is of use only with that of the other side
            projection = getattr(getattr(model, "encoders", None), f"{side}_projection", None) if is_pair else None
            try:
                filled = fill_(tower, weights, key, projection)
            except WeightsError as error:  # of both towers in one error
                unfit.append(str(error))
                continue
            lock = getattr(config.model, side).lock
            if lock is not None:
                lock_(tower, filled, lock)
            parameters = dict(tower.named_parameters())
            facts[side] = {
                "weights": weights.source,
                "filled": len(filled),
                "new": [name for name in parameters if name not in filled],
                "lock": lock,
                "locked_parameters": sum(
                    parameter.numel() for parameter in parameters.values() if not parameter.requires_grad
                ),
                "trained_parameters": sum(
                    parameter.numel() for parameter in parameters.values() if parameter.requires_grad
                ),
            }
            if side == "image":
                facts[side]["pixels"] = unlike_pixels(weights.pixels, config.data)
        if unfit:
            raise WeightsError("\n".join(unfit))
        # scalars belong to a pair of towers: with two sources none of them fits
        if is_pair:
            facts["scalars"] = []
            # a product of more spheres sums more cosines, for which the multiplier is another
            spheres = getattr(config.method, "num_spheres", 1)
            as_many = model.geometry.name == "sphere" or spheres == weights.num_spheres
            if weights.geometry == model.geometry.name and as_many:
                parameters = {
                    name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
                }
                for name, value in weights.beside.items():
                    if name in parameters and parameters[name].shape == value.shape:
                        parameters[name].copy_(value)
                        facts["scalars"].append(name)
                clamp_scalars_(model.scalars())
        # the optimiser would raise an error without a word about locks
        if self.of and not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError("model.image.lock = all and model.text.lock = all leave nothing to train")
        return facts


def _place(name: str) -> str | Path:
    # One value for all spellings of a path.
    path = Path(name).expanduser()
    return path.resolve() if path.exists() else name


def unlike_pixels(pixels: ImageTransform | None, data: DataConfig) -> str:
    """How the preprocessing of a run differs from that of its weights, and what to set instead; "" if it does not.

    Colours are folded into the weights and sizes have a rule (`fill_`): both are left out.
    """
    if pixels is None:
        return f"the weights do not state their preprocessing; used: data.resize={data.resize}, CLIP's mean and std"
    unlike = []
    if pixels.mode != data.resize:
        unlike.append(f"data.resize={data.resize}, the weights have {pixels.mode}: set data.resize={pixels.mode}")
    if pixels.interpolation != "bicubic":
        unlike.append(f"bicubic resizing, the weights have {pixels.interpolation}")
    if pixels.resized not in (None, pixels.size):
        unlike.append(
            f"images resized to data.image_size, those of the weights to {pixels.resized / pixels.size:.3g} times it"
        )
    return f"images are preprocessed differently: {'; '.join(unlike)}" if unlike else ""


def _with_colours(model: ModelConfig, colours: Colours | None) -> ModelConfig:
    # Fills the stem's mean and std if they are null.
    stem = model.image.stem
    if colours is None or not (stem.mean is stem.std is None):
        return model
    stem = dataclasses.replace(stem, mean=colours[0], std=colours[1])
    return dataclasses.replace(model, image=dataclasses.replace(model.image, stem=stem))


def start_text(facts: dict[str, Any]) -> str:
    """The facts of `start_` as text for the screen."""
    sides = [
        f"{side} tower from {side_facts['weights']}, {side_facts['locked_parameters']:,} parameters locked, "
        f"{side_facts['trained_parameters']:,} trained"
        for side, side_facts in facts.items()
        if side in SIDES
    ]
    sides += [facts["image"]["pixels"]] if facts.get("image", {}).get("pixels") else []
    return "; ".join(sides)
