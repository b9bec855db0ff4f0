"""Linear probes: how much of the classes one linear layer can read from a frozen network.

`PROBES` holds the recipes of MoCo v3, of the oblique paper (which deviates from it in most entries), and of MoCo v1
and v2. All train by SGD from weights of standard deviation 0.01 and bias 0.

Features are those before projection and geometry. The network stays in evaluation mode: BatchNorm statistics are
weights too.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

from common.data.broken import read_or_replace
from common.data.loader import Loader
from common.data.order import permuted, seed_of
from common.data.pairs import lost_at_open
from common.data.rand_augment import rand_augment
from common.data.transforms import ImageTransform
from common.distributed import gather_rows, rank, world_size
from common.encoders.two_towers import bare_tower
from common.evaluation.accuracy import classification_evaluation
from common.evaluation.arrays import labels_of, tensor_of
from common.evaluation.embed import evaluation_mode
from common.evaluation.knn import check_classes, labelled_features
from common.evaluation.protocol import Evaluation
from common.geometry import unit

Batches = Callable[[int], Iterable[tuple[torch.Tensor, torch.Tensor]]]
Schedule = Literal["cosine", "cosine_per_epoch", "steps"]

INITIAL_STD = 0.01  # of the layer's weights


@dataclass(frozen=True)
class ProbeConfig:
    """A recipe.

    learning_rate: at the peak; with rate_per_256 times batch_size / 256.
    schedule: "cosine" by step, "cosine_per_epoch", or "steps": a tenth at each of the milestones (epochs).
    warmup_epochs: linear, by step; "cosine" only.
    crop_scale, flip_probability, use_rand_augment: of training images; None, 0, False trains on cached features.
    """

    learning_rate: float
    batch_size: int
    epochs: int
    schedule: Schedule
    rate_per_256: bool = False
    sgd_momentum: float = 0.9
    weight_decay: float = 0.0
    warmup_epochs: int = 0
    milestones: tuple[int, ...] = ()
    normalize_features: bool = False
    crop_scale: tuple[float, float] | None = None
    flip_probability: float = 0.0
    use_rand_augment: bool = False

    def __post_init__(self) -> None:
        if self.schedule not in get_args(Schedule):
            raise ValueError(f"probe.schedule = {self.schedule!r}; expected one of: {', '.join(get_args(Schedule))}")
        for key in ("learning_rate", "batch_size", "epochs"):
            if not getattr(self, key) > 0:
                raise ValueError(f"probe.{key} = {getattr(self, key)}; expected: above 0")
        if not 0 <= self.warmup_epochs < self.epochs or (self.warmup_epochs and self.schedule != "cosine"):
            raise ValueError(
                f"probe.warmup_epochs = {self.warmup_epochs} of {self.epochs} with schedule {self.schedule!r}; "
                "expected: fewer than the epochs, with schedule 'cosine'"
            )

    @property
    def augments(self) -> bool:
        """Whether training images change from epoch to epoch, so that features are not cached."""
        return self.crop_scale is not None or self.flip_probability > 0 or self.use_rand_augment


_MOCO_V3 = ProbeConfig(
    learning_rate=0.1,
    rate_per_256=True,
    batch_size=1024,
    epochs=90,
    schedule="cosine_per_epoch",
    crop_scale=(0.08, 1.0),
    flip_probability=0.5,
)
PROBES = {
    "moco_v3_resnet": _MOCO_V3,
    "moco_v3_vit": replace(_MOCO_V3, learning_rate=3.0),
    "moco_v1": replace(
        _MOCO_V3,
        learning_rate=30.0,
        rate_per_256=False,
        batch_size=256,
        epochs=100,
        schedule="steps",
        milestones=(60, 80),
    ),  # MoCo v2 too
    # inferred: batch size, whether 1.0 is before scaling by the batch, warm-up by step, mirror images, initialisation
    "oblique": replace(
        _MOCO_V3,
        learning_rate=1.0,
        rate_per_256=False,
        epochs=100,
        schedule="cosine",
        warmup_epochs=5,
        sgd_momentum=0.0,
        crop_scale=(0.75, 1.0),
        use_rand_augment=True,
    ),
}


def probe_rate_at(step: int, config: ProbeConfig, steps_per_epoch: int) -> float:
    """Learning rate of update `step`, in [0, epochs * steps_per_epoch)."""
    peak = config.learning_rate * (config.batch_size / 256 if config.rate_per_256 else 1)
    epoch = step // steps_per_epoch
    if config.schedule == "steps":
        return peak * 0.1 ** sum(epoch >= milestone for milestone in config.milestones)
    if config.schedule == "cosine_per_epoch":
        return peak * 0.5 * (1 + math.cos(math.pi * epoch / config.epochs))
    warmup, total = config.warmup_epochs * steps_per_epoch, config.epochs * steps_per_epoch
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


def train_probe(
    batches: Batches, num_train: int, feature_dim: int, num_classes: int, config: ProbeConfig, seed: int, device: Any
) -> nn.Linear:
    """Trains one linear layer by cross-entropy; a pure function of seed and batches.

    Args:
        batches: epoch -> (features (batch, feature_dim), labels (batch,)) over every training image once:
            `feature_batches`, `augmented_batches`.
    Returns:
        In evaluation mode, on the device.
    Raises:
        FloatingPointError: a loss that is not finite; names step and rate.
    """
    classifier = _new_classifier(feature_dim, num_classes, seed).to(device)
    optimizer = torch.optim.SGD(
        classifier.parameters(), lr=0.0, momentum=config.sgd_momentum, weight_decay=config.weight_decay
    )
    steps_per_epoch = -(-num_train // config.batch_size)
    for epoch in range(config.epochs):
        for step, (features, labels) in enumerate(batches(epoch), start=epoch * steps_per_epoch):
            rate = probe_rate_at(step, config, steps_per_epoch)
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = F.cross_entropy(classifier(_prepared(features.to(device), config)), labels.to(device))
            if not torch.isfinite(loss):
                raise FloatingPointError(f"probe: loss is {loss.item()} at step {step}, learning rate {rate:.3g}")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return classifier.eval()


@torch.no_grad()
def probe_scores(classifier: nn.Linear, features: torch.Tensor, config: ProbeConfig) -> torch.Tensor:
    """(num_images, num_classes) logits on the CPU."""
    device, features = classifier.weight.device, tensor_of(features, "features")
    return torch.cat([classifier(_prepared(chunk.to(device), config)).cpu() for chunk in features.split(8192)])


def feature_batches(features: torch.Tensor, labels: torch.Tensor, batch_size: int, seed: int) -> Batches:
    """Batches of cached features; the order is a pure function of (seed, epoch), the last batch may be smaller."""
    features, labels = tensor_of(features, "features"), labels_of(labels, "labels")

    def batches(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for rows in _shuffled(len(features), seed, epoch).split(batch_size):
            yield features[rows], labels[rows]

    return batches


def augmented_batches(encoder: Any, task: Any, config: ProbeConfig, seed: int) -> Batches:
    """Batches of features of freshly augmented images; a view is a pure function of (seed, epoch, index).

    An unreadable image is replaced by the next readable one. Processes share the images of a batch, and each gets all
    features.
    """
    transform = replace(encoder.transform, crop_scale=config.crop_scale, flip_probability=config.flip_probability)

    def batches(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        views = _Views(task, transform, config.use_rand_augment, seed_of(seed, epoch))
        order = [rows.tolist() for rows in _shuffled(len(task), seed, epoch).split(config.batch_size)]
        name = getattr(task, "name", "pictures")
        shares = Loader(views, name, encoder.num_workers, batch_sampler=[_share(rows) for rows in order])
        for rows, (images, labels) in zip(order, shares):
            with torch.no_grad():
                features = encoder.model.encode_image(transform.inputs(images.to(encoder.device))).flatten(1)
            yield gather_rows(features, len(rows)), gather_rows(labels.to(encoder.device), len(rows))

    return batches


def _share(rows: list[int]) -> list[int]:
    # rows r, r + W, ... of a batch for process r, padded with its last one: every process has as many
    size = -(-len(rows) // world_size())
    mine = rows[rank() :: world_size()]
    return mine + rows[-1:] * (size - len(mine))


class TowerFeatures(nn.Module):
    """A tower without its projection: the class tokens of a ViT in one row, or the pooled map of a ResNet."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = bare_tower(tower)

    def encode_image(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, 3, size, size) normalised pixels -> (batch, feature_dim), after the last LayerNorm."""
        if hasattr(self.tower, "class_tokens"):
            return self.tower.class_tokens(images).flatten(1)
        return self.tower(images)


def backbone_encoder(encoder: Any, tower: nn.Module) -> Any:
    """An encoder with the same preprocessing that returns a tower's features instead of embeddings."""
    return replace(encoder, model=TowerFeatures(tower).to(encoder.device))


