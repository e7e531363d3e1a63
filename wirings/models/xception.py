"""A light network after Xception, as "Light-Head R-CNN" (Li and others, 2017) made it and ShuffleNetV2's paper used it.

That paper gives the channels of every stage (144, 288, 576) and 145M multiply-adds, not what a unit is made of. Ours
is a bottleneck of pointwise convolutions with two depthwise ones between them, joined to its shortcut as in ShuffleNet:
counted, that is 145M at width 1 and 40M at width 0.5, as published.
"""

from __future__ import annotations

from torch import Tensor, cat, nn
from torch.nn.functional import avg_pool2d, relu

from wirings.models.parts import check_width, conv_norm, depthwise, for_images, stem
from wirings.models.registry import register, wired
from wirings.rules import Rule

STEM, CHANNELS, UNITS = 24, (144, 288, 576), (4, 8, 4)


class Unit(nn.Module):
    """Pointwise, two depthwise and again pointwise convolution, beside a shortcut."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        inner, self.stride = channels // 4, stride
        self.branch = nn.Sequential(
            *conv_norm(before, inner, 1),
            nn.ReLU(inplace=True),
            *depthwise(inner, stride),
            *depthwise(inner),
            *conv_norm(inner, channels - before if stride == 2 else channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.stride == 2:
            return relu(cat([avg_pool2d(x, 3, 2, padding=1), self.branch(x)], 1))
        return relu(x + self.branch(x))


class Xception(nn.Module):
    """Takes images, (batch, 3, size, size). ``width`` multiplies the channels of every layer."""

    def __init__(self, width: float = 1.0, classes: int = 1000) -> None:
        super().__init__()
        check_width(width)
        channels = [max(1, round(width * count / 4)) * 4 for count in (STEM, *CHANNELS)]
        units: list[nn.Module] = []
        for before, after, count in zip(channels, channels[1:], UNITS, strict=False):
            units += [Unit(before, after, 2), *(Unit(after, after, 1) for _ in range(count - 1))]
        self.features = nn.Sequential(stem(channels[0]), *units)
        self.head = nn.Linear(channels[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).mean((-2, -1)))


@register
def xception(
    rule: str | Rule | None = None,
    width: float = 1.0,
    classes: int = 1000,
    image_size: int = 224,
    density: float | None = None,
) -> nn.Module:
    """The light Xception × ``width``; with a ``density`` it is wired, all but the first layer and the classifier."""
    model = for_images(Xception(width, classes), image_size)
    return wired(model, rule, density, skip=["features.0", "head"])
