"""What is logged beside the loss, so that a run that learns nothing shows why.

In every line:
loss_over_chance                     loss / its chance level: 1 is the plateau of a model that separates nothing
logit_scale_bound_share              share of the steps since the last line at which it sat at a bound
In a line every run.diagnose_every steps:
{image,text}_effective_rank          directions that the embeddings use, see `collapse_statistics`
{image,text}_mean_cosine             between different samples; near 1 = collapsed, or all share an offset
{image,text}_logit_std               mean spread of the logits over the images of one caption (the captions of one
                                     image); near 0 = collapsed, in any geometry
matched_similarity, unmatched_...    means over pairs that belong together, and over those that do not
duplicate_ids, duplicate_captions    share of the batch that occurs more than once: false negatives
gradient_norm_<scalar>               of trainable parameters: the logarithms of logit scale, curvature, ...; the bias
"""

import math
from collections.abc import Iterable
from typing import Any

import torch

from common.distributed import gather_without_gradient, world_size
from common.geometry import Geometry
from common.logit_scale import LogitScale
from common.scalars import Scalar
from common.sharded import whole
from common.vectors import unit

DECIDES = "nothing"

# Whether a representation has collapsed: whether features of different samples are still different.


@torch.no_grad()
def collapse_statistics(features: torch.Tensor) -> dict[str, float]:
    """Signs of a collapsed representation (SimSiam, Sec. 4.1, has the first).

    Computed on the CPU in float64. Behind a batch normalisation, which forces it, the spread proves nothing.

    Args:
        features: (batch, dim), any norm; batch at least 2.
    Returns:
        channel_std: standard deviation over the batch of the unit features' channels, averaged; 0 when all are equal,
            about 1 / sqrt(dim) when spread over the sphere.
        mean_cosine: of different samples; 1 when all are equal, about 0 when spread.
        effective_rank: exp of the entropy of the principal directions' shares in the variance of the unit features, in
            [1, dim]: how many directions are used. 1 for a constant.
        All NaN where a feature is not finite.
    Raises:
        ValueError: for fewer than two features.
    """
    if features.ndim != 2 or len(features) < 2:
        raise ValueError(f"features of shape {tuple(features.shape)}; expected: (batch, dim) with at least 2 rows")
    directions = unit(features).cpu().double()
    if not directions.isfinite().all():
        return dict.fromkeys(("channel_std", "mean_cosine", "effective_rank"), math.nan)
    batch, dim = directions.shape
    squared_norms = directions.square().sum()
    cosine = (directions.sum(dim=0).square().sum() - squared_norms) / (batch * (batch - 1))
    centred = directions - directions.mean(dim=0)
    gram = centred @ centred.T if batch < dim else centred.T @ centred  # both have the same eigenvalues but for zeros
    variances = torch.linalg.eigvalsh(gram).clamp(min=0)
    tiny = torch.finfo(variances.dtype).tiny
    shares = variances / variances.sum().clamp(min=tiny)
    entropy = -(shares * shares.clamp(min=tiny).log()).sum()
    return {
        "channel_std": float(directions.std(dim=0).mean()),
        "mean_cosine": float(cosine),
        "effective_rank": float(entropy.exp()),
    }


SAMPLE = 512  # pairs of a batch whose embeddings are inspected, over all processes
PLATEAU = 0.01  # of the loss over chance, either way
PLATEAU_STEPS = 100  # in a row
COLLAPSED = 0.005  # nats: a softmax over logits of so small a spread is a guess


@torch.no_grad()
def diagnose(
    geometry: Geometry,
    scalars: Iterable[Scalar],
    image_embeddings: torch.Tensor,
    text_embeddings: torch.Tensor,
    logit_scale: float,
    token_ids: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
) -> dict[str, float]:
    """Statistics of one step. Call between backward and the optimiser's step, on every process.

    Nothing is drawn and nothing changes. The values are those of the global batch; of embeddings, those of its first
    SAMPLE / processes pairs on each process.

    Args:
        image_embeddings, text_embeddings: (local_batch, ...); tokens are taken as one long vector.
        token_ids: (local_batch, context_length) of the captions; None = duplicates are not counted.
        ids: (local_batch,) int64 of the images, negative = unknown; None = all unknown. Pairs of one id do not count as
            unmatched.
    """
    device, per_process = image_embeddings.device, math.ceil(SAMPLE / world_size())
    images, texts = (gather_without_gradient(rows[:per_process]) for rows in (image_embeddings, text_embeddings))
    similarity, of_texts = geometry.directions(images, texts)
    values = {}
    # the images of one caption are candidates of a text's row, and the other way round
    for side, embeddings, rows in (("image", images, of_texts), ("text", texts, similarity)):
        statistics = collapse_statistics(embeddings.flatten(1))
        values |= {f"{side}_{name}": statistics[name] for name in ("effective_rank", "mean_cosine")}
        values[f"{side}_logit_std"] = logit_scale * float(rows.std(dim=1).mean())

    unmatched = ~torch.eye(len(images), dtype=torch.bool, device=device)
    if ids is not None:
        every_id = gather_without_gradient(ids.to(device))
        sampled = every_id.view(world_size(), -1)[:, :per_process].flatten()
        unmatched &= (sampled[:, None] != sampled) | (sampled < 0)
        values["duplicate_ids"] = float((_repeated(every_id) & (every_id >= 0)).float().mean())
    values["matched_similarity"] = float(similarity.diagonal().mean())
    if unmatched.any():
        values["unmatched_similarity"] = float(similarity[unmatched].mean())
    if token_ids is not None:
        values["duplicate_captions"] = float(_repeated(gather_without_gradient(token_ids.to(device))).float().mean())
    return values | gradient_norms(scalars)


