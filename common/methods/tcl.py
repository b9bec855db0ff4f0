"""TCL: ALBEF with contrast inside each modality, between whole samples and between a sample and its parts.

Source: Yang et al. 2022, after their code.
"""

import torch
import torch.nn.functional as F

from common.distributed import gather_without_gradient, rank
from common.geometry import Geometry, at_least_float32, full_precision
from common.logit_scale import LogitScale
from common.methods.albef import Albef, EncodedStep, FusedEncoders
from common.pool import Pool, pool_info_nce


class Tcl(Albef):
    """TCL's pre-training model.

    What differs from ALBEF:
        1. the momentum encoders see another view of the image; of the caption they see the same, with other dropout;
        2. image-to-image and text-to-text contrast against the pools, with hard targets;
        3. the whole image (caption) against its own patches (words) among those of the batch;
        4. the contrastive loss is the mean of the six terms.

    Args:
        pooled_grid: side of the grid that the patches' embeddings are averaged to.
    Raises:
        ValueError: a geometry that is no inner product: averages of patches have no meaning there, and pools compare
            keys with queries of the other modality only.
    """

    def __init__(
        self,
        encoders: FusedEncoders,
        geometry: Geometry,
        logit_scale: LogitScale,
        image_pool: Pool,
        text_pool: Pool,
        pooled_grid: int = 4,
    ) -> None:
        super().__init__(encoders, geometry, logit_scale, image_pool, text_pool)
        if not geometry.is_inner_product:
            raise ValueError(
                f"TCL compares wholes with averages of their parts by the inner product, got the geometry "
                f"{geometry.name}; expected: one that is an inner product, as sphere and oblique are"
            )
        tower = encoders.image_tower
        if tower.patch_dropout and tower.kept_patches > pooled_grid**2:
            raise ValueError(
                f"model.patch_dropout = {tower.patch_dropout} leaves {tower.kept_patches} patches, which are no grid, "
                f"and TCL averages grids to {pooled_grid} x {pooled_grid}; expected: 0"
            )
        self.pooled_grid = pooled_grid

    def contrast(self, step: EncodedStep, alpha: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As in `Albef`; the loss is the mean of the six terms."""
        *logits, cross_modal = self.cross_modal_contrast(step, alpha)
        return *logits, (2 * cross_modal + sum(self.in_modal_contrast(step))) / 6

    def in_modal_contrast(self, step: EncodedStep) -> list[torch.Tensor]:
        """image-image, text-text, image-patches, caption-words; targets are hard, without the momentum model."""
        momentum, scale = self.momentum_encoders.encoder, self.logit_scale()
        losses = [
            pool_info_nce(candidates, embeddings, scale, step.hard_targets(candidates))[0]
            for embeddings, candidates in (
                (step.image_embeddings, step.image_candidates),
                (step.text_embeddings, step.text_candidates),
            )
        ]
        with torch.no_grad():
            patches = momentum.image_projection(step.momentum_image_tokens[:, momentum.image_tower.num_class_tokens :])
            words = momentum.text_projection(step.momentum_text_tokens[:, 1:])
            patches = pooled_patches(_embedded(self.geometry, patches, "image"), self.pooled_grid)
            words = _embedded(self.geometry, words, "text")
        losses.append(local_contrast(patches, step.image_embeddings, scale))
        losses.append(local_contrast(words, step.text_embeddings, scale, step.text_mask[:, 1:]))
        return losses


def local_contrast(
    local_embeddings: torch.Tensor,
    global_embeddings: torch.Tensor,
    logit_scale: torch.Tensor,
    local_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """InfoNCE of each sample against each of its parts, among the parts of all other samples (TCL's code).

    For sample i and its part k, with s = logit_scale * inner product:
        -s(g_i, l_ik) + log( exp s(g_i, l_ik) + sum over j != i and all parts k' of exp s(g_i, l_jk') ),
    averaged over the parts of i, then over i. The other parts of i are neither positives nor negatives.

    Args:
        local_embeddings: (batch, parts, ...) momentum embeddings of patches or words; no gradient.
        global_embeddings: (batch, ...) of whole samples.
        local_mask: (batch, parts), False at padding, which is left out everywhere; None = no padding.
    Returns:
        Scalar in nats: the mean over this process's samples, among the parts of all processes.
    """
    batch, parts = local_embeddings.shape[:2]
    local, queries = local_embeddings.detach().flatten(2), global_embeddings.flatten(1)
    mask = torch.ones(batch, parts, dtype=torch.bool, device=local.device) if local_mask is None else local_mask
    everyone, real = gather_without_gradient(local), gather_without_gradient(mask)
    with full_precision(local):
        products = at_least_float32(queries) @ at_least_float32(everyone).flatten(0, 1).T
        logits = logit_scale * products.view(batch, len(everyone), parts)
    samples = torch.arange(batch, device=local.device)
    positives = logits[samples, samples + rank() * batch]  # (batch, parts)
    # every part is a positive once, against the parts of all other samples; padding is left out
    is_negative = real[None].expand(batch, -1, -1).clone()
    is_negative.diagonal(rank() * batch).fill_(False)
    negatives = logits.masked_fill(~is_negative, -torch.inf).flatten(1).logsumexp(dim=1, keepdim=True)
    losses = torch.logaddexp(positives, negatives) - positives
    return (losses.masked_fill(~mask, 0.0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean()


def pooled_patches(patches: torch.Tensor, grid: int) -> torch.Tensor:
    """Averages a square grid of patch embeddings to a coarser one; the means are not normalised again, as in TCL.

    Args:
        patches: (batch, side**2, ...).
        grid: new side; a smaller image stays as it is.
    Returns:
        (batch, min(grid, side)**2, ...).
    """
    batch, count = patches.shape[:2]
    side = round(count**0.5)
    if side <= grid:
        return patches
    square = patches.flatten(2).transpose(1, 2).reshape(batch, -1, side, side)
    return F.adaptive_avg_pool2d(square, grid).flatten(2).transpose(1, 2).reshape(batch, -1, *patches.shape[2:])


def _embedded(geometry: Geometry, features: torch.Tensor, modality: str) -> torch.Tensor:
    # the geometry's map for every part of every sample: (batch, parts, dim) -> (batch, parts, ...)
    embed = {"image": geometry.embed_image, "text": geometry.embed_text}[modality]
    embedded = embed(features.flatten(0, 1))
    return embedded.view(*features.shape[:2], *embedded.shape[1:])
