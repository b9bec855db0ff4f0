"""A geometry and its loss inside a transformers.Trainer: python -m examples.in_trainer (one module, one callback)"""

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from common.base.places import outputs
from common.geometry import Geometry, clamp_scalars_
from common.info_nce import contrastive_loss
from common.logit_scale import LogitScale
from euclip.geometry import Hyperbolic
from examples.around_transformers import features, tiny_clip
from examples.plots import plot_losses


class ContrastiveCLIP(nn.Module):
    """CLIPModel, geometry and logit scale in one module, so that the Trainer moves, wraps and saves all three."""

    def __init__(self, clip: nn.Module, geometry: Geometry, logit_scale: LogitScale) -> None:
        super().__init__()
        self.clip, self.geometry, self.logit_scale = clip, geometry, logit_scale
        clip.logit_scale.requires_grad_(False)  # the logit scale of transformers is not used

    def forward(self, pixel_values, input_ids, attention_mask=None) -> dict[str, torch.Tensor]:
        images, texts = features(self.clip, pixel_values, input_ids, attention_mask)
        images, texts = self.geometry.embed_image(images), self.geometry.embed_text(texts)
        return {"loss": contrastive_loss(images, texts, self.geometry, self.logit_scale())}


class Clamp(TrainerCallback):
    def on_step_end(self, args, state, control, model, **more) -> None:  # after the optimiser's step
        clamp_scalars_([*model.logit_scale.scalars(), *model.geometry.scalars()])


def fit(model: ContrastiveCLIP, samples: list[dict], **settings) -> list[float]:
    """Returns the loss of every step. max_grad_norm=0: the Trainer would clip gradients to a norm of 1."""
    steps = {"logging_steps": 1, "save_strategy": "no", "lr_scheduler_type": "constant", "max_grad_norm": 0}
    arguments = TrainingArguments(outputs() / "examples", report_to="none", **steps, **settings)
    # the Trainer excludes norms and biases from weight decay by name, and the logit scale would shrink towards 1
    matrices, others = ([p for p in model.parameters() if (p.ndim >= 2) == decays] for decays in (True, False))
    groups = [{"params": matrices, "weight_decay": arguments.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizers = torch.optim.AdamW(groups, lr=arguments.learning_rate), None
    trainer = Trainer(model, arguments, train_dataset=samples, callbacks=[Clamp()], optimizers=optimizers)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> list[float]:
    torch.manual_seed(0)
    model = ContrastiveCLIP(tiny_clip(), Hyperbolic(dim=32, squared=False), LogitScale())
    captions = nn.functional.pad(torch.randint(1, 48, (32, 7)), (0, 1), value=49)  # 49: end of text
    samples = [{"pixel_values": torch.randn(3, 16, 16), "input_ids": ids} for ids in captions]
    return fit(model, samples, per_device_train_batch_size=16, max_steps=60, learning_rate=1e-3, weight_decay=0.1)


if __name__ == "__main__":
    plot_losses("in_trainer", main())