def at_bound(logit_scale: LogitScale, value: float) -> bool:
    """Whether a trainable logit scale sits at one of its bounds, up to rounding (the bound is on its logarithm)."""
    (scalar,) = logit_scale.scalars()
    bounds = [bound for bound in (scalar.minimum, scalar.maximum) if bound is not None]
    return scalar.parameter.requires_grad and any(math.isclose(value, bound, rel_tol=1e-5) for bound in bounds)


def gradient_norms(scalars: Iterable[Scalar]) -> dict[str, float]:
    """Absolute gradients of the scalars that have one, as "gradient_norm_<scalar>"; call on every process."""
    gradients = {scalar.name: scalar.parameter.grad for scalar in scalars if scalar.parameter.grad is not None}
    return {f"gradient_norm_{name}": float(whole(gradient).norm()) for name, gradient in gradients.items()}


class Watch:
    """The share of steps at a bound, and warnings, each of which comes once.

    Args:
        warmup_steps: of the learning rate; no warning comes before their end.
        state: `state()` of a checkpoint; None = a fresh run.
    """

    def __init__(self, warmup_steps: int, state: dict[str, Any] | None = None) -> None:
        self.warmup_steps = warmup_steps
        self.steps = self.steps_at_bound = self.steps_at_plateau = 0
        self.warned: set[str] = set()
        if state is not None:
            self.steps, self.steps_at_bound = state["steps"], state["steps_at_bound"]
            self.steps_at_plateau, self.warned = state["steps_at_plateau"], set(state["warned"])

    def state(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "steps_at_bound": self.steps_at_bound,
            "steps_at_plateau": self.steps_at_plateau,
            "warned": sorted(self.warned),
        }

    def count(self, done: int, ratio: float, is_at_bound: bool) -> None:
        """Counts one step, the last of `done` updates; `ratio` is the loss over its chance level."""
        self.steps += 1
        self.steps_at_bound += is_at_bound
        at_plateau = done > self.warmup_steps and abs(ratio - 1) <= PLATEAU
        self.steps_at_plateau = self.steps_at_plateau + 1 if at_plateau else 0

    def read(self) -> dict[str, float]:
        """The share of steps at a bound since the last reading."""
        share = self.steps_at_bound / self.steps
        self.steps = self.steps_at_bound = 0
        return {"logit_scale_bound_share": share}

    def warnings(self, done: int, loss: float, values: dict[str, float]) -> list[str]:
        """New lines for the user, after `done` updates; `values` are those of `diagnose`, if the step was diagnosed."""
        if done <= self.warmup_steps:
            return []
        causes = {}
        if self.steps_at_plateau >= PLATEAU_STEPS:
            causes["plateau"] = (
                f"the loss has stayed at {loss:.3f}, its chance level, for {PLATEAU_STEPS} steps. Usual causes: "
                "captions that do not belong to their pictures, a learning rate that is too high or far too low, a "
                "logit scale that is fixed too low"
            )
        for side in ("image", "text"):
            spread = values.get(f"{side}_logit_std", math.inf)
            if spread < COLLAPSED:
                causes[side] = (
                    f"the logits of different {side}s are all alike, with a standard deviation of {spread:.1e}. Usual "
                    f"causes: {side} embeddings that have collapsed (a learning rate that is too high, a warm-up that "
                    "is too short, the same sample over and over: duplicate_ids and duplicate_captions in the log), a "
                    "logit scale that is fixed too low"
                )
        new = [f"warning at step {done}: {text}" for kind, text in causes.items() if kind not in self.warned]
        self.warned |= causes.keys()
        return new


def _repeated(rows: torch.Tensor) -> torch.Tensor:
    # (num_rows,) bool: whether a row occurs more than once
    _, which, counts = rows.unique(dim=0, return_inverse=True, return_counts=True)
    return counts[which] > 1
