"""Learning from images only, as a training loop sees it: `common/run/pretraining.py`.

One step, the same for all methods:

    model.start_step(step)                                                   graphs, prototypes; nothing elsewhere
    model.update_momentum_encoder(ema_momentum)                              MoCo; nothing elsewhere
    loss, keys = model(first_views, second_views, labels, shuffle_seed)
    loss.backward(); model.hold(step); optimizer.step()
    model.insert(keys)                                                       what has a queue; nothing elsewhere

Each method has an `encoder` of two parts, backbone and head; what is learnt is the backbone, the head is dropped.

Several processes. Methods whose heads normalise their batch want its statistics over the global batch
(`synchronised`): torch's SyncBatchNorm, which runs on GPUs only. MoCo v1 and v2 want them per process, and shuffle the
keys, so that the statistics do not give away which key belongs to a query. DDP must not broadcast buffers in its
forward pass: the queue is equal on all processes by construction and the momentum encoder's statistics are its own;
`common.run.launch.launched_accelerator` sees to that. Running statistics then differ between processes and are put
right by `share_buffers` before an evaluation.
"""

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from common.base.vision_settings import VisionModelConfig
from common.distributed import broadcast_
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

    encoder: backbone and head, by these names.
    synchronised: whether batch normalisation takes its statistics over all processes.
    loss_at_chance: of a model that separates nothing; None = not stated.
    """

    synchronised = True
    loss_at_chance: float | None = None

    def start_step(self, step: int) -> Mapping[str, Any]:
        """First call of a step, on every process: normalises or rebuilds what changes between steps.

        Returns:
            Facts for the log, empty if there are none; only the main process needs them.
        """
        return {}

    def update_momentum_encoder(self, ema_momentum: float | None) -> None:
        """Before the keys of a step; a method without a momentum encoder has nothing to do."""

    def hold(self, step: int) -> None:
        """After the backward pass: removes the gradients of what is frozen in this step."""

    def insert(self, keys: Tensor | None) -> None:
        """After a step, on every process; a method without a pool has nothing to do."""

    def predictor_parameters(self) -> list[nn.Parameter]:
        """Of SimSiam's predictor, which may keep its learning rate; none elsewhere."""
        return []


class MoCo(Method):
    """Queries against their keys and a queue of past ones (v1, v2).

    Args:
        contrast: encoder, momentum encoder and pool.
        shuffle_keys: whether a step's shuffle_seed is used.
    """

    synchronised = False

    def __init__(self, contrast: MomentumContrast, shuffle_keys: bool = True) -> None:
        super().__init__()
        self.contrast, self.shuffle_keys = contrast, shuffle_keys

    @property
    def encoder(self) -> nn.Module:
        """The query encoder."""
        return self.contrast.encoder

    def forward(
        self, first_views: Tensor, second_views: Tensor, labels: Tensor | None = None, shuffle_seed: int | None = None
    ) -> StepLoss:
        """(batch, 3, height, width) twice: queries and keys; shuffle_seed as in `MomentumContrast.forward`."""
        step = self.contrast(first_views, second_views, shuffle_seed if self.shuffle_keys else None)
        return StepLoss(moco_loss(step.logits, step.columns), step.keys)

    def start_step(self, step: int) -> Mapping[str, Any]:
        """Rebuilds what the pool derives from its keys, if it is due."""
        self.contrast.pool.rebuild(step)
        return {}

    def update_momentum_encoder(self, ema_momentum: float | None) -> None:
        """theta_k <- m theta_k + (1 - m) theta_q, parameters only."""
        self.contrast.update_momentum_encoder(ema_momentum)

    def insert(self, keys: Tensor | None) -> None:
        """The keys of all processes into the pool, in rank order."""
        self.contrast.insert(keys)


class RandomWeights(Method):
    """Lower control: the same backbone with its random weights. It is not trained.

    Args:
        encoder: backbone, and a head that does nothing.
    """

    synchronised = False

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder


def build_backbone(model: VisionModelConfig, batch_norm_parts: int = 1) -> nn.Module:
    """(batch, 3, height, width) -> (batch, output_dim).

    Args:
        batch_norm_parts: above 1, batch normalisation as on that many GPUs.
    """
    norm_layer = None if batch_norm_parts == 1 else partial(SplitBatchNorm, num_parts=batch_norm_parts)
    if model.backbone == "resnet50":
        return resnet50(model.zero_init_residual, norm_layer)
    return NarrowResNet(model.width, model.blocks, norm_layer, model.zero_init_residual)


def share_buffers(model: nn.Module) -> None:
    """Gives every process the first one's buffers, so that all evaluate the same model; call on every process."""
    for buffer in model.buffers():
        broadcast_(buffer)


def with_head(backbone: nn.Module, head: nn.Module) -> nn.Sequential:
    """An `encoder` of a method."""
    return nn.Sequential(OrderedDict(backbone=backbone, head=head))
