"""Measurements on the toy worlds: functions of a seed and settings that return numbers.

Designs and settings are ours, as the chapter prints none. Losses, queue, momentum encoder and metrics are those of this
repository, not copies.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from common.diagnosis import collapse_statistics
from common.evaluation.knn import knn_scores
from common.evaluation.retrieval import recall_at_k, retrieval_ranks
from common.feature_queue import FeatureQueue
from common.geometry import Sphere, inner_product_similarity, paired_inner_products, unit
from common.info_nce import info_nce, mask_absent, nt_xent, symmetric_info_nce
from common.logit_scale import LogitScale
from common.methods.momentum_contrast import MomentumContrast, moco_loss
from common.pool import QueuePool
from common.run.kept_memory import bytes_kept_for_backward
from contrastive_basics.toys import (
    EMBEDDING_DIM,
    NUM_CLASSES,
    NUM_PIXELS,
    NUM_WORDS,
    ClassWorld,
    PairWorld,
    generator,
    seeded,
    toy_encoder,
)
from contrastive_basics.vision.simsiam import SimSiam, simsiam_loss, simsiam_predictor

DECIDES = "evaluation"

Statistics = dict[str, float]
LossOfViews = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

OBJECTIVES = {  # name -> label
    "positives_only": "positives only",
    "simsiam": "SimSiam",
    "no_stop_gradient": "SimSiam, no stop-gradient",
    "no_predictor": "SimSiam, no predictor",
    "nt_xent": "NT-Xent",
    "moco": "MoCo",
}


@dataclass(frozen=True)
class ViewSettings:
    """Training on two views of images; `measure_at` are the steps of the statistics."""

    steps: int = 500
    batch: int = 256
    learning_rate: float = 0.05
    sgd_momentum: float = 0.9
    weight_decay: float = 1.0e-4
    temperature: float = 0.2
    queue: int = 2048
    ema_momentum: float = 0.99
    bank: int = 1000
    queries: int = 500
    neighbours: int = 20
    knn_temperature: float = 0.1
    measure_at: tuple[int, ...] = (0, 10, 25, 50, 100, 200, 300, 400, 500)


@dataclass(frozen=True)
class PairSettings:
    """Training on images with captions, Adam without weight decay."""

    steps: int = 600
    batch: int = 256
    learning_rate: float = 1.0e-3
    logit_scale_max: float = 100.0
    test_pairs: int = 1000
    measure_at: tuple[int, ...] = (0, 10, 25, 50, 100, 200, 300, 400, 500, 600)


@dataclass(frozen=True)
class BatchSettings:
    """Features of a model after `steps` of training, in sub-batches; early enough for the model to make mistakes."""

    steps: int = 100
    batch: int = 256
    learning_rate: float = 1.0e-3
    temperature: float = 0.07
    test_pairs: int = 1024


@dataclass(frozen=True)
class FloorSettings:
    """Free unit vectors, trained with Adam; without an encoder the loss can reach its optimum."""

    steps: int = 1000
    learning_rate: float = 0.02
    dim: int = 256


class ToyRun(NamedTuple):
    """Final statistics of a training, and its course: (step, statistics) in order."""

    statistics: Statistics
    course: tuple[tuple[int, Statistics], ...]


def train_on_views(seed: int, objective: str, settings: ViewSettings, batch_norm: bool = False) -> ToyRun:
    """Trains one of OBJECTIVES on two views of images; all objectives of a seed share world, first weights and batches.

    Returns:
        `view_statistics`, and from the first step on the "loss" of the last batch.
    """
    world, draws = ClassWorld.drawn(seed), generator(seed, "views")
    encoder = seeded(lambda: toy_encoder(NUM_PIXELS, batch_norm), seed, "encoder")
    loss_of, parameters = _view_objective(objective, encoder, settings, seed)
    optimizer = torch.optim.SGD(
        parameters, settings.learning_rate, settings.sgd_momentum, weight_decay=settings.weight_decay
    )
    loss, course = None, []
    for step in range(settings.steps + 1):
        if step in settings.measure_at or step == settings.steps:
            trained = {} if loss is None else {"loss": float(loss.detach())}
            course.append((step, trained | view_statistics(encoder, world, seed, settings)))
        if step < settings.steps:
            pictures, _ = world.pictures(settings.batch, draws)
            loss = loss_of(world.view(pictures, draws), world.view(pictures, draws))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return ToyRun(course[-1][1], tuple(course))


def _view_objective(
    objective: str, encoder: nn.Module, settings: ViewSettings, seed: int
) -> tuple[LossOfViews, list[nn.Parameter]]:
    """The loss of two views, and the parameters that it trains."""
    logit_scale = LogitScale(1 / settings.temperature, maximum=None, trainable=False)
    if objective == "moco":
        queue = FeatureQueue(settings.queue, EMBEDDING_DIM, seed=seed)
        pool = QueuePool(queue, inner_product_similarity, matched_key_only=True)
        moco, past_keys = MomentumContrast(encoder, Sphere(), logit_scale, pool), []

        def loss_of_moco(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            if past_keys:  # of the step before, whose backward pass has finished
                moco.insert(past_keys.pop())
            moco.update_momentum_encoder(settings.ema_momentum)
            logits, columns, keys = moco(first, second)
            past_keys.append(keys)
            return moco_loss(logits, columns)

        return loss_of_moco, list(encoder.parameters())
    if objective == "nt_xent":

        def loss_of_views(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            return nt_xent(unit(encoder(first)), unit(encoder(second)), Sphere(), logit_scale())

        return loss_of_views, list(encoder.parameters())
    if objective not in OBJECTIVES:
        raise ValueError(f"objective {objective!r} is unknown; expected: {', '.join(OBJECTIVES)}")
    # SimSiam and its ablations, down to the mean cosine of positives without predictor and stopped gradient
    with_predictor = objective in ("simsiam", "no_stop_gradient")
    with_stop = objective in ("simsiam", "no_predictor")
    predictor = seeded(lambda: simsiam_predictor(EMBEDDING_DIM, EMBEDDING_DIM // 2), seed, "predictor")
    simsiam = SimSiam(encoder, predictor if with_predictor else nn.Identity())
    return lambda first, second: simsiam_loss(*simsiam(first, second), with_stop), list(simsiam.parameters())


@torch.no_grad()
def view_statistics(encoder: nn.Module, world: ClassWorld, seed: int, settings: ViewSettings) -> Statistics:
    """Statistics of the encoder in eval mode on new images; a seed always gives the same images.

    Returns:
        channel_std, mean_cosine, effective_rank: `collapse_statistics` of whole images.
        positive_cosine, negative_cosine: mean over pairs of views of one image, and of different images.
        view_r1: percent of views whose nearest view among `queries` is of the same image.
        knn_accuracy: percent of images whose class the `neighbours` nearest of `bank` images vote for.
    """
    draws = generator(seed, "test views")
    bank, bank_labels = world.pictures(settings.bank, draws)
    pictures, labels = world.pictures(settings.queries, draws)
    views = [world.view(pictures, draws) for _ in range(2)]
    encoder.eval()
    features, bank_features = encoder(pictures), encoder(bank)
    cosines = inner_product_similarity(*(unit(encoder(view)) for view in views))
    encoder.train()
    votes = knn_scores(features, bank_features, bank_labels, NUM_CLASSES, settings.neighbours, settings.knn_temperature)
    return {
        **collapse_statistics(features),
        **_positive_and_negative_cosine(cosines),
        "view_r1": _recall_at_1(cosines)[0],
        "knn_accuracy": 100 * float((votes.argmax(dim=1) == labels).double().mean()),
    }


def train_on_pairs(
    seed: int, settings: PairSettings, temperature: float | None, learned: bool, num_negatives: int | None = None
) -> ToyRun:
    """Trains with Eq. 8 on images with captions; all runs of a seed share world, first weights and batches.

    Args:
        temperature: at the start; None = no negatives, the loss is minus the mean cosine of the pairs.
        learned: whether the temperature is trained.
        num_negatives: random negatives of each row and each column; None = all.
    Returns:
        `pair_statistics`, "logit_scale", and from the first step on the "loss" of the last batch.
    """
    world, draws, masks = PairWorld.drawn(seed), generator(seed, "pairs"), generator(seed, "masks")
    image_encoder, text_encoder, logit_scale = _pair_model(seed, temperature, learned, settings.logit_scale_max)
    model = nn.ModuleList([image_encoder, text_encoder, logit_scale])
    optimizer = torch.optim.Adam(
        [weight for weight in model.parameters() if weight.requires_grad], settings.learning_rate
    )
    loss, course = None, []
    for step in range(settings.steps + 1):
        # measured before the step, so that the course has the random start and the end
        if step in settings.measure_at or step == settings.steps:
            trained = {} if loss is None else {"loss": float(loss.detach())}
            scale = {"logit_scale": float(logit_scale().detach())}
            measured = pair_statistics(image_encoder, text_encoder, world, seed, settings.test_pairs)
            course.append((step, trained | scale | measured))
        if step < settings.steps:
            images, texts = world.pairs(settings.batch, draws)
            image_embeddings, text_embeddings = unit(image_encoder(images)), unit(text_encoder(texts))
            if temperature is None:
                loss = -paired_inner_products(image_embeddings, text_embeddings).mean()
            elif num_negatives is None:
                loss = symmetric_info_nce(logit_scale() * inner_product_similarity(image_embeddings, text_embeddings))
            else:
                logits = logit_scale() * inner_product_similarity(image_embeddings, text_embeddings)
                loss = loss_with_few_negatives(logits, num_negatives, masks)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            logit_scale.clamp_()
    return ToyRun(course[-1][1], tuple(course))


def _pair_model(
    seed: int, temperature: float | None, learned: bool, logit_scale_max: float
) -> tuple[nn.Module, nn.Module, LogitScale]:
    image_encoder = seeded(lambda: toy_encoder(NUM_PIXELS), seed, "image encoder")
    text_encoder = seeded(lambda: toy_encoder(NUM_WORDS), seed, "text encoder")
    start = 1.0 if temperature is None else 1 / temperature
    return image_encoder, text_encoder, LogitScale(start, maximum=logit_scale_max, trainable=learned)


def loss_with_few_negatives(logits: torch.Tensor, num_negatives: int, draws: torch.Generator) -> torch.Tensor:
    """Eq. 8 with a random subset of negatives, drawn separately for each row and each column (Sec. 5.3).

    Batch, steps and positives do not change, only the number of negatives.

    Args:
        logits: (batch, batch), positives on the diagonal.
        num_negatives: in [1, batch - 1]; batch - 1 is Eq. 8.
    Returns:
        Scalar in nats; equal logits give ln(1 + num_negatives).
    """
    targets = torch.arange(len(logits))
    image_to_text = mask_absent(logits, few_candidates(len(logits), num_negatives, draws))
    text_to_image = mask_absent(logits.T, few_candidates(len(logits), num_negatives, draws))
    return (info_nce(image_to_text, targets) + info_nce(text_to_image, targets)) / 2


def few_candidates(batch: int, num_negatives: int, draws: torch.Generator) -> torch.Tensor:
    """(batch, batch) bool: in each row the diagonal and `num_negatives` other columns, drawn without replacement."""
    if not 1 <= num_negatives < batch:
        raise ValueError(f"a batch of {batch} has 1 to {batch - 1} negatives a row, not {num_negatives}")
    order = torch.rand(batch, batch, generator=draws).fill_diagonal_(2.0)  # the positive always comes first
    chosen = order.topk(1 + num_negatives, dim=1).indices
    return torch.zeros(batch, batch, dtype=torch.bool).scatter(1, chosen, True)


@torch.no_grad()
def pair_statistics(
    image_encoder: nn.Module, text_encoder: nn.Module, world: PairWorld, seed: int, count: int
) -> Statistics:
    """Retrieval among new pairs; a seed always gives the same pairs.

    Returns:
        i2t_r1, t2i_r1: percent. channel_std: of the images. positive_cosine, negative_cosine: of pairs, and of images
        with other images' texts.
    """
    images, texts = world.pairs(count, generator(seed, "test pairs"))
    image_embeddings, text_embeddings = unit(image_encoder(images)), unit(text_encoder(texts))
    cosines = inner_product_similarity(image_embeddings, text_embeddings)
    i2t_r1, t2i_r1 = _recall_at_1(cosines)
    return {
        "i2t_r1": i2t_r1,
        "t2i_r1": t2i_r1,
        "channel_std": collapse_statistics(image_embeddings)["channel_std"],
        **_positive_and_negative_cosine(cosines),
    }


def measure_batch_sizes(seed: int, settings: BatchSettings, sizes: Sequence[int]) -> Statistics:
    """One set of features in sub-batches of different sizes, and the memory of a step of each size.

    Returns:
        For each size b in `sizes`, with features cut at random into sub-batches of b pairs:
        loss_b: mean of Eq. 8 over the sub-batches, in nats. error_b: percent of queries of both directions whose
        positive is not the nearest in the sub-batch. hardest_negative_b: mean over queries of the highest cosine to one
        of their b - 1 negatives. kept_mb_b: MB that one step with b pairs saves for the backward pass, without weights.
    """
    world, draws = PairWorld.drawn(seed), generator(seed, "pairs")
    image_encoder, text_encoder, logit_scale = _pair_model(seed, settings.temperature, False, math.inf)
    optimizer = torch.optim.Adam([*image_encoder.parameters(), *text_encoder.parameters()], settings.learning_rate)

    def loss_of(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        embeddings = unit(image_encoder(images)), unit(text_encoder(texts))
        return symmetric_info_nce(logit_scale() * inner_product_similarity(*embeddings))

    for _ in range(settings.steps):
        optimizer.zero_grad()
        loss_of(*world.pairs(settings.batch, draws)).backward()
        optimizer.step()
    # one matrix of cosines; sub-batches are its diagonal blocks in a random order of pairs
    tests = generator(seed, "test pairs")
    images, texts = world.pairs(settings.test_pairs, tests)
    with torch.no_grad():
        cosines = inner_product_similarity(unit(image_encoder(images)), unit(text_encoder(texts)))
    order = torch.randperm(settings.test_pairs, generator=tests)
    weights = [*image_encoder.parameters(), *text_encoder.parameters()]
    numbers: Statistics = {}
    for size in sizes:
        parts = [cosines[part][:, part] for part in order.split(size)]
        measured = [sub_batch_statistics(part, logit_scale().detach()) for part in parts]
        for name in measured[0]:
            numbers[f"{name}_{size}"] = math.fsum(part_numbers[name] for part_numbers in measured) / len(measured)
        kept = bytes_kept_for_backward(lambda size=size: loss_of(*world.pairs(size, draws)), weights)
        numbers[f"kept_mb_{size}"] = kept / 1e6
    return numbers


@torch.no_grad()
def sub_batch_statistics(cosines: torch.Tensor, logit_scale: torch.Tensor) -> Statistics:
    """loss (nats), error (percent) and hardest_negative (cosine) of one sub-batch, (b, b) with b at least 2."""
    negatives = cosines.clone().fill_diagonal_(-torch.inf)
    hardest = torch.cat([negatives.amax(dim=1), negatives.amax(dim=0)])
    positives = cosines.diagonal().repeat(2)
    return {
        "loss": float(symmetric_info_nce(logit_scale * cosines)),
        "error": 100 * float((hardest >= positives).double().mean()),
        "hardest_negative": float(hardest.mean()),
    }


def measure_loss_floor(seed: int, settings: FloorSettings, batches: Sequence[int]) -> Statistics:
    """The lowest value of Eq. 8 for b pairs of free unit vectors, from a random start, at a fixed temperature.

    Returns:
        For each b in `batches`, in nats: chance_b = ln b; t1_separated_b, the loss with positives at 1 and negatives at
        0; t1_optimum_b and t007_optimum_b, the loss of a regular simplex; t1_reached_b and t007_reached_b, the final
        loss of the training. And t1_negative_cosine_b and t007_negative_cosine_b, the final mean cosine of negatives.
    """
    numbers: Statistics = {}
    for batch in batches:
        simplex = unit(torch.eye(batch, dtype=torch.float64) - 1 / batch)
        numbers[f"chance_{batch}"] = math.log(batch)
        numbers[f"t1_separated_{batch}"] = float(symmetric_info_nce(torch.eye(batch, dtype=torch.float64)))
        for name, temperature in (("t1", 1.0), ("t007", 0.07)):
            numbers[f"{name}_optimum_{batch}"] = float(symmetric_info_nce(simplex @ simplex.T / temperature))
            draws = generator(seed, "free vectors", batch)
            sides = [torch.randn(batch, settings.dim, generator=draws).requires_grad_() for _ in range(2)]
            optimizer = torch.optim.Adam(sides, settings.learning_rate)
            for step in range(settings.steps):
                falling = 0.5 * (1 + math.cos(math.pi * step / settings.steps))
                optimizer.param_groups[0]["lr"] = settings.learning_rate * falling
                optimizer.zero_grad()
                _free_loss(sides, temperature).backward()
                optimizer.step()
            with torch.no_grad():
                cosines = inner_product_similarity(unit(sides[0]), unit(sides[1]))
                numbers[f"{name}_reached_{batch}"] = float(_free_loss(sides, temperature))
                numbers[f"{name}_negative_cosine_{batch}"] = _positive_and_negative_cosine(cosines)["negative_cosine"]
    return numbers


def _free_loss(sides: Sequence[torch.Tensor], temperature: float) -> torch.Tensor:
    return symmetric_info_nce(inner_product_similarity(unit(sides[0]), unit(sides[1])) / temperature)


def _recall_at_1(cosines: torch.Tensor) -> tuple[float, float]:
    """Percent of rows, and of columns, whose highest entry is on the diagonal."""
    threads = torch.get_num_threads()
    ranks = retrieval_ranks(cosines, torch.arange(len(cosines)))
    torch.set_num_threads(threads)  # the thread pool of the ranking may have changed it
    return 100 * recall_at_k(ranks.image_to_text, 1), 100 * recall_at_k(ranks.text_to_image, 1)


def _positive_and_negative_cosine(cosines: torch.Tensor) -> Statistics:
    """Means over the diagonal and over the rest of a square matrix."""
    cosines, count = cosines.double(), len(cosines)
    positive = float(cosines.diagonal().mean())
    return {
        "positive_cosine": positive,
        "negative_cosine": (float(cosines.sum()) - count * positive) / (count * (count - 1)),
    }
