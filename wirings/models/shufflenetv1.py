"""ShuffleNet (Zhang and others, 2018), with three groups."""

from __future__ import annotations

from torch import Tensor, nn

from wirings.models.option_groups import DENSE_LAYERS, IMAGENET_SIZE, LayerWiring, NetworkSize
from wirings.models.parts import PooledClassifier, ShortcutUnit, conv_norm, depthwise, stem
from wirings.models.registry import register

STEM, CHANNELS, UNITS, GROUPS = 24, (240, 480, 960), (4, 8, 4), 3


class ChannelShuffle(nn.Module):
    """Interleaves the channels of all groups, so that every group receives some of each."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        return x.view(batch, self.groups, channels // self.groups, height, width).transpose(1, 2).reshape(x.shape)


class ShuffleUnit(ShortcutUnit):
    """Grouped pointwise, depthwise and grouped pointwise convolution, with a shortcut."""

    def __init__(self, before: int, channels: int, stride: int, first_groups: int) -> None:
        inner = channels // 4
        branch = nn.Sequential(
            *conv_norm(before, inner, 1, groups=first_groups),
            nn.ReLU(inplace=True),
            ChannelShuffle(GROUPS),
            *depthwise(inner, stride),
            *conv_norm(inner, channels - before if stride == 2 else channels, 1, groups=GROUPS),
        )
        super().__init__(branch, stride)


class ShuffleNetV1(PooledClassifier):
    """ShuffleNet with three groups."""

    def build_features(self, width: float) -> tuple[nn.Module, int]:
        # Multiples of twelve: the groups, and the quarter of the channels inside a unit, must divide evenly.
        channels = [max(1, round(width * count / 12)) * 12 for count in (STEM, *CHANNELS)]
        units: list[nn.Module] = []
        for stage, (before, after, count) in enumerate(zip(channels, channels[1:], UNITS, strict=False)):
            # The few channels of the stem are not grouped.
            units.append(ShuffleUnit(before, after, 2, GROUPS if stage else 1))
            units += [ShuffleUnit(after, after, 1, GROUPS) for _ in range(count - 1)]
        return nn.Sequential(stem(channels[0]), *units), channels[-1]


@register
def shufflenetv1(size: NetworkSize = IMAGENET_SIZE, wiring: LayerWiring = DENSE_LAYERS) -> nn.Module:
    """ShuffleNet; all layers but the first and the classifier are wired."""
    return wiring.wire(ShuffleNetV1(size), skip=["features.0", "head"])
