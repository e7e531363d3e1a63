"""Convert PyTorch's operators on tensors whose channels are not in dimension 1, such as a transformer's tokens.

Views only change how a tensor lies in the program (`wirings.compaction.axes`). Everything else is expressed on the
tensor as it is stored, with its channels in dimension 1. The functions are registered in `wirings.compaction.aten`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wirings.compaction.aten import (
    CONVERTERS,
    Arguments,
    BatchConstant,
    ProgramTensor,
    converts_views,
    view_of,
    viewed,
)
from wirings.compaction.axes import Axes, Factor
from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.operations.add import Add
from wirings.compaction.operations.add_map import AddMap
from wirings.compaction.operations.add_numbers import AddNumbers
from wirings.compaction.operations.affine import add_affine
from wirings.compaction.operations.arrange import arrange, stored_with_channels
from wirings.compaction.operations.conv import Conv
from wirings.compaction.operations.linear import Linear, product_and_bias_as_linear, product_as_linear
from wirings.compaction.operations.mean import Mean
from wirings.compaction.operations.multiply import Multiply
from wirings.compaction.operations.multiply_map import MultiplyMap
from wirings.compaction.operations.reshape import Reshape
from wirings.compaction.operations.select_channels import SelectChannels

# ---- views ----------------------------------------------------------------------------------------------------------


def changed_axes(x: ProgramTensor, axes: Axes | None) -> ProgramTensor | None:
    """The same stored tensor with other axes."""
    return None if axes is None else ProgramTensor(x.name, None if axes.is_plain else axes)


@converts_views("permute", moved=lambda x, a: x.permute(a["dims"]))
@converts_views("transpose", moved=lambda x, a: x.transpose(a["dim0"], a["dim1"]))
@converts_views("swapaxes", moved=lambda x, a: x.swapaxes(a["axis0"], a["axis1"]))
@converts_views("t", moved=lambda x, a: x.t())
@converts_views("movedim", moved=lambda x, a: x.movedim(a["source"], a["destination"]))
def _permute(builder: ProgramBuilder, hint: str, a: Arguments, moved: Callable[[Tensor, Arguments], Tensor]) -> Any:
    """Another order of dimensions, which ``moved`` applies to a tensor with the given arguments."""
    x: Any = a["self"]
    axes = view_of(builder, x)
    if axes is None:
        return None
    numbered = torch.empty([d + 1 for d in range(len(axes.dims))], device="meta")  # sizes tell dimensions apart
    return changed_axes(x, axes.permuted([size - 1 for size in moved(numbered, a).shape]))


@converts_views("view", "reshape", "_unsafe_view", "flatten", "squeeze", "unsqueeze", "unflatten")
@converts_views("expand", repeats=True)
def _reshape(builder: ProgramBuilder, hint: str, a: Arguments, repeats: bool = False) -> Any:
    x, sizes = a["self"], a["sizes"]
    axes = view_of(builder, x)
    if isinstance(x, ProgramTensor) and x.axes is None and x.name not in builder.loose:
        value = builder.values[x.name]
        if isinstance(value, Tensor) and tuple(value.shape) == sizes:
            return x
    if axes is None or sizes is None:
        return None
    return _repeat_channels(builder, x, axes, sizes) if repeats else changed_axes(x, axes.reshaped(sizes))


def _repeat_channels(builder: ProgramBuilder, x: ProgramTensor, axes: Axes, sizes: tuple[int, ...]) -> Any:
    """Repeat a dimension of size 1 that is right after a factor of the channels, such as shared heads of keys."""
    if len(sizes) != len(axes.dims):
        return None
    changed = [d for d, (old, new) in enumerate(zip(axes.shape, sizes, strict=True)) if old != new]
    if len(changed) != 1 or changed[0] == 0:
        return None if changed else x
    (dim,) = changed
    before = axes.dims[dim - 1]
    if len(before) != 1 or before[0].dim != 1 or axes.shape[dim] != 1:
        return None
    count, inner = sizes[dim], before[0].stride
    index = torch.arange(axes.stored[1]).view(-1, 1, inner).expand(-1, count, -1).flatten()
    made = builder.add(SelectChannels, (x.name,), "expand", index=index)

    def moved(f: Factor) -> Factor:
        return f._replace(stride=f.stride * count) if f.dim == 1 and f.stride >= inner else f

    dims = [tuple(map(moved, own)) for own in axes.dims]
    dims[dim] = (Factor(1, count, inner),)
    stored = (axes.stored[0], axes.stored[1] * count, *axes.stored[2:])
    return viewed(builder, made, Axes(stored, tuple(dims)))


@converts_views("clone", "contiguous", "alias", "detach", "dropout", "feature_dropout", "_to_copy", "to")
def _identity(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
    x: Any = next(iter(a.values()))
    axes = view_of(builder, x)
    if axes is None or a.get("train") or a.get("dtype") not in (None, builder.values[x.name].dtype):
        return None
    return x


# ---- pixel by pixel -------------------------------------------------------------------------------------------------


def _activation(builder: ProgramBuilder, hint: str, a: Arguments, operator: str) -> Any:
    """An operator on single numbers, of a tensor as it is stored."""
    first = next(iter(a))
    axes = view_of(builder, a[first])
    if axes is None:
        return None
    made = CONVERTERS[operator](builder, hint, {**a, first: ProgramTensor(a[first].name)})
    return None if made is None else viewed(builder, made.name, axes)


for _operator in (
    "relu", "tanh", "sigmoid", "silu", "hardswish", "hardsigmoid", "mish", "gelu", "hardtanh", "relu6", "clamp",
    "clamp_min", "clamp_max", "leaky_relu", "elu", "softplus",
):  # fmt: skip
    converts_views(_operator, operator=_operator)(_activation)


def stored_alike(builder: ProgramBuilder, x: ProgramTensor, y: ProgramTensor) -> tuple[str, str, Axes] | None:
    """Two tensors of one shape, stored in the same way: their names and their axes."""
    one, two = view_of(builder, x), view_of(builder, y)
    if one is None or two is None or one.shape != two.shape:
        return None
    if one == two:
        return x.name, y.name, one
    if x.axes is None and y.axes is not None:
        found = stored_alike(builder, y, x)
        return None if found is None else (found[1], found[0], found[2])
    if not one.batch_first or not two.batch_first:
        return None
    parts = [f for dim in one.dims for f in dim]
    split = two.reshaped([f.size for f in parts])
    if split is None:
        return None
    order = sorted(range(len(parts)), key=lambda i: (parts[i].dim, -parts[i].stride))
    moved = split.permuted(order).reshaped(one.stored)
    if moved is None:
        return None
    return x.name, arrange(builder, y.name, moved, "arranged"), one


def _maps_and_numbers(builder: ProgramBuilder, x: ProgramTensor, y: ProgramTensor) -> tuple[str, str, Axes] | None:
    """Maps, and one number per channel that is the same for all pixels, as maps of one pixel; and the axes of the maps.

    Such as (batch, tokens, features) and (batch, 1, features).
    """
    one, two = view_of(builder, x), view_of(builder, y)
    if one is None or two is None or len(one.dims) != len(two.dims):
        return None
    if math.prod(one.shape) < math.prod(two.shape):
        return _maps_and_numbers(builder, y, x)
    maps = len(one.stored) - 2
    channels = [d for d in range(len(one.dims)) if one.is_channels(d) and two.is_channels(d)]
    single = math.prod(two.stored[2:]) == 1 and one.stored[:2] == two.stored[:2]
    if maps < 1 or not single or len(channels) != 1 or not one.batch_first or not two.batch_first:
        return None
    if any(own for d, own in enumerate(two.dims) if d not in (0, channels[0])):
        return None
    if one.stored[1] == 1:
        return None  # which dimension has the channel is not known
    name = (
        y.name if len(two.stored) == len(one.stored) else builder.add(Reshape, (y.name,), "numbers", shape=(1,) * maps)
    )
    return x.name, name, one


@converts_views("add")
@converts_views("sub", sign=-1.0)
@converts_views("rsub", sign=-1.0, swapped=True)
def _sum(builder: ProgramBuilder, hint: str, a: Arguments, sign: float = 1.0, swapped: bool = False) -> Any:
    """The sum self + sign · other, or other + sign · self."""
    x, y, alpha = a["self"], a["other"], a.get("alpha", 1)
    if swapped:
        x, y = y, x
    if alpha != 1:
        return None
    if isinstance(x, ProgramTensor) and isinstance(y, ProgramTensor):
        found, numbers = stored_alike(builder, x, y), None
        if found is None and sign > 0:
            numbers = _maps_and_numbers(builder, x, y)
        if numbers is not None:
            return viewed(builder, builder.add(AddNumbers, numbers[:2], hint), numbers[2])
        if found is None:
            return None
        one, two, alike = found
        if sign < 0:
            two = _affine(builder, hint, two, torch.tensor(-1.0), torch.tensor(0.0))
        return viewed(builder, builder.add(Add, (one, two), hint), alike)
    if not isinstance(x, ProgramTensor):
        x, y, factor, sign = y, x, sign, 1.0
    else:
        factor = 1.0
    axes, constant = view_of(builder, x), _stored_constant(builder, x, y)
    if axes is None or constant is None:
        return None
    name = x.name
    scale = torch.tensor(factor, dtype=constant.dtype)
    if constant.dim() == 1:
        return viewed(builder, _affine(builder, hint, name, scale, sign * constant), axes)
    if factor != 1:
        name = _affine(builder, hint, name, scale, torch.zeros_like(scale))
    return viewed(builder, builder.add(AddMap, (name,), hint, map=sign * constant), axes)


@converts_views("mul", "neg")
@converts_views("div", divides=True)
def _product(builder: ProgramBuilder, hint: str, a: Arguments, divides: bool = False) -> Any:
    x, y = a["self"], a.get("other", -1.0)
    if a.get("rounding_mode") is not None:
        return None
    if isinstance(x, ProgramTensor) and isinstance(y, ProgramTensor):
        if divides:
            return None
        found = stored_alike(builder, x, y) or _maps_and_numbers(builder, x, y)
        return None if found is None else viewed(builder, builder.add(Multiply, found[:2], hint), found[2])
    if not isinstance(x, ProgramTensor):
        if divides:
            return None
        x, y = y, x
    axes, constant = view_of(builder, x), _stored_constant(builder, x, y)
    if axes is None or constant is None:
        return None
    constant = 1 / constant if divides else constant
    if constant.dim() == 1:
        made = _affine(builder, hint, x.name, constant, torch.zeros_like(constant))
    else:
        made = builder.add(MultiplyMap, (x.name,), hint, map=constant)
    return viewed(builder, made, axes)


def _affine(builder: ProgramBuilder, hint: str, name: str, scale: Tensor, shift: Tensor) -> str:
    return add_affine(builder, hint, ProgramTensor(name), scale, shift).name


def _stored_constant(builder: ProgramBuilder, x: Any, constant: Any) -> Tensor | None:
    """A constant operand of x as it would be stored: one number per channel, or maps; None if it is neither."""
    axes = view_of(builder, x)
    if isinstance(constant, BatchConstant):
        constant = constant.value
    if axes is None or not isinstance(constant, (int, float, Tensor)):
        return None
    dtype = builder.values[x.name].dtype
    if isinstance(constant, Tensor) and not torch.can_cast(constant.dtype, dtype):
        return None
    stored = axes.to_stored(torch.as_tensor(constant, dtype=dtype))
    if stored is None:
        return None
    flat = stored.reshape(len(stored), -1)
    return flat[:, 0].clone() if torch.equal(flat, flat[:, :1].expand_as(flat)) else stored.contiguous()


# ---- sums over channels ---------------------------------------------------------------------------------------------


@converts_views("linear")
def _linear(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
    x, weight, bias = a["input"], a["weight"], a.get("bias")
    axes = view_of(builder, x)
    if axes is None or not isinstance(weight, Tensor) or weight.dim() != 2 or isinstance(bias, ProgramTensor):
        return None
    found = stored_with_channels(builder, x.name, axes, -1, hint)
    if found is None:
        return None
    name, axes = found
    maps = len(axes.stored) - 2
    if maps > 3:
        return None
    if maps == 0:
        made = builder.add(Linear, (name,), hint, weight=weight, bias=bias)
    else:
        sizes = {"stride": (1,) * maps, "padding": (0,) * maps, "dilation": (1,) * maps}
        made = builder.add(Conv, (name,), hint, weight=weight.view(*weight.shape, *[1] * maps), bias=bias, **sizes)
    return viewed(builder, made, axes, channels=-1)


@converts_views("mm", "matmul", arguments=product_as_linear)
@converts_views("addmm", arguments=product_and_bias_as_linear)
def _matrix_product(
    builder: ProgramBuilder, hint: str, a: Arguments, arguments: Callable[[Arguments], Arguments | None]
) -> Any:
    own = arguments(a)
    return None if own is None else _linear(builder, hint, own)


@converts_views("mean")
def _mean(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
    x, dims = a["self"], a.get("dim")
    axes = view_of(builder, x)
    if axes is None or not dims or a.get("dtype") is not None or not axes.batch_first:
        return None
    reduced = {d % len(axes.dims) for d in dims}
    pixels = {f for d in reduced for f in axes.dims[d]}
    left = [own for d, own in enumerate(axes.dims) if d not in reduced]
    if any(f.dim < 2 for f in pixels) or any(f.dim >= 2 for own in left for f in own) or len(axes.stored) < 3:
        return None
    name = builder.add(Mean, (x.name,), hint)
    kept = [() if d in reduced else own for d, own in enumerate(axes.dims) if d not in reduced or a.get("keepdim")]
    return viewed(builder, name, Axes(axes.stored[:2], tuple(kept)))
