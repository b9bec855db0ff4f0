"""How far image and text embeddings lie from the origin and from their mean (EuCLIP, Figures 2 to 8).

python euclip/distributions.py --checkpoint outputs/runs/euclip/<run>/seed0 --output distances
python euclip/distributions.py --checkpoint <folder> --output distances --pictures 50000 data.root=/data/flickr8k

Writes distances.json (summary), distances.png and the histograms as CSV. The paper uses all training pairs. This script
uses a random sample of images, the same for every model. The geometry defines the distance: Euclidean (not squared);
geodesic in hyperbolic space, where the mean is that of the tangent vectors; the scaled cosine distance (1 - cos) / 2 on
CLIP's sphere, which has no origin.
"""

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import torch
from torch.utils.data import Subset

from common.base.arguments import Parser
from common.base.files import write_json
from common.data.pairs import Pairs, open_training_pairs
from common.data.scenes import SceneDataset
from common.evaluation.embed import CaptionRule, Encoder, embed_pairs
from common.geometry import RootedGeometry
from common.report.figures import Distributions, plot_distributions
from common.run.checkpoint import named_checkpoint
from common.run.evaluation import this_device
from common.run.folder import provenance_of
from common.run.launch import run_or_explain
from euclip.evaluate import load_encoder
from euclip.traversal import generic_nearer, mean_of_modalities, root_of

DECIDES = "evaluation"

NUM_PICTURES = 5000  # of the draw; the mean of so many is off by 1.4 % of the embeddings' spread
OVERLAP_BINS = 50
DISTANCE = {
    "sphere": "scaled cosine distance",
    "elliptic": "angle (radians)",
    "euclidean": "Euclidean distance",
    "euclidean_squared": "Euclidean distance",
    "hyperbolic": "geodesic distance",
    "hyperbolic_squared": "geodesic distance",
}


class DrawnPairs(Subset):
    """A random sample of a set of pairs, without replacement; again a set of pairs.

    Args:
        size: maximum number of images. The choice depends only on `size` and `len(pairs)`.
    """

    def __init__(self, pairs: Pairs, size: int) -> None:
        size = min(size, len(pairs))
        drawn = np.random.default_rng(0).choice(len(pairs), size, replace=False, shuffle=False)
        super().__init__(pairs, sorted(drawn.tolist()))  # shards are read from front to back
        which = f"all {size}" if size == len(pairs) else f"{size} of {len(pairs)} drawn at random"
        self.name, self.fingerprint = f"{pairs.name}, {which}", f"{pairs.fingerprint}, {which}"

    def captions(self, index: int) -> list[str]:
        return self.dataset.captions(self.indices[index])


@dataclass(frozen=True)
class Sample:
    """Embedded pairs.

    images: (num_images, dim). texts: (num_texts, dim). text_to_image: (num_texts,).
    chains: indices of each image's captions from specific to generic; None where their order has no meaning.
    """

    name: str
    images: torch.Tensor
    texts: torch.Tensor
    text_to_image: torch.Tensor
    chains: Sequence[Sequence[int]] | None


@torch.no_grad()
def embed_sample(encoder: Encoder, pairs: Pairs, num_pictures: int = NUM_PICTURES) -> Sample:
    """Embeds a random sample of images with all their captions; the embeddings stay on the encoder's device."""
    drawn = DrawnPairs(pairs, num_pictures)
    embedded = embed_pairs(encoder, drawn, CaptionRule())
    chains = None
    if isinstance(pairs, SceneDataset):
        counts = [0, *np.cumsum([len(group) for group in embedded.captions_of]).tolist()]
        chains = [range(start, stop) for start, stop in itertools.pairwise(counts)]
    return Sample(
        drawn.name,
        embedded.images.to(encoder.device),
        embedded.texts.to(encoder.device),
        embedded.text_to_image,
        chains,
    )


def training_sample(encoder: Encoder, config: Any, num_pictures: int = NUM_PICTURES) -> Sample:
    """`embed_sample` of a config's training pairs; streamed data are read by position."""
    data = replace(config.data, stream_buffer=0)
    return embed_sample(encoder, open_training_pairs(data, config.run.seed), num_pictures)


@dataclass(frozen=True)
class Distances:
    """From one point: images (num_images,) and texts (num_texts,), on the CPU."""

    images: torch.Tensor
    texts: torch.Tensor


@torch.no_grad()
def distances_from(geometry: RootedGeometry, sample: Sample, point: torch.Tensor) -> Distances:
    """Distances of all embeddings from a point, (dim,), in the measure of `DISTANCE`."""
    distances = [geometry.distance_to(embeddings, point).cpu() for embeddings in (sample.images, sample.texts)]
    if geometry.name == "sphere":  # the paper's figures show (1 - cos) / 2 of the angle
        distances = [(angles / 2).sin().square() for angles in distances]
    return Distances(*distances)


@torch.no_grad()
def reference_points(geometry: RootedGeometry, sample: Sample) -> dict[str, torch.Tensor]:
    """ "origin" where the geometry has one, and "mean" of all embeddings with equal modality weights; both (dim,)."""
    mean = mean_of_modalities(sample.images, sample.texts)
    root = root_of(geometry, sample.images, sample.texts)
    return {"origin": root, "mean": mean} if geometry.has_cones else {"mean": root}


