"""Exponential moving average of a run's weights (optim.ema): evaluated, saved and published in their place.

    average <- decay * average + (1 - decay) * weights        after each step

It starts as the weights after the first step. The decay is constant (as timm's by default), without warm-up: about 1 /
(1 - decay) steps count, so a short run needs a low one. Buffers (queues, pools) are those of the model. A paper's
momentum encoders are averaged, too; training uses them as they are.
"""

from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from common.base.config import ConfigError
from common.run.checkpoint import Checkpoint


def averaged(model: nn.Module, config: Any, checkpoint: Checkpoint | None) -> AveragedModel | None:
    """The average of a model's weights, as the checkpoint left it; None without optim.ema.

    Raises:
        ConfigError: FSDP has sharded the model, or batch normalisation trains, whose statistics belong to single steps.
    """
    decay = getattr(config.optim, "ema", None)  # learning from images only has none
    if decay is None:
        return None
    if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        raise ConfigError(f"optim.ema = {decay} under FSDP, which shards the weights; expected: null, or DDP")
    for name, module in model.named_modules():
        is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if is_norm and any(parameter.requires_grad for parameter in module.parameters()):
            raise ConfigError(
                f"optim.ema = {decay} with batch normalisation that trains ({name}): its running statistics are not "
                "those of averaged weights; expected: null, or a frozen stem"
            )
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    if checkpoint is not None:
        checkpoint.load_model(average.module)
        average.n_averaged.fill_(checkpoint.state["step"])  # 0 would take the next weights as they are
    return average
