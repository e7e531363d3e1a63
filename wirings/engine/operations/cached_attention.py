"""Attention of one token to those before it, whose keys and values are kept; see ``source/cached_attention.h``."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from wirings.compaction.operation import Operation, Tensors
from wirings.compaction.operations import Attention
from wirings.engine.bounds import expect_all_inside, expect_inside
from wirings.engine.lowering import Lowering
from wirings.engine.memory_layout import FeatureMaps
from wirings.engine.operations.attention import head_table
from wirings.engine.operations.registry import kernel_for
from wirings.engine.step import Fields, LoweredStep, StepContext, integers, pointers

VALUE_TILE = 4
"""Vectors of values that are read at a time, as in the kernel."""


@dataclass(frozen=True, eq=False)
class CachedAttention(Operation):
    """Attention of one token to itself and those before it; the last two inputs are the cache and the position."""

    input_count = 5
    sizes: tuple[int, ...] = ()
    value_sizes: tuple[int, ...] = ()
    sharing: int = 1
    scale: float = 1.0
    capacity: int = 0

    def heads(self) -> list[tuple[slice, slice, slice]]:
        """The channels of each head's queries, keys and values."""
        like = Attention("", (), sizes=self.sizes, value_sizes=self.value_sizes, sharing=self.sharing)
        return list(like.heads())

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        """The result for an empty cache: a token that only sees itself has its own values."""
        return torch.cat([inputs[2][:, values] for _, _, values in self.heads()], 1)


@dataclass(eq=False)
class CachedAttentionStep(LoweredStep):
    """Attention of one token to those before it, whose keys and values are in one of the caller's inputs."""

    kind = "cached_attention"
    layout = (
        *pointers("queries", "keys", "values", "out", "heads"),
        *integers("sharing", "key_channels", "capacity", "cache", "position"),
        ("scale", c_float),
    )
    out: FeatureMaps
    queries: FeatureMaps
    keys: FeatureMaps
    values: FeatureMaps
    heads: np.ndarray
    """(heads, 6); see `head_table`."""
    sharing: int
    capacity: int
    cache: int
    """The number of the caller's input with the keys and values."""
    position: int
    """The number of the caller's input with the position."""
    scale: float

    def reads(self) -> list[FeatureMaps]:
        return [self.queries, self.keys, self.values]

    def fields(self, context: StepContext) -> tuple[Fields, int]:
        offsets = {name: context.memory.offsets(getattr(self, name)) for name in ("queries", "keys", "values", "out")}
        for places in offsets.values():
            expect_inside(self.name, places, 1, context.floats)
        needed = (len(self.keys) + len(self.values)) * self.capacity + VALUE_TILE * context.lanes
        expect_all_inside(self.name, needed, context.input_sizes[self.cache])
        expect_inside(self.name, np.array([self.capacity % context.lanes]), 1, 1)
        values = {
            **offsets,
            "heads": self.heads,
            "sharing": self.sharing,
            "key_channels": len(self.keys),
            "capacity": self.capacity,
            "cache": self.cache,
            "position": self.position,
            "scale": self.scale,
        }
        return values, len(self.heads) // self.sharing


@kernel_for(CachedAttention, lambda o, shapes: len(shapes[0]) == 1)
def lower_cached_attention(lowering: Lowering, o: CachedAttention) -> FeatureMaps:
    queries, keys, values = (lowering.solid(lowering.ready(name)) for name in o.inputs[:3])
    out = lowering.new_like(o.output)
    cache, position = (lowering.input_number(name) for name in o.inputs[3:])
    heads = head_table(o.heads())
    lowering.emit(
        CachedAttentionStep(
            o.output, out, queries, keys, values, heads, o.sharing, o.capacity, cache, position, o.scale
        )
    )
    return out
