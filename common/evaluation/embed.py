"""From a model and a data set to embeddings, metrics and the protocol that each number carries.

Processes share the work in whole batches, and results are joined by index. No padded duplicate enters a metric, and
every forward pass sees the same batch for any number of processes: the numbers are equal to the last bit (same hardware
and number of threads).
"""

import itertools
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from PIL import Image
from torch import nn
from torch.utils.data import Subset
from tqdm import tqdm

from common.base.settings import DataConfig, RunConfig
from common.data.broken import BrokenSample, check_whole, named
from common.data.decoding import read_picture, upright
from common.data.feature_cache import FeatureCache
from common.data.loader import Loader
from common.data.pairs import Pairs, lost_at_open
from common.data.tokenizer import Tokenizer
from common.data.transforms import ImageTransform
from common.distributed import gather_rows, is_main_process, rank, world_size
from common.encoders.two_towers import TwoTowers
from common.evaluation.accuracy import classification_evaluation
from common.evaluation.protocol import TIE_RULE, Evaluation, hash_of_captions, mean_of_folds
from common.evaluation.retrieval import (
    Part,
    Positives,
    Ranks,
    chance_level,
    hits_by_image,
    ranks_of_parts,
    recalls,
    retrieval_metrics,
)
from common.evaluation.zero_shot import PromptAverage, prompt_scores
from common.geometry import one_matrix

FurtherMetrics = Callable[[torch.Tensor, torch.Tensor, list[int]], dict[str, list[list[float]]]]
TIE_WARNING = 1.0e-3  # share of text queries
BAR_AFTER = 5.0  # seconds without a progress bar
_ROWS_AT_ONCE = 256  # of the scores; the same for any number of processes


@contextmanager
def evaluation_mode(network: nn.Module) -> Iterator[None]:
    """Sets eval mode; restores the mode of every module at the end."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@dataclass(frozen=True)
class Encoder:
    """A model with the preprocessing of its training; embeds in evaluation mode.

    model: unwrapped (no DDP), on `device`.
    batch_size: images or captions per forward pass and process.
    cache: features of a frozen stem; None = they are computed again.
    max_broken_share: of a test set's pictures; with clearly more it is refused.
    """

    model: TwoTowers
    transform: ImageTransform
    tokenizer: Tokenizer
    context_length: int
    batch_size: int
    device: torch.device
    num_workers: int | None = 0
    cache: FeatureCache | None = None
    ranking_gb: float = RunConfig.ranking_gb
    max_broken_share: float = DataConfig.max_broken_share

    @property
    def preprocessing(self) -> dict[str, Any]:
        """What happens to an image at evaluation, for the protocol."""
        content = json.loads(self.transform.to_json())
        return {key: value for key, value in content.items() if key not in ("crop_scale", "flip_probability")}

    def cached(self, data_set: Any) -> tuple[Any, Any]:
        """A set of images, or cached features in their place, and the transform of its items.

        A part (`Subset`) reads the features of the whole set; a set without a fingerprint keeps its images.
        """
        if isinstance(data_set, Subset):
            whole, transform = self.cached(data_set.dataset)
            return Subset(whole, data_set.indices), transform
        if self.cache is None or not hasattr(data_set, "fingerprint"):
            return data_set, self.transform
        return self.cache.of(data_set, self.transform, training=False)

    @torch.no_grad()
    def images(self, data_set: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings of all images of a data set, in its order.

        Returns:
            (num_images, ...) on the CPU, and (num_images,) bool: False where an image is unreadable (its embedding is
            zero and must not be ranked). A warning names some, and some of what opening the set has left out.
        Raises:
            TooManyBroken: see `check_whole`.
        """
        embeddings, readable = self._images(data_set)
        check_readable(data_set, readable, self.max_broken_share)
        return embeddings, readable

    @torch.no_grad()
    def _images(self, data_set: Any) -> tuple[torch.Tensor, torch.Tensor]:
        size = min(self.batch_size, max(len(data_set), 1))
        batches = batches_here(len(data_set), size)
        pictures, name = _Pictures(*self.cached(data_set)), getattr(data_set, "name", "pictures")
        rows, readable = [], []
        with evaluation_mode(self.model):
            for images, ok in with_bar(Loader(pictures, name, self.num_workers, batch_sampler=batches), name):
                images = self.transform.inputs(images.to(self.device))
                rows.append(self.model.encode_image(images))
                readable.append(ok.to(self.device))
        return in_order(rows, size, len(data_set)), in_order(readable, size, len(data_set))

    def pictures(self, pictures: Sequence[Image.Image | str | Path]) -> torch.Tensor:
        """(num_pictures, ...) embeddings on the CPU, in order, of files or of pictures that Pillow has opened.

        Raises:
            ValueError: one cannot be read, or one in place of a list.
        """
        if isinstance(pictures, str | Path | Image.Image):
            raise ValueError(f"pictures is {pictures!r}; expected a list")
        given = _Given(list(pictures))
        if not given.pictures:
            raise ValueError("pictures is empty; expected at least one")
        embeddings, readable = self._images(given)
        if not readable.all():
            unreadable = _unreadable(given, readable)
            raise ValueError(f"{len(unreadable)} of {len(given)} pictures cannot be read; the first: {unreadable[0]}")
        return embeddings

    @torch.no_grad()
    def texts(self, texts: list[str]) -> torch.Tensor:
        """(num_texts, ...) embeddings on the CPU, in order; equal texts are embedded once."""
        if isinstance(texts, str):  # its letters would be
            raise ValueError(f"texts is {texts!r}; expected a list")
        places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
        distinct = list(places)
        size = min(self.batch_size, max(len(distinct), 1))
        rows = []
        with evaluation_mode(self.model):
            for batch in with_bar(batches_here(len(distinct), size), "texts"):
                token_ids = self.tokenizer.encode([distinct[index] for index in batch], self.context_length)
                rows.append(self.model.encode_text(token_ids.to(self.device)))
        embeddings = in_order(rows, size, len(distinct))
        return embeddings if len(distinct) == len(texts) else embeddings[[places[text] for text in texts]]


