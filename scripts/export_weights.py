"""Writes a CLIP in the layout of transformers or open_clip, reads it again there and prints the largest difference.

python scripts/export_weights.py --model outputs/runs/<paper>/<run>/seed0/checkpoints/step-00000600 --to open_clip \\
    --output exported
python scripts/export_weights.py --model ViT-B-32.pt --activation quick_gelu --to transformers --output exported

--model is a run or checkpoint of any paper with CLIP's towers on the sphere (the oblique paper's text tower is
bidirectional, other geometries compare otherwise: no such layout), a transformers folder or hub name, a folder in
open_clip's hub layout, or a file of weights in OpenAI's layout (its --activation; OpenAI's archives: quick_gelu; its
--heads where they are no published ones). How pixels become inputs is written too: preprocess_cfg of open_clip's
configuration, or preprocessor_config.json. The layout of transformers holds the tokenizer, too: that of the run, that
beside the weights, or CLIP's.
"""

import json
import sys
from argparse import Namespace
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from safetensors.torch import save_file

from common.base.arguments import Parser
from common.base.files import as_any_new_file
from common.data.clip_tokenizer import FILE_NAMES, NUM_MERGES, ClipTokenizer
from common.data.text import tokenizer_from_json
from common.data.text_files import stated_file
from common.data.tokenizer import Tokenizer, ids_of
from common.data.transforms import ImageTransform
from common.encoders.two_towers import TwoTowers
from common.encoders.weights import (
    HEADS_HELP,
    NOT_STATED,
    agreed_heads,
    clip_to_open_clip,
    clip_to_transformers,
    heads_argument,
    heads_in,
    preprocess_of,
    processor_of,
    read_source,
)
from common.geometry import unit
from common.run.checkpoint import new_folder
from common.run.initial import open_source
from common.run.launch import run_or_explain
from common.run.sources import run_checkpoint


