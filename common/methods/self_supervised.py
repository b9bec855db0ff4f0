"""Learning from images only, as a training loop sees it: `common/run/pretraining.py`.

One step, the same for all methods; a method without the part named does nothing:

    model.start_step(step)                                                   graphs, prototypes
    model.update_momentum_encoder(ema_momentum)                              momentum encoder
    loss, keys = model(first_views, second_views, labels, shuffle_seed)
    loss.backward(); model.hold(step); optimizer.step()
    model.insert(keys)                                                       queue

Several processes. Methods whose heads normalise their batch want its statistics over the global batch (`synchronised`):
torch's SyncBatchNorm, which runs on GPUs only. MoCo v1 and v2 want them per process, and shuffle the keys. DDP must not
broadcast buffers in its forward pass (`common.run.launch.launched_accelerator` sees to that): the momentum encoder's
statistics are its own. Running statistics then differ between processes; `share_buffers` makes them equal before an
evaluation.
"""

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common.base.vision_settings import VisionModelConfig
from common.distributed import broadcast_, world_size
from common.encoders.resnet import NarrowResNet, resnet50
from common.methods.momentum_contrast import MomentumContrast, SplitBatchNorm, moco_loss


class StepLoss(NamedTuple):
    """Loss and keys of a batch.

    loss: scalar, whose mean over processes is that of the global batch. keys: for `insert`; None without a pool.
    """

    loss: Tensor
    keys: Tensor | None = None


class Method(nn.Module):
    """A method as the training loop sees it; calling it returns the StepLoss of a batch.

    encoder: backbone, which is what is learnt, and head, by these names.
    synchronised: whether batch normalisation takes its statistics over all processes.
    loss_at_chance: of a model that separates nothing; None = not stated.
    """

    synchronised = True
    loss_at_chance: float | None = None

    def start_step(self, step: int) -> Mapping[str, Any]:
        """First call of a step, on every process: normalises or rebuilds what changes between steps.

        Returns:
            Facts for the log; only the main process needs them.
        """
        return {}

    def update_momentum_encoder(self, ema_momentum: float | None) -> None:
        """Before the keys of a step."""

    def hold(self, step: int) -> None:
        """After the backward pass: removes the gradients of what is frozen in this step."""

    def insert(self, keys: Tensor | None) -> None:
        """After a step, on every process: keys into the pool."""

    def predictor_parameters(self) -> list[nn.Parameter]:
        """Of SimSiam's predictor, which may keep its learning rate."""
        return []


class MoCo(Method):
    """Queries against their keys and a queue of past ones (v1, v2).

    Args:
        shuffle_keys: whether a step's shuffle_seed is used.
    """

    synchronised = False

    def __init__(self, contrast: MomentumContrast, shuffle_keys: bool = True) -> None:
        super().__init__()
        self.contrast, self.shuffle_keys = contrast, shuffle_keys

    @property
    def encoder(self) -> nn.Module:
        return self.contrast.encoder

    def forward(
        self, first_views: Tensor, second_views: Tensor, labels: Tensor | None = None, shuffle_seed: int | None = None
    ) -> StepLoss:
        """(batch, 3, height, width) twice: queries and keys; shuffle_seed as in `MomentumContrast.forward`."""
        step = self.contrast(first_views, second_views, shuffle_seed if self.shuffle_keys else None)
        return StepLoss(moco_loss(step.logits, step.columns), step.keys)

    def start_step(self, step: int) -> Mapping[str, Any]:
        self.contrast.pool.rebuild(step)
        return {}

    def update_momentum_encoder(self, ema_momentum: float | None) -> None:
        self.contrast.update_momentum_encoder(ema_momentum)

    def insert(self, keys: Tensor | None) -> None:
        self.contrast.insert(keys)


class RandomWeights(Method):
    """Lower control: the backbone with its random weights and a head that does nothing. It is not trained."""

    synchronised = False

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder


def build_backbone(model: VisionModelConfig, batch_norm_parts: int = 1) -> nn.Module:
    """(batch, 3, height, width) -> (batch, output_dim); batch normalisation as on `batch_norm_parts` GPUs in all.

    Weights of convolutions have their channels last: the same numbers, a third faster on a CPU. Those of fewer than 8
    channels do not: oneDNN 3.12 writes beyond their gradients without AVX-512, which ends the process.
    """
    parts = max(1, batch_norm_parts // world_size())  # of this process's share of the batch
    norm_layer = None if parts == 1 else partial(SplitBatchNorm, num_parts=parts)
    if model.backbone == "resnet50":
        return resnet50(model.zero_init_residual, norm_layer).to(memory_format=torch.channels_last)
    backbone = NarrowResNet(model.width, model.blocks, norm_layer, model.zero_init_residual)
    return backbone if model.width < 8 else backbone.to(memory_format=torch.channels_last)


def share_buffers(model: nn.Module) -> None:
    """Gives every process the first one's buffers; call on every process."""
    for buffer in model.buffers():
        broadcast_(buffer)


def with_head(backbone: nn.Module, head: nn.Module) -> nn.Sequential:
    """An `encoder` of a method."""
    return nn.Sequential(OrderedDict(backbone=backbone, head=head))
