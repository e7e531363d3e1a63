"""MobileNetV1-DNW, the network of the paper's Tables 2 and 3 (its section 2.4 and appendix A), and MobileNetV1 itself.

MobileNetV1 is a stack of depthwise and pointwise convolutions. MobileNetV1-DNW has a static graph for each of its five
resolutions instead: as many blocks of nodes as there are pointwise convolutions at that resolution, and any block may
feed any later one. Its nodes are those of the full network; only the number of edges goes with the width.

In MobileNetV1 a norm and a ReLU stand between the depthwise and the pointwise convolution. A node has none there.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

from torch import Tensor, nn

from wirings.budgets.schedules import floor_of
from wirings.errors import WiringError
from wirings.graph import Blocks, StaticGraph
from wirings.graph.nodes import ConvNode, PlainNode
from wirings.models.registry import register, wired
from wirings.rules import Rule
from wirings.rules import get as get_rule
from wirings.wire.handle import Wiring
from wirings.wire.wire import wire_

STEM = 32
SMALL_IMAGE = 64
"""Up to so many pixels the first convolution has no stride."""


class Stage(NamedTuple):
    """The depthwise and pointwise convolutions at one resolution."""

    before: int
    """Channels that come in."""
    channels: int
    """Channels that every pointwise convolution gives."""
    stride: int
    """Of the first depthwise convolution."""
    blocks: int
    """Pointwise convolutions."""

    def edges(self) -> int:
        """The weights of the pointwise convolutions of the full network."""
        return self.channels * (self.before + self.channels * (self.blocks - 1))


STAGES = (
    Stage(32, 64, 1, 1),
    Stage(64, 128, 2, 2),
    Stage(128, 256, 2, 2),
    Stage(256, 512, 2, 6),
    Stage(512, 1024, 2, 2),
)
SMALLEST = math.prod(stage.stride for stage in STAGES)
"""Pixels of the smallest image whose last map has one pixel."""


def edges_of_width(stage: Stage, width: float) -> int:
    """The edges of a stage at a width: its share of the full network's, rounded down.

    >>> [edges_of_width(stage, 0.225) for stage in STAGES]
    [103, 1244, 4976, 72990, 79626]
    """
    return math.floor(width * width * stage.edges() + 1e-6)


class MobileNetV1DNW(nn.Module):
    """A convolution, five static graphs, and a classifier. Takes images, (batch, 3, size, size).

    Args:
        classes: how many.
        image_size: of a side, in pixels; up to 64 the first convolution has no stride.
        reach: how many blocks an edge may go forward; None: any number, 1: to the next block alone.
        eps: of the nodes' norms, as for `ConvNode`.
    """

    def __init__(self, classes: int = 10, image_size: int = 32, reach: int | None = None, eps: float = 1e-5) -> None:
        super().__init__()
        self.input_shape = (3, image_size, image_size)
        self.smallest = check_size(image_size)
        self.stem = make_stem(STEM, image_size)
        self.stages = nn.Sequential(*(_graph(stage, reach, eps) for stage in STAGES))
        last = STAGES[-1].channels
        self.norm = nn.BatchNorm2d(last)
        self.activation = nn.ReLU()
        self.head = nn.Linear(last, classes)
        self.wiring: Wiring | None = None

    def forward(self, images: Tensor) -> Tensor:
        check_image(images, self.smallest)
        maps = self.activation(self.norm(self.stages(self.stem(images))))
        return self.head(maps.mean((-2, -1)))


def _graph(stage: Stage, reach: int | None, eps: float) -> StaticGraph:
    first, rest = (ConvNode(norm="batch", stride=stride, eps=eps) for stride in (stage.stride, 1))
    blocks = [stage.before, *[stage.channels] * stage.blocks]
    nodes = [first, *[rest] * (stage.blocks - 1), PlainNode()]
    return StaticGraph(Blocks(blocks, reach=reach), node=nodes)


class Separable(nn.Sequential):
    """A depthwise and a pointwise convolution, a norm and a ReLU after each."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__(
            nn.Conv2d(before, before, 3, stride=stride, padding=1, groups=before, bias=False),
            nn.BatchNorm2d(before),
            nn.ReLU(inplace=True),
            nn.Conv2d(before, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
        )


