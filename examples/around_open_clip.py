"""An open_clip model with another geometry.

python -m examples.around_open_clip
"""

import open_clip
import torch
from torch import nn

from common.geometry import clamp_scalars_
from common.info_nce import contrastive_loss
from common.logit_scale import LogitScale
from euclip.geometry import Euclidean


def embeddings(model: nn.Module, geometry: nn.Module, images: torch.Tensor, token_ids: torch.Tensor):
    """Features before normalisation, which only the sphere needs; model(images, texts) would normalise them."""
    image_features = model.encode_image(images, normalize=False)
    text_features = model.encode_text(token_ids, normalize=False)
    return geometry.embed_image(image_features), geometry.embed_text(text_features)


def tiny_open_clip() -> nn.Module:
    """Stands for open_clip.create_model("ViT-B-32", pretrained="laion2b_s34b_b79k"), without a download."""
    vision = open_clip.model.CLIPVisionCfg(layers=1, width=32, head_width=16, patch_size=8, image_size=16)
    text = open_clip.model.CLIPTextCfg(context_length=8, vocab_size=50, width=32, heads=2, layers=1)
    return open_clip.model.CLIP(embed_dim=32, vision_cfg=vision, text_cfg=text)


def main() -> list:
    torch.manual_seed(0)
    model, geometry = tiny_open_clip(), Euclidean(squared=True)
    model.logit_scale.requires_grad_(False)  # open_clip's logit scale is not used
    logit_scale = LogitScale(1.0)  # squared distances: 1 / 0.07 would be too steep
    optimizer = torch.optim.AdamW([*model.parameters(), *logit_scale.parameters()], lr=1e-3)
    images, token_ids = torch.randn(16, 3, 16, 16), torch.randint(1, 49, (16, 8))
    losses = []
    for _ in range(30):
        # the towers may run in bfloat16; geometry and loss compute in float32 also under autocast
        with torch.autocast(images.device.type, torch.bfloat16):
            loss = contrastive_loss(*embeddings(model, geometry, images, token_ids), geometry, logit_scale())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clamp_scalars_([*logit_scale.scalars(), *geometry.scalars()])
        losses.append(loss.item())
    print(f"open_clip, {geometry.name}: loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    return losses


if __name__ == "__main__":
    from examples.plots import plot_losses

    plot_losses("around_open_clip", main())
