"""What the log says beside the loss, so that a run that learns nothing shows why.

loss_over_chance                     loss / ln(candidates): 1 is the plateau of a model that tells nothing apart
{image,text}_effective_rank          directions that the embeddings use, see common/evaluation/collapse.py
{image,text}_mean_cosine             between different samples; 1 = collapsed
matched_similarity, unmatched_...    means over the pairs that belong together, and over those that do not
duplicate_ids, duplicate_captions    share of the batch that occurs more than once: false negatives
logit_scale_at_bound, ..._share      whether it sits at a bound, and at which share of the steps since the last line
gradient_norm_<scalar>               of the logit scale (its logarithm) and of the geometry's trainable scalars
"""

import math

import torch
from torch import nn

from common.distributed import gather_without_gradient, world_size
from common.encoders.two_towers import TwoTowers
from common.evaluation.collapse import collapse_statistics
from common.info_nce import QueuedPairs
from common.logit_scale import LogitScale

SAMPLE = 512  # pairs of a batch whose embeddings are looked at, over all processes
PLATEAU = 0.01  # of the loss over chance, either way
PLATEAU_LINES = 10  # log lines in a row
COLLAPSED = 0.99  # mean cosine


@torch.no_grad()
def diagnose(
    model: TwoTowers,
    image_embeddings: torch.Tensor,
    text_embeddings: torch.Tensor,
    loss: float,
    logit_scale: float,
    token_ids: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
    queue: QueuedPairs | None = None,
) -> dict[str, float]:
    """The values of one step, the share at a bound excepted. Call between backward and the optimiser's step.

    Nothing is drawn and nothing changed. Call on every process; the values are those of the global batch, of its
    embeddings those of the first SAMPLE / processes pairs of each process.

    Args:
        model: unwrapped; its geometry compares, its logit scale has the bounds.
        image_embeddings, text_embeddings: (local_batch, ...) of this process; tokens are taken as one long vector.
        loss: of the global batch, in nats.
        logit_scale: the multiplier of this step.
        token_ids: (local_batch, context_length) of the captions; None = duplicates are not counted.
        ids: (local_batch,) int64 of the pictures, negative = not known; None likewise. Pairs of one id do not count as
            unmatched.
        queue: further candidates of the loss.
    """
    device, per_process = image_embeddings.device, math.ceil(SAMPLE / world_size())
    images, texts = (gather_without_gradient(rows[:per_process]) for rows in (image_embeddings, text_embeddings))
    candidates = world_size() * len(image_embeddings) + (0 if queue is None else len(queue.ids))
    values = {"loss_over_chance": loss / math.log(candidates)}
    for side, embeddings in (("image", images), ("text", texts)):
        statistics = collapse_statistics(embeddings.flatten(1))
        values |= {f"{side}_{name}": statistics[name] for name in ("effective_rank", "mean_cosine")}

    similarity = model.geometry.similarity(images, texts)
    unmatched = ~torch.eye(len(images), dtype=torch.bool, device=device)
    if ids is not None:
        ids = ids.to(device)
        sampled = gather_without_gradient(ids[:per_process])
        unmatched &= (sampled[:, None] != sampled) | (sampled < 0)
        repeated = _repeated(gather_without_gradient(ids)) & (gather_without_gradient(ids) >= 0)
        values["duplicate_ids"] = float(repeated.float().mean())
    values["matched_similarity"] = float(similarity.diagonal().mean())
    if unmatched.any():
        values["unmatched_similarity"] = float(similarity[unmatched].mean())
    if token_ids is not None:
        values["duplicate_captions"] = float(_repeated(gather_without_gradient(token_ids.to(device))).float().mean())

    values["logit_scale_at_bound"] = float(at_bound(model.logit_scale, logit_scale))
    return values | gradient_norms(model)


def at_bound(logit_scale: LogitScale, value: float) -> bool:
    """Whether a trainable logit scale sits at one of its bounds, up to rounding (the bound is on its logarithm)."""
    bounds = (logit_scale.minimum, logit_scale.maximum)
    trainable = logit_scale.log_logit_scale.requires_grad
    return trainable and any(bound is not None and math.isclose(value, bound, rel_tol=1e-5) for bound in bounds)


def gradient_norms(model: TwoTowers) -> dict[str, float]:
    """Of the logarithm of the logit scale and of the geometry's parameters, as backward left them."""
    scalars = {"logit_scale": model.logit_scale.log_logit_scale}
    if isinstance(model.geometry, nn.Module):
        scalars |= dict(model.geometry.named_parameters())
    gradients = {name: scalar.grad for name, scalar in scalars.items() if scalar.grad is not None}
    whole = {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in gradients.items()}
    return {f"gradient_norm_{name}": float(gradient.norm()) for name, gradient in whole.items()}


class Watch:
    """What takes more than one step to see: the share of steps at a bound, and what to warn of, each once.

    Args:
        warmup_steps: of the learning rate; before their end nothing is warned of.
    """

    def __init__(self, warmup_steps: int) -> None:
        self.warmup_steps = warmup_steps
        self.steps = self.steps_at_bound = self.lines_at_plateau = 0
        self.warned: set[str] = set()

    def count(self, is_at_bound: bool) -> None:
        """Takes in one step."""
        self.steps += 1
        self.steps_at_bound += is_at_bound

    def read(self) -> dict[str, float]:
        """The share since the last reading."""
        share = self.steps_at_bound / self.steps
        self.steps = self.steps_at_bound = 0
        return {"logit_scale_bound_share": share}

    def warnings(self, done: int, loss: float, values: dict[str, float]) -> list[str]:
        """Lines for the user, from the values of one log line; none before the warm-up's end.

        Args:
            done: updates made.
            loss: in nats.
            values: of `diagnose`.
        """
        if done <= self.warmup_steps:
            return []
        at_plateau = abs(values["loss_over_chance"] - 1) <= PLATEAU
        self.lines_at_plateau = self.lines_at_plateau + 1 if at_plateau else 0
        found = {}
        if self.lines_at_plateau >= PLATEAU_LINES:
            found["plateau"] = (
                f"the loss has stayed at {loss:.3f}, that of a guess, for {PLATEAU_LINES} log lines. Usual causes: "
                "captions that do not belong to their pictures, a learning rate that is too high or far too low, a "
                "logit scale that is fixed too low"
            )
        for side in ("image", "text"):
            cosine = values[f"{side}_mean_cosine"]
            if cosine > COLLAPSED:
                found[side] = (
                    f"the {side} embeddings have collapsed, different samples have a mean cosine of {cosine:.4f}. "
                    "Usual causes: a learning rate that is too high, a warm-up that is too short, the same sample over "
                    "and over (duplicate_ids and duplicate_captions in the log)"
                )
        new = [f"warning at step {done}: {text}" for kind, text in found.items() if kind not in self.warned]
        self.warned |= found.keys()
        return new


def _repeated(rows: torch.Tensor) -> torch.Tensor:
    """(num_rows,) bool: whether an equal row is there a second time."""
    _, which, counts = rows.unique(dim=0, return_inverse=True, return_counts=True)
    return counts[which] > 1