def with_bar(batches: Iterable[Any], label: str) -> Iterable[Any]:
    """The same batches, on the main process with a progress bar after `BAR_AFTER` seconds."""
    return tqdm(batches, label, unit="batch", delay=BAR_AFTER, leave=False, disable=not is_main_process())


@dataclass(frozen=True)
class CaptionRule:
    """Which captions of an image are ranked, and with what before them.

    per_image: number of captions, the first ones in file order; None = all.
    prefix: of every caption, e.g. "a photo of ".
    """

    per_image: int | None = None
    prefix: str = ""

    def __post_init__(self) -> None:
        if self.per_image is not None and self.per_image < 1:
            raise ValueError(f"captions per image = {self.per_image}; expected: at least 1, or None for all")

    def apply(self, caption: str) -> str:
        return self.prefix + caption


def check_readable(items: Any, readable: torch.Tensor, max_broken_share: float) -> None:
    """Warns of what an evaluation leaves out; `readable`: (num_items,) bool.

    Raises:
        TooManyBroken: see `check_whole`.
    """
    name, unreadable = getattr(items, "name", "pictures"), _unreadable(items, readable)
    check_whole(int(readable.sum()), unreadable, max_broken_share)
    pictures = f"{len(unreadable)} of {len(readable)} pictures cannot be read and are left out"
    opened = lost_at_open(items)
    for text, lost in ((pictures, unreadable), (f"left out when opened, {len(opened)} in all", opened)):
        if lost and is_main_process():
            more = "; ..." if len(lost) > 3 else ""
            warnings.warn(f"{name}: {text}: {'; '.join(map(str, lost[:3]))}{more}", stacklevel=3)


def _unreadable(pictures: Any, readable: torch.Tensor) -> list[BrokenSample]:
    # why each is unreadable
    broken = []
    for index in (~readable).nonzero().flatten().tolist():
        try:
            pictures[index]
        except BrokenSample as reason:
            broken.append(reason)
        else:
            broken.append(BrokenSample(f"picture {index}", "", "could not be read, and can be read now"))
    return broken


