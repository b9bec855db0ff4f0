"""From a model and a data set to embeddings, metrics and the protocol that each number carries.

Work is dealt out to the processes by index and put together by index, so no padded duplicate can enter a metric.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from common.data.broken import BrokenSample
from common.data.pairs import Pairs, lost_at_open
from common.data.tokenizer import WordTokenizer
from common.data.transforms import ImageTransform, normalize
from common.distributed import gather_rows, rank, world_size
from common.encoders.two_towers import TwoTowers
from common.evaluation.retrieval import RECALL_AT, Ranks, chance_level, retrieval_metrics, retrieval_ranks
from common.evaluation.zero_shot import PromptAverage, class_scores, classification_hits


@dataclass(frozen=True)
class Encoder:
    """A model with the preprocessing that it was trained with.

    model: unwrapped (no DDP around it), on `device`.
    context_length: of the text tower.
    batch_size: pictures or captions per forward pass and process.
    """

    model: TwoTowers
    transform: ImageTransform
    tokenizer: WordTokenizer
    context_length: int
    batch_size: int
    device: torch.device
    num_workers: int = 0

    @torch.no_grad()
    def images(self, data_set: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings of all pictures of a data set, in its order.

        Returns:
            (num_images, ...) embeddings on the CPU, and (num_images,) bool: False where a picture could not be read
            (its embedding is then zero and must not be ranked).
        """
        share = _Pictures(data_set, self.transform, _share(len(data_set)))
        loader = DataLoader(share, batch_size=self.batch_size, num_workers=self.num_workers)
        rows, readable = [], []
        for images, ok in loader:
            images = normalize(images.to(self.device), self.transform.mean, self.transform.std)
            rows.append(self.model.encode_image(images))
            readable.append(ok.to(self.device))
        return tuple(gather_rows(torch.cat(part), len(data_set)).cpu() for part in (rows, readable))

    @torch.no_grad()
    def texts(self, texts: list[str]) -> torch.Tensor:
        """(num_texts, ...) embeddings on the CPU, in order."""
        share = [texts[index] for index in _share(len(texts))]
        rows = [
            self.model.encode_text(self.tokenizer.encode(chunk, self.context_length).to(self.device))
            for chunk in _chunks(share, self.batch_size)
        ]
        return gather_rows(torch.cat(rows), len(texts)).cpu()


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one data set, with what is needed to compare them and to put an interval around them.

    metrics: fractions in [0, 1].
    protocol: what the numbers mean; only equal protocols may share a column.
    chance: expected metrics of a random model, for the keys it knows.
    hits: metric -> one array per image of its queries' results, for a bootstrap over images.
    """

    metrics: dict[str, float]
    protocol: dict[str, Any]
    chance: dict[str, float]
    hits: dict[str, list[list[float]]] = field(repr=False)


def evaluate_retrieval(encoder: Encoder, pairs: Pairs) -> Evaluation:
    """Ranks a test set of captioned pictures both ways by the model's own similarity."""
    image_embeddings, readable = encoder.images(pairs)
    kept = readable.nonzero().squeeze(1).tolist()
    if not kept:
        raise ValueError(f"{pairs.name}: none of its {len(pairs)} pictures could be read")
    captions_of = [pairs.captions(index) for index in kept]
    captions = [caption for group in captions_of for caption in group]
    text_to_image = torch.tensor([row for row, group in enumerate(captions_of) for _ in group])
    text_embeddings = encoder.texts(captions)

    scores = _similarity(encoder, image_embeddings[readable], text_embeddings)
    ranks = retrieval_ranks(scores, text_to_image)
    protocol = {
        "task": "retrieval",
        "data": pairs.name,
        "fingerprint": pairs.fingerprint,
        "captions_hash": hashlib.sha256("\n".join(captions).encode()).hexdigest()[:16],
        "num_images": len(kept),
        "num_texts": len(captions),
        "unreadable_images": len(pairs) - len(kept) + len(lost_at_open(pairs)),
        "tie_rule": "lower index first",
        "score_dtype": str(scores.dtype).removeprefix("torch."),
        "preprocessing": encoder.transform.to_json(),
    }
    hits = _hits_by_image(ranks, text_to_image)
    return Evaluation(retrieval_metrics(ranks), protocol, chance_level(text_to_image, len(kept)), hits)


