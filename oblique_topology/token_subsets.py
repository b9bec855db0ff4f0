"""Zero-shot classification with a part of the pairs of class tokens (Table 10).

The scores of a class are those of a random set K of spheres, the same for all pictures and prompts; K = all of them is
the full model. The paper says neither how many sets it draws nor what its plus-minus means; here 20 different sets, or
all there are, and the standard deviation over them (inferred).
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
    """Different sets of `size` of the spheres, ascending within each; all of them where there are at most num_draws.

    Args:
        num_spheres: of the model.
        size: in [1, num_spheres].
        num_draws: at least 1.
        seed: of the draws.
    Raises:
        ValueError: a size out of range.
    """
    if not 1 <= size <= num_spheres:
        raise ValueError(f"{size} of {num_spheres} class tokens; accepted: 1 to {num_spheres}")
    if math.comb(num_spheres, size) <= num_draws:
        return [list(chosen) for chosen in itertools.combinations(range(num_spheres), size)]
    generator = torch.Generator().manual_seed(seed)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < num_draws:
        chosen = torch.randperm(num_spheres, generator=generator)[:size].sort().values
        found[tuple(chosen.tolist())] = None
    return [list(chosen) for chosen in found]


@torch.no_grad()
def subset_hits(encoder: Encoder, task: Any, sizes: list[int], average: PromptAverage) -> dict[int, torch.Tensor]:
    """Whether each picture is classified rightly by each draw of spheres.

    Args:
        encoder: of a model whose embeddings are (num, num_spheres, sphere_dim).
        task: labelled set.
        sizes: of the sets.
        average: how prompts of a class are combined, the row's `method.prompt_average`.
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

    def encode(prompts: list[str]) -> torch.Tensor:  # every draw asks for the same prompts
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

    num_spheres = images.shape[1]
    return {size: torch.stack([hits(chosen) for chosen in draw_subsets(num_spheres, size)]) for size in sizes}
