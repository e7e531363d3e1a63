"""The operations of a program: what a network does, one small object a step.

Tensors are (batch, channels, height, width), (batch, features), or have another number of dimensions after the
channels. A channel is a node: operations say what happens along dimension 1. Every operation gives one tensor, which
has a name of its own; its weights are plain tensors, zeros included. Whether a convolution runs dense or sparse is
nothing that a program says.

The file is long since the whole vocabulary stands in one place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from wirings.compaction.allowed import PYTHON, guarded, python

Own = Mapping[str, Any]
"""The tensors of an operation by the name of their field; None where it has none there."""

ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "relu": F.relu,
    "clamp": torch.clamp,  # (lowest, highest); 0 and 6 are a relu6
    "leaky_relu": F.leaky_relu,  # (slope)
    "elu": F.elu,  # (alpha)
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "softplus": F.softplus,
    "mish": F.mish,
}
"""Functions of single numbers, with the parameters that they take after the tensor."""

_CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_POOLS: dict[tuple[str, int], Callable[..., Tensor]] = {
    ("max", 1): F.max_pool1d, ("max", 2): F.max_pool2d, ("max", 3): F.max_pool3d,
    ("avg", 1): F.avg_pool1d, ("avg", 2): F.avg_pool2d, ("avg", 3): F.avg_pool3d,
    ("adaptive_avg", 1): F.adaptive_avg_pool1d, ("adaptive_avg", 2): F.adaptive_avg_pool2d,
    ("adaptive_avg", 3): F.adaptive_avg_pool3d,
    ("adaptive_max", 1): F.adaptive_max_pool1d, ("adaptive_max", 2): F.adaptive_max_pool2d,
    ("adaptive_max", 3): F.adaptive_max_pool3d,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Operation(ABC):
    """One step. Its fields are its weights, and numbers, names and tuples of them."""

    output: str
    """The name of the tensor that it gives."""
    inputs: tuple[str, ...]
    """The names of the tensors that it takes."""
    weights: ClassVar[tuple[str, ...]] = ()
    """The fields that hold tensors."""

    @abstractmethod
    def compute(self, inputs: Sequence[Tensor], own: Own) -> Tensor:
        """The result for inputs, with the weights in ``own`` instead of the operation's (a module's parameters)."""

    def run(self, *inputs: Tensor) -> Tensor:
        """The result for inputs: the reference that every engine must meet."""
        return self.compute(inputs, self.tensors())

    def tensors(self) -> dict[str, Tensor | None]:
        """The weights by field, None where there are none."""
        return {name: getattr(self, name) for name in self.weights}


@dataclass(frozen=True, eq=False)
class Conv(Operation):
    """A convolution with zero padding, of one to three dimensions; depthwise where ``groups`` is the channels."""

    weights = ("weight", "bias")
    weight: Tensor
    """(out, in / groups, height, width)."""
    bias: Tensor | None = None
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    """Zeros on both sides of each dimension."""
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1

    def compute(self, inputs: Sequence[Tensor], own: Own) -> Tensor:
        convolution = _CONVOLUTIONS[len(self.stride)]
        return convolution(inputs[0], own["weight"], own["bias"], self.stride, self.padding, self.dilation, self.groups)

    @property
    def depthwise(self) -> bool:
        """Whether every channel has a kernel of its own and sees itself alone."""
        return self.groups == self.weight.shape[0] and self.weight.shape[1] == 1

    @property
    def pointwise(self) -> bool:
        """Whether it only sums over edges: one weight for each pair of channels, pixel by pixel."""
        plain = set(self.stride) == {1} and set(self.padding) == {0} and self.groups == 1
        return plain and set(self.weight.shape[2:]) == {1}


@dataclass(frozen=True, eq=False)
class Linear(Operation):
    """(batch, in) to (batch, out)."""

    weights = ("weight", "bias")
    weight: Tensor
    """(out, in)."""
    bias: Tensor | None = None

    def compute(self, inputs: Sequence[Tensor], own: Own) -> Tensor:
        return F.linear(inputs[0], own["weight"], own["bias"])


@dataclass(frozen=True, eq=False)
class Affine(Operation):
    """Each channel times ``scale`` plus ``shift``, (channels,) both: a batch norm in evaluation."""

    weights = ("scale", "shift")
    scale: Tensor
    shift: Tensor

    def compute(self, inputs: Sequence[Tensor], own: Own) -> Tensor:
        return inputs[0] * by_channel(own["scale"], inputs[0]) + by_channel(own["shift"], inputs[0])


@dataclass(frozen=True, eq=False)
class InstanceNorm(Operation):
    """Each channel of each image less its mean over the pixels, by its standard deviation, times scale plus shift."""

    weights = ("scale", "shift")
    scale: Tensor
    shift: Tensor
    epsilon: float = 1e-5

    def compute(self, inputs: Sequence[Tensor], own: Own) -> Tensor:
        if inputs[0].shape[0] == 0:
            return inputs[0]  # PyTorch's takes no empty batch
        return F.instance_norm(inputs[0], weight=own["scale"], bias=own["shift"], eps=self.epsilon)


@dataclass(frozen=True, eq=False)
class Activation(Operation):
    """A function of single numbers, one of `ACTIVATIONS`."""

    kind: str = "relu"
    values: tuple[float, ...] = ()
    """The function's parameters."""

    def compute(self, inputs: Sequence[Tensor], own: Own) -> Tensor:
        return ACTIVATIONS[self.kind](inputs[0], *self.values)


