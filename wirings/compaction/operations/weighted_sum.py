"""Sums over edges: what convolutions and linear layers have in common."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wirings.compaction.channel_constants import ChannelConstants
from wirings.compaction.constant_maps import remove_noise, uniform_values
from wirings.compaction.operation import Operation, OperationCounts, Shape
from wirings.compaction.operations.add_map import AddMap
from wirings.compaction.operations.affine import Affine

if TYPE_CHECKING:
    from wirings.compaction.liveness import NeededChannels
    from wirings.compaction.onnx import OnnxWriter
    from wirings.compaction.prune import Pruner
    from wirings.compaction.rewriter import ProgramRewriter


@dataclass(frozen=True, eq=False)
class WeightedSum(Operation):
    """Every output channel is a weighted sum over input channels, plus a bias."""

    weights = ("weight", "bias")
    weight: Tensor
    """(out, in / groups, …)."""
    bias: Tensor | None = None
    """(out,)."""

    @property
    @abstractmethod
    def group_count(self) -> int:
        """The number of groups of channels that have no edges between them."""

    @property
    def depthwise(self) -> bool:
        """Whether every output channel sees one input channel, with a kernel of its own."""
        return False

    def counts(self, shape: Shape, inputs: Sequence[Shape]) -> OperationCounts:
        pixels, edges = math.prod(shape[1:]), int(self.weight.count_nonzero())
        mult_adds = edges * pixels, self.weight.numel() * pixels
        return OperationCounts(0, 0, *mult_adds) if self.depthwise else OperationCounts(shape[0], edges, *mult_adds)

    # ---- channels ---------------------------------------------------------------------------------------------------

    def _adjacency(self) -> Tensor:
        """1 where a weight that is not zero connects two channels, else 0: (groups, out / groups, in / groups)."""
        nonzero = self.weight != 0
        nonzero = nonzero if self.weight[0, 0].numel() == 1 else nonzero.flatten(2).any(2)
        return nonzero.view(self.group_count, -1, self.weight.shape[1]).to(torch.float32)

    def constant_channels(self, inputs: Sequence[ChannelConstants]) -> Tensor:
        matrix, varies = self._adjacency(), ~inputs[0].constant
        return ~((matrix @ varies.to(torch.float32).view(len(matrix), -1, 1)) > 0).flatten()

    def constant_maps(self, inputs: Sequence[ChannelConstants], mask: Tensor, shape: Shape) -> Tensor:
        rows = mask.nonzero().squeeze(1)
        return torch.zeros(shape, dtype=torch.float64).index_copy(0, rows, self.from_constants(inputs[0], rows))

    def needed_channels(self, number: int, needed: Tensor, liveness: NeededChannels) -> Tensor:
        matrix = self._adjacency()
        return ((needed.to(torch.float32).view(len(matrix), 1, -1) @ matrix) > 0).flatten()

    @torch.no_grad()
    def from_constants(self, source: ChannelConstants, rows: Tensor) -> Tensor:
        """What constant inputs and the bias contribute to some output channels: maps, (rows, …)."""
        wide = self.in_double()
        if self.group_count > 1:
            return wide.run(source.maps[None])[0][rows]
        some = source.constant & ~source.zero  # mostly a few channels
        some[0] = some[0] or not some.any()  # PyTorch has no convolution of no channels
        weight = rows_and_columns(wide.weight, rows, some.nonzero().squeeze(1))
        bias = None if wide.bias is None else wide.bias[rows]
        return dataclasses.replace(wide, weight=weight, bias=bias).run(source.maps[some][None])[0]

    # ---- pruning ----------------------------------------------------------------------------------------------------

    def prune(self, pruner: Pruner, needed: Tensor) -> None:
        source, wanted = self.inputs[0], needed.nonzero().squeeze(1)
        weight = rows_and_columns(self.weight, wanted, pruner.kept[source])
        self._emit(pruner, pruner.names[source], wanted, self._pruned_bias(pruner, wanted), weight=weight)

    def _pruned_bias(self, pruner: Pruner, wanted: Tensor) -> Tensor | None:
        """What constant inputs and the bias contribute to the wanted channels: numbers, maps, or None."""
        source = pruner.constants_of(self.inputs[0])
        if not source.constant.any() or not source.maps.any():
            return None if self.bias is None else self.bias[wanted].clone()
        return self.from_constants(source, wanted)

    def _emit(self, pruner: Pruner, source: str, wanted: Tensor, added: Tensor | None, **changes: Any) -> None:
        """Add the pruned sum, plus numbers or maps as a bias or as an operation that adds the maps."""
        bias = added if added is None or added.dim() == 1 else uniform_values(added)
        pruner.emit(self, (source,), wanted, bias=bias, **changes)
        if added is not None and bias is None:
            inputs, maps = (pruner.names[self.output],), remove_noise(added)
            pruner.names[self.output] = pruner.builder.add(AddMap, inputs, f"{self.output}.map", map=maps)

    # ---- simplifying ------------------------------------------------------------------------------------------------

    def absorbs_scale(self, rewriter: ProgramRewriter) -> bool:
        return True

    def absorb_affine(self, rewriter: ProgramRewriter, affine: Affine) -> bool:
        scale = affine.scale.view(-1, *[1] * (self.weight.dim() - 1))
        bias: Tensor | None = affine.shift if self.bias is None else self.bias * affine.scale + affine.shift
        if self.bias is None and not affine.shift.any():
            bias = None
        rewriter.replace(dataclasses.replace(self, weight=self.weight * scale, bias=bias))
        rewriter.remove(affine.output, self.output)
        return True

    def absorb_affine_before(self, rewriter: ProgramRewriter, affine: Affine) -> None:
        """Absorb an affine operation on the input. A shift that padding makes uneven is added as maps afterwards."""
        weight, ins = self.weight, self.weight.shape[1]
        outs = len(weight) // self.group_count
        columns = (torch.arange(len(weight)) // outs)[:, None] * ins + torch.arange(ins)
        scale = affine.scale[columns].view(len(weight), ins, *[1] * (weight.dim() - 2))
        scaled = dataclasses.replace(self, weight=weight * scale)
        if not affine.shift.any():
            rewriter.replace(scaled)
            return
        size = rewriter.shapes[affine.inputs[0]][1:]
        shift = affine.shift.view(-1, *[1] * len(size)).expand(-1, *size)
        with torch.no_grad():
            added = dataclasses.replace(self, bias=None).run(shift[None])[0]
        values = added if added.dim() == 1 else uniform_values(added)
        if values is not None:
            rewriter.replace(dataclasses.replace(scaled, bias=values if self.bias is None else self.bias + values))
            return
        if self.bias is not None:
            added = added + self.bias.view(-1, *[1] * len(size))
        name = rewriter.new_name(f"{self.output}.sum")
        rewriter.insert(self.output, dataclasses.replace(scaled, output=name, bias=None))
        rewriter.shapes[name] = rewriter.shapes[self.output]
        rewriter.replace(AddMap(self.output, (name,), remove_noise(added)))

    def split_bias(self) -> tuple[Operation, Tensor] | None:
        return None if self.bias is None else (dataclasses.replace(self, bias=None), self.bias)

    # ---- export -----------------------------------------------------------------------------------------------------

    def onnx_inputs(self, writer: OnnxWriter) -> list[str]:
        """The names of the input, the weight and the bias."""
        inputs = [self.inputs[0], writer.tensor(self.weight, f"{self.output}.weight")]
        return inputs if self.bias is None else [*inputs, writer.tensor(self.bias, f"{self.output}.bias")]


def rows_and_columns(weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Some rows and columns of a weight, (out, in, …)."""
    some = weight if len(rows) == weight.shape[0] else weight.index_select(0, rows)
    return some if len(columns) == weight.shape[1] else some.index_select(1, columns)
