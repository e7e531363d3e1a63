"""Maps whose pixels move around: those that leave at one border return at the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from wirings.compaction.aten import Arguments, converts_views, view_of, viewed
from wirings.compaction.axes import Axes
from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.operation import Operation, Shape, Tensors, expect
from wirings.compaction.operations.arrange import arrange

if TYPE_CHECKING:
    from wirings.compaction.onnx import OnnxWriter


@dataclass(frozen=True, eq=False)
class Roll(Operation):
    """Maps moved by some pixels along each dimension."""

    shifts: tuple[int, ...] = ()
    """By how many pixels, for each dimension of the maps."""

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        return inputs[0].roll(self.shifts, tuple(range(2, inputs[0].dim())))

    def check(self, inputs: Sequence[Tensor]) -> None:
        expect(0 < len(self.shifts) == inputs[0].dim() - 2, "a shift for each dimension of the maps")

    def is_identity(self, shapes: Mapping[str, Shape]) -> bool:
        sizes = shapes[self.inputs[0]][1:]
        return all(size and shift % size == 0 for shift, size in zip(self.shifts, sizes, strict=True))

    def affine_repeats(self, shape: Shape) -> int:
        return 1

    def to_onnx(self, writer: OnnxWriter) -> None:
        x, sizes = self.inputs[0], writer.shapes[self.output][1:]
        for axis, (shift, size) in enumerate(zip(self.shifts, sizes, strict=True), 2):
            places = [(place - shift) % size for place in range(size)]
            name = self.output if axis == len(sizes) + 1 else f"{self.output}.{axis}"
            x = writer.node("Gather", [x, writer.integers(places, f"{name}.places")], name, axis=axis)


@converts_views("roll")
def _roll(builder: ProgramBuilder, operator: str, a: Arguments) -> Any:
    x: Any = a["self"]
    axes = view_of(builder, x)
    shifts, dims = a["shifts"], a.get("dims") or ()
    if axes is None or len(shifts) != len(dims) or not dims or not all(isinstance(n, int) for n in shifts):
        return None
    name, moved = x.name, _by_pixel(axes, {dim % len(axes.dims) for dim in dims})
    if moved is None:
        return None
    if moved != axes:
        order = (0, *(d for d in range(1, len(axes.dims)) if axes.is_channels(d)))
        order += tuple(d for d in range(len(axes.dims)) if d not in order)
        name = arrange(builder, name, axes.permuted(order), operator)
        back = sorted(range(len(order)), key=lambda d: order[d])
        axes = Axes.plain(tuple(builder.values[name].shape)).permuted(back)
    by_dim = dict.fromkeys(range(2, len(axes.stored)), 0)
    for shift, dim in zip(shifts, dims, strict=True):
        if axes.shape[dim] > 1:
            by_dim[axes.whole(dim) or 0] += shift
    return viewed(builder, builder.add(Roll, (name,), operator, shifts=tuple(by_dim.values())), axes)


def _by_pixel(axes: Axes, dims: set[int]) -> Axes | None:
    """The axes themselves if these dimensions are whole dimensions of the maps, other ones if they can become so."""
    if all(axes.shape[dim] == 1 or (axes.whole(dim) or 0) >= 2 for dim in dims):
        return axes
    channels = [d for d in range(1, len(axes.dims)) if axes.is_channels(d)]
    if len(channels) != 1 or not axes.batch_first or dims & {0, channels[0]}:
        return None
    return Axes.plain(axes.stored)