@dataclass(frozen=True, eq=False)
class Add(Operation):
    """The sum of two or more tensors of one shape."""

    def compute(self, inputs: Sequence[Tensor], own: Own) -> Tensor:
        total = inputs[0]
        for x in inputs[1:]:
            total = total + x
        return total


@dataclass(frozen=True, eq=False)
class Multiply(Operation):
    """The product of two tensors with the same channels; maps of one pixel stand for all pixels."""

    def compute(self, inputs: Sequence[Tensor], own: Own) -> Tensor:
        return inputs[0] * inputs[1]


@dataclass(frozen=True, eq=False)
class AddMap(Operation):
    """Plus a constant map for each channel, (channels, height, width): what constant nodes bring, borders exact."""

    weights = ("map",)
    map: Tensor

    def compute(self, inputs: Sequence[Tensor], own: Own) -> Tensor:
        return inputs[0] + own["map"]


@dataclass(frozen=True, eq=False)
class Concat(Operation):
    """The channels of several tensors, one after the other."""

    def compute(self, inputs: Sequence[Tensor], own: Own) -> Tensor:
        return torch.cat(list(inputs), 1)


@dataclass(frozen=True, eq=False)
class Select(Operation):
    """Some channels, by number."""

    weights = ("index",)
    index: Tensor

    def compute(self, inputs: Sequence[Tensor], own: Own) -> Tensor:
        return inputs[0].index_select(1, own["index"])


@dataclass(frozen=True, eq=False)
class Place(Operation):
    """Channels put where ``index`` says among ``channels`` of them; the others are zero."""

    weights = ("index",)
    index: Tensor
    channels: int = 0

    def compute(self, inputs: Sequence[Tensor], own: Own) -> Tensor:
        x = inputs[0]
        return x.new_zeros(x.shape[0], self.channels, *x.shape[2:]).index_copy(1, own["index"], x)


@dataclass(frozen=True, eq=False)
class Pool(Operation):
    """A pool of each channel: max or avg; adaptive_avg or adaptive_max, whose ``kernel`` is the output's size."""

    kind: str = "max"
    kernel: tuple[int, ...] = (2, 2)
    stride: tuple[int, ...] = (2, 2)
    padding: tuple[int, ...] = (0, 0)
    dilation: tuple[int, ...] = (1, 1)
    ceil: bool = False
    count_padding: bool = True

    def compute(self, inputs: Sequence[Tensor], own: Own) -> Tensor:
        x, pool = inputs[0], _POOLS[self.kind, len(self.kernel)]
        if self.kind == "max":
            return pool(x, self.kernel, self.stride, self.padding, self.dilation, self.ceil)
        if self.kind == "avg":
            return pool(x, self.kernel, self.stride, self.padding, self.ceil, self.count_padding)
        return pool(x, self.kernel)


@dataclass(frozen=True, eq=False)
class Mean(Operation):
    """The mean over all pixels: (batch, channels), or with ``keep`` (batch, channels, 1, 1)."""

    keep: bool = False

    def compute(self, inputs: Sequence[Tensor], own: Own) -> Tensor:
        return inputs[0].mean(list(range(2, inputs[0].dim())), keepdim=self.keep)


