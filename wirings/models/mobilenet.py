"""MobileNetV1-DNW, the network of the paper's Tables 2 and 3 (its section 2.4 and appendix A), and MobileNetV1 itself.

MobileNetV1 is a stack of depthwise and pointwise convolutions. MobileNetV1-DNW has a static graph for each of the five
resolutions instead, with one block of nodes for each pointwise convolution at that resolution, and edges from any block
to any later one. It always has the nodes of the full network; the width only determines the number of edges.

MobileNetV1 has a norm and a ReLU between the depthwise and the pointwise convolution. A node has none there.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wirings.budgets.schedules import floor_of
from wirings.errors import WiringError
from wirings.graph import Blocks, StaticGraph
from wirings.graph.ends import convolves, first_maps, pooled_maps
from wirings.graph.nodes import ConvNode, PlainNode
from wirings.models.option_groups import CIFAR10_SIZE, DENSE_LAYERS, LayerWiring, NetworkSize
from wirings.models.parts import SMALL_IMAGE, check_image_size, check_images
from wirings.models.registry import register
from wirings.rules import Rule
from wirings.rules import get as get_rule
from wirings.selection.structure import FREE, Structure
from wirings.wire.handle import Wiring
from wirings.wire.wire import wire_

STEM = 32
DNW_SIZE = NetworkSize(width=0.225, classes=10, image_size=32)


class Stage(NamedTuple):
    """The depthwise and pointwise convolutions at one resolution."""

    before: int
    """Input channels."""
    channels: int
    """Output channels of every pointwise convolution."""
    stride: int
    """Stride of the first depthwise convolution."""
    blocks: int
    """Number of pointwise convolutions."""

    def edges(self) -> int:
        """Return the number of weights of the full network's pointwise convolutions."""
        return self.channels * (self.before + self.channels * (self.blocks - 1))


STAGES = (
    Stage(32, 64, 1, 1),
    Stage(64, 128, 2, 2),
    Stage(128, 256, 2, 2),
    Stage(256, 512, 2, 6),
    Stage(512, 1024, 2, 2),
)
SMALLEST = math.prod(stage.stride for stage in STAGES)
"""Height and width in pixels of the smallest image, whose last map has one pixel."""


def edges_of_width(stage: Stage, width: float) -> int:
    """Return the number of edges of a stage at a width: width² of the full network's, rounded down.

    >>> [edges_of_width(stage, 0.225) for stage in STAGES]
    [103, 1244, 4976, 72990, 79626]
    """
    return math.floor(width * width * stage.edges() + 1e-6)


class MobileNetV1DNW(nn.Module):
    """A convolution, five static graphs, and a classifier. Takes images, (batch, 3, height, width).

    Args:
        classes: Number of classes.
        image_size: Height and width of the images in pixels; up to 64, the first convolution has no stride.
        reach: How many blocks forward an edge may go; 1 is the next block only, None is any number.
        eps: Epsilon of the nodes' norms, see `ConvNode`.
    """

    def __init__(self, classes: int = 10, image_size: int = 32, reach: int | None = None, eps: float = 1e-5) -> None:
        super().__init__()
        self.input_shape = (3, image_size, image_size)
        self.smallest = smallest_image(image_size)
        self.stem = make_stem(STEM, image_size)
        self.stages = nn.Sequential(*(_graph(stage, reach, eps) for stage in STAGES))
        last = STAGES[-1].channels
        self.norm = nn.BatchNorm2d(last)
        self.activation = nn.ReLU()
        self.head = nn.Linear(last, classes)
        self.wiring: Wiring | None = None
        self.sole_readers = {"stem": "stages.0"}
        """By the name of a dense layer, the graph that alone reads its channels: those no edge leaves cost nothing."""

    def forward(self, images: Tensor) -> Tensor:
        check_images(images, self.smallest)
        maps = self.stages(first_maps(self.stem, images))
        return self.head(pooled_maps(maps, self.norm, self.activation))

    def runs_in_own_kernels(self, dtype: torch.dtype) -> bool:
        """Return whether nearly all of a step on a GPU runs in kernels of this library, in this precision.

        A compiled model cannot use them: a captured step is faster if the model is not compiled.
        """
        graphs = all(isinstance(graph, StaticGraph) and graph.is_one_operation for graph in self.stages)
        return graphs and convolves(self.stem, dtype)


def _graph(stage: Stage, reach: int | None, eps: float) -> StaticGraph:
    first, rest = (ConvNode(norm="batch", stride=stride, eps=eps) for stride in (stage.stride, 1))
    blocks = [stage.before, *[stage.channels] * stage.blocks]
    nodes = [first, *[rest] * (stage.blocks - 1), PlainNode()]
    return StaticGraph(Blocks(blocks, reach=reach), node=nodes)


