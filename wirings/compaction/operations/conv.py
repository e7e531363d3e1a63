"""Convolutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from wirings.compaction.allowed_operators import MAX_INTEGER, MAX_WINDOW
from wirings.compaction.aten import Arguments, ProgramTensor, converts, has_channels, per_dimension
from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.operation import Tensors, expect, expect_size
from wirings.compaction.operations.pad import Pad
from wirings.compaction.operations.select_channels import SelectChannels
from wirings.compaction.operations.weighted_sum import WeightedSum

if TYPE_CHECKING:
    from wirings.compaction.onnx import OnnxWriter
    from wirings.compaction.prune import Pruner

_FUNCTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@dataclass(frozen=True, eq=False)
class Conv(WeightedSum):
    """A zero-padded convolution in one to three dimensions; depthwise if it has as many groups as channels."""

    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    """Zeros on both sides of each dimension."""
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        convolve = _FUNCTIONS[len(self.stride)]
        return convolve(inputs[0], own["weight"], own["bias"], self.stride, self.padding, self.dilation, self.groups)

    @property
    def group_count(self) -> int:
        return self.groups

    @property
    def depthwise(self) -> bool:
        return self.groups == self.weight.shape[0] and self.weight.shape[1] == 1

    @property
    def pointwise(self) -> bool:
        """Whether it only sums over edges, pixel by pixel, with one weight for each pair of channels."""
        plain = set(self.stride) == {1} and set(self.padding) == {0} and self.groups == 1
        return plain and set(self.weight.shape[2:]) == {1}

    def check(self, inputs: Sequence[Tensor]) -> None:
        dims, maps = len(self.stride), inputs[0].dim() - 2
        sizes = dims == maps == len(self.padding) == len(self.dilation)
        expect(1 <= dims <= 3 and sizes, "a stride, a padding and a dilation for every dimension")
        expect(
            all(1 <= n <= MAX_WINDOW for n in (*self.stride, *self.dilation)), "a stride and a dilation of 1 or more"
        )
        expect(all(0 <= n <= MAX_WINDOW for n in self.padding), "a padding of 0 or more")
        expect(self.weight.dim() == dims + 2 and 1 <= self.groups <= MAX_INTEGER, "a weight for every dimension")
        expect(inputs[0].shape[1] == self.weight.shape[1] * self.groups, "as many channels as its weight has")
        expect(self.weight.shape[0] % self.groups == 0, "groups of equal size")
        expect_size(self.bias, (self.weight.shape[0],))

    def prune(self, pruner: Pruner, needed: Tensor) -> None:
        if self.groups == 1:
            super().prune(pruner, needed)
            return
        source, wanted = self.inputs[0], needed.nonzero().squeeze(1)
        added, kept = self._pruned_bias(pruner, wanted), pruner.kept[source]
        outs, ins = self.weight.shape[0] // self.groups, self.weight.shape[1]
        if len(wanted) == len(self.weight) and len(kept) == self.groups * ins:
            self._emit(pruner, pruner.names[source], wanted, added)
        elif ins == 1:  # depthwise: one input channel for each output channel, repeated if several share it
            taken = pruner.select(source, wanted // outs)
            self._emit(pruner, taken, wanted, added, weight=self.weight[wanted], groups=len(wanted))
        else:
            self._prune_groups(pruner, wanted, added)

    def _prune_groups(self, pruner: Pruner, wanted: Tensor, added: Tensor | None) -> None:
        """Groups that have different numbers of channels left are padded to the largest, with zero weights."""
        outs, ins = self.weight.shape[0] // self.groups, self.weight.shape[1]
        source = self.inputs[0]
        kept = pruner.kept[source]
        groups = [g for g in range(self.groups) if ((wanted // outs) == g).any()]
        rows = [wanted[wanted // outs == g] for g in groups]
        columns = [kept[kept // ins == g] for g in groups]
        most_rows, most_columns = max(map(len, rows)), max(map(len, columns))
        if most_columns == 1:  # what is left is depthwise
            own = torch.cat([self.weight[r][:, c % ins] for r, c in zip(rows, columns, strict=True)])
            sources = torch.cat([c.expand(len(r)) for r, c in zip(rows, columns, strict=True)])
            self._emit(pruner, pruner.select(source, sources), wanted, added, weight=own, groups=len(wanted))
            return
        weight = self.weight.new_zeros(len(groups) * most_rows, most_columns, *self.weight.shape[2:])
        taken: list[int] = []
        real: list[int] = []
        for number, (row, column) in enumerate(zip(rows, columns, strict=True)):
            first = number * most_rows
            weight[first : first + len(row), : len(column)] = self.weight[row][:, column % ins]
            taken += column.tolist() + [int(column[0])] * (most_columns - len(column))
            real += range(first, first + len(row))
        inside = pruner.select(source, torch.tensor(taken))
        if len(real) == len(weight):
            self._emit(pruner, inside, wanted, added, weight=weight, groups=len(groups))
            return
        pruner.emit(self, (inside,), None, weight=weight, groups=len(groups), bias=None)
        padded = (pruner.names[self.output],)
        chosen = pruner.builder.add(SelectChannels, padded, self.output, index=torch.tensor(real))
        pruner.alias(self.output, pruner.add_maps(chosen, added), wanted)

    def to_onnx(self, writer: OnnxWriter) -> None:
        kernel = list(self.weight.shape[2:])
        sizes = {"kernel_shape": kernel, "strides": list(self.stride), "dilations": list(self.dilation)}
        pads = [*self.padding, *self.padding]
        writer.node("Conv", self.onnx_inputs(writer), self.output, pads=pads, group=self.groups, **sizes)


@converts("conv1d", "conv2d", "conv3d")
def _convolution(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
    weight, bias = a["weight"], a.get("bias")
    x: Any = a["input"]
    if not isinstance(weight, Tensor) or isinstance(bias, ProgramTensor) or not has_channels(builder, x):
        return None
    dims = weight.dim() - 2
    if builder.values[x.name].dim() != dims + 2:
        return None  # an image without a batch dimension
    stride, dilation = per_dimension(a.get("stride", 1), dims), per_dimension(a.get("dilation", 1), dims)
    padding, name = a.get("padding", 0), x.name
    if isinstance(padding, str):
        total = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, weight.shape[2:], strict=True)]
        padding = [n // 2 for n in total]
        if any(n % 2 for n in total):  # an even kernel has one zero more on one side
            before, after = (0,) * dims, tuple(n % 2 for n in total)
            name = builder.add(Pad, (name,), "pad", before=before, after=after)
    sizes = {"stride": stride, "padding": per_dimension(padding, dims), "dilation": dilation}
    groups = a.get("groups", 1)
    return ProgramTensor(builder.add(Conv, (name,), hint, weight=weight, bias=bias, groups=groups, **sizes))
