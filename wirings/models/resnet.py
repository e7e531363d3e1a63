"""Residual networks (He and others, 2015): ResNet50, the network of the paper's Table 4, and ResNet18 of any width.

As in Table 4, a bottleneck has its stride in the 3 × 3 convolution. The classifier is a 1 × 1 convolution without bias,
so it is wired like all others. Convolutions are initialised with Kaiming's normal distribution by fan-in, and all norms
to 1, including those that end a residual branch. For images of up to 64 pixels, such as CIFAR-10's, the first
convolution is 3 × 3 without stride, and no pooling follows it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from wirings.models.option_groups import CIFAR10_SIZE, DENSE_LAYERS, IMAGENET_SIZE, LayerWiring, NetworkSize
from wirings.models.parts import SMALL_IMAGE, check_image_size, check_images, check_width
from wirings.models.registry import register

CHANNELS = (64, 128, 256, 512)
"""Channels of the four stages; a bottleneck has four times as many output channels."""


def _conv(before: int, channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, channels, kernel, stride, padding=kernel // 2, bias=False)


def _shortcut(before: int, after: int, stride: int) -> nn.Sequential:
    """Return the shortcut of a block: the identity, or a 1 × 1 convolution if the shape changes."""
    if stride == 1 and before == after:
        return nn.Sequential()
    return nn.Sequential(_conv(before, after, 1, stride), nn.BatchNorm2d(after))


class BasicBlock(nn.Module):
    """Two 3 × 3 convolutions with a shortcut. Recipes select the norms by their names, ``bn1`` and ``bn2``."""

    expansion = 1

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(before, channels, 3, stride), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = _conv(channels, channels, 3), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = _shortcut(before, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """A 3 × 3 convolution with few channels between two 1 × 1 convolutions, with a shortcut."""

    expansion = 4

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        after = channels * self.expansion
        self.conv1, self.bn1 = _conv(before, channels, 1), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = _conv(channels, channels, 3, stride), nn.BatchNorm2d(channels)
        self.conv3, self.bn3 = _conv(channels, after, 1), nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = _shortcut(before, after, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A residual network. Takes images, (batch, 3, height, width).

    Args:
        block: `BasicBlock` or `Bottleneck`.
        blocks: Number of blocks of each of the four stages.
        size: Width, classes and images. For images of up to 64 pixels, the first convolution has no stride.
    """

    def __init__(
        self, block: type[BasicBlock] | type[Bottleneck], blocks: Sequence[int], size: NetworkSize = IMAGENET_SIZE
    ) -> None:
        super().__init__()
        check_width(size.width)
        small = size.image_size <= SMALL_IMAGE
        self.smallest = 8 if small else 32
        check_image_size(size.image_size, self.smallest)
        self.input_shape = (3, size.image_size, size.image_size)
        stages = [max(1, round(channels * size.width)) for channels in CHANNELS]
        before = stages[0]
        self.conv1 = _conv(3, before, 3) if small else _conv(3, before, 7, 2)
        self.bn1 = nn.BatchNorm2d(before)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.Identity() if small else nn.MaxPool2d(3, 2, padding=1)
        made = []
        for number, (channels, count) in enumerate(zip(stages, blocks, strict=True)):
            stage = []
            for place in range(count):
                stage.append(block(before, channels, stride=2 if number and not place else 1))
                before = channels * block.expansion
            made.append(nn.Sequential(*stage))
        self.stages = nn.Sequential(*made)
        self.head = _conv(before, size.classes, 1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        check_images(images, self.smallest)
        maps = self.stages(self.pool(self.relu(self.bn1(self.conv1(images)))))
        return self.head(maps.mean((-2, -1), keepdim=True)).flatten(1)


@register
def resnet50(
    size: NetworkSize = IMAGENET_SIZE, wiring: LayerWiring = DENSE_LAYERS, first_dense: bool = False
) -> nn.Module:
    """ResNet50; all convolutions are wired, or with ``first_dense`` all but the first."""
    return wiring.wire(ResNet(Bottleneck, (3, 4, 6, 3), size), skip=["conv1"] if first_dense else [])


@register
def resnet18(
    size: NetworkSize = CIFAR10_SIZE, wiring: LayerWiring = DENSE_LAYERS, first_dense: bool = False
) -> nn.Module:
    """ResNet18, for CIFAR-10 by default; wired as `resnet50` is."""
    return wiring.wire(ResNet(BasicBlock, (2, 2, 2, 2), size), skip=["conv1"] if first_dense else [])