@dataclass(frozen=True, eq=False)
class Crop(Operation):
    """Some pixels: from ``starts`` to before ``stops``, in ``steps``, one of each for every dimension of the maps."""

    starts: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()

    def compute(self, inputs: Sequence[Tensor], own: Own) -> Tensor:
        places = zip(self.starts, self.stops, self.steps, strict=True)
        return inputs[0][(slice(None), slice(None), *(slice(*place) for place in places))]


@dataclass(frozen=True, eq=False)
class Pad(Operation):
    """Zeros around the maps; ``before`` and ``after`` have one number for every dimension of the maps."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def compute(self, inputs: Sequence[Tensor], own: Own) -> Tensor:
        pairs = list(zip(self.before, self.after, strict=True))
        return F.pad(inputs[0], [side for pair in reversed(pairs) for side in pair])


@dataclass(frozen=True, eq=False)
class Flatten(Operation):
    """(batch, channels, height, width) to (batch, channels · height · width): each channel's pixels in a row."""

    def compute(self, inputs: Sequence[Tensor], own: Own) -> Tensor:
        return inputs[0].flatten(1)


@dataclass(frozen=True, eq=False)
class Reshape(Operation):
    """Each channel's pixels, in their order, as a map of another ``shape``; () leaves one number a channel."""

    shape: tuple[int, ...] = ()

    def compute(self, inputs: Sequence[Tensor], own: Own) -> Tensor:
        return inputs[0].reshape(*inputs[0].shape[:2], *self.shape)


@dataclass(frozen=True, eq=False)
class Constant(Operation):
    """A constant map for each channel, (channels, height, width), as often as its input has images."""

    weights = ("map",)
    map: Tensor

    def compute(self, inputs: Sequence[Tensor], own: Own) -> Tensor:
        return own["map"].expand(inputs[0].shape[0], *own["map"].shape)


@dataclass(frozen=True)
class Taken:
    """In an opaque operation's arguments: the input of this number."""

    number: int


@dataclass(frozen=True)
class Held:
    """In an opaque operation's arguments: the weight of this number."""

    number: int


@dataclass(frozen=True, eq=False)
class Opaque(Operation):
    """Any other operator, run by PyTorch. Unless it is ``channelwise``, no channel around it can go."""

    target: str = ""
    """An operator such as ``aten::softmax.int``, or one of Python's such as ``getitem``."""
    arguments: tuple[Any, ...] = ()
    """What it takes: numbers, names, tuples of them, `Taken` and `Held`."""
    options: tuple[tuple[str, Any], ...] = ()
    """The same by name."""
    channelwise: bool = False
    """Whether it takes one tensor and does the same to every channel, alone."""
    held: tuple[Tensor, ...] = ()

    def compute(self, inputs: Sequence[Tensor], own: Own) -> Tensor:
        values = [own[f"held{i}"] for i in range(len(self.held))]

        def filled(x: Any) -> Any:
            if isinstance(x, Taken):
                return inputs[x.number]
            if isinstance(x, Held):
                return values[x.number]
            return [filled(item) for item in x] if isinstance(x, tuple) else x

        named = {name: filled(x) for name, x in self.options}
        arguments = tuple(filled(x) for x in self.arguments)
        guarded(self.target, arguments, named)
        return operator(self.target)(*arguments, **named)

    def tensors(self) -> dict[str, Tensor | None]:
        return {f"held{i}": value for i, value in enumerate(self.held)}


def operator(target: str) -> Any:
    """The operator of a name: PyTorch's, such as ``aten::softmax.int``, or one of `PYTHON`."""
    if target in PYTHON:
        return python(target)
    space, _, name = target.partition("::")
    name, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, space), name), overload or "default")


def by_channel(values: Tensor, x: Tensor) -> Tensor:
    """One number a channel, shaped to go with (batch, channels, …)."""
    return values.view(-1, *[1] * (x.dim() - 2))


KINDS: dict[str, type[Operation]] = {
    kind.__name__: kind
    for kind in (
        Conv, Linear, Affine, InstanceNorm, Activation, Add, Multiply, AddMap, Concat, Select, Place, Pool, Mean, Crop,
        Pad, Flatten, Reshape, Constant, Opaque,
    )
}  # fmt: skip
"""All operations by name."""
