"""Slices of maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wirings.compaction.aten import Arguments, ProgramTensor, converts, has_channels, takes_all
from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.operation import Operation, Shape, Tensors, expect
from wirings.compaction.operations.select_channels import SelectChannels

if TYPE_CHECKING:
    from wirings.compaction.onnx import OnnxWriter


@dataclass(frozen=True, eq=False)
class Crop(Operation):
    """Some pixels of each map: a slice of every dimension, as in ``x[:, :, start:stop:step, …]``."""

    starts: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        slices = [slice(*limits) for limits in zip(self.starts, self.stops, self.steps, strict=True)]
        return inputs[0][(slice(None), slice(None), *slices)]

    def check(self, inputs: Sequence[Tensor]) -> None:
        sizes = len(self.starts) == len(self.stops) == len(self.steps) == inputs[0].dim() - 2
        expect(sizes, "a start, a stop and a step for every dimension")
        expect(all(n >= 1 for n in self.steps), "steps of 1 or more")

    def affine_repeats(self, shape: Shape) -> int:
        return 1

    def to_onnx(self, writer: OnnxWriter) -> None:
        axes = list(range(2, 2 + len(self.starts)))
        limits = [self.starts, self.stops, axes, self.steps]
        names = [writer.integers(list(values), f"{self.output}.limit") for values in limits]
        writer.node("Slice", [self.inputs[0], *names], self.output)


@converts("slice")
def _slice(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
    x, start, end, step = a["self"], a.get("start"), a.get("end"), a.get("step", 1)
    if not has_channels(builder, x) or any(isinstance(limit, ProgramTensor) for limit in (start, end, step)):
        return None
    shape = builder.values[x.name].shape
    dim = a.get("dim", 0) % len(shape)
    if dim == 0:  # only a slice of the whole batch can be expressed
        return x if takes_all(a) else None
    first, last, step = slice(start, end, step).indices(shape[dim])
    if dim == 1:
        return ProgramTensor(builder.add(SelectChannels, (x.name,), hint, index=torch.arange(first, last, step)))
    limits = [(0, int(size), 1) for size in shape[2:]]
    limits[dim - 2] = (first, max(first, last), step)
    starts, stops, steps = zip(*limits, strict=True)
    return ProgramTensor(builder.add(Crop, (x.name,), hint, starts=starts, stops=stops, steps=steps))
