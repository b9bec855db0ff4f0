"""Compares geometries on the same frozen features: trains two projections for each, in seconds.

    python -m examples.compare_geometries                                  the embedded scenes, no download
    python -m examples.compare_geometries --data /data/flickr8k --weights /data/weights
    python -m examples.compare_geometries --data /data/flickr8k --weights /data/weights --only sphere l2 --seeds 5

With --data, an EfficientNet and a BERT compute features once, which are cached in outputs/features. An image is the
mean over its positions, a caption the mean over its words. Without --data, features of the scenes need no network. All
features have the same norm. For each geometry two linear maps of them are trained and compared. --weights is a folder
that has weights under their names. R@1 is in percent, text to image / image to text. EfficientNet was trained on
ImageNet, and MiniLM on captions of COCO and Flickr30k, so no number is zero-shot. Learning rate, dropout and norm were
chosen on Flickr8k's test images, and distances depend on the norm: this is a first look, not a ranking.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean

import torch
from torch import nn
from tqdm import tqdm

from common.base.arguments import Parser
from common.base.files import shown, write_json
from common.base.places import outputs
from common.evaluation.embed import EmbeddedPairs
from common.evaluation.retrieval import retrieval_metrics, retrieval_ranks
from common.geometry import Sphere, clamp_scalars_
from common.info_nce import contrastive_loss
from common.logit_scale import LogitScale
from common.oblique import Oblique
from common.run.launch import run_or_explain
from euclip.geometry import Elliptic, Euclidean, Hyperbolic
from examples.frozen_features import features, photo_config, scene_features
from examples.plots import TEMPERATURES, Runs, Trained, last_recalls, plot_courses, plot_recalls
from oblique_topology.geometry import L2, ObliqueGeodesic

DIM, BATCH = 256, 512
NUM_TRAIN, NUM_TEST = 4000, 1000  # scenes

# name -> (dim -> geometry, start of the learned logit scale)
GEOMETRIES = {
    "sphere": (lambda dim: Sphere(), 1 / 0.07),
    "oblique": (lambda dim: Oblique(dim // 8), 1 / 0.07),  # 8 spheres
    "oblique_geodesic": (lambda dim: ObliqueGeodesic(dim // 8), 1 / 0.07),
    "l2": (lambda dim: L2(), 1 / 0.07),
    "elliptic": (lambda dim: Elliptic(), 1 / 0.07),
    "euclidean": (lambda dim: Euclidean(squared=False), 1 / 0.07),
    "hyperbolic": (lambda dim: Hyperbolic(dim, squared=False), 1 / 0.07),
    "euclidean_squared": (lambda dim: Euclidean(squared=True), 1.0),
    "euclidean_squared_from_14": (lambda dim: Euclidean(squared=True), 1 / 0.07),
    "hyperbolic_squared": (lambda dim: Hyperbolic(dim, squared=True), 1.0),
}


def run(
    train: EmbeddedPairs, test: EmbeddedPairs, name: str, learned: bool, seed: int, steps: int,
    step_done: Callable[[], object] = lambda: None,
) -> Trained:  # fmt: skip
    """Trains two maps on `steps` batches with one caption per image, and ranks the test pairs four times."""
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
    losses, scales, recalls = [], [], []
    for step in range(1, steps + 1):
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
        losses.append(loss.item())
        scales.append(logit_scale().item())
        if step in {-(-steps * quarter // 4) for quarter in range(1, 5)}:
            modules.eval()
            recalls.append((step, *_recall_at_1(test, geometry, maps)))
            modules.train()
        step_done()
    return Trained(losses, scales, recalls)


@torch.no_grad()
def _recall_at_1(test: EmbeddedPairs, geometry: nn.Module, maps: Sequence[nn.Module]) -> tuple[float, float]:
    images, texts = geometry.embed_image(maps[0](test.images)), geometry.embed_text(maps[1](test.texts))
    similarity = torch.cat([geometry.similarity(part, texts) for part in images.split(100)])
    metrics = retrieval_metrics(retrieval_ranks(similarity, test.text_to_image))
    return 100 * metrics["t2i_recall_at_1"], 100 * metrics["i2t_recall_at_1"]


def compare(train: EmbeddedPairs, test: EmbeddedPairs, names: Sequence[str], seeds: int, steps: int) -> Runs:
    """Runs of every geometry with a learned and with a fixed temperature; prints each row when it is done."""
    print(f"{len(train.images)} pictures to train on, {len(test.images)} to test, R@1 t2i / i2t, {seeds} seeds")
    print(f"{'':26}{TEMPERATURES[True]:24}{TEMPERATURES[False]}", flush=True)
    runs, total = {}, 2 * len(names) * seeds
    with tqdm(total=total * steps, unit="step") as bar:  # one bar for the whole command: its time to the end is of all
        for name in names:
            began, cells = time.perf_counter(), []
            for learned in (True, False):
                runs[name, learned] = []
                for seed in range(seeds):
                    bar.set_description(f"run {bar.n // steps + 1} of {total}, {name}")
                    runs[name, learned].append(run(train, test, name, learned, seed, steps, bar.update))
                t2i, i2t = (mean(values) for values in last_recalls(runs[name, learned]))
                cells.append(f"{t2i:.1f} / {i2t:.1f}")
            bar.write(f"{name:26}{cells[0]:24}{cells[1]:24}{time.perf_counter() - began:.0f} s")
    return runs


def main(arguments: list[str] | None = None) -> Runs:
    parser = Parser(__doc__)
    parser.add_argument("--data", help="folder of tar shards, as Flickr8k's; default: the embedded scenes")
    parser.add_argument("--weights", help="folder with weights by name, for --data")
    parser.add_argument("--image-stem", default="tf_efficientnet_lite0", help="of timm, default %(default)s")
    parser.add_argument("--text-stem", default="all-MiniLM-L6-v2", help="a BERT, default %(default)s")
    parser.add_argument(
        "--only", nargs="+", choices=GEOMETRIES, default=[*GEOMETRIES], metavar="GEOMETRY",
        help=f"some of: {', '.join(GEOMETRIES)}",
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, default=3, help="runs per geometry, default %(default)s")
    parser.add_argument("--steps", type=int, default=400, help="training steps, default %(default)s")
    parser.add_argument("--output", type=Path, default=outputs() / "compare_geometries", help="default %(default)s")
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.steps < 1:
        parser.error(f"--seeds {options.seeds} --steps {options.steps}; expected: at least 1")
    if (options.data is None) != (options.weights is None):
        parser.error("--data and --weights; expected: both, or neither for the embedded scenes")
    if options.data is None:
        train, test = scene_features(NUM_TRAIN, NUM_TEST)
    else:
        train, test = features(photo_config(options.data, options.weights, options.image_stem, options.text_stem))
    runs = compare(train, test, options.only, options.seeds, options.steps)
    rows = [
        {"geometry": name, "learned": learned, "runs": [asdict(trained) for trained in of_seeds]}
        for (name, learned), of_seeds in runs.items()
    ]
    protocol = {
        "train": train.pairs.name,
        "test": test.pairs.name,
        "num_test": len(test.images),
        "steps": options.steps,
    }
    written = [write_json(options.output / "comparison.json", protocol | {"rows": rows})]
    written += [plot_recalls(runs, options.output / "recalls.png")[0]]
    written += [plot_courses(runs, options.output / "courses.png")[0]]
    print("saved:", ", ".join(shown(path) for path in written))
    return runs


if __name__ == "__main__":
    run_or_explain(main)