def overlap(first: torch.Tensor, second: torch.Tensor, bins: int = OVERLAP_BINS) -> float:
    """Common area of two normalised histograms over their joint range, in [0, 1]: 1 = equal, 0 = disjoint."""
    low, high = float(min(first.min(), second.min())), float(max(first.max(), second.max()))
    shares = [np.histogram(values.numpy(), bins, (low, high))[0] / len(values) for values in (first, second)]
    return float(np.minimum(*shares).sum())


def mean_norm(sample: Sample) -> float:
    """Norm of the mean embedding with equal modality weights; at most 1 on a sphere."""
    return float(mean_of_modalities(sample.images, sample.texts).norm())


def summarise(distances: Distances, sample: Sample) -> dict[str, float]:
    """Statistics of one pair of histograms.

    Returns:
        image_mean, text_mean, image_std, text_std: distances, in the geometry's unit.
        overlap: of the two histograms, in [0, 1].
        image_farther: share of pairs whose image is farther out than its text; ties count half.
        within_half: share of embeddings nearer than 0.5, with equal modality weights.
        mean_norm: see the function.
        level0_mean ... level4_mean (scenes): of captions from specific to generic.
        generic_nearer (scenes): share of caption pairs of one image in which the more generic one is nearer.
    """
    images, texts = distances.images.double(), distances.texts.double()
    gap = images[sample.text_to_image] - texts
    numbers = {
        "image_mean": float(images.mean()),
        "text_mean": float(texts.mean()),
        "image_std": float(images.std(correction=0)),
        "text_std": float(texts.std(correction=0)),
        "overlap": overlap(images, texts),
        "image_farther": float((gap > 0).double().mean() + (gap == 0).double().mean() / 2),
        "within_half": float(((images < 0.5).double().mean() + (texts < 0.5).double().mean()) / 2),
        "mean_norm": mean_norm(sample),
    }
    if sample.chains is not None:
        numbers |= {f"level{level}_mean": float(values.mean()) for level, values in enumerate(by_level(texts, sample))}
        numbers["generic_nearer"] = generic_nearer(texts, sample.chains)
    return numbers


def by_level(texts: torch.Tensor, sample: Sample) -> list[torch.Tensor]:
    """Values of texts split by the level of the caption, most specific first; for samples with chains."""
    longest = max(map(len, sample.chains))
    return [texts[[chain[level] for chain in sample.chains if level < len(chain)]] for level in range(longest)]


def panels_of(
    title: str, geometry: RootedGeometry, sample: Sample, points: Mapping[str, torch.Tensor], levels: bool = False
) -> list[Distributions]:
    """One panel per reference point.

    Args:
        points: name -> (dim,), from `reference_points`.
        levels: splits the texts by level; no panel for a sample without chains.
    """
    panels = []
    for name, point in points.items():
        distances = distances_from(geometry, sample, point)
        texts = {"text": distances.texts}
        if levels and sample.chains is None:
            continue
        if levels:
            split = by_level(distances.texts, sample)
            ends = {0: " (specific)", len(split) - 1: " (generic)"}
            texts = {f"text, level {level}{ends.get(level, '')}": values for level, values in enumerate(split)}
        values = {label: tensor.tolist() for label, tensor in {"image": distances.images, **texts}.items()}
        panels.append(Distributions(title, f"{DISTANCE[geometry.name]} from the {name}", values))
    return panels


def write_distances(geometry: RootedGeometry, sample: Sample, folder: Path, **facts: Any) -> dict[str, Any]:
    """Writes distances.json, distances.png and the histograms as CSV; returns the content of the JSON.

    Args:
        facts: provenance, copied into the JSON.
    """
    points = reference_points(geometry, sample)
    content = {
        **facts,
        "data": sample.name,
        "geometry": geometry.name,
        "distance": DISTANCE[geometry.name],
        **{
            f"from_{reference}": summarise(distances_from(geometry, sample, point), sample)
            for reference, point in points.items()
        },
    }
    panels = panels_of("by modality", geometry, sample, points)
    panels += panels_of("captions from specific (0) to generic", geometry, sample, points, levels=True)
    plot_distributions(panels, folder / "distances.png", across=len(points))
    write_json(folder / "distances.json", content)
    return content


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; `arguments` replaces sys.argv."""
    parser = Parser(__doc__)
    parser.add_argument("--checkpoint", required=True, type=Path, help="folder of a run, or step-XXXXXXXX in it")
    parser.add_argument("--pictures", type=int, default=NUM_PICTURES, help="size of the sample of the training set")
    parser.add_argument("--output", required=True, type=Path, help="folder of the files")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. data.root=/data/flickr8k")
    options = parser.parse_intermixed_args(arguments)
    if options.pictures < 1:
        raise ValueError(f"--pictures {options.pictures}; expected: at least 1")

    checkpoint = named_checkpoint(options.checkpoint)
    config, encoder = load_encoder(checkpoint, this_device(), options.overrides)
    sample = training_sample(encoder, config, options.pictures)
    facts = {"step": checkpoint.state["step"], **provenance_of()}
    content = write_distances(encoder.model.geometry, sample, options.output, **facts)
    print(json.dumps(content, indent=1))


if __name__ == "__main__":
    run_or_explain(main)