@dataclass(frozen=True)
class EmbeddedPairs:
    """A test set of captioned images, embedded, without unreadable images.

    images, texts: (num_images, ...) and (num_texts, ...), on the CPU of every process.
    indices: of the images in the data set.
    captions_of: their captions as in the file. text_to_image: (num_texts,) row of each caption's image.
    """

    pairs: Pairs
    rule: CaptionRule
    images: torch.Tensor
    texts: torch.Tensor
    indices: list[int]
    captions_of: list[list[str]]
    text_to_image: torch.Tensor

    @property
    def captions(self) -> list[str]:
        return [self.rule.apply(caption) for group in self.captions_of for caption in group]

    def protocol(
        self,
        encoder: Encoder,
        positives: Positives,
        score_dtype: torch.dtype,
        *,
        ranking: str = "similarity",
    ) -> dict[str, Any]:
        """All that changes a recall without changing the model.

        Captions per image are the first ones in file order; "all" where images have unlike numbers of them and all are
        used. Queries are those that have a positive. The hash is of the candidates as in the file: which split it is.
        Unreadable images are left out of the candidates.
        """
        counts = {len(captions) for captions in self.captions_of}
        per_image = (
            self.rule.per_image if self.rule.per_image is not None else counts.pop() if len(counts) == 1 else "all"
        )
        return {
            "task": "retrieval",
            "data": self.pairs.name,
            "fingerprint": self.pairs.fingerprint,
            "captions_per_image": per_image,
            "caption_prefix": self.rule.prefix,
            "caption_cleaning": encoder.tokenizer.cleaning,
            "positives": "own captions",
            "candidates": "all",
            "ranking": ranking,
            "num_images": positives.num_images,
            "num_texts": positives.num_texts,
            "num_image_queries": len(positives.query_images),
            "num_text_queries": len(positives.query_texts),
            "captions_hash": hash_of_captions(self.captions_of),
            "unreadable_images": len(self.pairs) - len(self.indices) + len(lost_at_open(self.pairs)),
            "score_dtype": str(score_dtype).removeprefix("torch."),
            "preprocessing": encoder.preprocessing,
            "tie_rule": TIE_RULE,
        }


def embed_pairs(encoder: Encoder, pairs: Pairs, rule: CaptionRule) -> EmbeddedPairs:
    """Embeds a test set on all processes."""
    images, readable = encoder.images(pairs)
    indices = readable.nonzero().squeeze(1).tolist()
    if not indices:
        raise ValueError(f"{pairs.name}: none of its {len(pairs)} pictures could be read")
    captions_of = [list(pairs.captions(index))[: rule.per_image] for index in indices]
    text_to_image = torch.tensor([row for row, group in enumerate(captions_of) for _ in group], dtype=torch.long)
    if not len(text_to_image):
        raise ValueError(f"{pairs.name}: none of its {len(indices)} readable pictures has a caption")
    texts = encoder.texts([rule.apply(caption) for group in captions_of for caption in group])
    return EmbeddedPairs(pairs, rule, images[readable], texts, indices, captions_of, text_to_image)


def evaluate_retrieval(
    encoder: Encoder, pairs: Pairs, rule: CaptionRule = CaptionRule(), gallery: int | None = None
) -> Evaluation:
    """Ranks a test set both ways by the model's similarity; each process ranks its share.

    Args:
        gallery: number of consecutive images ranked together, with their captions only; metrics are means over
            galleries. None = all images.
    Raises:
        ValueError: no image can be read, none has a caption, or their number is no multiple of the gallery.
    """
    embedded = embed_pairs(encoder, pairs, rule)
    count, owners = len(embedded.images), embedded.text_to_image
    gallery = count if gallery is None else min(gallery, count)
    if count % gallery:
        raise ValueError(f"{pairs.name}: {count} readable pictures are no multiple of the gallery of {gallery}")
    folds = []
    for start in range(0, count, gallery):
        pictures = slice(start, start + gallery)
        captions = slice(*torch.searchsorted(owners, torch.tensor([pictures.start, pictures.stop])).tolist())
        folds.append(_rank(encoder, embedded, pictures, captions))
    tied = max(fold.metrics["t2i_tied_share"] for fold in folds)
    if tied > TIE_WARNING and is_main_process():
        warnings.warn(
            f"{pairs.name}: more than {TIE_WARNING:.1%} of the captions score their picture and another one alike "
            "(t2i_tied_share): the embeddings have collapsed, or pictures occur twice",
            stacklevel=2,
        )
    return folds[0] if gallery == count else mean_of_folds(folds, f"own gallery of {gallery} images")


