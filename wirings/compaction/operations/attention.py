"""Scaled dot-product attention."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from wirings.compaction.channel_constants import ChannelConstants
from wirings.compaction.operation import (
    Operation,
    OperationCounts,
    Shape,
    Tensors,
    UnsupportedByOnnxError,
    expect,
    expect_size,
)

if TYPE_CHECKING:
    from wirings.compaction.liveness import NeededChannels
    from wirings.compaction.onnx import OnnxWriter
    from wirings.compaction.prune import Pruner


@dataclass(frozen=True, eq=False)
class Attention(Operation):
    """softmax(scale · queries · keys + mask) · values, head by head, over the tokens in the last dimension.

    Queries, keys and values are (batch, channels, …, tokens), with the channels of one head after the other. A head of
    keys and values may have several heads of queries (``sharing``), which then follow each other. Heads may have
    different numbers of channels. A fourth input, if there is one, is added before the softmax: (batch, 1 or heads, 1
    or tokens, tokens).
    """

    weights = ("mask", "window_mask")
    input_count = None
    mask: Tensor | None = None
    """Added before the softmax: (1 or heads, tokens, tokens)."""
    sizes: tuple[int, ...] = ()
    """Channels of the keys of each head, and of each of its queries."""
    value_sizes: tuple[int, ...] = ()
    """Channels of the values of each head."""
    sharing: int = 1
    """Heads of queries for each head of keys and values."""
    scale: float = 1.0
    causal: bool = False
    """Whether a token sees itself and earlier ones only."""
    window_mask: Tensor | None = None
    """Added, too, if there is a dimension of windows between channels and tokens: (windows, tokens, tokens)."""

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        # (batch, …, channels, tokens), with at least four dimensions, which PyTorch's exporter to ONNX needs
        queries, keys, values = (x[:, None] if x.dim() == 3 else x.movedim(1, -2) for x in inputs[:3])
        tokens = queries.shape[-1], keys.shape[-1]
        mask: Tensor | None = own["mask"]
        if self.causal:
            later = torch.full(tokens, -math.inf, dtype=queries.dtype, device=queries.device).triu(1)[None]
            mask = later if mask is None else mask + later
        heads = []
        for number, (queries_of, keys_of, values_of) in enumerate(self.heads()):
            q, k, v = queries[..., queries_of, :].mT, keys[..., keys_of, :].mT, values[..., values_of, :].mT
            added = None if mask is None else mask[number if len(mask) > 1 else 0]
            if own["window_mask"] is not None:
                added = own["window_mask"] if added is None else own["window_mask"] + added
            if len(inputs) > 3:
                first = number if inputs[3].shape[1] > 1 else 0
                own_bias = inputs[3][:, first : first + 1]
                added = own_bias if added is None else own_bias + added
            heads.append(self.attend(q, k, v, added).mT)
        made = torch.cat(heads, -2)
        return made.squeeze(1) if inputs[0].dim() == 3 else made.movedim(-2, 1)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, added: Tensor | None) -> Tensor:
        """One head: (…, tokens, size) each."""
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=added, scale=self.scale)

    def heads(self) -> list[tuple[slice, slice, slice]]:
        """The channels of the queries, keys and values of every head of queries."""
        found, query = [], 0
        starts = itertools.accumulate(self.sizes, initial=0), itertools.accumulate(self.value_sizes, initial=0)
        for size, value_size, key, value in zip(self.sizes, self.value_sizes, *starts, strict=False):
            for _ in range(self.sharing):
                found.append((slice(query, query + size), slice(key, key + size), slice(value, value + value_size)))
                query += size
        return found

    def check(self, inputs: Sequence[Tensor]) -> None:
        expect(len(inputs) in (3, 4), "queries, keys, values and at most a bias")
        queries, keys, values = inputs[:3]
        expect(len(self.sizes) == len(self.value_sizes) >= 1 and self.sharing >= 1, "sizes of every head")
        expect(all(n >= 0 for n in (*self.sizes, *self.value_sizes)), "sizes of 0 or more")
        expect(queries.dim() >= 3 and queries.dim() == keys.dim() == values.dim(), "tensors with tokens")
        expect(queries.shape[1] == self.sharing * sum(self.sizes), "queries of the heads' sizes")
        expect(keys.shape[1] == sum(self.sizes) and values.shape[1] == sum(self.value_sizes), "keys and values")
        expect(keys.shape[2:] == values.shape[2:] and queries.shape[2:-1] == keys.shape[2:-1], "the same tokens")
        if self.mask is not None:
            tokens = (queries.shape[-1], keys.shape[-1])
            heads = (1, len(self.sizes) * self.sharing)
            expect(self.mask.dim() == 3 and self.mask.shape[0] in heads and self.mask.shape[1:] == tokens, "a mask")
        if self.window_mask is not None:
            expect(queries.dim() == 4, "windows")
            expect_size(self.window_mask, (*queries.shape[2:], keys.shape[-1]))
        if len(inputs) > 3:
            count, found = len(self.sizes) * self.sharing, tuple(inputs[3].shape[1:])
            expect(queries.dim() == 3 and len(found) == 3 and found[2] == keys.shape[-1], "a bias for every token")
            plain = found[0] in (1, count) and found[1] in (1, queries.shape[-1])
            expect(plain, "a bias for every head and token, or for all")

    def counts(self, shape: Shape, inputs: Sequence[Shape]) -> OperationCounts:
        channels = self.sharing * sum((*self.sizes, *self.value_sizes))
        pairs = math.prod(shape[1:]) * inputs[1][-1]
        return OperationCounts(0, 0, channels * pairs, channels * pairs)

    # ---- channels ---------------------------------------------------------------------------------------------------

    def _value_channels(self) -> Tensor:
        """The channel of the values behind each channel of the result."""
        return torch.cat([torch.arange(v.start, v.stop) for _, _, v in self.heads()])

    def constant_channels(self, inputs: Sequence[ChannelConstants]) -> Tensor:
        """A weighted mean of equal numbers is that number, if a token sees any other."""
        masks = [torch.isfinite(x) for x in (self.mask, self.window_mask) if x is not None]
        seen = masks[0] if len(masks) == 1 else masks[0][:, None] & masks[1] if masks else torch.ones(1)
        if len(inputs) > 3 or not bool(seen.any(-1).all()):
            return torch.zeros(self.sharing * sum(self.value_sizes), dtype=torch.bool)
        return _uniform(inputs[2])[self._value_channels()]

    def constant_maps(self, inputs: Sequence[ChannelConstants], mask: Tensor, shape: Shape) -> Tensor:
        values = inputs[2].maps[..., :1][self._value_channels()].expand(shape)
        return torch.where(mask.view(-1, *[1] * (len(shape) - 1)), values, 0.0)

    def _used(self, needed: Tensor, constants: Sequence[ChannelConstants]) -> tuple[Tensor, Tensor]:
        """Which channels of the keys, and of the values, have any influence on the ``needed`` channels."""
        values = torch.zeros(sum(self.value_sizes), dtype=torch.bool)
        values[self._value_channels()[needed]] = True
        # A number that is added for all keys alike changes nothing.
        pairs = ~_uniform(constants[1])
        silent = constants[0].zero
        for number, (size, value_size) in enumerate(zip(self.sizes, self.value_sizes, strict=True)):
            first, value = sum(self.sizes[:number]), sum(self.value_sizes[:number])
            own = slice(first, first + size)
            queries = silent[self.sharing * first : self.sharing * (first + size)].view(self.sharing, size)
            pairs[own] &= ~queries.all(0) & values[value : value + value_size].any()
        if not pairs.any() and len(pairs):  # all tokens count alike; tensors need a channel
            pairs[0] = True
        return pairs, values

    def _queries_of(self, pairs: Tensor) -> Tensor:
        """The channels of the queries that meet channels of the keys."""
        return torch.cat([pairs[keys] for _, keys, _ in self.heads()])

    def mark_needed(self, liveness: NeededChannels, needed: Tensor) -> None:
        known = [liveness.constants[name] for name in self.inputs[:3]]
        pairs, values = self._used(needed, [x for x in known if x is not None])
        for name, channels in zip(self.inputs[:3], (self._queries_of(pairs), pairs, values), strict=True):
            liveness.mark(name, channels)
        for name in self.inputs[3:]:
            liveness.used.add(name)
            liveness.mark(name, None)

    def prune(self, pruner: Pruner, needed: Tensor) -> None:
        pairs, values = self._used(needed, [pruner.constants_of(name) for name in self.inputs[:3]])
        sizes = [int(x.sum()) for x in pairs.split(list(self.sizes))]
        value_sizes = [int(x.sum()) for x in values.split(list(self.value_sizes))]
        alive = [n for n, both in enumerate(zip(sizes, value_sizes, strict=True)) if any(both)]
        masks = self.mask
        if masks is not None and len(masks) > 1:
            masks = masks[[n * self.sharing + i for n in alive for i in range(self.sharing)]]
        wanted = [x.nonzero().squeeze(1) for x in (self._queries_of(pairs), pairs, values)]
        inputs = tuple(pruner.with_constants(name, index) for name, index in zip(self.inputs[:3], wanted, strict=True))
        inputs += tuple(pruner.with_constants(name, None) for name in self.inputs[3:])
        kept = values[self._value_channels()].nonzero().squeeze(1)
        changed = {"sizes": tuple(sizes[n] for n in alive), "value_sizes": tuple(value_sizes[n] for n in alive)}
        pruner.emit(self, inputs, kept, mask=masks, **changed)

    # ---- export -----------------------------------------------------------------------------------------------------

    def spelled_out(self) -> Operation:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return SpelledOutAttention(**fields)

    def to_onnx(self, writer: OnnxWriter) -> None:
        if len(writer.shapes[self.inputs[0]]) != 2 or len(self.inputs) > 3:
            raise UnsupportedByOnnxError("attention within windows, or with a mask that depends on the input")
        mask = self._full_mask(writer)
        alike = len(set(self.sizes)) == len(set(self.value_sizes)) == 1 and self.sharing == 1
        if alike:
            heads = len(self.sizes)
            sizes = [self.sizes[0], self.sizes[0], self.value_sizes[0]]
            parts: list[str] = []
            for name, size in zip(self.inputs[:3], sizes, strict=True):
                shape = writer.integers([0, heads, size, -1], f"{self.output}.heads")
                parts.append(writer.node("Reshape", [name, shape], f"{self.output}.split{len(parts)}"))
            made = self._one_to_onnx(writer, parts, mask, f"{self.output}.all", [0, 1, 3, 2])
            shape = writer.integers([0, heads * sizes[2], -1], f"{self.output}.merge")
            writer.node("Reshape", [made, shape], self.output)
            return
        results = []
        for number, parts_of in enumerate(self.heads()):
            parts = []
            for name, part in zip(self.inputs, parts_of, strict=True):
                limits = [writer.integers([n], f"{self.output}.limit") for n in (part.start, part.stop, 1)]
                parts.append(writer.node("Slice", [name, *limits], f"{self.output}.{number}.part{len(parts)}"))
            own = mask if mask is None or len(mask) == 1 else mask[number : number + 1]
            results.append(self._one_to_onnx(writer, parts, own, f"{self.output}.{number}", [0, 2, 1]))
        writer.node("Concat", results, self.output, axis=1)

    def _full_mask(self, writer: OnnxWriter) -> Tensor | None:
        if not self.causal:
            return self.mask
        tokens = [writer.shapes[name][-1] for name in self.inputs[:2]]
        later = torch.full(tokens, -math.inf).triu(1)[None]
        return later if self.mask is None else self.mask + later

    def _one_to_onnx(
        self, writer: OnnxWriter, parts: Sequence[str], mask: Tensor | None, hint: str, dims: list[int]
    ) -> str:
        """One head, or all of them in a dimension of their own: (…, channels, tokens) each, which ``dims`` swap."""
        queries, keys, values = parts
        turned = writer.node("Transpose", [queries], f"{hint}.turned", perm=dims)
        scores = writer.node("MatMul", [turned, keys], f"{hint}.products")
        scores = writer.node(
            "Mul", [scores, writer.tensor(torch.tensor(self.scale), f"{hint}.scale")], f"{hint}.scores"
        )
        if mask is not None:
            scores = writer.node("Add", [scores, writer.tensor(mask, f"{hint}.mask")], f"{hint}.masked")
        shares = writer.node("Softmax", [scores], f"{hint}.shares", axis=-1)
        blind = None if mask is None else (mask == -math.inf).all(-1, keepdim=True)
        if blind is not None and blind.any():  # such a token gets zeros
            zero = writer.tensor(torch.zeros(()), f"{hint}.zero")
            shares = writer.node("Where", [writer.tensor(blind, f"{hint}.blind"), zero, shares], f"{hint}.seen")
        turned = writer.node("Transpose", [shares], f"{hint}.back", perm=dims)
        return writer.node("MatMul", [values, turned], f"{hint}.result")


@dataclass(frozen=True, eq=False)
class SpelledOutAttention(Attention):
    """Attention in plain operators. PyTorch's exporter to ONNX writes NaN for a token that sees no other."""

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, added: Tensor | None) -> Tensor:
        scores = queries @ keys.mT * self.scale
        if added is None:
            return scores.softmax(-1) @ values
        scores = scores + added
        shares = torch.where(scores.amax(-1, keepdim=True) == -math.inf, 0.0, scores.softmax(-1))
        return shares @ values


def _uniform(x: ChannelConstants) -> Tensor:
    """Which channels are constant, with one number for all tokens."""
    return x.constant & (x.maps == x.maps[..., :1]).flatten(1).all(1)
