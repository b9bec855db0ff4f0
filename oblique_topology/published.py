"""Evaluates published weights like a trained row: the paper's two files, and CLIP of open_clip, OpenAI, transformers.

python oblique_topology/published.py --checkpoint vit-b16_mt-ob-32-16_e32_f32k_2.pt \\
    data.source=shards data.root=/data/flickr8k data.vocabulary=/data/bert/vocab.txt
python oblique_topology/published.py --checkpoint openai/clip-vit-base-patch16 --layout clip \\
    coco.root=/data/coco coco.test=dataset_coco.json#test coco.images=images coco.eccv=/data/eccv

Without coco.* the metrics of Tables 2 and 3: labelled sets, retrieval, linear probe; with it Table 7.
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from common.base.config import load_beside_weights, load_config
from common.data.bert_tokenizer import BertTokenizer
from common.data.clip_tokenizer import ClipTokenizer
from common.data.pairs import open_evaluation_sets
from common.data.transforms import ImageTransform
from common.encoders.transformer import Activation
from common.encoders.weights import NOT_STATED, Heads, agreed_activation, agreed_heads, heads_in, read_source
from common.evaluation.coco import evaluate_coco
from common.evaluation.embed import Encoder
from common.run.evaluation import (
    answer_of_published,
    check_layout,
    command_line,
    evaluate_if_run,
    published_encoder,
    this_device,
)
from common.run.launch import join_processes, run_or_explain
from oblique_topology.coco_table import CocoConfig, open_coco
from oblique_topology.config import Config
from oblique_topology.evaluate import MODELS, PAPER, evaluate_all
from oblique_topology.released import load_released

DECIDES = "evaluation"


def open_published(
    checkpoint: str,
    layout: str,
    config: Config,
    device: torch.device,
    activation: Activation | None = None,
    heads: Heads = NOT_STATED,
) -> Encoder:
    """Model, preprocessing and tokenizer of published weights; released files use CLIP's scaling and crop.

    Args:
        checkpoint: a released file; layout clip: whatever `read_source` takes.
        layout: released or clip.
        config: data.vocabulary names the tokenizer's file, run its batch size.
        activation: of a bare file of layout clip; otherwise the source states it (released: gelu).
        heads: of a file whose sizes are those of no published model.
    Raises:
        WeightsError, FileNotFoundError, ValueError: the weights cannot be read, or do not fit.
    """
    check_layout(checkpoint, layout, of_files=("released",), of_folders=("clip",))
    if layout == "released":
        agreed_activation(checkpoint, "gelu", activation)
        model = load_released(checkpoint, heads)
        pixels = ImageTransform(model.image_tower.image_size, "crop")
        tokenizer = BertTokenizer.from_vocabulary(config.data.vocabulary)
    else:
        weights = read_source(checkpoint, activation, heads=heads)
        model, pixels = weights.clip(), weights.pixels
        tokenizer = ClipTokenizer.from_vocabulary(config.data.vocabulary)
        tokenizer.check_beside(weights.source, "model")
    agreed_heads(checkpoint, heads_in(model), heads)
    return published_encoder(model, tokenizer, config, device, pixels)


def main() -> None:
    parser = command_line(__doc__, "file of weights; layout clip: also a folder or hub name", published=True)
    parser.add_argument("--layout", help="released, clip; default: released")
    options = parser.parse_intermixed_args()
    join_processes(options.overrides)
    if evaluate_if_run(MODELS, options):  # a checkpoint of this repository records its settings
        return

    layout = options.layout or "released"
    of_coco = [text for text in options.overrides if text.startswith("coco.")]
    config = load_beside_weights(Config, [text for text in options.overrides if text not in of_coco])
    files = load_config(CocoConfig, [], of_coco).coco
    if of_coco and not files.test:
        raise ValueError(f"{of_coco[0]} without coco.test, the file of the test pictures; expected: both")
    encoder = open_published(options.checkpoint, layout, config, this_device(), options.activation, options.heads)
    if files.test:
        test = open_coco(files)
        results = evaluate_coco(encoder, test.pairs, test.relations)
    else:
        results = evaluate_all(config, encoder, open_evaluation_sets(config.data))
    answer_of_published(PAPER, options.checkpoint, layout, encoder, results, options.output)


if __name__ == "__main__":
    run_or_explain(main)
