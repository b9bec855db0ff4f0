"""Entailment in addition to the contrast: each image in the cone behind its caption (MERU, EuCLIP).

python -m examples.entailment
"""

import torch

from common.info_nce import contrastive_loss
from common.logit_scale import LogitScale
from euclip.geometry import Euclidean

ENTAILMENT_WEIGHT, MIN_RADIUS = 0.1, 0.3  # lambda and K of EuCLIP


def main() -> list:
    torch.manual_seed(0)
    geometry, logit_scale = Euclidean(squared=True), LogitScale(torch.tensor(-1.0).exp().item())
    images, texts = (torch.randn(64, 32, requires_grad=True) for _ in range(2))  # stand for the towers' features
    optimizer = torch.optim.Adam([images, texts], lr=0.1)
    missed = []
    for _ in range(60):
        pairs = {"images": geometry.embed_image(images), "texts": geometry.embed_text(texts)}
        # radians by which each image misses the cone of its caption; zero inside it
        residuals = geometry.entailment_residual(**pairs, min_radius=MIN_RADIUS)
        contrast = contrastive_loss(pairs["images"], pairs["texts"], geometry, logit_scale())
        loss = contrast + ENTAILMENT_WEIGHT * residuals.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        missed.append(residuals.mean().item())
    print(f"pictures miss their cones by {missed[0]:.2f} -> {missed[-1]:.2f} rad")
    return missed


if __name__ == "__main__":
    from examples.plots import plot_losses

    plot_losses("entailment", main(), "mean angle outside of the cones (rad)")