@contextmanager
def frozen(network: nn.Module) -> Iterator[nn.Module]:
    """Evaluation mode and no gradients; restores both at the end."""
    trainable = {parameter: parameter.requires_grad for parameter in network.parameters()}
    network.requires_grad_(False)
    try:
        with evaluation_mode(network):
            yield network
    finally:
        for parameter, requires_grad in trainable.items():
            parameter.requires_grad_(requires_grad)


def evaluate_linear_probe(encoder: Any, train: Any, test: Any, config: ProbeConfig, seed: int = 0) -> Evaluation:
    """Trains a probe on one labelled set and evaluates it on another.

    Args:
        encoder: of `backbone_encoder`. Test images get its evaluation view (MoCo resizes to 256 and cuts out 224).
        seed: of initialisation, order and views.
    """
    check_classes(train, test)
    num_classes = len(test.class_names)
    with frozen(encoder.model):
        test_features, test_labels = labelled_features(encoder, test)
        if config.augments:
            num_train, batches = len(train), augmented_batches(encoder, train, config, seed)
        else:
            features, labels = labelled_features(encoder, train)
            num_train, batches = len(labels), feature_batches(features, labels, config.batch_size, seed)
        dim = test_features.shape[1]
        classifier = train_probe(batches, num_train, dim, num_classes, config, seed, encoder.device)
    protocol = {
        "task": "linear_probe",
        "data": test.name,
        "fingerprint": test.fingerprint,
        "train_fingerprint": train.fingerprint,
        "num_train": num_train,
        "num_images": len(test_features),
        "num_classes": num_classes,
        "feature_dim": dim,
        "unreadable_images": len(test) - len(test_features) + len(lost_at_open(test)),
        "preprocessing": encoder.preprocessing,
        "probe": asdict(config),
        "seed": seed,
    }
    return classification_evaluation(probe_scores(classifier, test_features, config), test_labels, protocol)


