"""Convert PyTorch's operators into operations of a program.

The functions that do so are defined beside the operations they produce, in `wirings.compaction.operations`, and are
registered here with `converts`. Each takes the builder, a hint for the result's name and the operator's arguments by
name: tensors of the program (`ProgramTensor`), constant tensors (weights) and plain Python values. It returns a tensor
of the program, a tuple of them, or None if it cannot express the operator with these arguments. Operators that nothing
can express become a `TorchOperator`.

Operators that share a function differ in keyword arguments that are given when it is registered. What a function does
never depends on the hint.

Functions that are registered with `converts` take tensors that are stored as the model sees them. Those registered with
`converts_views` take tensors whose dimensions are in another order, too (`wirings.compaction.axes`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from wirings.compaction.axes import Axes
from wirings.compaction.builder import ProgramBuilder


@dataclass(frozen=True)
class ProgramTensor:
    """A tensor of the model: a tensor of the program by name, and how it lies there."""

    name: str
    axes: Axes | None = None
    """None if it is stored as the model sees it."""


Arguments = dict[str, Any]
Converter = Callable[[ProgramBuilder, str, Arguments], Any]
CONVERTERS: dict[str, Converter] = {}
"""By the operator's name without its overload; all overloads of a name share one function."""

VIEW_CONVERTERS: dict[str, Converter] = {}
"""The same, for tensors whose dimensions may be in another order."""

CHANNELWISE = {
    "abs", "ceil", "cos", "erf", "exp", "expm1", "floor", "hardshrink", "log1p", "log_sigmoid", "logit",
    "pow", "reciprocal", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d", "round",
    "rsqrt", "selu", "celu", "sign", "sin", "softshrink", "softsign", "sqrt", "square", "threshold", "trunc",
    "upsample_bicubic2d", "upsample_bilinear2d", "upsample_linear1d", "upsample_nearest1d", "upsample_nearest2d",
    "upsample_nearest3d", "upsample_trilinear3d", "_upsample_nearest_exact2d", "lp_pool2d",
}  # fmt: skip
"""Operators of one tensor that treat all of its channels alike and separately. They have no operation of their own."""


Register = Callable[[Callable[..., Any]], Callable[..., Any]]


def converts(*names: str, **variant: Any) -> Register:
    """Register a function that converts the operators of these names, with keyword arguments that tell them apart."""
    return _register(CONVERTERS, names, variant)


def converts_views(*names: str, **variant: Any) -> Register:
    """Register a function that converts the operators of these names, for tensors with any `Axes`."""
    return _register(VIEW_CONVERTERS, names, variant)


def _register(converters: dict[str, Converter], names: tuple[str, ...], variant: dict[str, Any]) -> Register:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        converters.update(dict.fromkeys(names, partial(function, **variant) if variant else function))
        return function

    return register


def view_of(builder: ProgramBuilder, x: Any) -> Axes | None:
    """The axes of an argument that is a floating-point tensor of the program; None for any other argument."""
    if not isinstance(x, ProgramTensor) or x.name in builder.loose:
        return None
    value = builder.values[x.name]
    if not isinstance(value, Tensor) or value.dim() < 2 or not value.is_floating_point():
        return None
    return Axes.plain(tuple(value.shape)) if x.axes is None else x.axes


def viewed(builder: ProgramBuilder, name: str, axes: Axes, channels: int | None = None) -> ProgramTensor:
    """A stored tensor as the model sees it.

    Args:
        builder: the program.
        name: the stored tensor.
        axes: the axes of a tensor of the same shape, or of one with another number of channels.
        channels: in the latter case, the dimension that has all channels.
    """
    if channels is not None:
        dims, stored = list(axes.dims), tuple(builder.values[name].shape)
        dims[channels] = Axes.plain(stored).dims[1]
        axes = Axes(stored, tuple(dims))
    return ProgramTensor(name, None if axes.is_plain else axes)


@dataclass(frozen=True)
class BatchConstant:
    """A constant that the model repeats for every example of a batch: (1, …)."""

    value: Tensor


def has_channels(builder: ProgramBuilder, x: Any) -> bool:
    """Whether an argument is a floating-point tensor of the program with a batch and channels."""
    if not isinstance(x, ProgramTensor):
        return False
    value = builder.values[x.name]
    return isinstance(value, Tensor) and value.dim() >= 2 and value.is_floating_point()


def per_dimension(value: Any, dims: int) -> tuple[int, ...]:
    """One number for each of ``dims`` dimensions, from one for all of them or one for each."""
    numbers = [value] if isinstance(value, int) else list(value)
    return tuple(int(x) for x in (numbers * dims if len(numbers) == 1 else numbers))


def takes_all(a: Arguments) -> bool:
    """Whether the arguments ``start``, ``end`` and ``step`` select a whole dimension."""
    end = a.get("end")
    return a.get("start") in (None, 0) and (end is None or end >= 2**62) and a.get("step", 1) == 1


@converts("clone", "contiguous", "alias", "detach", "dropout", "feature_dropout", "lift_fresh_copy", "_to_copy", "to")
def _identity(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
    x: Any = next(iter(a.values()))
    if not has_channels(builder, x) or a.get("train") or a.get("dtype") not in (None, builder.values[x.name].dtype):
        return None
    return x


@converts("copy", "slice_scatter")
def _overwrite(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
    """In-place changes of a whole tensor, such as ``x[:] += y``."""
    x, source = a["self"], a["src"]
    if not has_channels(builder, x) or not has_channels(builder, source) or not takes_all(a):
        return None
    before, after = builder.values[x.name], builder.values[source.name]
    return source if (before.shape, before.dtype) == (after.shape, after.dtype) else None
