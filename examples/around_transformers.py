"""A CLIPModel of transformers with another geometry.

python -m examples.around_transformers
"""

import torch
from transformers import CLIPConfig, CLIPModel

from common.geometry import clamp_scalars_
from common.info_nce import contrastive_loss
from common.logit_scale import LogitScale
from euclip.geometry import Hyperbolic


def features(model: CLIPModel, pixel_values: torch.Tensor, input_ids: torch.Tensor, attention_mask=None):
    """Projected features of both towers before normalisation; `model(...)` would normalise them."""
    images = model.visual_projection(model.vision_model(pixel_values=pixel_values).pooler_output)
    text = model.text_model(input_ids=input_ids, attention_mask=attention_mask).pooler_output
    return images, model.text_projection(text)


def tiny_clip() -> CLIPModel:
    """Stands for CLIPModel.from_pretrained("openai/clip-vit-base-patch32"), without a download."""
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = tower | {"vocab_size": 50, "max_position_embeddings": 8, "eos_token_id": 49, "bos_token_id": 48}
    vision = tower | {"image_size": 16, "patch_size": 8}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=32))


def main() -> list:
    torch.manual_seed(0)
    model, geometry, logit_scale = tiny_clip(), Hyperbolic(dim=32, squared=False), LogitScale()
    model.logit_scale.requires_grad_(False)  # the logit scale of transformers is not used
    parameters = [*model.parameters(), *geometry.parameters(), *logit_scale.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    pixel_values, input_ids = torch.randn(16, 3, 16, 16), torch.randint(1, 48, (16, 8))
    input_ids[:, -1] = 49
    losses = []
    for _ in range(30):
        image_features, text_features = features(model, pixel_values, input_ids)
        image_embeddings, text_embeddings = geometry.embed_image(image_features), geometry.embed_text(text_features)
        loss = contrastive_loss(image_embeddings, text_embeddings, geometry, logit_scale())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clamp_scalars_([*logit_scale.scalars(), *geometry.scalars()])  # beta, curvature, both scales of the features
        losses.append(loss.item())
    print(f"transformers, {geometry.name}: loss {losses[0]:.2f} -> {losses[-1]:.2f}, c = {geometry.curvature():.3f}")
    return losses


if __name__ == "__main__":
    from examples.plots import plot_losses

    plot_losses("around_transformers", main())
