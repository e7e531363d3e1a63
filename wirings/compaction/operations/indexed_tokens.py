"""Tokens at indices that the caller gives, such as the nodes that the edges of a graph join."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wirings.compaction.aten import Arguments, ProgramTensor, converts_views, view_of
from wirings.compaction.axes import Axes
from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.channel_constants import ChannelConstants
from wirings.compaction.operation import IndexRange, Operation, Tensors, expect
from wirings.compaction.operations.add import Add
from wirings.compaction.operations.arrange import stored_with_channels
from wirings.compaction.operations.torch_operator import TorchOperator

if TYPE_CHECKING:
    from wirings.compaction.liveness import NeededChannels
    from wirings.compaction.onnx import OnnxWriter
    from wirings.compaction.prune import Pruner

_VIEWS = {
    "select", "slice", "reshape", "view", "flatten", "squeeze", "unsqueeze", "transpose", "t", "permute", "unbind",
    "getitem", "expand", "clone", "contiguous", "alias", "detach", "chunk", "split",
}  # fmt: skip
"""Operators that compute nothing, so that integers after them are those of an input."""


@dataclass(frozen=True, eq=False)
class IndexedTokens(Operation):
    """An operation on tokens, (batch, channels, tokens), and integers, (batch, …), some of which are their indices."""

    input_count = 2
    start: int = 0
    """The number of the first index among the integers of an example."""
    count: int = 0
    """The number of indices."""
    tokens: int = 0
    """The number of tokens that indices refer to."""

    def _index(self, integers: Tensor, like: Tensor) -> Tensor:
        """The indices for each channel of a tensor: (batch, channels, count)."""
        own = integers.flatten(1)[:, None, self.start : self.start + self.count].long()
        return own.expand(-1, like.shape[1], -1)

    @property
    def index_range(self) -> IndexRange:
        return IndexRange(self.inputs[1], self.tokens, self.start, self.count)

    def infer(self, inputs: Sequence[Any]) -> Any:
        expect(len(inputs) == 2 and all(isinstance(x, Tensor) for x in inputs), "tokens and indices")
        x, integers = inputs
        expect(x.dim() == 3 and x.is_floating_point(), "tokens (batch, channels, tokens)")
        expect(integers.dim() >= 2 and integers.dtype in (torch.int64, torch.int32), "integers with a batch dimension")
        numbers = all(type(n) is int and n >= 0 for n in (self.start, self.count, self.tokens))
        expect(numbers and self.start + self.count <= integers[0].numel(), "indices among the integers")
        self.check(inputs)
        return self.compute(inputs, {})

    def needed_channels(self, number: int, needed: Tensor, liveness: NeededChannels) -> Tensor:
        return needed if number == 0 else needed.any().expand(len(liveness.needed[self.inputs[1]]))

    def prune(self, pruner: Pruner, needed: Tensor) -> None:
        wanted = needed.nonzero().squeeze(1)
        integers = pruner.with_constants(self.inputs[1], None)
        pruner.emit(self, (pruner.with_constants(self.inputs[0], wanted), integers), wanted)

    def constant_channels(self, inputs: Sequence[ChannelConstants]) -> Tensor:
        return inputs[0].zero

    def constant_maps(self, inputs: Sequence[ChannelConstants], mask: Tensor, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64)

    def _onnx_index(self, writer: OnnxWriter) -> str:
        """The indices for each channel: (batch, channels, count)."""
        out = self.output
        flat = writer.node("Flatten", [self.inputs[1]], f"{out}.flat", axis=1)
        limits = [writer.integers([n], f"{out}.limit") for n in (self.start, self.start + self.count, 1)]
        own = writer.node("Slice", [flat, *limits], f"{out}.index")
        own = writer.node("Unsqueeze", [own, writer.integers([1], f"{out}.axis")], f"{out}.row")
        shape = writer.integers([1, writer.shapes[self.inputs[0]][0], 1], f"{out}.shape")
        return writer.node("Expand", [own, shape], f"{out}.indices")


@dataclass(frozen=True, eq=False)
class PickTokens(IndexedTokens):
    """The tokens at ``count`` indices, in their order."""

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        return inputs[0].gather(2, self._index(inputs[1], inputs[0]))

    def check(self, inputs: Sequence[Tensor]) -> None:
        expect(inputs[0].shape[2] == self.tokens, f"{self.tokens} tokens")

    def to_onnx(self, writer: OnnxWriter) -> None:
        writer.node("GatherElements", [self.inputs[0], self._onnx_index(writer)], self.output, axis=2)


@dataclass(frozen=True, eq=False)
class SumTokens(IndexedTokens):
    """Sums of tokens: each of ``count`` tokens is added to the sum at its index, of which there are ``tokens``."""

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        x = inputs[0]
        sums = x.new_zeros(*x.shape[:2], self.tokens)
        return sums.scatter_add(2, self._index(inputs[1], x), x)

    def check(self, inputs: Sequence[Tensor]) -> None:
        expect(inputs[0].shape[2] == self.count, f"{self.count} tokens")

    def to_onnx(self, writer: OnnxWriter) -> None:
        out, index = self.output, self._onnx_index(writer)
        channels = writer.shapes[self.inputs[0]][0]
        sizes = writer.node("Shape", [self.inputs[0]], f"{out}.sizes")
        limits = [writer.integers([n], f"{out}.first") for n in (0, 1)]
        batch = writer.node("Slice", [sizes, *limits], f"{out}.batch")
        rest = writer.integers([channels, self.tokens], f"{out}.rest")
        shape = writer.node("Concat", [batch, rest], f"{out}.shape", axis=0)
        zero = writer.tensor(torch.zeros(()), f"{out}.zero")
        sums = writer.node("Expand", [zero, shape], f"{out}.zeros")
        writer.node("ScatterElements", [sums, index, self.inputs[0]], out, axis=2, reduction="add")


def _indices(builder: ProgramBuilder, index: Any) -> tuple[str, int, int] | None:
    """The input that an index is a part of, the number of its first entry there, and how many it has.

    None unless it is consecutive entries of an input of integers, in a batch of one. An index may be repeated for
    each channel, (count, channels).
    """
    if not isinstance(index, ProgramTensor) or index.axes is not None or builder.batch != 1:
        return None
    made = {o.output: o for o in builder.operations}
    chain: list[TorchOperator] = []
    name = index.name
    while name in made:
        o = made[name]
        target = o.target.removeprefix("aten::").partition(".")[0] if isinstance(o, TorchOperator) else ""
        if not isinstance(o, TorchOperator) or target not in _VIEWS or len(o.inputs) != 1:
            return None
        chain.append(o)
        name = o.inputs[0]
    source = builder.values[name]
    if not isinstance(source, Tensor) or source.dtype not in (torch.int64, torch.int32):
        return None
    numbers: Any = torch.arange(source.numel()).view(source.shape)
    for o in reversed(chain):
        numbers = o.run(numbers)
    if numbers.dim() == 2 and torch.equal(numbers, numbers[:, :1].expand_as(numbers)):
        numbers = numbers[:, 0]
    count = numbers.numel()
    if numbers.dim() != 1 or not count or not torch.equal(numbers, numbers[0] + torch.arange(count)):
        return None
    return name, int(numbers[0]), count


def _tokens_of(builder: ProgramBuilder, x: Any, hint: str) -> tuple[str, int] | None:
    """A tensor (tokens, features) without a batch dimension, stored as (1, features, tokens); and its tokens."""
    axes = view_of(builder, x)
    if axes is None or len(axes.dims) != 2 or any(f.dim == 0 for own in axes.dims for f in own):
        return None
    found = stored_with_channels(builder, x.name, axes, 1, hint)
    if found is None or len(found[1].stored) != 3 or found[1].whole(0) != 2:
        return None
    return found[0], axes.shape[0]


def _as_features(builder: ProgramBuilder, name: str) -> ProgramTensor:
    """A stored tensor as (tokens, features)."""
    axes = Axes.plain(tuple(builder.values[name].shape))
    return ProgramTensor(name, Axes(axes.stored, (axes.dims[2], axes.dims[1])))


@converts_views("index", "index_select")
def _pick(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
    given = a["index"] if "index" in a else a["indices"][0] if len(a["indices"]) == 1 else None
    found, index = _tokens_of(builder, a["self"], hint), _indices(builder, given)
    if found is None or index is None or a.get("dim", 0) != 0:
        return None
    fields = {"start": index[1], "count": index[2], "tokens": found[1]}
    return _as_features(builder, builder.add(PickTokens, (found[0], index[0]), hint, **fields))


@converts_views("index_add", source="source")
@converts_views("scatter_add", source="src")
def _add_at(builder: ProgramBuilder, hint: str, a: Arguments, source: str) -> Any:
    found, index, before = _tokens_of(builder, a[source], hint), _indices(builder, a["index"]), a["self"]
    if found is None or index is None or a["dim"] != 0 or a.get("alpha", 1) != 1 or index[2] != found[1]:
        return None
    features = builder.values[found[0]].shape[1]
    if a["sizes"] is None or len(a["sizes"]) != 2 or a["sizes"][1] != features:
        return None
    fields = {"start": index[1], "count": index[2], "tokens": a["sizes"][0]}
    constant = isinstance(before, Tensor)
    if constant and before.any():
        return None
    own = None if constant else _tokens_of(builder, before, hint)
    if not constant and own is None:
        return None
    made = builder.add(SumTokens, (found[0], index[0]), hint, **fields)
    if own is not None:
        made = builder.add(Add, (own[0], made), hint)
    return _as_features(builder, made)
