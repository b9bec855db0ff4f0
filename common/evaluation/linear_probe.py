"""Linear probes: how much of the classes one linear layer can read from a frozen network.

Every paper has its own recipe, so a recipe is a value: `PROBES` holds those of MoCo v3,
of the oblique paper (which says "follows MoCo v3" and deviates from it in most entries), of MoCo v1 and v2, and of the
CLIP benchmark. Logistic regression with CLIP's and MERU's search for the regularisation stands beside them.

Features are those of the tower before projection and geometry (`backbone_encoder`). The network stays in evaluation
mode, because BatchNorm statistics are weights too, and is compared with itself after training. Two tensors train.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

from common.data.broken import BrokenSample
from common.data.loader import Loader
from common.data.order import permuted, seed_of
from common.data.pairs import lost_at_open
from common.data.rand_augment import rand_augment
from common.data.transforms import ImageTransform
from common.evaluation.accuracy import classification_evaluation
from common.evaluation.arrays import array_of, labels_of, tensor_of
from common.evaluation.embed import evaluation_mode
from common.evaluation.knn import labelled_features
from common.evaluation.protocol import Evaluation
from common.geometry import unit

Batches = Callable[[int], Iterable[tuple[torch.Tensor, torch.Tensor]]]

WEIGHT_DECAYS = np.logspace(-6, 2, num=97)  # the benchmark's grid: twelve per decade
INVERSE_REGULARISATIONS = (1e-6, 1e-4, 1e-2, 1.0, 1e2, 1e4, 1e6)  # CLIP's and MERU's first pass
MAX_ITERATIONS = 1000
_ATTEMPTS = 20  # pictures tried in place of a broken one


@dataclass(frozen=True)
class ProbeConfig:
    """A recipe.

    optimizer: "sgd" or "adamw".
    learning_rate: at the peak; of a batch of 256 where rate_per_256 is set (then times batch_size / 256).
    schedule: "cosine" by step, "cosine_per_epoch", or "steps": a tenth at each of the milestones (epochs).
    warmup_epochs: linear, by step; "cosine" only.
    normalize_features: to norm 1.
    init_std: of the weights, bias 0; None leaves PyTorch's own initialisation.
    crop_scale, flip_probability, use_rand_augment: of training pictures; None, 0, False trains on cached features.
    """

    optimizer: Literal["sgd", "adamw"]
    learning_rate: float
    batch_size: int
    epochs: int
    schedule: Literal["cosine", "cosine_per_epoch", "steps"]
    rate_per_256: bool = False
    sgd_momentum: float = 0.9
    weight_decay: float = 0.0
    warmup_epochs: int = 0
    milestones: tuple[int, ...] = ()
    normalize_features: bool = False
    init_std: float | None = 0.01
    crop_scale: tuple[float, float] | None = None
    flip_probability: float = 0.0
    use_rand_augment: bool = False

    def __post_init__(self) -> None:
        for key, accepted in (
            ("optimizer", ("sgd", "adamw")),
            ("schedule", ("cosine", "cosine_per_epoch", "steps")),
        ):
            if getattr(self, key) not in accepted:
                raise ValueError(f"probe.{key} = {getattr(self, key)!r}; accepted: {', '.join(accepted)}")
        for key in ("learning_rate", "batch_size", "epochs"):
            if not getattr(self, key) > 0:
                raise ValueError(f"probe.{key} = {getattr(self, key)}; accepted: above 0")
        if not 0 <= self.warmup_epochs < self.epochs or (self.warmup_epochs and self.schedule != "cosine"):
            raise ValueError(
                f"probe.warmup_epochs = {self.warmup_epochs} of {self.epochs} with schedule {self.schedule!r}; "
                "accepted: fewer than the epochs, with schedule 'cosine'"
            )

    @property
    def augments(self) -> bool:
        """Whether training pictures change from epoch to epoch, so that features cannot be cached."""
        return self.crop_scale is not None or self.flip_probability > 0 or self.use_rand_augment


_MOCO_V3 = ProbeConfig(
    optimizer="sgd",
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
    # rate, epochs and batch size are "given" by whoever calls it; these are its command line's defaults
    "benchmark": ProbeConfig(
        optimizer="adamw",
        learning_rate=0.1,
        batch_size=64,
        epochs=10,
        schedule="cosine",
        normalize_features=True,
        init_std=None,
    ),
}


def probe_rate_at(step: int, config: ProbeConfig, steps_per_epoch: int) -> float:
    """Learning rate of the update number `step`, in [0, epochs * steps_per_epoch)."""
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
    """Trains one linear layer by cross-entropy; the same seed and batches give the same layer.

    Args:
        batches: epoch -> (features (batch, feature_dim), labels (batch,)) until each of num_train was seen once; see
            `feature_batches` and `augmented_batches`. They carry no gradient.
        num_train: training pictures.
        feature_dim, num_classes: of the layer.
        config: the recipe.
        seed: of the initialisation.
        device: where the layer trains.
    Returns:
        The layer, in evaluation mode, on the device.
    Raises:
        ValueError: if an epoch brings another number of batches than num_train asks for, or features with a gradient.
        FloatingPointError: if the loss is not finite; names step and rate.
    """
    classifier = _new_classifier(feature_dim, num_classes, config, seed).to(device)
    if config.optimizer == "sgd":
        options = {"momentum": config.sgd_momentum}
        optimizer = torch.optim.SGD(classifier.parameters(), lr=0.0, weight_decay=config.weight_decay, **options)
    else:
        optimizer = torch.optim.AdamW(classifier.parameters(), lr=0.0, weight_decay=config.weight_decay)
    steps_per_epoch = -(-num_train // config.batch_size)
    for epoch in range(config.epochs):
        step = epoch * steps_per_epoch
        for features, labels in batches(epoch):
            if features.requires_grad:
                raise ValueError("features carry a gradient: the network below the probe would train")
            rate = probe_rate_at(step, config, steps_per_epoch)
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = F.cross_entropy(classifier(_prepared(features.to(device), config)), labels.to(device))
            if not torch.isfinite(loss):
                raise FloatingPointError(f"probe: loss is {loss.item()} at step {step}, learning rate {rate:.3g}")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
        if step != (epoch + 1) * steps_per_epoch:
            raise ValueError(
                f"epoch {epoch} brought {step - epoch * steps_per_epoch} batches; {num_train} pictures in batches of "
                f"{config.batch_size} are {steps_per_epoch}"
            )
    return classifier.eval()


@torch.no_grad()
def probe_scores(classifier: nn.Linear, features: torch.Tensor, config: ProbeConfig) -> torch.Tensor:
    """(num_images, num_classes) logits on the CPU."""
    device, features = classifier.weight.device, tensor_of(features, "features")
    return torch.cat([classifier(_prepared(chunk.to(device), config)).cpu() for chunk in features.split(8192)])


def feature_batches(features: torch.Tensor, labels: torch.Tensor, batch_size: int, seed: int) -> Batches:
    """Batches of cached features in an order that is a pure function of (seed, epoch); the last may be smaller."""
    features, labels = tensor_of(features, "features"), labels_of(labels, "labels")

    def batches(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for rows in _shuffled(len(features), seed, epoch).split(batch_size):
            yield features[rows], labels[rows]

    return batches


def augmented_batches(encoder: Any, task: Any, config: ProbeConfig, seed: int) -> Batches:
    """Batches of features of freshly augmented pictures; a view is a pure function of (seed, epoch, index).

    A picture that cannot be read is replaced by the next one that can.

    Args:
        encoder: an Encoder whose model is frozen.
        task: labelled set.
        config: crop_scale, flip_probability, use_rand_augment, batch_size.
        seed: of order and views.
    """
    transform = replace(encoder.transform, crop_scale=config.crop_scale, flip_probability=config.flip_probability)

    def batches(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        views = _Views(task, transform, config.use_rand_augment, seed_of(seed, epoch))
        order = [rows.tolist() for rows in _shuffled(len(task), seed, epoch).split(config.batch_size)]
        name = getattr(task, "name", "pictures")
        for images, labels in Loader(views, name, encoder.num_workers, batch_sampler=order):
            with torch.no_grad():
                features = encoder.model.encode_image(transform.inputs(images.to(encoder.device))).flatten(1)
            yield features, labels

    return batches


class TowerFeatures(nn.Module):
    """A tower without what follows it: the class tokens of a ViT, all in one row, or the pooled map of a ResNet."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def encode_image(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, 3, size, size) normalised pixels -> (batch, feature_dim), after the last LayerNorm, unprojected."""
        if hasattr(self.tower, "class_tokens"):
            return self.tower.class_tokens(images).flatten(1)
        return self.tower(images)