class SeparableConv(nn.Sequential):
    """A depthwise and a pointwise convolution, each followed by a norm and a ReLU."""

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
    """MobileNetV1 (Howard and others, 2017). Takes images, (batch, 3, height, width).

    Args:
        size: Width, classes and images. For images of up to 64 pixels, the first convolution has no stride.
    """

    def __init__(self, size: NetworkSize = CIFAR10_SIZE) -> None:
        super().__init__()
        width, image_size = size.width, size.image_size
        if not 0 < width <= 8 or round(STEM * width) < 1:
            raise WiringError(f"width must leave at least one of {STEM} channels and be at most 8, got {width}.")
        self.input_shape = (3, image_size, image_size)
        self.smallest = smallest_image(image_size)
        channels = [STEM, *(stage.channels for stage in STAGES for _ in range(stage.blocks))]
        strides = [s for stage in STAGES for s in [stage.stride, *[1] * (stage.blocks - 1)]]
        channels = [round(count * width) for count in channels]
        stem = [make_stem(channels[0], image_size), nn.BatchNorm2d(channels[0]), nn.ReLU(inplace=True)]
        pairs = zip(itertools.pairwise(channels), strides, strict=True)
        self.features = nn.Sequential(*stem, *(SeparableConv(*pair, stride) for pair, stride in pairs))
        self.head = nn.Linear(channels[-1], size.classes)

    def forward(self, images: Tensor) -> Tensor:
        check_images(images, self.smallest)
        return self.head(self.features(images).mean((-2, -1)))


def make_stem(channels: int, image_size: int) -> nn.Conv2d:
    """Return the first convolution."""
    return nn.Conv2d(3, channels, 3, stride=1 if image_size <= SMALL_IMAGE else 2, padding=1, bias=False)


def smallest_image(image_size: int) -> int:
    """Return the smallest image that a network for images of this size takes. An error if this one is smaller."""
    smallest = SMALLEST * (1 if image_size <= SMALL_IMAGE else 2)
    check_image_size(image_size, smallest)
    return smallest


@register
def mobilenetv1_dnw(
    size: NetworkSize = DNW_SIZE,
    rule: str | Rule | None = None,
    small: bool = False,
    reach: int | None = None,
    share: str | None = None,
    eps: float = 1e-5,
    mult_adds: float | None = None,
    structure: str = FREE,
) -> MobileNetV1DNW:
    """MobileNetV1-DNW with the edges of MobileNetV1 at a width of ``size.width``.

    Args:
        size: Width, classes and images.
        rule: A rule or its name.
        small: Whether the classifier keeps only that fraction of its weights, too.
        reach: See `MobileNetV1DNW`.
        share: How the edges are shared among the stages, see `wirings.wire_`; by default every stage has as many as
            MobileNetV1's.
        eps: See `MobileNetV1DNW`.
        mult_adds: At most so many multiply-adds of the whole network, if ``share`` is given; see `wirings.wire_`.
        structure: Which edges are real together, such as "16x16"; see `wirings.wire_`. The fractions of the groups are
            then those of the edges, and with N:M the width has no influence on them.
    """
    model, made = MobileNetV1DNW(size.classes, size.image_size, reach, eps), Structure.of(structure)
    if rule is None:
        if made is not None:
            raise WiringError(f"structure={structure!r} needs a rule that chooses edges, such as 'dnw'.")
        return model
    rule = get_rule(rule)
    names = [f"stages.{i}" for i in range(len(STAGES))] + (["head"] if small else [])
    if rule.own_budget or (made is not None and made.fixed is not None):
        model.wiring = wire_(model, rule, include=names, structure=structure)
        return model
    width = size.width
    if not width > 0:
        raise WiringError(f"width must be above 0, got {width}.")
    budget: dict[str, Any] = {}
    for name, stage, graph in zip(names, STAGES, model.stages, strict=False):
        budget[name] = max(edges_of_width(stage, width), 1)
        if budget[name] > graph.allowed:
            raise WiringError(
                f"width = {width} needs {budget[name]:,} edges in {name}, which allows {graph.allowed:,}. "
                f"Use a width of at most {math.sqrt(graph.allowed / stage.edges()):.3g}."  # type: ignore[operator]
            )
    if small:
        budget["head"] = float(width)
    if mult_adds is not None and share is None:
        raise WiringError('mult_adds bounds edges that are shared among the stages: give share, such as "global".')
    sizes = {name: model.get_submodule(name).weight.numel() for name in budget}  # type: ignore[operator]
    total = sum(floor_of(n, sizes[name]) if isinstance(n, float) else n for name, n in budget.items())
    if made is not None:  # groups may have different sizes, of which no number of edges can be made
        budget = {name: n if isinstance(n, float) else n / sizes[name] for name, n in budget.items()}
    if share is None:
        model.wiring = wire_(model, rule, budget=budget, structure=structure)
    else:
        amount: dict[str, Any] = {"k": total} if made is None else {"density": total / sum(sizes.values())}
        amount |= {"mult_adds": mult_adds, "share": share, "structure": structure}
        model.wiring = wire_(model, rule, include=names, **amount)
    return model


@register
def mobilenetv1(size: NetworkSize = CIFAR10_SIZE, wiring: LayerWiring = DENSE_LAYERS) -> nn.Module:
    """MobileNetV1, for CIFAR-10 by default; all layers but the first and the classifier are wired."""
    return wiring.wire(MobileNetV1(size), skip=["features.0", "head"])
