"""Zero-shot classification: class prompts are texts, the closest class wins.

Two of the four ways to combine the prompts of a class (papers/evaluation.md, Sec. 7) differ in kind: average the
*embeddings* as the geometry defines the mean (modes A, B, C), or average the *scores* (mode D, oblique paper: "compute
the distances, then average the distances"). They are not interchangeable.
"""

from collections.abc import Callable
from typing import Literal

import torch

PromptAverage = Literal["scores", "embeddings"]


def class_scores(
    image_embeddings: torch.Tensor,
    prompt_embeddings: torch.Tensor,
    similarity: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    mean: Callable[[torch.Tensor], torch.Tensor],
    average: PromptAverage,
) -> torch.Tensor:
    """Score of every picture for every class.

    Args:
        image_embeddings: (num_images, ...).
        prompt_embeddings: (num_templates, num_classes, ...).
        similarity: the geometry's, images first.
        mean: the geometry's mean over the first axis; used by average="embeddings".
        average: "scores" (mode D) or "embeddings" (modes A, B, C by geometry).
    Returns:
        (num_images, num_classes), higher is closer.
    """
    if average == "embeddings":
        return similarity(image_embeddings, mean(prompt_embeddings))
    if average != "scores":
        raise ValueError(f"average = {average!r}; accepted: scores, embeddings")
    total = similarity(image_embeddings, prompt_embeddings[0])
    for prompts in prompt_embeddings[1:]:
        total = total + similarity(image_embeddings, prompts)
    return total / len(prompt_embeddings)


def classification_hits(scores: torch.Tensor, labels: torch.Tensor, k: int = 1) -> torch.Tensor:
    """Whether the label is among the k best classes of each picture; ties go to the lower class index.

    Args:
        scores: (num_images, num_classes), finite.
        labels: (num_images,) in [0, num_classes).
        k: at most num_classes; a larger k would call every picture right.
    Returns:
        (num_images,) bool.
    Raises:
        ValueError: non-finite scores, or k larger than the number of classes.
    """
    if not torch.isfinite(scores).all():
        raise ValueError(f"{int((~torch.isfinite(scores)).sum())} of {scores.numel()} class scores are not finite")
    if not 1 <= k <= scores.shape[1]:
        raise ValueError(f"top-{k} accuracy needs at least {k} classes, got {scores.shape[1]}")
    own = scores.gather(1, labels[:, None])
    index = torch.arange(scores.shape[1], device=scores.device)
    ahead = (scores > own) | ((scores == own) & (index < labels[:, None]))
    return ahead.sum(dim=1) < k
