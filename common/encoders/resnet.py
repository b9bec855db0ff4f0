"""ResNets as feature extractors: torchvision's for photographs, a narrow one for images of 32 pixels."""

from collections.abc import Callable

import torch
from torch import nn


def resnet50(zero_init_residual: bool = False, norm_layer: Callable[[int], nn.Module] | None = None) -> nn.Module:
    """torchvision's ResNet-50 without its classifier: (batch, 3, height, width) -> (batch, 2048) pooled features.

    Args:
        zero_init_residual: residual blocks start as the identity (SimSiam, SimCLR).
        norm_layer: None = nn.BatchNorm2d.
    """
    from torchvision.models import resnet50 as torchvisions  # two seconds, which towers of other kinds need not spend

    model = torchvisions(weights=None, zero_init_residual=zero_init_residual, norm_layer=norm_layer)
    model.fc = nn.Identity()
    model.output_dim = 2048
    return model


class NarrowResNet(nn.Module):
    """ResNet of basic blocks for small images: 3x3 stem of stride 1, no pooling before the last one.

    With width 64 and blocks (2, 2, 2, 2) it is the ResNet-18 of self-supervised work on CIFAR-10.

    Args:
        width: channels of the first stage; each further stage doubles them and halves the side.
        blocks: of each stage.
        norm_layer, zero_init_residual: as in `resnet50`.
    """

    def __init__(
        self,
        width: int = 16,
        blocks: tuple[int, ...] = (2, 2, 2, 2),
        norm_layer: Callable[[int], nn.Module] | None = None,
        zero_init_residual: bool = False,
    ) -> None:
        from torchvision.models.resnet import BasicBlock

        super().__init__()
        norm_layer = nn.BatchNorm2d if norm_layer is None else norm_layer
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, kernel_size=3, padding=1, bias=False), norm_layer(width), nn.ReLU(inplace=True)
        )
        stages, channels = [], width
        for stage, count in enumerate(blocks):
            wide = width * 2**stage
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                shortcut = None
                if stride != 1 or channels != wide:
                    shortcut = nn.Sequential(
                        nn.Conv2d(channels, wide, kernel_size=1, stride=stride, bias=False), norm_layer(wide)
                    )
                stages.append(BasicBlock(channels, wide, stride, shortcut, norm_layer=norm_layer))
                channels = wide
        self.blocks = nn.Sequential(*stages)
        self.output_dim = channels
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if zero_init_residual and isinstance(module, BasicBlock):
                nn.init.zeros_(module.bn2.weight)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, 3, height, width) -> (batch, output_dim) mean over the last feature map."""
        return self.blocks(self.stem(images)).mean(dim=(2, 3))
