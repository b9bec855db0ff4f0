"""Several class tokens, one sphere each: the oblique paper's Multi, and its single token cut into spheres.

python -m examples.class_tokens

No picture: shapes and one loss.
"""

import torch
from torch import nn

from common.geometry import Sphere
from common.info_nce import contrastive_loss
from common.logit_scale import LogitScale
from common.oblique import Oblique


def main() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    geometry, logit_scale = Oblique(sphere_dim=16), LogitScale()

    # one class token of 64 numbers, cut into 4 spheres: (batch, 64) -> (batch, 4, 16)
    images, texts = torch.randn(8, 64), torch.randn(8, 64)
    single = geometry.embed_image(images), geometry.embed_text(texts)

    # 4 class tokens, projected to one sphere each: (batch, 4, width) -> (batch, 4, 16), the same shape of embeddings
    project = nn.Linear(48, 16, bias=False)  # one for all tokens
    multi = geometry.embed_image(project(torch.randn(8, 4, 48))), geometry.embed_text(project(torch.randn(8, 4, 48)))

    for image_embeddings, text_embeddings in (single, multi):
        assert image_embeddings.shape == text_embeddings.shape == (8, 4, 16)
        assert torch.allclose(image_embeddings.norm(dim=-1), torch.ones(8, 4))
        loss = contrastive_loss(image_embeddings, text_embeddings, geometry, logit_scale())
        similarity = geometry.similarity(image_embeddings, text_embeddings)  # (8, 8), a sum of 4 cosines in [-4, 4]
        print(f"{tuple(image_embeddings.shape)}: loss {loss:.2f}, similarities up to {similarity.abs().max():.2f} of 4")

    # one sphere is CLIP
    one = Oblique(sphere_dim=64)
    return (
        one.similarity(one.embed_image(images), one.embed_text(texts)),
        Sphere().similarity(Sphere().embed_image(images), Sphere().embed_text(texts)),
    )


if __name__ == "__main__":
    main()