class _Views(Dataset):
    # Augmented training images; the view and the replacement of a broken image depend on (seed, index) only.

    def __init__(self, task: Any, transform: ImageTransform, use_rand_augment: bool, seed: int) -> None:
        self.task, self.transform, self.use_rand_augment, self.seed = task, transform, use_rand_augment, seed

    def __len__(self) -> int:
        return len(self.task)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        rng = np.random.default_rng(seed_of(self.seed, index))
        place, image = read_or_replace(
            lambda place: (place, self.task[place]["image"]), index, lambda place, _: (place + 1) % len(self.task), []
        )
        pixels = self.transform.train(image, rng)
        if self.use_rand_augment:
            fill = tuple(min(255, round(255 * value)) for value in self.transform.mean)
            picture = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
            pixels = torch.from_numpy(np.array(rand_augment(picture, rng, fill))).permute(2, 0, 1)
        return pixels, self.task.label(place)


def _new_classifier(feature_dim: int, num_classes: int, seed: int) -> nn.Linear:
    generator = torch.Generator().manual_seed(seed)
    classifier = nn.Linear(feature_dim, num_classes)
    with torch.no_grad():
        classifier.weight.normal_(0.0, INITIAL_STD, generator=generator)
        classifier.bias.zero_()
    return classifier


def _prepared(features: torch.Tensor, config: ProbeConfig) -> torch.Tensor:
    return (unit(features) if config.normalize_features else features).float()


def _shuffled(size: int, seed: int, epoch: int) -> torch.Tensor:
    return torch.from_numpy(permuted(np.arange(size), size, seed_of(seed, epoch)))
