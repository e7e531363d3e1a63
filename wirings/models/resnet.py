"""Residual networks (He and others, 2015): ResNet50, the network of the paper's Table 4, and ResNet18 of any width.

As in Table 4: a bottleneck has its stride in the 3 × 3 convolution; the classifier is a 1 × 1 convolution without bias,
and so is wired as all others are; convolutions start normal, with Kaiming's deviation by what comes in (fan-in); all
norms start at 1, those that end a residual branch too. Images of 64 pixels or less, such as CIFAR-10's, meet a first
convolution of 3 × 3 without stride, and no pooling after it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from wirings.errors import WiringError
from wirings.models.parts import check_width
from wirings.models.registry import register, wired
from wirings.rules import Rule

CHANNELS = (64, 128, 256, 512)
"""Of the four stages; a bottleneck gives four times as many."""
SMALL_IMAGE = 64
"""Up to so many pixels the first convolution has no stride."""


def _conv(before: int, channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, channels, kernel, stride, padding=kernel // 2, bias=False)


def _shortcut(before: int, after: int, stride: int) -> nn.Sequential:
    """What stands beside a block's convolutions: nothing, or a 1 × 1 convolution where sizes change."""
    if stride == 1 and before == after:
        return nn.Sequential()
    return nn.Sequential(_conv(before, after, 1, stride), nn.BatchNorm2d(after))


class Block(nn.Module):
    """Two convolutions of 3 × 3 beside a shortcut. (Norms are called ``bn…``, but for the shortcut's: recipes tell.)"""

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
    """A convolution of 3 × 3 with few channels, between two of 1 × 1, beside a shortcut."""

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
    """Takes images, (batch, 3, size, size).

    Args:
        block: `Block` or `Bottleneck`.
        blocks: how many, in each of the four stages.
        width: multiplies the channels of every layer.
        classes: how many.
        image_size: of a side, in pixels; up to 64 the first convolution has no stride.
    """

    def __init__(
        self,
        block: type[Block] | type[Bottleneck],
        blocks: Sequence[int],
        width: float = 1.0,
        classes: int = 1000,
        image_size: int = 224,
    ) -> None:
        super().__init__()
        check_width(width)
        small = image_size <= SMALL_IMAGE
        self.smallest = 8 if small else 32
        if image_size < self.smallest:
            raise WiringError(
                f"image_size = {image_size} is too small: the network divides an image's sides by {self.smallest}, so "
                f"it takes {self.smallest} pixels a side at least."
            )
        self.input_shape = (3, image_size, image_size)
        stages = [max(1, round(channels * width)) for channels in CHANNELS]
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
        self.head = _conv(before, classes, 1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        if images.dim() != 4 or min(images.shape[-2:]) < self.smallest:
            raise WiringError(
                f"images must be (batch, 3, height, width) of at least {self.smallest} × {self.smallest} pixels, but "
                f"{tuple(images.shape)} came."
            )
        maps = self.stages(self.pool(self.relu(self.bn1(self.conv1(images)))))
        return self.head(maps.mean((-2, -1), keepdim=True)).flatten(1)


@register
def resnet50(
    rule: str | Rule | None = None,
    classes: int = 1000,
    image_size: int = 224,
    density: float | None = None,
    first_dense: bool = False,
    share: str = "uniform",
) -> nn.Module:
    """ResNet50; with a ``density`` all its convolutions are wired, or with ``first_dense`` all but the first."""
    model = ResNet(Bottleneck, (3, 4, 6, 3), 1.0, classes, image_size)
    return wired(model, rule, density, skip=["conv1"] if first_dense else [], share=share)


@register
def resnet18(
    rule: str | Rule | None = None,
    width: float = 1.0,
    classes: int = 10,
    image_size: int = 32,
    density: float | None = None,
    first_dense: bool = False,
    share: str = "uniform",
) -> nn.Module:
    """ResNet18 × ``width``, for small images unless said; wired as `resnet50` is."""
    model = ResNet(Block, (2, 2, 2, 2), width, classes, image_size)
    return wired(model, rule, density, skip=["conv1"] if first_dense else [], share=share)
