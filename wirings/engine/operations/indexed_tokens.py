"""Tokens at indices that the caller gives, picked or summed; their kernel is in ``source/indexed_tokens.h``."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from wirings.compaction.operations import PickTokens, SumTokens
from wirings.engine.bounds import expect_all_inside, expect_inside
from wirings.engine.fused_steps import FusedStep
from wirings.engine.lowering import Lowering
from wirings.engine.memory_layout import FeatureMaps
from wirings.engine.operations.registry import kernel_for
from wirings.engine.step import Fields, LoweredStep, StepContext, integers, pointers

MOVE = 16.0
"""What it costs to copy a number, in multiply-adds, of which a vector takes as long as one number."""


class TokenIndices(ctypes.Structure):
    """Consecutive integers of a caller's input; see ``source/indexed_tokens.h``."""

    _fields_ = integers("source", "start")


@dataclass(eq=False)
class IndexedTokensStep(LoweredStep):
    """Tokens that are picked, summed, or both."""

    kind = "indexed_tokens"
    layout = (
        *pointers("in_", "out", "chunks"),
        ("picked", TokenIndices),
        ("summed", TokenIndices),
        *integers("count", "tokens", "sums"),
    )
    out: FeatureMaps
    tokens: FeatureMaps
    picked: tuple[int, int] | None
    """The caller's input that has the indices of the tokens that are picked, and the first of them, as numbers."""
    summed: tuple[int, int] | None
    """The same for the sums that they are added to."""
    count: int

    def reads(self) -> list[FeatureMaps]:
        return [self.tokens]

    def fields(self, context: StepContext) -> tuple[Fields, int]:
        in_, out = context.memory.offsets(self.tokens), context.memory.offsets(self.out)
        tokens, sums = self.tokens.width, self.out.width if self.summed else 0
        expect_inside(self.name, in_, tokens, context.floats)
        expect_inside(self.name, out, sums or self.count, context.floats)
        for own in (self.picked, self.summed):
            if own is not None:
                expect_all_inside(self.name, own[1] + self.count, context.input_sizes[own[0]])
        moved = tokens + sums if self.summed else self.count
        chunks = context.chunks(np.full(len(in_), MOVE * moved))
        values = {
            "in_": in_,
            "out": out,
            "chunks": chunks,
            "picked": _indices(self.picked),
            "summed": _indices(self.summed),
            "count": self.count,
            "tokens": tokens,
            "sums": sums,
        }
        return values, len(chunks) - 1


def _indices(own: tuple[int, int] | None) -> Fields:
    """The fields of `TokenIndices`."""
    source, start = (-1, 0) if own is None else own
    return {"source": source, "start": start}


@dataclass(eq=False)
class PickedTokens(FusedStep):
    """Tokens that are picked, which need no memory if they are only summed."""

    tokens: FeatureMaps
    picked: tuple[int, int]
    count: int

    @property
    def open(self) -> bool:
        return False

    def close(self, lowering: Lowering) -> FeatureMaps:
        out = lowering.new_like(self.name)
        lowering.emit(IndexedTokensStep(self.name, out, self.tokens, self.picked, None, self.count))
        return out


@kernel_for(PickTokens, lambda o, shapes: len(shapes[0]) == 2)
def lower_pick_tokens(lowering: Lowering, o: PickTokens) -> PickedTokens:
    tokens = lowering.solid(lowering.ready(o.inputs[0]))
    return PickedTokens(o.output, tokens, (lowering.input_number(o.inputs[1]), o.start), o.count)


@kernel_for(SumTokens, lambda o, shapes: len(shapes[0]) == 2)
def lower_sum_tokens(lowering: Lowering, o: SumTokens) -> FeatureMaps:
    before = lowering.values.get(o.inputs[0])
    picked = before if isinstance(before, PickedTokens) and lowering.users[o.inputs[0]] == 1 else None
    tokens = lowering.solid(lowering.ready(o.inputs[0])) if picked is None else picked.tokens
    out, summed = lowering.new_like(o.output), (lowering.input_number(o.inputs[1]), o.start)
    step = IndexedTokensStep(o.output, out, tokens, None if picked is None else picked.picked, summed, o.count)
    lowering.emit(step)
    return out
