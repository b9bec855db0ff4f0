"""Zero-shot classification: class prompts are texts, the closest class wins.

The ways to combine the prompts of a class are not interchangeable: on the same embeddings they can choose different
classes.

    name             class c, templates k                              used by
    normalized_mean  unit(mean_k unit(t_ck))                           A: CLIP, open_clip, DataComp; elliptic
    plain_mean       mean_k t_ck                                       B: EuCLIP's Euclidean geometries
    tangent_mean     mean_k of tangent vectors, lifted by similarity   C: MERU, EuCLIP's hyperbolic geometries
    scores           mean_k similarity(x, t_ck)                        D: oblique paper, "average the distances"
    embeddings       the geometry's own mean: A on the sphere, B where it is Euclidean, C where it is hyperbolic

Hyperbolic embeddings are tangent vectors here, so B and C are the same sum; a protocol names the recipe of a paper.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import get_args

import torch

from common.base.settings import PromptAverage
from common.evaluation.arrays import labels_of, tensor_of
from common.vectors import at_least_float32, unit

Similarity = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Mean = Callable[[torch.Tensor], torch.Tensor]


def normalized_mean(prompt_embeddings: torch.Tensor) -> torch.Tensor:
    """Mode A over the first axis; the last axis is the vector."""
    return unit(unit(tensor_of(prompt_embeddings, "prompt embeddings")).mean(dim=0))


def plain_mean(prompt_embeddings: torch.Tensor) -> torch.Tensor:
    """Modes B and C over the first axis."""
    return at_least_float32(tensor_of(prompt_embeddings, "prompt embeddings")).mean(dim=0)


_MEANS: dict[str, Mean] = {
    "normalized_mean": normalized_mean,
    "plain_mean": plain_mean,
    "tangent_mean": plain_mean,
}


def class_scores(
    image_embeddings: torch.Tensor,
    prompt_embeddings: torch.Tensor,
    similarity: Similarity,
    mean: Mean,
    average: PromptAverage,
    chunk_size: int = 1024,
) -> torch.Tensor:
    """(num_images, num_classes) score of every image for every class, higher is closer.

    Args:
        image_embeddings, prompt_embeddings: (num_images, ...) and (num_templates, num_classes, ...).
        mean: the geometry's, over the first axis; used by average="embeddings".
        chunk_size: images per call of `similarity`; no effect beyond rounding.
    """
    if average not in get_args(PromptAverage):
        raise ValueError(f"average = {average!r}; expected: {', '.join(get_args(PromptAverage))}")
    image_embeddings = tensor_of(image_embeddings, "image embeddings")
    prompt_embeddings = tensor_of(prompt_embeddings, "prompt embeddings")
    if not len(prompt_embeddings):
        raise ValueError("no prompt templates; expected: at least one")
    if average == "scores":
        total = _in_chunks(similarity, image_embeddings, prompt_embeddings[0], chunk_size)
        for prompts in prompt_embeddings[1:]:
            total += _in_chunks(similarity, image_embeddings, prompts, chunk_size)
        return total / len(prompt_embeddings)
    classes = _MEANS.get(average, mean)(prompt_embeddings)
    return _in_chunks(similarity, image_embeddings, classes, chunk_size)


def prompt_scores(
    image_embeddings: torch.Tensor,
    encode: Callable[[list[str]], torch.Tensor],
    class_names: Sequence[str],
    templates: Sequence[str],
    similarity: Similarity,
    mean: Mean,
    average: PromptAverage,
    chunk_size: int = 1024,
    prompts_per_chunk: int = 16_384,
) -> torch.Tensor:
    """`class_scores` from names and templates, with the embeddings of `prompts_per_chunk` prompts at a time.

    A name that occurs twice (ImageNet: "missile", "sunglasses") is encoded once, so that its columns tie to the last
    bit and the first class wins.

    Args:
        encode: texts -> (num_texts, ...), on the device of the image embeddings.
        templates: each with one "{}" or "{c}" for the name.
        prompts_per_chunk: at least the templates of one class.
    """
    if not class_names or not templates:
        raise ValueError(f"{len(class_names)} class names and {len(templates)} templates; expected: at least one each")
    names = list(dict.fromkeys(class_names))
    column = {name: index for index, name in enumerate(names)}
    blocks = []
    for block in _blocks(names, max(1, prompts_per_chunk // len(templates))):
        prompts = tensor_of(
            encode([fill(template, name) for template in templates for name in block]), "prompt embeddings"
        )
        prompts = prompts.view(len(templates), len(block), *prompts.shape[1:])
        blocks.append(class_scores(image_embeddings, prompts, similarity, mean, average, chunk_size))
    return torch.cat(blocks, dim=1)[:, [column[name] for name in class_names]]


def fill(template: str, name: str) -> str:
    """The prompt of a class; names and templates may hold other braces than the placeholder.

    Raises:
        ValueError: the template has no "{}" or "{c}".
    """
    for place in ("{c}", "{}"):
        if place in template:
            return template.replace(place, name)
    raise ValueError(f"prompt template {template!r} has no place for the class name; expected: one {{}} or {{c}}")


def classification_hits(scores: torch.Tensor, labels: torch.Tensor, k: int = 1) -> torch.Tensor:
    """Whether the label is among the k best classes of each image; ties go to the lower class index.

    Args:
        scores: (num_images, num_classes), finite, higher is closer.
        k: at most num_classes, with which every image is right.
    Raises:
        ValueError: non-finite scores, labels that are no class, or k out of range.
    """
    scores = tensor_of(scores, "scores")
    labels = labels_of(labels, "labels").to(scores.device)
    if scores.ndim != 2 or labels.shape != scores.shape[:1]:
        raise ValueError(
            f"scores of shape {tuple(scores.shape)} and labels of shape {tuple(labels.shape)}; expected (num_images, "
            "num_classes) and one label for each image"
        )
    if not torch.isfinite(scores).all():
        raise ValueError(f"{int((~torch.isfinite(scores)).sum())} of {scores.numel()} class scores are not finite")
    if not 1 <= k <= scores.shape[1]:
        raise ValueError(f"top-{k} accuracy needs at least {k} classes, got {scores.shape[1]}")
    if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= scores.shape[1]):
        raise ValueError(f"labels {int(labels.min())}..{int(labels.max())}; expected: 0..{scores.shape[1] - 1}")
    label_scores = scores.gather(1, labels[:, None])
    index = torch.arange(scores.shape[1], device=scores.device)
    ahead = (scores > label_scores) | ((scores == label_scores) & (index < labels[:, None]))
    return ahead.sum(dim=1) < k


@torch.no_grad()
def _in_chunks(
    similarity: Similarity, image_embeddings: torch.Tensor, class_embeddings: torch.Tensor, chunk_size: int
) -> torch.Tensor:
    if chunk_size < 1:
        raise ValueError(f"chunk_size = {chunk_size}; expected: at least 1")
    return torch.cat([similarity(chunk, class_embeddings) for chunk in image_embeddings.split(chunk_size)])


def _blocks(names: list[str], size: int) -> Iterator[list[str]]:
    for start in range(0, len(names), size):
        yield names[start : start + size]
