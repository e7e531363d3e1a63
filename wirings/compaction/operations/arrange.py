"""Other orders of dimensions: where a model's tensor is not stored with its channels in dimension 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from wirings.compaction.axes import Axes, Factor, merged
from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.operation import MAX_DIMENSIONS, Operation, Tensors, expect
from wirings.compaction.operations.reshape import Reshape
from wirings.compaction.operations.select_channels import SelectChannels

if TYPE_CHECKING:
    from wirings.compaction.onnx import OnnxWriter


@dataclass(frozen=True, eq=False)
class Arrange(Operation):
    """A tensor with its dimensions split into factors, reordered and merged; it may move channels elsewhere."""

    factors: tuple[tuple[int, ...], ...] = ()
    """The sizes of the factors of each dimension but the batch, the outermost first."""
    order: tuple[int, ...] = ()
    """The factors in their new order, as numbers; 0 is the batch."""
    shape: tuple[int, ...] = ()
    """The sizes of the result, with -1 for the dimension that has the batch."""

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        x = inputs[0]
        split = x.reshape(x.shape[0], *(size for own_sizes in self.factors for size in own_sizes))
        return split.permute(self.order).reshape(self.shape)

    @property
    def opaque(self) -> bool:
        kept = self.order[:2] == (0, 1) and self.shape[:1] == (-1,) and len(self.factors[0]) == 1
        return not (kept and self.shape[1:2] == self.factors[0])

    def pruned_weights(self, wanted: Tensor) -> dict[str, Any]:
        """Only pixels move, so that channels can be removed."""
        count = len(wanted)
        return {"factors": ((count,), *self.factors[1:]), "shape": (-1, count, *self.shape[2:])}

    @property
    def fixed_size(self) -> bool:
        return True

    @property
    def transposes(self) -> bool:
        """Whether it swaps the channels with all other dimensions, in order: (channels, …) to (…, channels)."""
        flat = [size for sizes in self.factors for size in sizes]
        own = len(self.factors[0])
        numbers = [*range(own + 1, len(flat) + 1), *range(1, own + 1)]
        moved = [n for n in self.order[1:] if flat[n - 1] > 1] == [n for n in numbers if flat[n - 1] > 1]
        return moved and self.order[0] == 0 and self.shape[0] == -1 and self.shape[-1] == math.prod(self.factors[0])

    def check(self, inputs: Sequence[Tensor]) -> None:
        sizes = [math.prod(own) for own in self.factors]
        expect(list(inputs[0].shape[1:]) == sizes, "factors of its input's sizes")
        count = 1 + sum(map(len, self.factors))
        expect(sorted(self.order) == list(range(count)) and count <= MAX_DIMENSIONS, "an order of all factors")
        expect(1 <= len(self.shape) < MAX_DIMENSIONS and self.shape.count(-1) == 1, "sizes with one for the batch")
        expect(all(size >= -1 for size in self.shape), "sizes of 0 or more")

    def to_onnx(self, writer: OnnxWriter) -> None:
        split = writer.integers([0, *(size for own in self.factors for size in own)], f"{self.output}.split")
        parts = writer.node("Reshape", [self.inputs[0], split], f"{self.output}.factors")
        moved = writer.node("Transpose", [parts], f"{self.output}.moved", perm=list(self.order))
        shape = writer.integers(list(self.shape), f"{self.output}.shape")
        writer.node("Reshape", [moved, shape], self.output)


def arrange(builder: ProgramBuilder, name: str, axes: Axes, hint: str) -> str:
    """Add what turns a stored tensor into the model's tensor, which these axes describe, unless it was added before."""
    if axes.is_plain:
        return name
    if (name, axes) not in builder.arranged:
        builder.arranged[name, axes] = _arrange(builder, name, axes, hint)
    return builder.arranged[name, axes]


def _arrange(builder: ProgramBuilder, name: str, axes: Axes, hint: str) -> str:
    index = axes.permuted_channels()
    if index is not None:
        return builder.add(SelectChannels, (name,), hint, index=index)
    pixels = [f for dim in axes.dims[2:] for f in dim]
    in_order = [Factor(d, n, 1) for d, n in enumerate(axes.stored) if d > 1 and n > 1]
    if axes.batch_first and len(axes.dims) > 1 and axes.is_channels(1) and merged(pixels) == merged(in_order):
        return builder.add(Reshape, (name,), hint, shape=axes.shape[2:])
    parts = [f for dim in axes.dims for f in dim if f.dim]
    by_place = sorted(parts, key=lambda f: (f.dim, -f.stride))
    factors = tuple(tuple(f.size for f in by_place if f.dim == d) or (1,) for d in range(1, len(axes.stored)))
    numbers: dict[Any, int] = {}
    count = 1
    for d in range(1, len(axes.stored)):
        own = [f for f in by_place if f.dim == d]
        for i in range(max(len(own), 1)):  # a dimension of size 1 has a factor of 1
            numbers[own[i] if own else ("one", d)] = count + i
        count += max(len(own), 1)
    order, shape, seen = [], [], False
    for own_factors, size in zip(axes.dims, axes.shape, strict=True):
        has_batch = any(f.dim == 0 for f in own_factors)
        order += [0 if f.dim == 0 else numbers[f] for f in own_factors]
        shape.append(-1 if has_batch else size)
        seen = seen or has_batch
    if not seen:  # a batch of one
        order.insert(0, 0)
        shape[0] = -1
    order += [number for key, number in numbers.items() if isinstance(key[0], str)]
    return builder.add(Arrange, (name,), hint, factors=factors, order=tuple(order), shape=tuple(shape))


def stored_with_channels(
    builder: ProgramBuilder, name: str, axes: Axes, dim: int, hint: str
) -> tuple[str, Axes] | None:
    """The same tensor stored so that a dimension of the model's tensor is that of the channels.

    Returns:
        The stored tensor and its axes; None if that dimension has a part of the batch.
    """
    dim %= len(axes.dims)
    if axes.is_channels(dim):
        return name, axes
    if any(f.dim == 0 for f in axes.dims[dim]):
        return None
    maps = {d: tuple(f for f in own if f.dim) for d, own in enumerate(axes.dims) if d != dim}
    maps = {d: own for d, own in maps.items() if own}
    moved = Axes(axes.stored, (Axes.plain(axes.stored).dims[0], axes.dims[dim], *maps.values()))
    made = arrange(builder, name, moved, hint)
    stored = tuple(builder.values[made].shape)
    dims = []
    for d, own in enumerate(axes.dims):
        place = 1 if d == dim else 2 + list(maps).index(d) if d in maps else 0
        found, inner = [], stored[place] if place else 1
        for f in own:
            if f.dim == 0:
                found.append(Factor(0, f.size, 1))
            else:
                inner //= f.size
                found.append(Factor(place, f.size, inner))
        dims.append(merged(found))
    return made, Axes(stored, tuple(dims))
