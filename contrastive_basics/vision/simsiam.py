"""SimSiam: two views, a predictor and a stopped gradient, no negatives (Chen & He 2021, Alg. 1).

    predictions_1, predictions_2, projections_1, projections_2 = model(first_views, second_views)
    loss = simsiam_loss(predictions_1, predictions_2, projections_1, projections_2)

Pairs do not depend on each other, so the mean over processes is the loss of the global batch, without gathering. Batch
normalisation must be synchronised over processes. The predictor keeps its first learning rate while the encoder's
falls: two parameter groups, `model.encoder` and `model.predictor`.
"""

import torch
from torch import nn

from common.geometry import paired_inner_products, unit


class SimSiam(nn.Module):
    """Differences from SimCLR: no negatives; a predictor on one side of each comparison, no gradient on the other.

    Args:
        encoder: backbone and projector, (batch, ...) views -> projections (batch, dim); see `simsiam_projector`.
        predictor: projections -> predictions of the same size; see `simsiam_predictor`. nn.Identity() leaves it out.
    """

    def __init__(self, encoder: nn.Module, predictor: nn.Module) -> None:
        super().__init__()
        self.encoder, self.predictor = encoder, predictor

    def forward(self, first_views: torch.Tensor, second_views: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(batch, ...) twice -> predictions of both views, projections of both views, (batch, dim) each."""
        first, second = self.encoder(first_views), self.encoder(second_views)
        return self.predictor(first), self.predictor(second), first, second


def simsiam_loss(
    first_predictions: torch.Tensor,
    second_predictions: torch.Tensor,
    first_projections: torch.Tensor,
    second_projections: torch.Tensor,
    stop_gradient: bool = True,
) -> torch.Tensor:
    """-( cos(p1, sg(z2)) + cos(p2, sg(z1)) ) / 2, mean over the batch.

    Without a predictor (p = z) and without the stopped gradient it is minus the mean cosine of the positives.

    Args:
        first_predictions, second_predictions: (batch, dim) p of both views.
        first_projections, second_projections: (batch, dim) z of both views.
        stop_gradient: without it the representation collapses.
    Returns:
        Scalar in [-1, 1], float32 or better; any constant representation with p = z reaches -1.
    Raises:
        ValueError: if the four shapes differ; the message lists them.
    """
    tensors = (first_predictions, second_predictions, first_projections, second_projections)
    if len({tensor.shape for tensor in tensors}) > 1 or first_predictions.ndim != 2:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ValueError(f"SimSiam's loss takes four tensors of one shape (batch, dim), got {shapes}")
    if stop_gradient:
        first_projections, second_projections = first_projections.detach(), second_projections.detach()
    first = paired_inner_products(unit(first_predictions), unit(second_projections))
    second = paired_inner_products(unit(second_predictions), unit(first_projections))
    return -(first.mean() + second.mean()) / 2


def simsiam_projector(width: int, dim: int = 2048) -> nn.Sequential:
    """Three layers of one width with batch normalisation after each and ReLU after the first two.

    Args:
        width: of the backbone's features.
        dim: of the layers and of the output, which is normalised without scale and shift.
    """
    return nn.Sequential(
        nn.Linear(width, dim, bias=False),
        nn.BatchNorm1d(dim),
        nn.ReLU(inplace=True),
        nn.Linear(dim, dim, bias=False),
        nn.BatchNorm1d(dim),
        nn.ReLU(inplace=True),
        nn.Linear(dim, dim, bias=False),  # the published code has a frozen bias here, which the norm removes
        nn.BatchNorm1d(dim, affine=False),
    )


def simsiam_predictor(dim: int = 2048, hidden_dim: int = 512) -> nn.Sequential:
    """Bottleneck of two layers, (batch, dim) -> (batch, dim): normalised inside, nothing after the last layer."""
    return nn.Sequential(
        nn.Linear(dim, hidden_dim, bias=False),
        nn.BatchNorm1d(hidden_dim),
        nn.ReLU(inplace=True),
        nn.Linear(hidden_dim, dim),
    )
