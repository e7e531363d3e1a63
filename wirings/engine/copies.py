"""Copies of maps and numbers: between layouts, from the caller's inputs, and to the caller's outputs.

The kernels are in ``source/copies.h``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wirings.engine.bounds import expect_all_inside, expect_inside
from wirings.engine.edge_sums import StridePhases
from wirings.engine.memory_layout import FeatureMaps
from wirings.engine.step import Fields, LoweredStep, StepContext, WorkDivision, integers, pointers

TILE = 1024
"""Numbers that one task copies, at least."""


@dataclass(eq=False)
class CopyStep(LoweredStep):
    """Copies of maps; with a stride, of the phases that a strided convolution reads."""

    kind = "copy"
    layout = (
        *pointers("in_", "out", "chunks"),
        ("phases", StridePhases),
        *integers("chunk_count", "strips", "height", "width", "pitch", "source"),
    )
    out: FeatureMaps
    source: FeatureMaps | int
    """Maps, or the number of a caller's input, in which channels are contiguous."""
    height: int
    width: int
    stride: tuple[int, int] = (1, 1)
    needed: np.ndarray | None = None
    """Which phases are read; None for all. A convolution of single pixels reads one in four, with a stride of 2."""

    def reads(self) -> list[FeatureMaps]:
        return [self.source] if isinstance(self.source, FeatureMaps) else []

    def strips(self, division: WorkDivision) -> list[int]:
        return [division.threads if division.together else 1]

    def fields(self, context: StepContext) -> tuple[Fields, int]:
        memory, strips, (stride_y, stride_x) = context.memory, context.choice.strips, self.stride
        out = memory.offsets(self.out)
        if isinstance(self.source, FeatureMaps):
            number, size = -1, context.floats
            in_, pitch = memory.offsets(self.source), memory.pitch(self.source)
        else:
            number, size = self.source, context.input_sizes[self.source]
            in_, pitch = np.arange(len(out) // (stride_y * stride_x)) * self.height * self.width, self.width
        expect_inside(self.name, in_, (self.height - 1) * pitch + self.width, size)
        if self.needed is not None:
            out = np.where(self.needed, out, -1)
        expect_inside(self.name, out[out != -1], context.extent(self.out), context.floats)
        chunks = context.channel_chunks(len(in_), self.height, self.width, strips)
        values = {
            "in_": in_,
            "out": out,
            "chunks": chunks,
            "phases": {"stride_y": stride_y, "stride_x": stride_x, "pitch": memory.pitch(self.out)},
            "chunk_count": len(chunks) - 1,
            "strips": strips,
            "height": self.height,
            "width": self.width,
            "pitch": pitch,
            "source": number,
        }
        return values, strips * (len(chunks) - 1)


@dataclass(eq=False)
class GiveStep(LoweredStep):
    """Copies of maps or single numbers to a caller's output."""

    kind = "give"
    layout = (*pointers("in_", "chunks"), *integers("height", "width", "pitch", "output"))
    source: FeatureMaps
    output: int
    """The number of the caller's output."""

    def reads(self) -> list[FeatureMaps]:
        return [self.source]

    def fields(self, context: StepContext) -> tuple[Fields, int]:
        source, in_ = self.source, context.memory.offsets(self.source)
        expect_inside(self.name, in_, context.extent(source), context.floats)
        expect_all_inside(self.name, len(in_) * source.height * source.width, context.output_sizes[self.output])
        chunks = context.channel_chunks(len(in_), source.height, source.width)
        values = {
            "in_": in_,
            "chunks": chunks,
            "height": source.height,
            "width": source.width,
            "pitch": context.memory.pitch(source),
            "output": self.output,
        }
        return values, len(chunks) - 1


@dataclass(eq=False)
class GatherStep(LoweredStep):
    """Copies of single numbers, in another order: between maps, from a caller's input, or to a caller's output."""

    kind = "gather"
    layout = (*pointers("places", "out"), *integers("rows", "length", "source", "output", "tiles"))
    index: np.ndarray
    """(rows, length): for each number of the result, that of its source, counted channel by channel."""
    source: FeatureMaps | int
    """Maps, or the number of a caller's input."""
    output: int = -1
    """The number of a caller's output, if that is where the result goes."""

    def reads(self) -> list[FeatureMaps]:
        return [self.source] if isinstance(self.source, FeatureMaps) else []

    def fields(self, context: StepContext) -> tuple[Fields, int]:
        memory = context.memory
        if isinstance(self.source, FeatureMaps):
            number, source, pitch = -1, self.source, memory.pitch(self.source)
            y, x = np.divmod(np.arange(source.height * source.width), max(source.width, 1))
            flat = (memory.offsets(source)[:, None] + (y * pitch + x)).reshape(-1)
            places = flat[self.index]
            expect_inside(self.name, places, 1, context.floats)
        else:
            number, places = self.source, self.index
            expect_inside(self.name, places, 1, context.input_sizes[number])
        rows, length = self.index.shape
        if self.out is not None:
            pitch = memory.pitch(self.out)
            out = (memory.offsets(self.out)[:, None] + np.arange(self.out.height) * pitch).reshape(-1)
            expect_inside(self.name, out, length, context.floats)
        else:
            out = np.arange(rows) * length
            expect_inside(self.name, out, length, context.output_sizes[self.output])
        expect_all_inside(self.name, rows, len(out))
        tiles = int(np.clip(rows * length // TILE, 1, min(rows, 4 * context.threads)))
        values = {
            "places": places,
            "out": out,
            "rows": rows,
            "length": length,
            "source": number,
            "output": self.output,
            "tiles": tiles,
        }
        return values, tiles
