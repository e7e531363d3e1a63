"""Insertion of channels that are zero."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wirings.compaction.channel_constants import ChannelConstants
from wirings.compaction.operation import Operation, Shape, Tensors, expect
from wirings.compaction.operations.affine import scatter_rows
from wirings.compaction.operations.select_channels import expect_index
from wirings.compaction.operations.weighted_sum import WeightedSum

if TYPE_CHECKING:
    from wirings.compaction.liveness import NeededChannels
    from wirings.compaction.onnx import OnnxWriter
    from wirings.compaction.prune import Pruner
    from wirings.compaction.rewriter import ProgramRewriter


@dataclass(frozen=True, eq=False)
class ScatterChannels(Operation):
    """Move the channels to ``index`` among ``channels``; all others are zero."""

    weights = ("index",)
    index: Tensor
    channels: int = 0

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        x = inputs[0]
        return x.new_zeros(x.shape[0], self.channels, *x.shape[2:]).index_copy(1, own["index"], x)

    def check(self, inputs: Sequence[Tensor]) -> None:
        channels = inputs[0].shape[1]
        expect(0 <= self.channels < 2**31, "a number of channels")
        expect_index(self.index, self.channels)
        expect(len(self.index) == channels == len(self.index.unique()), "a different index for each channel")

    def constant_channels(self, inputs: Sequence[ChannelConstants]) -> Tensor:
        constant = torch.ones(self.channels, dtype=torch.bool)
        constant[self.index] = inputs[0].constant
        return constant

    def needed_channels(self, number: int, needed: Tensor, liveness: NeededChannels) -> Tensor:
        return needed[self.index]

    def prune(self, pruner: Pruner, needed: Tensor) -> None:
        wanted, own = needed.nonzero().squeeze(1), needed[self.index]
        source = pruner.select(self.inputs[0], own.nonzero().squeeze(1))
        index = torch.searchsorted(wanted, self.index[own])
        pruner.emit(self, (source,), wanted, index=index, channels=len(wanted))

    def is_identity(self, shapes: Mapping[str, Shape]) -> bool:
        return torch.equal(self.index, torch.arange(self.channels))

    def simplify(self, rewriter: ProgramRewriter) -> bool:
        """Make zero channels rows of zeros in the weight of a sum, past operations that keep zeros."""
        before = rewriter.sole_producer(self.inputs[0])
        if before is None:
            return False
        if isinstance(before, WeightedSum) and before.group_count == 1:
            rewriter.shapes[before.output] = rewriter.shapes[self.output]
            own: dict[str, Any] = {k: scatter_rows(x, self.index, self.channels) for k, x in before.tensors().items()}
            rewriter.replace(dataclasses.replace(before, **own))
            rewriter.remove(self.output, before.output)
            return True
        changes = before.scattered_weights(self.index, self.channels)
        if changes is not None:
            rewriter.swap(before, self, changes)
        return changes is not None

    def to_onnx(self, writer: OnnxWriter) -> None:
        dims = len(writer.shapes[self.output])
        sides = [0] * (2 * dims + 2)
        sides[dims + 2] = 1  # append one channel of zeros, from which all missing ones are gathered
        names = [self.inputs[0], writer.integers(sides, f"{self.output}.sides")]
        padded = writer.node("Pad", names, f"{self.output}.padded")
        index = [len(self.index)] * self.channels
        for number, place in enumerate(self.index.tolist()):
            index[place] = number
        writer.node("Gather", [padded, writer.integers(index, f"{self.output}.index")], self.output, axis=1)
