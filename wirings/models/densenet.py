"""A small DenseNet in the frame of ShuffleNetV2, as the latter's paper compares with.

The frame is published: a stem, stages of 4, 8 and 4 units that start by halving the map, a pointwise convolution to
1,024 channels. The DenseNet's channels are not: its authors adjusted them to 42M and 142M multiply-adds. So do we.
"""

from __future__ import annotations

from torch import Tensor, cat, nn

from wirings.models.parts import check_width, conv_norm, for_images, stem
from wirings.models.registry import register, wired
from wirings.rules import Rule

STEM, UNITS, LAST = 24, (4, 8, 4), 1024
GROWTH = {0.5: 9, 1.0: 21}
"""New channels of a unit, by width; so that the network comes nearest to the published multiply-adds."""


def _norm_conv(before: int, channels: int, kernel: int) -> list[nn.Module]:
    conv = nn.Conv2d(before, channels, kernel, padding=kernel // 2, bias=False)
    return [nn.BatchNorm2d(before), nn.ReLU(inplace=True), conv]


class Unit(nn.Module):
    """A bottleneck whose few new channels stand beside all that came in."""

    def __init__(self, before: int, growth: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(*_norm_conv(before, 4 * growth, 1), *_norm_conv(4 * growth, growth, 3))

    def forward(self, x: Tensor) -> Tensor:
        return cat([x, self.branch(x)], 1)


class DenseNet(nn.Module):
    """Takes images, (batch, 3, size, size). ``width`` says how many channels a unit adds (see `GROWTH`)."""

    def __init__(self, width: float = 1.0, classes: int = 1000) -> None:
        super().__init__()
        check_width(width)
        growth = GROWTH.get(width, max(1, round(GROWTH[1.0] * width)))
        layers: list[nn.Module] = [stem(STEM)]
        channels = STEM
        for stage, units in enumerate(UNITS):
            kept = channels // 2 if stage else channels
            layers += [*_norm_conv(channels, kept, 1), nn.AvgPool2d(2, ceil_mode=True)]
            layers += [Unit(kept + growth * unit, growth) for unit in range(units)]
            channels = kept + growth * units
        layers += [
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            *conv_norm(channels, LAST, 1),
            nn.ReLU(inplace=True),
        ]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(LAST, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).mean((-2, -1)))


@register
def densenet(
    rule: str | Rule | None = None,
    width: float = 1.0,
    classes: int = 1000,
    image_size: int = 224,
    density: float | None = None,
) -> nn.Module:
    """The small DenseNet × ``width``; with a ``density`` it is wired, all but the first layer and the classifier."""
    model = for_images(DenseNet(width, classes), image_size)
    return wired(model, rule, density, skip=["features.0", "head"])
