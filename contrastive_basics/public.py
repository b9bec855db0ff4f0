"""Evaluates published CLIP and FLAVA checkpoints from transformers by the code that ranks trained models.

    python contrastive_basics/public.py --checkpoint openai/clip-vit-large-patch14-336 \\
        data.source=karpathy data.root=/data/coco data.test='dataset_coco.json#test' data.images=images
    python contrastive_basics/public.py --checkpoint facebook/flava-full --prefix "a photo of " \\
        data.source=shards data.root=/data/flickr8k

A checkpoint is a folder that transformers wrote, or a name on the hub (downloaded once, then cached). BEiT-3, the third
row of Table 1, is only cited: transformers has no BEiT-3, and the printed model of 1.9 billion weights is not public.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import nn

from common.base.arguments import some
from common.base.config import load_beside_weights
from common.data.pairs import open_retrieval_sets
from common.encoders.weights import (
    WeightsError,
    agreed_activation,
    agreed_heads,
    model_of_transformers,
    pixels_of_processor,
)
from common.encoders.weights.keys import square
from common.evaluation.embed import CaptionRule, Encoder, evaluate_retrieval
from common.evaluation.protocol import PUBLISHED, as_json
from common.geometry import Sphere
from common.run.evaluation import command_line, read_with, save_answer, this_device
from common.run.folder import provenance_of
from common.run.launch import join_processes, run_or_explain
from common.run.sources import weights_fingerprint
from contrastive_basics.config import Config
from contrastive_basics.evaluate import PAPER

DECIDES = "evaluation"

MODELS = {"clip": "CLIPModel", "flava": "FlavaModel"}  # by name: transformers takes seconds to import
CONTEXT_LENGTH = 77  # of both rows
_NOT_USED = re.compile(r"pooler\.|logit_scale$|^multimodal_model\.|_to_mm_projection\.")  # by images and texts apart


class PublicTowers(nn.Module):
    """A CLIPModel or FlavaModel with the methods that evaluations call; embeddings are unit vectors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.geometry = model, Sphere()

    def encode_image(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, 3, size, size) normalised pixels -> (batch, dim)."""
        return self.geometry.embed_image(self._one_vector(self.model.get_image_features(pixel_values=images)))

    def encode_text(self, ids_and_mask: torch.Tensor) -> torch.Tensor:
        """(batch, 2, context_length) ids and attention mask -> (batch, dim)."""
        ids, mask = ids_and_mask.unbind(dim=1)
        return self.geometry.embed_text(
            self._one_vector(self.model.get_text_features(input_ids=ids, attention_mask=mask))
        )

    def _one_vector(self, output: Any) -> torch.Tensor:
        features = output.pooler_output
        # FLAVA projects all positions; its loss uses the first
        return features[:, 0] if features.ndim == 3 else features


@dataclass(frozen=True)
class PublicTokenizer:
    """The checkpoint's tokenizer with the interface that Encoder calls."""

    tokenizer: Any
    cleaning = "none"

    def encode(self, texts: list[str], context_length: int) -> torch.Tensor:
        """(num_texts, 2, context_length) int64: ids, padded and cut to the length, and the attention mask."""
        batch = self.tokenizer(
            texts, padding="max_length", truncation=True, max_length=context_length, return_tensors="pt"
        )
        return torch.stack([batch["input_ids"], batch["attention_mask"]], dim=1)


