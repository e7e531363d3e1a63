"""A light Xception, as in "Light-Head R-CNN" (Li and others, 2017) and in the comparison of ShuffleNetV2's paper.

The latter gives the channels of every stage (144, 288, 576) and 145M multiply-adds, but not the structure of a unit.
Ours is a bottleneck of pointwise convolutions around two depthwise ones, joined to its shortcut as in ShuffleNet. It
has 145M multiply-adds at width 1 and 40M at width 0.5, as published.
"""

from __future__ import annotations

from torch import nn

from wirings.models.option_groups import DENSE_LAYERS, IMAGENET_SIZE, LayerWiring, NetworkSize
from wirings.models.parts import PooledClassifier, ShortcutUnit, conv_norm, depthwise, stem
from wirings.models.registry import register

STEM, CHANNELS, UNITS = 24, (144, 288, 576), (4, 8, 4)


class XceptionUnit(ShortcutUnit):
    """Pointwise, two depthwise and pointwise convolutions, with a shortcut."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        inner = channels // 4
        branch = nn.Sequential(
            *conv_norm(before, inner, 1),
            nn.ReLU(inplace=True),
            *depthwise(inner, stride),
            *depthwise(inner),
            *conv_norm(inner, channels - before if stride == 2 else channels, 1),
        )
        super().__init__(branch, stride)


class Xception(PooledClassifier):
    """The light Xception."""

    def build_features(self, width: float) -> tuple[nn.Module, int]:
        channels = [max(1, round(width * count / 4)) * 4 for count in (STEM, *CHANNELS)]
        units: list[nn.Module] = []
        for before, after, count in zip(channels, channels[1:], UNITS, strict=False):
            units += [XceptionUnit(before, after, 2), *(XceptionUnit(after, after, 1) for _ in range(count - 1))]
        return nn.Sequential(stem(channels[0]), *units), channels[-1]


@register
def xception(size: NetworkSize = IMAGENET_SIZE, wiring: LayerWiring = DENSE_LAYERS) -> nn.Module:
    """The light Xception; all layers but the first and the classifier are wired."""
    return wiring.wire(Xception(size), skip=["features.0", "head"])