def evaluate_zero_shot(encoder: Encoder, task: Any, average: PromptAverage) -> Evaluation:
    """Top-1 (and where there are more than five classes top-5) accuracy of class prompts.

    Args:
        encoder: model and preprocessing.
        task: has class_names, templates with one "{}", name, fingerprint; items with "image" and "label".
        average: how the prompts of a class are combined.
    """
    image_embeddings, readable = encoder.images(task)
    labels = torch.tensor([task.label(index) for index in readable.nonzero().squeeze(1).tolist()])
    prompts = [template.format(name) for template in task.templates for name in task.class_names]
    prompt_embeddings = encoder.texts(prompts)
    prompt_embeddings = prompt_embeddings.view(len(task.templates), len(task.class_names), *prompt_embeddings.shape[1:])

    geometry = encoder.model.geometry
    scores = class_scores(
        image_embeddings[readable].to(encoder.device),
        prompt_embeddings.to(encoder.device),
        geometry.similarity,
        geometry.mean,
        average,
    ).cpu()
    num_classes = len(task.class_names)
    hits = {f"acc{k}": classification_hits(scores, labels, k) for k in (1, 5) if k == 1 or k < num_classes}
    protocol = {
        "task": "zero_shot",
        "data": task.name,
        "fingerprint": task.fingerprint,
        "num_images": len(labels),
        "num_classes": num_classes,
        "num_templates": len(task.templates),
        "prompt_average": average,
        "unreadable_images": len(task) - len(labels),
        "preprocessing": encoder.transform.to_json(),
    }
    return Evaluation(
        metrics={name: float(hit.double().mean()) for name, hit in hits.items()},
        protocol=protocol,
        chance={f"acc{k}": k / num_classes for k in (1, 5) if f"acc{k}" in hits},
        hits={name: [[float(item)] for item in hit] for name, hit in hits.items()},
    )


def _hits_by_image(ranks: Ranks, text_to_image: torch.Tensor) -> dict[str, list[list[float]]]:
    """Results of the queries of each image: one for i2t, one per caption for t2i, one mean of the six recalls.

    Where images have unlike numbers of captions, the mean over images of "mean_recall" differs slightly from the
    metric, which averages t2i over captions.
    """
    hits: dict[str, list[list[float]]] = {}
    row_of = {image: row for row, image in enumerate(ranks.query_images.tolist())}
    for k in RECALL_AT:
        hits[f"i2t_recall_at_{k}"] = [[float(found)] for found in ranks.image_to_text < k]
        by_image: list[list[float]] = [[] for _ in row_of]
        for image, found in zip(text_to_image.tolist(), (ranks.text_to_image < k).tolist()):
            by_image[row_of[image]].append(float(found))
        hits[f"t2i_recall_at_{k}"] = by_image
    hits["mean_recall"] = [
        [sum(sum(recall[row]) / len(recall[row]) for recall in hits.values()) / len(hits)] for row in range(len(row_of))
    ]
    return hits


@torch.no_grad()
def _similarity(encoder: Encoder, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    """All scores, in row chunks so that geometries with large intermediates stay bounded; on the CPU."""
    texts = texts.to(encoder.device)
    similarity = encoder.model.geometry.similarity
    return torch.cat([similarity(chunk.to(encoder.device), texts).cpu() for chunk in images.split(1024)])


def _share(count: int) -> list[int]:
    """Indices of this process: rank, rank + W, ...; padded with the last, so that all make as many forward passes."""
    return [min(index, count - 1) for index in range(rank(), -(-count // world_size()) * world_size(), world_size())]


def _chunks(items: list[str], size: int) -> Iterator[list[str]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


class _Pictures(torch.utils.data.Dataset):
    """Pictures of some indices of a data set, preprocessed; one that cannot be read is zero and marked."""

    def __init__(self, data_set: Any, transform: ImageTransform, indices: list[int]) -> None:
        self.data_set, self.transform, self.indices = data_set, transform, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, item: int) -> tuple[torch.Tensor, bool]:
        try:
            return self.transform.eval(self.data_set[self.indices[item]]["image"]), True
        except BrokenSample:
            return torch.zeros(3, self.transform.size, self.transform.size, dtype=torch.uint8), False
