"""One process's share of a step of EuCLIP's loss, for tests/test_euclip_train.py; with few imports."""

import torch

from common.distributed import rank, world_size
from common.tiled import geometry_loss
from euclip.config import MethodConfig
from euclip.model import build_geometry

PAIRS, DIM = 12, 32


def share_of_a_step(methods: list[MethodConfig], tile: int = 0) -> list[dict]:
    """Loss, and gradients of scalars and features, in float64; the processes share a batch of 12.

    Args:
        methods: of the rows.
        tile: optim.loss_tile.
    """
    steps = []
    for method in methods:
        torch.manual_seed(7)
        images, texts = torch.randn(2, PAIRS, DIM, dtype=torch.float64).unbind()
        geometry = build_geometry(method, DIM).double()
        share = slice(rank() * PAIRS // world_size(), (rank() + 1) * PAIRS // world_size())
        features = [part[share].clone().requires_grad_() for part in (images, texts)]
        scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        image_embeddings, text_embeddings = geometry.embed_image(features[0]), geometry.embed_text(features[1])
        loss = geometry_loss(image_embeddings, text_embeddings, geometry, scale, tile=tile)
        residuals = geometry.entailment_residual(
            images=image_embeddings, texts=text_embeddings, min_radius=method.min_radius
        )
        (loss + method.entailment_weight * residuals.mean()).backward()
        scalars = {name: parameter.grad for name, parameter in geometry.named_parameters()} | {"scale": scale.grad}
        entailed = loss.detach() + method.entailment_weight * residuals.detach().mean()
        steps.append({"loss": entailed, "scalars": scalars, "features": [side.grad for side in features]})
    return steps
