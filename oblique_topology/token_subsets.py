"""Zero-shot classification with a part of the pairs of class tokens (Table 10).

The scores of a class use a random set K of spheres, the same for all images and prompts; all spheres give the full
model. The paper states neither the number of sets nor the meaning of its plus-minus. Here they are 20 different sets,
or all if there are fewer, and the standard deviation over them (inferred).
"""

import itertools
import math
from typing import Any

import torch

from common.evaluation.embed import Encoder
from common.evaluation.zero_shot import PromptAverage, classification_hits, prompt_scores

DECIDES = "evaluation"

NUM_DRAWS = 20


def draw_subsets(num_spheres: int, size: int, num_draws: int = NUM_DRAWS, seed: int = 0) -> list[list[int]]:
    """Different ascending sets of `size` spheres; all sets if there are at most num_draws.

    Args:
        size: in [1, num_spheres].
        num_draws: at least 1.
    Raises:
        ValueError: a size out of range.
    """
    if not 1 <= size <= num_spheres:
        raise ValueError(f"{size} of {num_spheres} class tokens; expected: 1 to {num_spheres}")
    if math.comb(num_spheres, size) <= num_draws:
        return [list(chosen) for chosen in itertools.combinations(range(num_spheres), size)]
    generator = torch.Generator().manual_seed(seed)
    subsets: dict[tuple[int, ...], None] = {}
    while len(subsets) < num_draws:
        chosen = torch.randperm(num_spheres, generator=generator)[:size].sort().values
        subsets[tuple(chosen.tolist())] = None
    return [list(chosen) for chosen in subsets]


@torch.no_grad()
def subset_hits(encoder: Encoder, task: Any, sizes: list[int], average: PromptAverage) -> dict[int, torch.Tensor]:
    """Whether each draw of spheres classifies each image correctly.

    Args:
        encoder: of a model whose embeddings are (num, num_spheres, sphere_dim).
        task: labelled set.
        sizes: of the sets.
        average: the row's `method.prompt_average`.
    Returns:
        size -> (num_draws, num_images) bool.
    Raises:
        ValueError: a size out of range.
    """
    images, readable = encoder.images(task)
    images = images[readable].to(encoder.device)
    labels = torch.tensor([task.label(index) for index in readable.nonzero().squeeze(1).tolist()])
    similarity, mean = encoder.model.geometry.similarity, encoder.model.geometry.mean
    known: dict[str, torch.Tensor] = {}

    def encode(prompts: list[str]) -> torch.Tensor:  # all draws use the same prompts
        key = "\n".join(prompts)
        if key not in known:
            known[key] = encoder.texts(prompts).to(encoder.device)
        return known[key]

    def hits(chosen: list[int]) -> torch.Tensor:
        scores = prompt_scores(
            images[:, chosen],
            lambda prompts: encode(prompts)[:, chosen],
            task.class_names,
            task.templates,
            similarity,
            mean,
            average,
        )
        return classification_hits(scores.cpu(), labels)

    # the same draws for every model: they depend on the sizes only
    num_spheres = images.shape[1]
    return {size: torch.stack([hits(chosen) for chosen in draw_subsets(num_spheres, size)]) for size in sizes}
