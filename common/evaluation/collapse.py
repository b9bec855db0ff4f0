"""Whether a representation has collapsed: whether features of different samples are still different."""

import math

import torch

from common.geometry import unit


@torch.no_grad()
def collapse_statistics(features: torch.Tensor) -> dict[str, float]:
    """What tells a collapsed representation, to be logged together (contrastive-basics spec Sec. 2.4).

    Computed on the CPU in float64. The spread alone is no proof of health behind a batch normalisation, which forces it
    (spec Sec. 5.1).

    Args:
        features: (batch, dim), any norm; batch at least 2.
    Returns:
        channel_std: standard deviation over the batch of the unit features' channels, averaged; 0 when all are equal,
            about 1 / sqrt(dim) when they are spread over the sphere.
        mean_cosine: of different samples; 1 when all are equal, about 0 when spread.
        effective_rank: exp of the entropy of the shares that the principal directions have in the variance of the unit
            features, in [1, dim]: how many directions are used, however small the spread is. 1 for a constant.
        All NaN where a feature is not finite: a figure for the log is no reason to stop a run.
    Raises:
        ValueError: for fewer than two features.
    """
    if features.ndim != 2 or len(features) < 2:
        raise ValueError(f"features of shape {tuple(features.shape)}; accepted: (batch, dim) with at least 2 rows")
    directions = unit(features).cpu().double()
    if not directions.isfinite().all():
        return dict.fromkeys(("channel_std", "mean_cosine", "effective_rank"), math.nan)
    batch, dim = directions.shape
    own = directions.square().sum()
    cosine = (directions.sum(dim=0).square().sum() - own) / (batch * (batch - 1))
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
