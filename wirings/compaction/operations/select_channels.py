"""Selection of channels: slices, splits and indexing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wirings.compaction.aten import Arguments, ProgramTensor, converts, has_channels
from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.channel_constants import ChannelConstants
from wirings.compaction.operation import Operation, Shape, Tensors, expect
from wirings.compaction.operations.affine import Affine, producer_absorbs_scale, scale_inputs

if TYPE_CHECKING:
    from wirings.compaction.liveness import NeededChannels
    from wirings.compaction.onnx import OnnxWriter
    from wirings.compaction.prune import Pruner
    from wirings.compaction.rewriter import ProgramRewriter


@dataclass(frozen=True, eq=False)
class SelectChannels(Operation):
    """The channels at ``index``, in this order; a channel may be selected several times."""

    weights = ("index",)
    index: Tensor

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        return inputs[0].index_select(1, own["index"])

    def check(self, inputs: Sequence[Tensor]) -> None:
        expect_index(self.index, inputs[0].shape[1])

    def constant_channels(self, inputs: Sequence[ChannelConstants]) -> Tensor:
        return inputs[0].constant[self.index]

    def needed_channels(self, number: int, needed: Tensor, liveness: NeededChannels) -> Tensor:
        wanted = torch.zeros_like(liveness.needed[self.inputs[0]])
        wanted[self.index[needed]] = True
        return wanted

    def prune(self, pruner: Pruner, needed: Tensor) -> None:
        source, wanted = self.inputs[0], needed.nonzero().squeeze(1)
        index = torch.searchsorted(pruner.kept[source], self.index[wanted])
        pruner.emit(self, (pruner.names[source],), wanted, index=index)

    def is_identity(self, shapes: Mapping[str, Shape]) -> bool:
        return torch.equal(self.index, torch.arange(shapes[self.inputs[0]][0]))

    def simplify(self, rewriter: ProgramRewriter) -> bool:
        """Merge two selections."""
        before = rewriter.operations.get(self.inputs[0])
        if not isinstance(before, SelectChannels):
            return False
        rewriter.replace(dataclasses.replace(self, inputs=before.inputs, index=before.index[self.index]))
        return True

    def absorb_affine(self, rewriter: ProgramRewriter, affine: Affine) -> bool:
        unique = len(self.index.unique()) == len(affine.scale)
        if not unique or not producer_absorbs_scale(rewriter, self.inputs[0]):
            return False
        count = rewriter.shapes[self.inputs[0]][0]
        scale = torch.ones(count, dtype=affine.scale.dtype).index_copy(0, self.index, affine.scale)
        shift = torch.zeros(count, dtype=affine.shift.dtype).index_copy(0, self.index, affine.shift)
        scale_inputs(rewriter, self, [(scale, shift)])
        rewriter.remove(affine.output, self.output)
        return True

    def to_onnx(self, writer: OnnxWriter) -> None:
        index = self.index.tolist()
        if index == list(range(index[0], index[0] + len(index))):
            limits = [writer.integers([n], f"{self.output}.limit") for n in (index[0], index[-1] + 1, 1)]
            writer.node("Slice", [self.inputs[0], *limits], self.output)
        else:
            names = [self.inputs[0], writer.integers(index, f"{self.output}.index")]
            writer.node("Gather", names, self.output, axis=1)


def expect_index(index: Tensor, channels: int) -> None:
    """Raise unless a tensor is an index of channels."""
    expect(index.dtype == torch.int64 and index.dim() == 1, "an index of integers")
    in_range = not len(index) or 0 <= int(index.min()) <= int(index.max()) < channels
    expect(in_range, f"an index from 0 to {channels - 1}")


@converts("split", "split_with_sizes", "chunk")
def _split(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
    x, dim = a["self"], a.get("dim", 0)
    if not has_channels(builder, x) or dim % builder.values[x.name].dim() != 1:
        return None
    count = builder.channels(x.name)
    sizes: Any = -(-count // a["chunks"]) if "chunks" in a else a.get("split_size", a.get("split_sizes"))
    if isinstance(sizes, Sequence) and not all(isinstance(size, int) for size in sizes):
        return None
    parts = torch.arange(count).split(list(sizes) if isinstance(sizes, Sequence) else sizes)
    return tuple(ProgramTensor(builder.add(SelectChannels, (x.name,), hint, index=part.clone())) for part in parts)


@converts("index_select")
def _index_select(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
    x, index = a["self"], a["index"]
    if not has_channels(builder, x) or not isinstance(index, Tensor) or a["dim"] % builder.values[x.name].dim() != 1:
        return None
    return ProgramTensor(builder.add(SelectChannels, (x.name,), hint, index=index.long()))


@converts("index")
def _index(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
    x, indices = a["self"], list(a["indices"])
    plain = len(indices) == 2 and indices[0] is None and isinstance(indices[1], Tensor) and indices[1].dim() == 1
    if not has_channels(builder, x) or not plain or indices[1].dtype == torch.bool:
        return None
    return ProgramTensor(builder.add(SelectChannels, (x.name,), hint, index=indices[1] % builder.channels(x.name)))
