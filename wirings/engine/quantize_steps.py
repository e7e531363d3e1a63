"""Steps that turn maps of floats into maps of bytes; ``source/int8_kernels.h`` has their structs."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from wirings.engine.bounds import expect_inside
from wirings.engine.memory_layout import FeatureMaps
from wirings.engine.step import Fields, LoweredStep, StepContext, integers, pointers


@dataclass(frozen=True)
class ByteLayout:
    """How maps of bytes are stored: flat, with borders, and with a map for each remainder by a stride."""

    rows: int
    row_bytes: int
    above: int = 0
    before: int = 0
    stride: tuple[int, int] = (1, 1)

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(eq=False)
class QuantizePixelsStep(LoweredStep):
    """Maps to bytes, with a scale for every pixel."""

    kind = "quantize_pixels"
    layout = (
        *pointers("in_", "out"),
        *integers("channels", "height", "width", "pitch", "scales", "zeros", "tiles"),
    )
    out: FeatureMaps
    """The maps of bytes, and those of `about`."""
    source: FeatureMaps
    made: FeatureMaps
    """Maps of one row, with four bytes for every float."""
    about: FeatureMaps
    """Two maps of one row: the scales and the zeros of the pixels."""

    def reads(self) -> list[FeatureMaps]:
        return [self.source]

    def fields(self, context: StepContext) -> tuple[Fields, int]:
        memory, source = context.memory, self.source
        pixels = source.height * source.width
        in_, out = memory.offsets(source), memory.offsets(self.made)
        about = memory.offsets(self.about)
        expect_inside(self.name, in_, context.vector_extent(source, 4 * context.lanes), context.floats)
        expect_inside(self.name, out, -(-pixels // 4), context.floats)
        expect_inside(self.name, about, pixels, context.floats)
        expect_inside(self.name, np.array([len(in_) - 1]), 1, len(out))
        runs = source.height * -(-source.width // (4 * context.lanes))
        tiles = max(1, min(runs, 4 * context.threads))
        values = {"in_": in_, "out": out, "channels": len(in_), "height": source.height, "width": source.width}
        values |= {"pitch": memory.pitch(source), "scales": int(about[0]), "zeros": int(about[1]), "tiles": tiles}
        return values, tiles


@dataclass(eq=False)
class QuantizeChannelsStep(LoweredStep):
    """Maps to bytes, with a scale for every channel."""

    kind = "quantize_channels"
    layout = (
        *pointers("in_", "out", "inverse", "zero"),
        *integers("channels", "height", "width", "pitch", "stride_y", "stride_x"),
        *integers("rows", "row_bytes", "above", "before", "tiles"),
    )
    out: FeatureMaps
    """The maps of bytes of one channel after the other, a map for each remainder."""
    source: FeatureMaps
    inverse: np.ndarray
    zero: np.ndarray
    bytes: ByteLayout

    def only(self, channels: np.ndarray) -> QuantizeChannelsStep:
        """A step for some of the channels, of maps without remainders."""
        out, source = (maps.take(np.flatnonzero(channels)) for maps in (self.out, self.source))
        return QuantizeChannelsStep(self.name, out, source, self.inverse[channels], self.zero[channels], self.bytes)

    def reads(self) -> list[FeatureMaps]:
        return [self.source]

    def fields(self, context: StepContext) -> tuple[Fields, int]:
        memory, source, made = context.memory, self.source, self.bytes
        in_, out = memory.offsets(source), memory.offsets(self.out)
        expect_inside(self.name, in_, context.vector_extent(source), context.floats)
        expect_inside(self.name, out, -(-made.bytes // 4), context.floats)
        (sy, sx), channels = made.stride, len(in_)
        last = (made.above + -(-source.height // sy) - 1) * made.row_bytes + made.before + -(-source.width // sx)
        expect_inside(self.name, np.array([0]), last, made.bytes)
        expect_inside(self.name, np.array([channels * sy * sx - 1]), 1, len(out))
        expect_inside(self.name, np.array([channels - 1]), 1, min(len(self.inverse), len(self.zero)))
        tiles = max(1, min(channels, 4 * context.threads))
        values = {
            "in_": in_,
            "out": out,
            "inverse": self.inverse,
            "zero": self.zero,
            "channels": channels,
            "height": source.height,
            "width": source.width,
            "pitch": memory.pitch(source),
            "stride_y": sy,
            "stride_x": sx,
            "rows": made.rows,
            "row_bytes": made.row_bytes,
            "above": made.above,
            "before": made.before,
            "tiles": tiles,
        }
        return values, tiles


class ByteResults(ctypes.Structure):
    """Maps of bytes that a step makes of its results; see ``source/bytes.h``."""

    _fields_ = [*pointers("places", "inverse", "zero"), *integers("only")]


@dataclass(eq=False)
class BytesOfNodes:
    """The results of nodes in bytes, made by the step of the nodes itself."""

    step: QuantizeChannelsStep
    """What would quantise them."""
    only: bool = False
    """Whether nothing reads them in floats."""

    @staticmethod
    def fields(own: BytesOfNodes | None, name: str, results: FeatureMaps, rows: int, context: StepContext) -> Fields:
        """The fields of `ByteResults`, for the results of so many rows."""
        if own is None:
            return dict.fromkeys(("places", "inverse", "zero", "only"), 0)
        places = context.memory.offsets(own.step.out)
        expect_inside(name, places, -(-results.height * results.width // 4), context.floats)
        found, (inverse, zero), channels = np.full(rows, -1), np.zeros((2, rows), np.float32), own.step.source.channels
        found[channels], inverse[channels], zero[channels] = places, own.step.inverse, own.step.zero
        return {"places": found, "inverse": inverse, "zero": zero, "only": int(own.only)}