def open_public(source: str, settings: Config, device: torch.device) -> Encoder:
    """Model, preprocessing and tokenizer of a published checkpoint.

    Args:
        source: folder or hub name.
        settings: data and run decide how it evaluates.
    Raises:
        ValueError: the checkpoint does not exist, is no CLIP or FLAVA, does not fit its config.json, or has a
            preprocessing that `ImageTransform` lacks; names the checkpoint.
    """
    import transformers

    config = _read("AutoConfig", source)
    if config.model_type not in MODELS:
        raise ValueError(
            f"checkpoint {source!r} is a {config.model_type}; expected: {', '.join(MODELS)} (BEiT-3, VLMo and FILIP "
            "are not in transformers)"
        )
    model, missing = model_of_transformers(getattr(transformers, MODELS[config.model_type]), source)
    missing = [name for name in missing if not _NOT_USED.search(name)]
    if missing:  # transformers would draw them at random
        raise WeightsError(f"checkpoint {source!r} lacks {some(missing)}")
    pixels = pixels_of_processor(_read("AutoImageProcessor", source).to_dict(), f"checkpoint {source!r}: ")
    size = square(_of_images(config).image_size, f"checkpoint {source!r}: ", "image_size")
    if pixels.size != size:
        raise ValueError(
            f"checkpoint {source!r}: its preprocessing makes images of {pixels.size} pixels, its image tower takes "
            f"{size}; expected the same size in its preprocessing file"
        )
    return Encoder(
        model=PublicTowers(model).to(device).eval(),
        transform=pixels,
        tokenizer=PublicTokenizer(_read("AutoTokenizer", source)),
        context_length=min(CONTEXT_LENGTH, config.text_config.max_position_embeddings),
        batch_size=settings.run.evaluation_batch_size,
        device=device,
        num_workers=settings.run.num_workers,
        ranking_gb=settings.run.ranking_gb,
        max_broken_share=settings.data.max_broken_share,
    )


def evaluate_public(encoder: Encoder, config: Config, prefix: str = "") -> dict[str, Any]:
    """Retrieval on every test set of config.data, by role; `prefix` goes before every caption."""
    rule, gallery = CaptionRule(prefix=prefix), config.data.gallery
    results = {
        role: evaluate_retrieval(encoder, pairs, rule, gallery=gallery)
        for role, pairs in open_retrieval_sets(config.data).items()
    }
    return read_with(activation_of(encoder), results)


def activation_of(encoder: Encoder) -> str:
    """The activation of the image tower in the checkpoint's configuration."""
    return _of_images(encoder.model.model.config).hidden_act


def heads_of_public(encoder: Encoder) -> dict[str, int]:
    """The heads of both towers in the checkpoint's configuration."""
    config = encoder.model.model.config
    return {"image": _of_images(config).num_attention_heads, "text": config.text_config.num_attention_heads}


def _of_images(config: Any) -> Any:
    # the section of the image tower
    return config.vision_config if config.model_type == "clip" else config.image_config


def public_state(source: str, git_revision: str) -> dict[str, str]:
    """Provenance of the weights with the keys of a checkpoint's state; of a folder only its name, not its path."""
    name = Path(source).name if Path(source).expanduser().is_dir() else source
    fingerprint = weights_fingerprint(source)
    revision = f"published weights, evaluated at {git_revision}"
    return {"training_data": f"{name} ({fingerprint[:12]}){PUBLISHED}", "training_revision": revision}


def _read(kind: str, source: str) -> Any:
    """from_pretrained of a class of transformers, with one message for its errors; runs no code of a checkpoint."""
    import transformers

    path = Path(source).expanduser()
    if path.is_absolute() and not path.is_dir():
        raise ValueError(f"checkpoint {source!r}: no such folder")
    try:
        return getattr(transformers, kind).from_pretrained(path if path.is_dir() else source, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"checkpoint {source!r}: {kind} cannot read it: {reason}") from error


def main() -> None:
    parser = command_line(__doc__, "folder written by transformers, or hub name", published=True)
    parser.add_argument("--prefix", default="", help='before every caption, e.g. "a photo of "')
    arguments = parser.parse_intermixed_args()
    join_processes(arguments.overrides)

    config = load_beside_weights(Config, arguments.overrides)
    encoder = open_public(arguments.checkpoint, config, this_device())
    agreed_activation(arguments.checkpoint, activation_of(encoder), arguments.activation)
    agreed_heads(arguments.checkpoint, heads_of_public(encoder), arguments.heads)
    results = evaluate_public(encoder, config, arguments.prefix)
    provenance = provenance_of()
    state = public_state(arguments.checkpoint, provenance["git_revision"])
    content = as_json(PAPER, results, 0, state, provenance)
    save_answer(content, results, arguments.checkpoint, arguments.output)


if __name__ == "__main__":
    run_or_explain(main)