def backbone_encoder(encoder: Any, tower: nn.Module) -> Any:
    """The encoder with the same preprocessing that yields the features of a tower instead of embeddings.

    Args:
        encoder: an Encoder.
        tower: e.g. `encoder.model.image_tower`, or an untrained copy of it for a baseline.
    """
    return replace(encoder, model=TowerFeatures(tower).to(encoder.device))


@contextmanager
def frozen(network: nn.Module) -> Iterator[nn.Module]:
    """Evaluation mode and no gradients inside; afterwards both are as before, and every tensor is as before.

    Raises:
        RuntimeError: at the end, if a parameter or buffer (BatchNorm statistics) has changed; names them.
    """
    wanted = {parameter: parameter.requires_grad for parameter in network.parameters()}
    before = {name: tensor.detach().clone() for name, tensor in _tensors(network).items()}
    network.requires_grad_(False)
    try:
        with evaluation_mode(network):
            yield network
    finally:
        for parameter, requires_grad in wanted.items():
            parameter.requires_grad_(requires_grad)
    after = _tensors(network)
    changed = [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
    if changed:
        raise RuntimeError(f"frozen tensors changed during a probe: {', '.join(changed[:5])}")


def evaluate_linear_probe(
    encoder: Any, train: Any, test: Any, config: ProbeConfig, seed: int = 0, val: Any | None = None
) -> Evaluation:
    """Trains a probe on one labelled set and evaluates it on another.

    Without augmentation the features are computed once. With a validation set the benchmark's search picks the weight
    decay on it, and the probe is trained again on training and validation set together.

    Args:
        encoder: of `backbone_encoder`. Test pictures get its evaluation view (MoCo resizes to 256 and cuts out 224).
        train, test: labelled sets with the same class names.
        config: the recipe, e.g. `PROBES["oblique"]`.
        seed: of initialisation, order and views.
        val: labelled set for the search, None for no search.
    Raises:
        ValueError: unlike classes, or a search with a recipe that augments.
    """
    check_classes(train, test, val)
    if val is not None and config.augments:
        raise ValueError("the weight-decay search works on cached features; accepted: a recipe without augmentation")
    num_classes = len(test.class_names)
    with frozen(encoder.model):
        test_features, test_labels = labelled_features(encoder, test)
        num_val = 0
        if config.augments:
            num_train, batches = len(train), augmented_batches(encoder, train, config, seed)
        else:
            features, labels = labelled_features(encoder, train)
            num_train = len(labels)
            if val is not None:
                val_features, val_labels = labelled_features(encoder, val)
                num_val = len(val_labels)
                chosen = search_weight_decay(
                    features, labels, val_features, val_labels, num_classes, config, seed, encoder.device
                )
                config = replace(config, weight_decay=chosen)
                # the benchmark trains once more, on everything but the test set
                features, labels = torch.cat([features, val_features]), torch.cat([labels, val_labels])
            batches = feature_batches(features, labels, config.batch_size, seed)
        dim = test_features.shape[1]
        classifier = train_probe(batches, num_train + num_val, dim, num_classes, config, seed, encoder.device)
    protocol = _protocol("linear_probe", encoder, (train, val, test), num_train, num_val, test_features)
    scores = probe_scores(classifier, test_features, config)
    return classification_evaluation(scores, test_labels, {**protocol, "probe": asdict(config), "seed": seed})


def search_weight_decay(
    features: torch.Tensor,
    labels: torch.Tensor,
    val_features: torch.Tensor,
    val_labels: torch.Tensor,
    num_classes: int,
    config: ProbeConfig,
    seed: int,
    device: Any,
) -> float:
    """The benchmark's search: the weight decay of `WEIGHT_DECAYS` with the best validation accuracy it comes across."""
    batches = feature_batches(features, labels, config.batch_size, seed)
    val_labels = labels_of(val_labels, "validation labels")

    def val_accuracy(index: int) -> float:
        tried = replace(config, weight_decay=float(WEIGHT_DECAYS[index]))
        classifier = train_probe(batches, len(labels), features.shape[1], num_classes, tried, seed, device)
        return float((probe_scores(classifier, val_features, tried).argmax(dim=1) == val_labels).double().mean())

    return float(WEIGHT_DECAYS[peak_on_grid(val_accuracy, len(WEIGHT_DECAYS))])


def peak_on_grid(score: Callable[[int], float], size: int, first: int = 7) -> int:
    """Index with the best score: `first` evenly spaced ones, then the neighbours 8, 4, 2 and 1 away from the best.

    No index is scored twice. Of equal scores the lower index wins.

    Args:
        score: index in [0, size) -> number, larger is better.
        size: of the grid.
        first: indices of the first pass, ends included.
    """
    known: dict[int, float] = {}

    def best_of(indices: Iterable[int]) -> int:
        for index in indices:
            if index not in known:
                known[index] = score(index)
        return max(sorted(indices), key=known.__getitem__)

    peak = best_of([round(place) for place in np.linspace(0, size - 1, first)])
    for span in (8, 4, 2, 1):
        peak = best_of([max(0, peak - span), peak, min(size - 1, peak + span)])
    return peak


def evaluate_logistic_regression(encoder: Any, train: Any, val: Any, test: Any) -> Evaluation:
    """CLIP's and MERU's probe: L-BFGS logistic regression on features as they are, refitted on train and val.

    Args:
        encoder: of `backbone_encoder`.
        train, val, test: labelled sets with the same class names; C is chosen by the accuracy on val.
    Raises:
        ValueError: unlike classes, or fewer than two classes in the training set.
    """
    check_classes(train, test, val)
    num_classes = len(test.class_names)
    with frozen(encoder.model):
        parts = [labelled_features(encoder, task) for task in (train, val, test)]
    (features, labels), (val_features, val_labels), (test_features, test_labels) = parts
    if len(labels.unique()) < 2:
        raise ValueError(f"{train.name} has pictures of one class only; accepted: at least two classes")

    def val_accuracy(inverse_regularisation: float) -> float:
        scores, _ = regression_scores(features, labels, val_features, num_classes, inverse_regularisation)
        return float((scores.argmax(dim=1) == val_labels).double().mean())

    chosen = search_inverse_regularisation(val_accuracy)
    features, labels = torch.cat([features, val_features]), torch.cat([labels, val_labels])
    scores, converged = regression_scores(features, labels, test_features, num_classes, chosen)
    num_train, num_val = len(parts[0][1]), len(val_labels)
    protocol = _protocol("logistic_regression", encoder, (train, val, test), num_train, num_val, test_features)
    fit = {"inverse_regularisation": chosen, "max_iterations": MAX_ITERATIONS, "converged": converged}
    return classification_evaluation(scores, test_labels, {**protocol, **fit})


def search_inverse_regularisation(score: Callable[[float], float]) -> float:
    """C with the best score it comes across: seven values, then C / delta and C * delta with delta 10, its root, ...

    Of equal scores the one tried first stays. Both values of a round are tried around the C that was best before it.

    Args:
        score: C -> number, larger is better; C is the inverse of the regularisation, so a large one is weak.
    """
    scores = {candidate: score(candidate) for candidate in INVERSE_REGULARISATIONS}
    best, delta = max(scores, key=scores.__getitem__), 10.0
    for _ in range(4):
        for candidate in (best / delta, best * delta):
            scores[candidate] = score(candidate)
        best, delta = max(scores, key=scores.__getitem__), delta**0.5
    return best


def regression_scores(
    features: torch.Tensor,
    labels: torch.Tensor,
    other_features: torch.Tensor,
    num_classes: int,
    inverse_regularisation: float,
) -> tuple[torch.Tensor, bool]:
    """Fits logistic regression by scikit-learn on one set and scores another.

    Returns:
        (num_others, num_classes) decision values, those of classes without a training picture below all others; and
        whether the fit converged within MAX_ITERATIONS.
    """
    from sklearn.exceptions import ConvergenceWarning  # half a second, which not every training run needs
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=inverse_regularisation, max_iter=MAX_ITERATIONS, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # returned and put into the protocol instead
        model.fit(array_of(features), labels_of(labels, "labels").cpu().numpy())
    decision = model.decision_function(array_of(other_features))
    if decision.ndim == 1:  # two classes: one number, the second class's side
        decision = np.stack([-decision, decision], axis=1)
    scores = np.full((len(other_features), num_classes), decision.min() - 1, dtype=np.float64)
    scores[:, model.classes_] = decision
    return torch.from_numpy(scores), bool(model.n_iter_.max() < MAX_ITERATIONS)


class _Views(Dataset):
    """Augmented training pictures; view and stand-ins for broken pictures depend on (seed, index) only."""

    def __init__(self, task: Any, transform: ImageTransform, use_rand_augment: bool, seed: int) -> None:
        self.task, self.transform, self.use_rand_augment, self.seed = task, transform, use_rand_augment, seed

    def __len__(self) -> int:
        return len(self.task)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        rng = np.random.default_rng(seed_of(self.seed, index))
        for attempt in range(_ATTEMPTS):
            place = (index + attempt) % len(self.task)
            try:
                pixels = self.transform.train(self.task[place]["image"], rng)
            except BrokenSample as error:
                broken = error
                continue
            if self.use_rand_augment:
                fill = tuple(min(255, round(255 * value)) for value in self.transform.mean)
                picture = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
                pixels = torch.from_numpy(np.array(rand_augment(picture, rng, fill))).permute(2, 0, 1)
            return pixels, self.task.label(place)
        raise ValueError(f"{self.task.name}: {_ATTEMPTS} pictures in a row cannot be read; the last: {broken}")


def _new_classifier(feature_dim: int, num_classes: int, config: ProbeConfig, seed: int) -> nn.Linear:
    generator = torch.Generator().manual_seed(seed)
    classifier = nn.Linear(feature_dim, num_classes)
    with torch.no_grad():
        if config.init_std is None:  # PyTorch's own, from a generator of our own
            bound = feature_dim**-0.5
            classifier.weight.uniform_(-bound, bound, generator=generator)
            classifier.bias.uniform_(-bound, bound, generator=generator)
        else:
            classifier.weight.normal_(0.0, config.init_std, generator=generator)
            classifier.bias.zero_()
    return classifier


def _tensors(network: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(network.named_parameters()), **dict(network.named_buffers())}


def _prepared(features: torch.Tensor, config: ProbeConfig) -> torch.Tensor:
    return (unit(features) if config.normalize_features else features).float()


def _shuffled(size: int, seed: int, epoch: int) -> torch.Tensor:
    return torch.from_numpy(permuted(np.arange(size), size, seed_of(seed, epoch)))


def check_classes(train: Any, test: Any, val: Any | None) -> None:
    """Refuses labelled sets of a probe whose class names differ.

    Args:
        train, test, val: have name and class_names; no val = None.
    Raises:
        ValueError: names both sets.
    """
    for task in (train, val):
        if task is not None and list(task.class_names) != list(test.class_names):
            raise ValueError(f"{task.name} and {test.name} have unlike class names; a probe needs the same ones")


def _protocol(
    task: str,
    encoder: Any,
    sets: tuple[Any, Any | None, Any],
    num_train: int,
    num_val: int,
    test_features: torch.Tensor,
) -> dict[str, Any]:
    """What numbers of a probe mean; sets are those of training, validation (None = none) and test."""
    train, val, test = sets
    return {
        "task": task,
        "data": test.name,
        "fingerprint": test.fingerprint,
        "train_fingerprint": train.fingerprint,
        "val_fingerprint": None if val is None else val.fingerprint,
        "num_train": num_train,
        "num_val": num_val,
        "num_images": len(test_features),
        "num_classes": len(test.class_names),
        "feature_dim": test_features.shape[1],
        "unreadable_images": len(test) - len(test_features) + len(lost_at_open(test)),
        "preprocessing": encoder.preprocessing,
    }
