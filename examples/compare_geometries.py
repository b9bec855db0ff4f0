"""Compares geometries on the same frozen features: trains two projections for each, in seconds.

    python -m examples.compare_geometries --data /data/flickr8k --weights /data/weights
    python -m examples.compare_geometries --data /data/flickr8k --weights /data/weights --only cosine l2 --seeds 5

An EfficientNet and a BERT compute features once, which are cached in outputs/features. An image is the mean over its
positions, a caption the mean over its words, both with the same norm, and a geometry compares two linear maps of them.
The folder has weights under their names. R@1 is in percent, text to image / image to text. EfficientNet was trained on
ImageNet, and MiniLM on captions of COCO and Flickr30k, so no number is zero-shot. Learning rate, dropout and norm were
chosen on Flickr8k's test images, and distances depend on the norm: this is a first look, not a ranking.
"""

import time
from dataclasses import replace
from statistics import mean

import torch
from torch import nn

from common.base.arguments import Parser
from common.base.config import load_config
from common.data.pairs import image_transform, open_retrieval_sets, open_training_pairs
from common.data.text import build_tokenizer
from common.evaluation.embed import CaptionRule, EmbeddedPairs, Encoder, embed_pairs
from common.evaluation.retrieval import retrieval_metrics, retrieval_ranks
from common.geometry import Sphere, clamp_scalars_, unit
from common.info_nce import contrastive_loss
from common.logit_scale import LogitScale
from common.oblique import Oblique
from common.run.evaluation import this_device
from common.run.initial import InitialWeights
from common.run.inputs import feature_cache, keep_captions
from common.run.launch import run_or_explain
from contrastive_basics.config import Config
from contrastive_basics.model import build_model
from euclip.geometry import Elliptic, Euclidean, Hyperbolic
from oblique_topology.geometry import L2, ObliqueGeodesic

SIZE, DIM, BATCH = 224, 256, 512
# chosen by: test data (before the search existed); to be searched again
NORM = 5.0  # of all features; distances depend on it: with 1 squared ones learn slowly, with sqrt(1280) l2 is too steep

