"""Which channels of a program are constant: they depend on no input, whatever it is.

A node that nothing reaches is constant, and so is all that it alone feeds. A constant channel is a map rather than a
number, since zero padding makes borders differ. Everything is computed in double precision.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wirings.compaction.operations import (
    Add,
    Affine,
    Concat,
    Constant,
    Conv,
    Flatten,
    InstanceNorm,
    Linear,
    Multiply,
    Opaque,
    Operation,
    Place,
    Select,
)
from wirings.compaction.program import Program


@dataclass(eq=False)
class Known:
    """What is known of a tensor's channels: which are constant, and their maps, (channels, …); zero for the others."""

    constant: Tensor
    maps: Tensor

    @property
    def index(self) -> Tensor:
        """The numbers of the constant channels."""
        return self.constant.nonzero().squeeze(1)


def find(program: Program) -> dict[str, Known | None]:
    """What is known of every tensor of a program; None where it is no tensor with channels."""
    shapes = program.shapes()
    known: dict[str, Known | None] = {}
    for name, shape in program.inputs.items():
        known[name] = nothing(shape)
    for operation in program.operations:
        shape = shapes.get(operation.output, ())
        inputs = [known[name] for name in operation.inputs]
        if isinstance(operation, Constant):
            maps = operation.map.double()
            known[operation.output] = Known(torch.ones(len(maps), dtype=torch.bool), maps)
        elif not shape:
            known[operation.output] = None
        elif any(x is None for x in inputs) or (isinstance(operation, Opaque) and not operation.channelwise):
            known[operation.output] = nothing(shape)
        else:
            mask = _constant_channels(operation, inputs)
            known[operation.output] = _evaluated(operation, inputs, mask, shape)
    return known


def nothing(shape: tuple[int, ...]) -> Known:
    """Of a tensor whose channels all vary."""
    # One number stands for all, so that nothing is kept of tensors that have nothing constant.
    return Known(torch.zeros(shape[0], dtype=torch.bool), torch.zeros(()).double().expand(shape))


def _evaluated(operation: Operation, inputs: list[Any], mask: Tensor, shape: tuple[int, ...]) -> Known:
    """The maps of constant channels: the operation on its constant inputs, with zeros for what varies."""
    if not mask.any():
        return nothing(shape)
    if isinstance(operation, (Conv, Linear)):
        rows = mask.nonzero().squeeze(1)
        return Known(
            mask, torch.zeros(shape, dtype=torch.float64).index_copy(0, rows, brought(operation, inputs[0], rows))
        )
    with torch.no_grad():
        maps = in_double(operation).run(*(x.maps[None] for x in inputs))[0]
    return Known(mask, torch.where(mask.view(-1, *[1] * (maps.dim() - 1)), maps, 0.0))


@torch.no_grad()
def brought(operation: Conv | Linear, source: Known, rows: Tensor) -> Tensor:
    """What constant inputs and the bias bring to some channels of a sum: maps, (rows, …)."""
    wide: Any = in_double(operation)
    if isinstance(operation, Linear) or operation.groups == 1:
        # Of the channels that come in only the constant ones count, and most often they are few.
        some = source.constant & (source.maps.reshape(len(source.maps), -1) != 0).any(1)
        some[0] = some[0] or not some.any()  # a convolution of no channels is none
        weight = rows_and_columns(wide.weight, rows, some.nonzero().squeeze(1))
        bias = None if wide.bias is None else wide.bias[rows]
        return dataclasses.replace(wide, weight=weight, bias=bias).run(source.maps[some][None])[0]
    return wide.run(source.maps[None])[0][rows]


def rows_and_columns(weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Some rows and columns of a weight, (out, in, …)."""
    some = weight if len(rows) == weight.shape[0] else weight.index_select(0, rows)
    return some if len(columns) == weight.shape[1] else some.index_select(1, columns)


def in_double(operation: Operation) -> Operation:
    """The same operation with weights in double precision."""
    own = operation.tensors().items()
    wide: dict[str, Any] = {name: x.double() if x is not None and x.is_floating_point() else x for name, x in own}
    fields = {"held": tuple(wide.values())} if isinstance(operation, Opaque) else wide
    return dataclasses.replace(operation, **fields)


def _constant_channels(operation: Operation, inputs: list[Any]) -> Tensor:
    """Which channels of the result are constant."""
    for kind, rule in _RULES.items():
        if isinstance(operation, kind):
            return rule(operation, inputs)
    return inputs[0].constant.clone()  # what acts on every channel alone


def _joins(operation: Conv | Linear) -> Tensor:
    """Which channels are joined by weights that are not zero: (groups, out / groups, in / groups), ones and zeros."""
    weight, groups = operation.weight, operation.groups if isinstance(operation, Conv) else 1
    nonzero = weight != 0
    nonzero = nonzero if weight[0, 0].numel() == 1 else nonzero.flatten(2).any(2)
    return nonzero.view(groups, -1, weight.shape[1]).to(torch.float32)


def fed(operation: Conv | Linear, sources: Tensor) -> Tensor:
    """The channels of a sum that at least one of these channels of its input leads to: boolean vectors both."""
    matrix = _joins(operation)
    return ((matrix @ sources.to(torch.float32).view(len(matrix), -1, 1)) > 0).flatten()


def feeding(operation: Conv | Linear, targets: Tensor) -> Tensor:
    """The channels of a sum's input that lead to at least one of these channels of it."""
    matrix = _joins(operation)
    return ((targets.to(torch.float32).view(len(matrix), 1, -1) @ matrix) > 0).flatten()


def _by_weights(operation: Any, inputs: list[Any]) -> Tensor:
    return ~fed(operation, ~inputs[0].constant)


def _by_scale(operation: Any, inputs: list[Any]) -> Tensor:
    return inputs[0].constant | (operation.scale == 0)


def _all(operation: Operation, inputs: list[Any]) -> Tensor:
    return torch.stack([x.constant for x in inputs]).all(0)


def _product(operation: Operation, inputs: list[Any]) -> Tensor:
    zero = [x.constant & (x.maps.reshape(len(x.maps), -1) == 0).all(1) for x in inputs]
    return _all(operation, inputs) | torch.stack(zero).any(0)


def _flat(operation: Operation, inputs: list[Any]) -> Tensor:
    return inputs[0].constant.repeat_interleave(inputs[0].maps[0].numel())


def _placed(operation: Any, inputs: list[Any]) -> Tensor:
    constant = torch.ones(operation.channels, dtype=torch.bool)
    constant[operation.index] = inputs[0].constant
    return constant


_RULES: dict[type[Operation], Callable[[Any, list[Any]], Tensor]] = {
    Conv: _by_weights,
    Linear: _by_weights,
    Affine: _by_scale,
    InstanceNorm: _by_scale,
    Add: _all,
    Multiply: _product,
    Concat: lambda operation, inputs: torch.cat([x.constant for x in inputs]),
    Select: lambda operation, inputs: inputs[0].constant[operation.index],
    Place: _placed,
    Flatten: _flat,
}
