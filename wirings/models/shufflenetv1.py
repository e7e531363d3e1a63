"""ShuffleNet (Zhang and others, 2018), with three groups."""

from __future__ import annotations

from torch import Tensor, cat, nn
from torch.nn.functional import avg_pool2d, relu

from wirings.models.parts import check_width, conv_norm, depthwise, for_images, stem
from wirings.models.registry import register, wired
from wirings.rules import Rule

STEM, CHANNELS, UNITS, GROUPS = 24, (240, 480, 960), (4, 8, 4), 3


class Shuffle(nn.Module):
    """Deals channels out in turn, so that every group gets some of every group before it."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        return x.view(batch, self.groups, channels // self.groups, height, width).transpose(1, 2).reshape(x.shape)


class Unit(nn.Module):
    """Grouped pointwise, depthwise and again pointwise convolution, beside a shortcut.

    With a stride of 2 the shortcut is a pooled map, whose channels stand beside the new ones; else they are added up.
    """

    def __init__(self, before: int, channels: int, stride: int, first_groups: int) -> None:
        super().__init__()
        inner, self.stride = channels // 4, stride
        self.branch = nn.Sequential(
            *conv_norm(before, inner, 1, groups=first_groups),
            nn.ReLU(inplace=True),
            Shuffle(GROUPS),
            *depthwise(inner, stride),
            *conv_norm(inner, channels - before if stride == 2 else channels, 1, groups=GROUPS),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.stride == 2:
            return relu(cat([avg_pool2d(x, 3, 2, padding=1), self.branch(x)], 1))
        return relu(x + self.branch(x))


class ShuffleNetV1(nn.Module):
    """Takes images, (batch, 3, size, size). ``width`` multiplies the channels of every layer."""

    def __init__(self, width: float = 1.0, classes: int = 1000) -> None:
        super().__init__()
        check_width(width)
        # Twelve: the groups and the quarter of channels inside a unit must come out even.
        channels = [max(1, round(width * count / 12)) * 12 for count in (STEM, *CHANNELS)]
        units: list[nn.Module] = []
        for stage, (before, after, count) in enumerate(zip(channels, channels[1:], UNITS, strict=False)):
            # The stem's few channels are not put in groups.
            units.append(Unit(before, after, 2, GROUPS if stage else 1))
            units += [Unit(after, after, 1, GROUPS) for _ in range(count - 1)]
        self.features = nn.Sequential(stem(channels[0]), *units)
        self.head = nn.Linear(channels[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).mean((-2, -1)))


@register
def shufflenetv1(
    rule: str | Rule | None = None,
    width: float = 1.0,
    classes: int = 1000,
    image_size: int = 224,
    density: float | None = None,
) -> nn.Module:
    """ShuffleNet × ``width``; with a ``density`` its layers are wired, all but the first and the classifier."""
    model = for_images(ShuffleNetV1(width, classes), image_size)
    return wired(model, rule, density, skip=["features.0", "head"])
