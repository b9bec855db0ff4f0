"""torch.compile of a model's towers: the stacks of blocks (image, text, fusion, momentum copies) and ResNet backbones.

Each is compiled in place (`Module.compile`), so that names, checkpoints and hooks stay. The loss, patch embeddings and
projections are not compiled.
"""

from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from torch import nn

from common.base.config import ConfigError
from common.encoders.resnet import NarrowResNet
from common.encoders.transformer import Transformer

# shapes, train and evaluation mode, with and without gradient: every variant of every tower counts against torch's 8
_VARIANTS = 64


def without_accelerate() -> TorchDynamoPlugin:
    """Settings with which Accelerate compiles nothing: it would compile the loss of a model that computes one."""
    return TorchDynamoPlugin(backend=DynamoBackend.NO.value)


def compile_towers_(model: nn.Module, is_on: bool) -> int:
    """Compiles the towers in place if `is_on` or the launch sets --dynamo_backend; returns how many.

    Shapes are dynamic from the first graph on, and random numbers are drawn as without compilation, so that a resumed
    run equals an uninterrupted one.
    """
    plugin = TorchDynamoPlugin()  # of the launch
    if plugin.backend == DynamoBackend.NO:
        if not is_on:
            return 0
        plugin.backend = DynamoBackend.INDUCTOR
    if plugin.backend == DynamoBackend.INDUCTOR:
        from torch._inductor import config as inductor

        _check_compiler()
        inductor.fallback_random = True
    from torch._dynamo import config as dynamo  # a second of imports

    dynamo.recompile_limit = max(_VARIANTS, dynamo.recompile_limit)
    options = plugin.to_kwargs() | {"dynamic": True if plugin.dynamic is None else plugin.dynamic}
    towers = [module for module in model.modules() if _is_tower(module)]
    for tower in towers:
        tower.compile(**options)
    return len(towers)


def _is_tower(module: nn.Module) -> bool:
    from torchvision.models import ResNet

    return isinstance(module, Transformer | NarrowResNet | ResNet)


def _check_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ConfigError(
            f"optim.compile = true needs a C++ compiler: {str(error).splitlines()[0]} expected: g++ or clang++, named "
            "by the variable CXX if it has another name, or optim.compile=false"
        ) from error
