"""A small DenseNet in the frame of ShuffleNetV2, which the latter's paper compares with.

The frame is published: a stem, stages of 4, 8 and 4 units that start by halving the maps, and a pointwise convolution
to 1,024 channels. The DenseNet's channels are not: its authors adjusted them to 42M and 142M multiply-adds, as we do.
"""

from __future__ import annotations

from torch import Tensor, cat, nn

from wirings.models.option_groups import DENSE_LAYERS, IMAGENET_SIZE, LayerWiring, NetworkSize
from wirings.models.parts import PooledClassifier, conv_norm, stem
from wirings.models.registry import register

STEM, UNITS, LAST = 24, (4, 8, 4), 1024
GROWTH = {0.5: 9, 1.0: 21}
"""Number of channels that a unit adds, by width, chosen to match the published multiply-adds as closely as possible."""


def _norm_conv(before: int, channels: int, kernel: int) -> list[nn.Module]:
    conv = nn.Conv2d(before, channels, kernel, padding=kernel // 2, bias=False)
    return [nn.BatchNorm2d(before), nn.ReLU(inplace=True), conv]


class DenseUnit(nn.Module):
    """A bottleneck whose output is concatenated to its input."""

    def __init__(self, before: int, growth: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(*_norm_conv(before, 4 * growth, 1), *_norm_conv(4 * growth, growth, 3))

    def forward(self, x: Tensor) -> Tensor:
        return cat([x, self.branch(x)], 1)


class DenseNet(PooledClassifier):
    """The small DenseNet. Its width sets how many channels a unit adds, see `GROWTH`."""

    def build_features(self, width: float) -> tuple[nn.Module, int]:
        growth = GROWTH.get(width, max(1, round(GROWTH[1.0] * width)))
        layers: list[nn.Module] = [stem(STEM)]
        channels = STEM
        for stage, units in enumerate(UNITS):
            kept = channels // 2 if stage else channels
            layers += [*_norm_conv(channels, kept, 1), nn.AvgPool2d(2, ceil_mode=True)]
            layers += [DenseUnit(kept + growth * unit, growth) for unit in range(units)]
            channels = kept + growth * units
        layers += [
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            *conv_norm(channels, LAST, 1),
            nn.ReLU(inplace=True),
        ]
        return nn.Sequential(*layers), LAST


@register
def densenet(size: NetworkSize = IMAGENET_SIZE, wiring: LayerWiring = DENSE_LAYERS) -> nn.Module:
    """The small DenseNet; all layers but the first and the classifier are wired."""
    return wiring.wire(DenseNet(size), skip=["features.0", "head"])