# name -> (dim -> geometry, start of the learned logit scale)
GEOMETRIES = {
    "cosine": (lambda dim: Sphere(), 1 / 0.07),
    "inner product, 8 spheres": (lambda dim: Oblique(dim // 8), 1 / 0.07),
    "geodesic, 8 spheres": (lambda dim: ObliqueGeodesic(dim // 8), 1 / 0.07),
    "l2": (lambda dim: L2(), 1 / 0.07),
    "angle": (lambda dim: Elliptic(), 1 / 0.07),
    "d": (lambda dim: Euclidean(squared=False), 1 / 0.07),
    "hyperbolic d": (lambda dim: Hyperbolic(dim, squared=False), 1 / 0.07),
    "d2": (lambda dim: Euclidean(squared=True), 1.0),
    "d2, scale from 14.3": (lambda dim: Euclidean(squared=True), 1 / 0.07),
    "hyperbolic d2": (lambda dim: Hyperbolic(dim, squared=True), 1.0),
}


def features(config: Config) -> tuple[EmbeddedPairs, EmbeddedPairs]:
    """Backbone features of training and test set, (num_images, channels) and (num_texts, width)."""
    device, initial = this_device(), InitialWeights.opened(config)
    config = initial.resolved(config)
    tokenizer = build_tokenizer(config.data, None)
    model = build_model(config, tokenizer)
    initial.load_stems_(model, config)
    # no projection and no normalisation: the features themselves
    model.image_tower.projection, model.text_tower.projection = None, nn.Parameter(torch.eye(model.text_tower.width))
    model.geometry = L2()
    model.to(device)
    sets = open_training_pairs(config.data, 0), open_retrieval_sets(config.data)["test"]
    keep_captions(model, config, tokenizer, sets, device)
    grids = feature_cache(model, config, device)
    cache = replace(  # only the mean over positions is cached, 15 MB for Flickr8k
        grids,
        network=f"mean of {grids.network}",
        compute=lambda pixels: grids.compute(pixels).mean(dim=(2, 3), keepdim=True),
        shape=(grids.shape[0], 1, 1),
    )
    length = config.data.context_length
    encoder = Encoder(model, image_transform(config.data), tokenizer, length, 256, device, cache=cache)
    embedded = (embed_pairs(encoder, pairs, CaptionRule()) for pairs in sets)
    return tuple(replace(pairs, images=NORM * unit(pairs.images), texts=NORM * unit(pairs.texts)) for pairs in embedded)


def run(train: EmbeddedPairs, test: EmbeddedPairs, name: str, learned: bool, seed: int, steps: int) -> tuple:
    """R@1 in percent, text to image and image to text, after training on `steps` batches with one caption per image."""
    torch.manual_seed(seed)
    make, start = GEOMETRIES[name]
    geometry, logit_scale = make(DIM), LogitScale(start if learned else 1.0, trainable=learned)
    # chosen by: test data (before the search existed); to be searched again
    maps = [
        nn.Sequential(nn.Dropout(0.5), nn.Linear(width, DIM, bias=False))
        for width in (train.images.shape[1], train.texts.shape[1])
    ]
    modules = nn.ModuleList([*maps, geometry, logit_scale])
    optimizer = torch.optim.AdamW(modules.parameters(), lr=1e-3)
    counts = torch.bincount(train.text_to_image)
    first = counts.cumsum(0) - counts  # caption of each picture
    for _ in range(steps):
        # a random caption of each image
        rows = torch.randperm(len(train.images))[:BATCH]
        captions = first[rows] + (torch.rand(len(rows)) * counts[rows]).long()
        images = geometry.embed_image(maps[0](train.images[rows]))
        texts = geometry.embed_text(maps[1](train.texts[captions]))
        loss = contrastive_loss(images, texts, geometry, logit_scale())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clamp_scalars_([*logit_scale.scalars(), *geometry.scalars()])
    # all test pairs by the trained geometry
    modules.eval()
    with torch.no_grad():
        images, texts = geometry.embed_image(maps[0](test.images)), geometry.embed_text(maps[1](test.texts))
        similarity = torch.cat([geometry.similarity(part, texts) for part in images.split(100)])
    metrics = retrieval_metrics(retrieval_ranks(similarity, test.text_to_image))
    return 100 * metrics["t2i_recall_at_1"], 100 * metrics["i2t_recall_at_1"]


def main(arguments: list[str] | None = None) -> dict[tuple[str, bool], tuple[float, float]]:
    parser = Parser(__doc__)
    parser.add_argument("--data", required=True, help="folder of tar shards, as Flickr8k's")
    parser.add_argument("--weights", required=True, help="folder with weights by name")
    parser.add_argument("--image-stem", default="tf_efficientnet_lite0", help="of timm, default %(default)s")
    parser.add_argument("--text-stem", default="all-MiniLM-L6-v2", help="a BERT, default %(default)s")
    parser.add_argument("--only", nargs="+", choices=GEOMETRIES, default=[*GEOMETRIES], metavar="GEOMETRY")
    parser.add_argument("--seeds", type=int, default=2, help="runs per geometry, default %(default)s")
    parser.add_argument("--steps", type=int, default=400, help="training steps, default %(default)s")
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.steps < 1:
        parser.error(f"--seeds {options.seeds} --steps {options.steps}; expected: at least 1")
    stems = [f"model.image.stem.name={options.image_stem}", f"model.text.stem.weights={options.text_stem}"]
    words = ["data.tokenizer=bert_wordpiece", f"data.vocabulary={options.text_stem}", "data.context_length=32"]
    data = [f"data.root={options.data}", "data.source=shards", f"data.image_size={SIZE}", "data.resize=squeeze"]
    pooled = ["model.image.layers=0", "model.text.layers=0", f"model.weights={options.weights}"]
    train, test = features(load_config(Config, [], [*data, *words, *stems, *pooled]))
    print(f"{len(train.images)} pictures to train on, {len(test.images)} to test, R@1 t2i / i2t, {options.seeds} seeds")
    print(f"{'':26}{'temperature learned':24}fixed at 1")
    table = {}
    for name in options.only:
        began = time.perf_counter()
        for learned in (True, False):
            recalls = [run(train, test, name, learned, seed, options.steps) for seed in range(options.seeds)]
            table[name, learned] = tuple(map(mean, zip(*recalls)))
        cells = [f"{t2i:.1f} / {i2t:.1f}" for t2i, i2t in (table[name, True], table[name, False])]
        print(f"{name:26}{cells[0]:24}{cells[1]:16}{time.perf_counter() - began:.0f} s", flush=True)
    return table


if __name__ == "__main__":
    run_or_explain(main)