def _rank(encoder: Encoder, embedded: EmbeddedPairs, pictures: slice, captions: slice) -> Evaluation:
    # Consecutive images against their captions.
    images, owners = embedded.images[pictures], embedded.text_to_image[captions] - pictures.start
    parts, positives = ScoreParts(encoder, images, embedded.texts[captions]), Positives.from_owners(owners, len(images))
    ranks = ranks_of_parts(parts, positives, shared=True)
    return retrieval_evaluation(ranks, positives, owners, embedded.protocol(encoder, positives, parts.dtype))


def retrieval_evaluation(
    ranks: Ranks, positives: Positives, text_to_image: torch.Tensor, protocol: dict[str, Any]
) -> Evaluation:
    """What every protocol of retrieval reports."""
    hits = hits_by_image(recalls(ranks), text_to_image, positives.num_images)
    return Evaluation(retrieval_metrics(ranks), protocol, chance_level(positives), hits)


class ScoreParts:
    """Scores of all images and texts, in parts as `ranks_of_parts` takes them.

    Scores that fit in `encoder.ranking_gb` are one part and computed once; others are computed again in every pass.
    Both are equal to the last bit, as equally many images are scored at a time.

    Args:
        shared: each process has a share of the images; otherwise all of them.
    """

    def __init__(self, encoder: Encoder, images: torch.Tensor, texts: torch.Tensor, *, shared: bool = True) -> None:
        self.geometry, self.device = encoder.model.geometry, encoder.device
        self.images, self.texts = images, texts.to(encoder.device)
        with torch.no_grad():
            one_pair = self.geometry.directions(images[:1].to(encoder.device), self.texts[:1])
        self.dtype, self.symmetric = one_pair[0].dtype, one_matrix(one_pair)
        # whole tiles of images go to the processes in turn, and as many to a part as fit in the memory
        tiles = _batches(len(images), _ROWS_AT_ONCE)
        tiles = tiles[rank() :: world_size()] if shared else tiles
        bytes_of_row = max(1, len(texts)) * self.dtype.itemsize * (1 if self.symmetric else 2)
        most_rows = int(encoder.ranking_gb * 1e9 // bytes_of_row)
        fits = sum(map(len, tiles)) <= most_rows
        num_parts = 1 if fits else -(-len(tiles) // max(1, most_rows // _ROWS_AT_ONCE))
        size = max(1, -(-len(tiles) // num_parts))  # parts of similar size
        self.groups = [tiles[start : start + size] for start in range(0, len(tiles), size)] or [[]]
        most = max(sum(map(len, group)) for group in self.groups)
        # allocated once: the last part of a pass is still in use when the next pass begins
        self.scores = torch.empty(most, len(texts), dtype=self.dtype)
        self.text_scores = None if self.symmetric else torch.empty_like(self.scores)
        self.cached: list[Part] = []

    def __iter__(self) -> Iterator[Part]:
        """A part is valid until the next one, which overwrites its memory."""
        if len(self.groups) == 1:
            self.cached = self.cached or list(self._computed())
            return iter(self.cached)
        return self._computed()

    @torch.no_grad()
    def _computed(self) -> Iterator[Part]:
        scores, text_scores = self.scores, self.text_scores
        for group in with_bar(self.groups, "scores") if len(self.groups) > 1 else self.groups:
            rows = torch.tensor([row for tile in group for row in tile], dtype=torch.long)
            for start, tile in zip(range(0, len(rows), _ROWS_AT_ONCE), group):
                part = slice(start, start + len(tile))
                scores[part], by_texts = self.geometry.directions(self.images[tile].to(self.device), self.texts)
                if text_scores is not None:
                    text_scores[part] = by_texts.T
            yield Part(rows, scores[: len(rows)], None if text_scores is None else text_scores[: len(rows)])


def evaluate_zero_shot(
    encoder: Encoder, task: Any, average: PromptAverage, further: FurtherMetrics | None = None
) -> Evaluation:
    """Top-1 (with more than five classes also top-5) accuracy of class prompts, and mean per-class recall.

    Args:
        task: has class_names, templates with one "{}" or "{c}", name, fingerprint, label(index), items with "image".
        further: (scores, labels, indices in the task) of the readable images -> metric -> one list per image; the mean
            of all entries is the metric.
    """
    image_embeddings, readable = encoder.images(task)
    indices = readable.nonzero().squeeze(1).tolist()
    if not indices:
        raise ValueError(f"{task.name}: none of its {len(task)} pictures could be read")
    labels = torch.tensor([task.label(index) for index in indices])
    geometry = encoder.model.geometry
    scores = prompt_scores(
        image_embeddings[readable].to(encoder.device),
        lambda prompts: encoder.texts(prompts).to(encoder.device),
        task.class_names,
        task.templates,
        geometry.similarity,
        geometry.mean,
        average,
    ).cpu()
    evaluation = classification_evaluation(
        scores,
        labels,
        {
            "task": "zero_shot",
            "data": task.name,
            "fingerprint": task.fingerprint,
            "num_images": len(labels),
            "num_classes": len(task.class_names),
            "num_templates": len(task.templates),
            "prompt_average": average,
            "unreadable_images": len(task) - len(labels) + len(lost_at_open(task)),
            "preprocessing": encoder.preprocessing,
        },
    )
    hits = {} if further is None else further(scores, labels, indices)
    metrics = {name: fmean(itertools.chain.from_iterable(lists)) for name, lists in hits.items()}
    return replace(evaluation, metrics=evaluation.metrics | metrics, hits=evaluation.hits | hits)


def _batches(count: int, size: int) -> list[list[int]]:
    # 0 .. count - 1 in lists of `size`, the last one shorter.
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]


def batches_here(count: int, size: int) -> list[list[int]]:
    """Batches rank, rank + W, ... of this process; padded with the last, so that all have equally many."""
    batches, processes = _batches(count, size), world_size()
    last = len(batches) - 1
    return [batches[min(index, last)] for index in range(rank(), -(-len(batches) // processes) * processes, processes)]


def in_order(parts: list[torch.Tensor], size: int, count: int) -> torch.Tensor:
    """Results of `batches_here` from all processes as (count, ...) in order, on the CPU of each."""
    if world_size() == 1 or not parts:
        return torch.cat([part.cpu() for part in parts]) if parts else torch.zeros(0)
    whole = [torch.cat([part, part.new_zeros(size - len(part), *part.shape[1:])]) for part in parts]
    return gather_rows(torch.stack(whole), -(-count // size)).flatten(0, 1)[:count].cpu()


@dataclass(frozen=True)
class _Given:
    # Pictures of a caller as a data set; files are read one at a time.

    pictures: Sequence[Image.Image | str | Path]

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> dict[str, Image.Image]:
        picture = self.pictures[index]
        if isinstance(picture, Image.Image):
            with named(f"pictures[{index}]"):
                return {"image": upright(picture)}
        if isinstance(picture, str | Path):
            return {"image": read_picture(Path(picture).expanduser())}
        what = f"a {type(picture).__name__}; expected a path, or a picture that Pillow has opened"
        raise BrokenSample(f"pictures[{index}]", reason=what)


class _Pictures(torch.utils.data.Dataset):
    # Images of a data set, preprocessed; one that cannot be read is zero and marked.

    def __init__(self, data_set: Any, transform: ImageTransform) -> None:
        self.data_set, self.transform = data_set, transform

    def __len__(self) -> int:
        return len(self.data_set)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, bool]:
        data_set = self.data_set
        try:
            # scenes take longer to describe than to draw; the class is asked, as a wrapped set has other images
            image = data_set.picture(index) if hasattr(type(data_set), "picture") else data_set[index]["image"]
            return self.transform.eval(image), True
        except BrokenSample:
            return self.transform.blank, False
