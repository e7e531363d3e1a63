"""Embeddings of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from wirings.compaction.aten import Arguments, ProgramTensor, converts_views
from wirings.compaction.axes import Axes
from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.channel_constants import ChannelConstants
from wirings.compaction.operation import IndexRange, Operation, Shape, Tensors, expect

if TYPE_CHECKING:
    from wirings.compaction.liveness import NeededChannels
    from wirings.compaction.onnx import OnnxWriter
    from wirings.compaction.prune import Pruner


@dataclass(frozen=True, eq=False)
class Embedding(Operation):
    """Tokens (batch, length) to (batch, channels, length): the row of each token."""

    weights = ("weight",)
    weight: Tensor
    """(tokens, channels)."""

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        return F.embedding(inputs[0], own["weight"]).movedim(-1, 1)

    @property
    def index_range(self) -> IndexRange:
        return IndexRange(self.inputs[0], len(self.weight))

    def infer(self, inputs: Sequence[Any]) -> Any:
        expect(len(inputs) == 1 and isinstance(inputs[0], Tensor) and inputs[0].dim() == 2, "tokens (batch, length)")
        expect(inputs[0].dtype in (torch.int64, torch.int32), "integers")
        expect(self.weight.dim() == 2 and self.weight.is_floating_point(), "a matrix with a row for each token")
        expect(len(self.weight) > 0, "a row for at least one token")
        return self.compute(inputs, {"weight": torch.empty_like(self.weight, device="meta")})

    def constant_channels(self, inputs: Sequence[ChannelConstants]) -> Tensor:
        return (self.weight == self.weight[:1]).all(0)

    def constant_maps(self, inputs: Sequence[ChannelConstants], mask: Tensor, shape: Shape) -> Tensor:
        return torch.where(mask, self.weight[0], 0.0).double()[:, None].expand(shape)

    def needed_channels(self, number: int, needed: Tensor, liveness: NeededChannels) -> Tensor:
        return needed.any().expand(len(liveness.needed[self.inputs[0]]))

    def prune(self, pruner: Pruner, needed: Tensor) -> None:
        wanted = needed.nonzero().squeeze(1)
        source = pruner.with_constants(self.inputs[0], None)
        pruner.emit(self, (source,), wanted, weight=self.weight[:, wanted])

    def to_onnx(self, writer: OnnxWriter) -> None:
        names = [writer.tensor(self.weight, f"{self.output}.weight"), self.inputs[0]]
        rows = writer.node("Gather", names, f"{self.output}.rows", axis=0)
        writer.node("Transpose", [rows], self.output, perm=[0, 2, 1])


@converts_views("embedding")
def _embedding(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
    weight, tokens = a["weight"], a["indices"]
    if not isinstance(weight, Tensor) or not isinstance(tokens, ProgramTensor) or tokens.axes is not None:
        return None
    if builder.values[tokens.name].dim() != 2 or builder.values[tokens.name].is_floating_point():
        return None
    made = builder.add(Embedding, (tokens.name,), hint, weight=weight)
    return ProgramTensor(made, Axes.plain(tuple(builder.values[made].shape)).permuted((0, 2, 1)))
