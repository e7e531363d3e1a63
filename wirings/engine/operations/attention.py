"""Attention of tokens to others; its kernel is in ``source/attention.h``."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float
from dataclasses import dataclass

import numpy as np

from wirings.compaction.operations import Attention
from wirings.compaction.report import operation_counts
from wirings.engine.bounds import expect_all_inside, expect_inside
from wirings.engine.lowering import Lowering, as_array
from wirings.engine.memory_layout import LINE, FeatureMaps
from wirings.engine.operations.registry import Shape, kernel_for
from wirings.engine.step import Fields, LoweredStep, StepContext, integers, pointers


@dataclass(eq=False)
class AttentionStep(LoweredStep):
    """Attention of tokens to others."""

    kind = "attention"
    layout = (
        *pointers("queries", "keys", "values", "out", "heads", "mask", "window_mask"),
        *integers(
            "head_count", "mask_heads", "tokens", "others", "pitch", "other_pitch", "out_pitch", "tiles", "causal",
            "bias", "bias_heads", "bias_tokens",
        ),
        ("scale", c_float),
    )  # fmt: skip
    out: FeatureMaps
    queries: FeatureMaps
    keys: FeatureMaps
    values: FeatureMaps
    heads: np.ndarray
    """(heads, 6); see `head_table`."""
    scale: float
    causal: bool
    mask: np.ndarray | None = None
    """(1 or heads, tokens, others)."""
    window_mask: np.ndarray | None = None
    """(sequences, tokens, others)."""
    bias: int = -1
    """The number of the caller's input that is added to the scores."""
    bias_shape: tuple[int, ...] = (1, 1)
    """(1 or heads, 1 or tokens)."""

    def reads(self) -> list[FeatureMaps]:
        return [self.queries, self.keys, self.values]

    def fields(self, context: StepContext) -> tuple[Fields, int]:
        memory, lanes = context.memory, context.lanes
        queries, keys, values, out = (memory.offsets(maps) for maps in (self.queries, self.keys, self.values, self.out))
        expect_inside(self.name, queries, context.vector_extent(self.queries), context.floats)
        expect_inside(self.name, keys, context.vector_extent(self.keys, LINE), context.floats)
        expect_inside(self.name, values, context.extent(self.values), context.floats)
        expect_inside(self.name, out, context.extent(self.out), context.floats)
        first, last = self.heads[:, [0, 1, 2, 3]], self.heads[:, [4, 4, 5, 5]]
        limits = np.array([len(queries), len(keys), len(values), len(out)])
        expect_inside(self.name, np.where((first >= 0) & (first + last <= limits), 0, -1), 1, 1)
        tokens, others, rows = self.queries.width, self.keys.width, self.queries.height
        if self.mask is not None:
            expect_all_inside(self.name, len(self.mask) * tokens * others, self.mask.size)
            expect_inside(self.name, np.array([len(self.mask) - 1]), 1, len(self.heads))
        if self.window_mask is not None:
            expect_all_inside(self.name, rows * tokens * others, self.window_mask.size)
        if self.bias >= 0:
            size = self.bias_shape[0] * self.bias_shape[1] * others
            expect_all_inside(self.name, size, context.input_sizes[self.bias])
        tiles = context.tiles(-(-tokens // lanes), rows * len(self.heads))
        fields = {
            "queries": queries,
            "keys": keys,
            "values": values,
            "out": out,
            "heads": self.heads,
            "mask": 0 if self.mask is None else self.mask,
            "window_mask": 0 if self.window_mask is None else self.window_mask,
            "head_count": len(self.heads),
            "mask_heads": 1 if self.mask is None else len(self.mask),
            "tokens": tokens,
            "others": others,
            "pitch": memory.pitch(self.queries),
            "other_pitch": memory.pitch(self.keys),
            "out_pitch": memory.pitch(self.out),
            "tiles": tiles,
            "causal": self.causal,
            "bias": self.bias,
            "bias_heads": self.bias_shape[0],
            "bias_tokens": self.bias_shape[1],
            "scale": self.scale,
        }
        return fields, tiles * rows * len(self.heads)


def head_table(heads: Sequence[tuple[slice, slice, slice]]) -> np.ndarray:
    """An ``AttentionHead`` for each head, from the channels of its queries, keys and values: (heads, 6).

    That is its first channel of the queries, keys, values and results, and its number of keys' and values' channels.
    """
    table, given = [], 0
    for query, key, value in heads:
        size, value_size = key.stop - key.start, value.stop - value.start
        table.append((query.start, key.start, value.start, given, size, value_size))
        given += value_size
    return np.array(table)


def _supports(o: Attention, shapes: Sequence[Shape]) -> bool:
    return all(len(shape) in (2, 3) for shape in shapes[:3])


@kernel_for(Attention, _supports)
def lower_attention(lowering: Lowering, o: Attention) -> FeatureMaps:
    queries, keys, values = (lowering.solid(lowering.ready(name)) for name in o.inputs[:3])
    lowering.memory.join(keys, values)
    out = lowering.new_like(o.output)
    work = operation_counts(o, lowering.shapes).mult_adds
    step = AttentionStep(o.output, out, queries, keys, values, head_table(o.heads()), o.scale, o.causal, work=work)
    step.mask = None if o.mask is None else as_array(o.mask)
    step.window_mask = None if o.window_mask is None else as_array(o.window_mask)
    if len(o.inputs) > 3:
        step.bias, step.bias_shape = lowering.input_number(o.inputs[3]), lowering.shapes[o.inputs[3]][:2]
    lowering.emit(step)
    return out