def export_to_transformers(model: TwoTowers, pixels: ImageTransform, folder: Path):
    """Writes the folder; returns functions that encode with what was written."""
    from transformers import CLIPImageProcessor

    exported = clip_to_transformers(model)
    exported.save_pretrained(folder)
    CLIPImageProcessor(**processor_of(pixels)).save_pretrained(folder)
    theirs = type(exported).from_pretrained(folder).eval()

    def encode(images: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = theirs(input_ids=token_ids, pixel_values=images)
        return output.image_embeds, output.text_embeds

    return encode, "transformers"


def export_to_open_clip(model: TwoTowers, pixels: ImageTransform, folder: Path):
    """Likewise; without the open_clip package our own reader stands in for it, and the answer says so."""
    state, configuration = clip_to_open_clip(model)
    content = json.dumps({"model_cfg": configuration, "preprocess_cfg": preprocess_of(pixels)}, indent=1)
    save_file(state, folder / "open_clip_model.safetensors")
    as_any_new_file(folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(content, encoding="utf-8")
    try:
        import open_clip
    except ImportError:
        again = read_source(str(folder)).clip()
        return lambda images, token_ids: (again.encode_image(images), again.encode_text(token_ids)), "our own reader"
    theirs = open_clip.CLIP(
        configuration["embed_dim"],
        open_clip.CLIPVisionCfg(**configuration["vision_cfg"]),
        open_clip.CLIPTextCfg(**configuration["text_cfg"]),
        quick_gelu=configuration["quick_gelu"],
        init_logit_bias=configuration.get("init_logit_bias"),
    ).eval()
    theirs.load_state_dict(state)
    return lambda images, token_ids: (
        unit(theirs.encode_image(images)),
        unit(theirs.encode_text(token_ids)),
    ), "open_clip"


def tokenizer_of(name: str, vocabulary_size: int) -> Tokenizer | None:
    """That of a run, that beside the weights, or CLIP's where neither is stated; None where the sizes differ."""
    checkpoint = run_checkpoint(name)
    if checkpoint is not None:
        return tokenizer_from_json(checkpoint.state["tokenizer"])
    file = stated_file(name, *FILE_NAMES)
    try:
        tokenizer = ClipTokenizer.from_vocabulary("" if file is None else str(file))
    except ValueError:  # other pieces than CLIP's, or no file of them
        return None
    return tokenizer if tokenizer.vocabulary_size == vocabulary_size else None


def save_for_transformers(tokenizer: ClipTokenizer, context_length: int, folder: Path) -> None:
    """Files that `transformers.CLIPTokenizer` reads."""
    start, end = "<|startoftext|>", "<|endoftext|>"
    ids = ids_of([*tokenizer.vocabulary[:-2], start, end])
    special = {"bos_token": start, "eos_token": end, "unk_token": end, "pad_token": end}
    settings = {"tokenizer_class": "CLIPTokenizer", "model_max_length": context_length, **special}
    (folder / "vocab.json").write_text(json.dumps(ids, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *tokenizer.merges, ""]), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


@torch.no_grad()
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--model", required=True, help="checkpoint, folder, hub name or file of weights")
    parser.add_argument("--activation", choices=["gelu", "quick_gelu"], help="for a bare file of weights")
    parser.add_argument("--heads", type=heads_argument, default=NOT_STATED, metavar="IMAGE,TEXT", help=HEADS_HELP)
    parser.add_argument("--to", required=True, choices=["transformers", "open_clip"])
    parser.add_argument("--output", required=True, type=Path, help="new folder to write")
    arguments = parser.parse_args()
    # a new folder: of two layouts in one a reader takes one, perhaps that of another model
    with new_folder(arguments.output) as folder:
        differences = export(arguments, folder)
    if max(differences) > 1e-4:
        sys.exit("error: that is more than rounding explains (1e-4); do not use the export")


def export(arguments: Namespace, folder: Path) -> list[float]:
    """Writes the weights, and reads them again; the largest difference of an entry, of pictures and of captions."""
    weights = open_source(arguments.model, arguments.activation, heads=arguments.heads)
    model = weights.clip().float()
    agreed_heads(arguments.model, heads_in(model), arguments.heads)
    pixels, note = weights.pixels, ""
    if pixels is None:
        pixels = ImageTransform(model.image_tower.image_size, "crop")
        note = "; --model does not state how pixels become inputs, CLIP's way is written"
    write = {"transformers": export_to_transformers, "open_clip": export_to_open_clip}[arguments.to]
    generator = torch.Generator().manual_seed(0)
    image, text = model.image_tower, model.text_tower
    images = torch.randn(8, 3, image.image_size, image.image_size, generator=generator)
    end_id = text.vocabulary_size - 1 if text.end_id is None else text.end_id
    token_ids = torch.randint(1, text.vocabulary_size - 1, (8, text.context_length), generator=generator)
    token_ids[token_ids == end_id] = 0
    token_ids[:, -1] = end_id
    ours = model.encode_image(images), model.encode_text(token_ids)
    encode, reader = write(model, pixels, folder)
    theirs = encode(images, token_ids)
    differences = [float((one - other).abs().max()) for one, other in zip(ours, theirs)]
    print(
        f"{arguments.output}: read again by {reader}; largest difference of an entry of the unit embeddings: "
        f"{differences[0]:.1e} (8 random pictures), {differences[1]:.1e} (8 random captions). Pictures: {pixels.mode}, "
        f"{pixels.interpolation}, mean {pixels.mean}, std {pixels.std}{note}"
    )
    tokenizer = tokenizer_of(arguments.model, text.vocabulary_size)
    if tokenizer is None:
        print("No tokenizer is written: --model has none of CLIP's kind with as many tokens as the text tower")
    elif not isinstance(tokenizer, ClipTokenizer):
        kind = run_checkpoint(arguments.model).state["config"]["data"]["tokenizer"]
        print(
            f"Its words have no place in this layout (data.tokenizer={kind}): other programs cannot make its ids "
            "from captions. Trained with data.tokenizer=clip_bpe a model goes out whole"
        )
    elif arguments.to == "transformers":
        save_for_transformers(tokenizer, text.context_length, folder)
    elif len(tokenizer.merges) != NUM_MERGES:
        print(
            f"Its {len(tokenizer.merges)} merges have no place in this layout, which takes CLIP's {NUM_MERGES}: "
            "open_clip would make other ids; --to transformers holds them"
        )
    return differences


if __name__ == "__main__":
    run_or_explain(main)