class MobileNetV1(nn.Module):
    """MobileNetV1 (Howard and others, 2017). Takes images, (batch, 3, size, size).

    Args:
        width: multiplies the channels of every layer.
        classes: how many.
        image_size: of a side, in pixels; up to 64 the first convolution has no stride.
    """

    def __init__(self, width: float = 1.0, classes: int = 10, image_size: int = 32) -> None:
        super().__init__()
        if not 0 < width <= 8 or round(STEM * width) < 1:
            raise WiringError(f"width must leave at least one channel of {STEM} (and be at most 8), but it is {width}.")
        self.input_shape = (3, image_size, image_size)
        self.smallest = check_size(image_size)
        channels = [STEM, *(stage.channels for stage in STAGES for _ in range(stage.blocks))]
        strides = [s for stage in STAGES for s in [stage.stride, *[1] * (stage.blocks - 1)]]
        channels = [round(count * width) for count in channels]
        stem = [make_stem(channels[0], image_size), nn.BatchNorm2d(channels[0]), nn.ReLU(inplace=True)]
        pairs = zip(itertools.pairwise(channels), strides, strict=True)
        self.features = nn.Sequential(*stem, *(Separable(*pair, stride) for pair, stride in pairs))
        self.head = nn.Linear(channels[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        check_image(images, self.smallest)
        return self.head(self.features(images).mean((-2, -1)))


def make_stem(channels: int, image_size: int) -> nn.Conv2d:
    """The first convolution."""
    return nn.Conv2d(3, channels, 3, stride=1 if image_size <= SMALL_IMAGE else 2, padding=1, bias=False)


def check_size(image_size: int) -> int:
    """The smallest image that a network for images of this size takes; raises if this one is smaller."""
    smallest = SMALLEST * (1 if image_size <= SMALL_IMAGE else 2)
    if image_size < smallest:
        raise WiringError(
            f"image_size = {image_size} is too small: the network halves an image four times, so it takes "
            f"{smallest} pixels a side at least."
        )
    return smallest


def check_image(images: Tensor, smallest: int) -> None:
    """Raise if the network's strides would leave nothing of these images."""
    if images.dim() != 4 or min(images.shape[-2:]) < smallest:
        raise WiringError(
            f"images must be (batch, 3, height, width) of at least {smallest} × {smallest} pixels, which the strides "
            f"leave one of, but {tuple(images.shape)} came."
        )


@register
def mobilenetv1_dnw(
    rule: str | Rule | None = None,
    width: float = 0.225,
    classes: int = 10,
    image_size: int = 32,
    small: bool = False,
    reach: int | None = None,
    share: str | None = None,
    eps: float = 1e-5,
) -> MobileNetV1DNW:
    """MobileNetV1-DNW with the edges of MobileNetV1 × ``width``; ``small``: the classifier keeps that part, too.

    Every stage has as many as MobileNetV1's; with a ``share``, as for `wire_`, that many in all are shared out anew.
    ``eps``: of the nodes' norms, as for `ConvNode`.
    """
    model = MobileNetV1DNW(classes, image_size, reach, eps)
    if rule is None:
        return model
    rule = get_rule(rule)
    names = [f"stages.{i}" for i in range(len(STAGES))] + (["head"] if small else [])
    if rule.own_budget:
        model.wiring = wire_(model, rule, include=names)
        return model
    if not width > 0:
        raise WiringError(f"width must be above 0, but it is {width}.")
    budget: dict[str, Any] = {}
    for name, stage, graph in zip(names, STAGES, model.stages, strict=False):
        budget[name] = max(edges_of_width(stage, width), 1)
        if budget[name] > graph.allowed:
            raise WiringError(
                f"width = {width} asks for {budget[name]:,} edges in {name}, which allows {graph.allowed:,}; "
                f"take a width of at most {math.sqrt(graph.allowed / stage.edges()):.3g}."  # type: ignore[operator]
            )
    if small:
        budget["head"] = float(width)
    if share is None:
        model.wiring = wire_(model, rule, budget=budget)
    else:
        total = sum(floor_of(n, model.head.weight.numel()) if isinstance(n, float) else n for n in budget.values())
        model.wiring = wire_(model, rule, k=total, share=share, include=names)
    return model


@register
def mobilenetv1(
    rule: str | Rule | None = None,
    width: float = 1.0,
    classes: int = 10,
    image_size: int = 32,
    density: float | None = None,
) -> nn.Module:
    """MobileNetV1 × ``width``; with a ``density`` its layers are wired, all but the first and the classifier."""
    model = MobileNetV1(width, classes, image_size)
    return wired(model, rule, density, skip=["features.0", "head"])
