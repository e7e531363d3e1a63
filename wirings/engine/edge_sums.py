"""Sums over edges, which are most of what a network computes; their kernel is in ``source/edge_sums.h``."""

from __future__ import annotations

import ctypes
import enum
from ctypes import c_float
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from wirings.engine.bounds import as_int32, expect_inside
from wirings.engine.fused_steps import FusedStep
from wirings.engine.kernel_step import ClampRange
from wirings.engine.memory_layout import EMPTY, FeatureMaps
from wirings.engine.pack_weights import filled, grouped
from wirings.engine.step import (
    Fields,
    LoweredStep,
    StepContext,
    WorkDivision,
    integers,
    pointers,
    ways_by_density,
)
from wirings.engine.tiled_sums import (
    NOT_TILED,
    TILED,
    TiledEdges,
    places_read,
    tiled_chunks,
    tiled_fields,
    with_tiling,
)

if TYPE_CHECKING:
    from wirings.engine.lowering import Lowering

AFTER_SUMS = 4
"""What it costs to store one of the sums, in multiply-adds."""


class SumsResult(enum.IntEnum):
    """What becomes of sums."""

    MAPS = 0
    MEANS = 1
    """The mean of each map."""
    PHASES = 2
    """Maps for a strided convolution."""


@dataclass(eq=False)
class EdgeTerm:
    """Edges from one tensor: out[row] += value · source[channel], shifted by dy rows and dx columns."""

    source: FeatureMaps
    row: np.ndarray
    channel: np.ndarray
    value: np.ndarray
    dy: np.ndarray
    dx: np.ndarray
    taps: int
    """The number of different places (channel, dy, dx) that the rows read."""


@dataclass(eq=False)
class EdgeSum(FusedStep):
    """Sums over edges, with a bias."""

    height: int
    width: int
    terms: list[EdgeTerm]
    bias: np.ndarray

    @property
    def edges(self) -> int:
        return sum(len(term.row) for term in self.terms)

    @property
    def density(self) -> float:
        """The number of edges, divided by that of all pairs of a row and a place that some row reads."""
        return self.edges / max(1, len(self.bias) * sum(term.taps for term in self.terms))

    def sources(self) -> list[FeatureMaps]:
        return [term.source for term in self.terms]

    def ways(self) -> list[str]:
        """The ways of computing them that may be the fastest, the most likely first."""
        return with_tiling(ways_by_density(self.density), self.edges, len(self.bias))

    def close(self, lowering: Lowering) -> FeatureMaps:
        out = lowering.memory.new(len(self.bias), self.height, self.width)
        lowering.memory.join(*self.sources(), out)
        self.emit(lowering, out)
        return out

    def emit(
        self,
        lowering: Lowering,
        out: FeatureMaps,
        result: SumsResult = SumsResult.MAPS,
        stride: tuple[int, int] = (1, 1),
    ) -> SumsStep:
        """Add a step of these sums, and of what becomes of them."""
        lowering.memory.join(*self.sources())
        work = self.edges * self.height * self.width
        step = SumsStep(self.name, out, self, result, stride, work=work)
        lowering.emit(step)
        return step


class EdgeGroups(ctypes.Structure):
    """The edges of sums; see ``source/edge_sums.h``."""

    _fields_ = [
        *pointers("starts", "records", "bias"),
        ("activation", ClampRange),
        *integers("block", "tile"),
        ("tiled", TiledEdges),
    ]


class StridePhases(ctypes.Structure):
    """The phases of a map; see ``source/stride_phases.h``."""

    _fields_ = list(integers("stride_y", "stride_x", "pitch"))


@dataclass(eq=False)
class SumsStep(LoweredStep):
    """Sums over edges, as maps, means or phases."""

    kind = "sums"
    layout = (
        ("edges", EdgeGroups),
        *pointers("out", "mask", "chunks"),
        ("phases", StridePhases),
        *integers("chunk_count", "strips", "result", "length", "height", "width", "pitch"),
        ("share", c_float),
    )
    out: FeatureMaps
    sums: EdgeSum
    result: SumsResult
    stride: tuple[int, int]

    def reads(self) -> list[FeatureMaps]:
        return self.sums.sources()

    @property
    def words(self) -> int:
        return 9 * self.sums.edges

    def ways(self) -> list[str]:
        return self.sums.ways()

    def strips(self, division: WorkDivision) -> list[int]:
        if self.result != SumsResult.MAPS:
            return [1]
        vectors, threads = self.sums.height * self.sums.width // division.lanes, division.threads
        return [1, *(threads * n for n in (1, 2, 4) if threads * n <= vectors // 2)]

    def fields(self, context: StepContext) -> tuple[Fields, int]:
        sums, memory, strips = self.sums, context.memory, context.choice.strips
        height, width = sums.height, sums.width
        # Means and phases are made of sums in scratch memory, which may have any pitch.
        pitch = pitch_of(sums, context, memory.pitch(self.out) if self.result == SumsResult.MAPS else width)
        length = (height - 1) * pitch + width
        edges = edge_fields(sums, [place_of(term, context, pitch) for term in sums.terms], context)
        out = padded_offsets(self.out, edges, sums, context)
        whole = -(-length // context.lanes) * context.lanes
        given = {SumsResult.MAPS: whole, SumsResult.MEANS: 1}.get(self.result, context.extent(self.out))
        chunks, edges = divided(edges, group_costs(edges, sums, AFTER_SUMS), context, strips, whole)
        expect_inside(self.name, places_read(edges), whole, context.floats)
        expect_inside(self.name, out[out != -1], given, context.floats)
        values = {
            "edges": edges,
            "out": out,
            "mask": self._mask(context, pitch),
            "chunks": chunks,
            "phases": {"stride_y": self.stride[0], "stride_x": self.stride[1], "pitch": memory.pitch(self.out)},
            "chunk_count": len(chunks) - 1,
            "strips": strips,
            "result": self.result,
            "length": length,
            "height": height,
            "width": width,
            "pitch": pitch,
            "share": 1 / (height * width),
        }
        return values, strips * (len(chunks) - 1)

    def _mask(self, context: StepContext, pitch: int) -> np.ndarray | int:
        """The mask that keeps zeros between rows, if the next convolution or a mean reads them; otherwise 0."""
        (buffer,) = context.memory.of(self.out)
        if self.result == SumsResult.PHASES or (self.result == SumsResult.MAPS and not buffer.zeros):
            return 0
        height, width = self.sums.height, self.sums.width
        mask = np.zeros(height * pitch + 2 * context.lanes, np.int32)
        mask[: height * pitch].reshape(height, pitch)[:, :width] = -1
        return mask


def pitch_of(sums: EdgeSum, context: StepContext, otherwise: int) -> int:
    """The pitch of the maps that sums are over, or ``otherwise`` if they are over none."""
    real = (maps for maps in sums.sources() if (maps.buffers != EMPTY).any())
    return next((context.memory.pitch(maps) for maps in real), otherwise)


def place_of(term: EdgeTerm, context: StepContext, pitch: int) -> np.ndarray:
    """The place in memory that each edge reads for the first pixel of a map."""
    return context.memory.offsets(term.source)[term.channel] + term.dy * pitch + term.dx


def edge_fields(sums: EdgeSum, places: list[np.ndarray], context: StepContext) -> Fields:
    """The fields of `EdgeGroups`.

    Args:
        sums: the sums.
        places: what the edges of each term read.
        context: what determines whether they are sparse or dense.
    """
    machine, sparse = context.machine, context.choice.way != "dense"
    row = np.concatenate([*(term.row for term in sums.terms), np.zeros(0, int)])
    place = np.concatenate([*places, np.zeros(0, int)])
    value = np.concatenate([*(term.value for term in sums.terms), np.zeros(0, np.float32)])
    block = 1 if sparse else machine.block
    groups = -(-len(sums.bias) // block)
    starts, records = grouped(row, as_int32(place, sums.name), value, block, groups)
    return {
        "starts": starts,
        "records": records,
        "bias": filled(sums.bias, groups * block),
        "activation": sums.activation,
        "block": block,
        "tile": machine.tile if sparse else machine.dense_tile,
        "tiled": NOT_TILED,
    }


def divided(
    edges: Fields, costs: np.ndarray, context: StepContext, strips: int, row_floats: int
) -> tuple[np.ndarray, Fields]:
    """The groups of rows of each task, and the fields of `EdgeGroups` in the chosen way.

    Args:
        edges: the fields of `EdgeGroups`, for one group after the other.
        costs: what each group costs.
        context: what determines the way.
        strips: the number of tasks that each chunk is divided into.
        row_floats: floats of a row of sums.
    """
    if context.choice.way != TILED:
        return context.chunks(costs, strips), edges
    chunks = tiled_chunks(costs, context, strips, row_floats)
    return chunks, tiled_fields(edges, chunks, context.lanes)


def padded_offsets(out: FeatureMaps, edges: Fields, sums: EdgeSum, context: StepContext) -> np.ndarray:
    """The offsets of the results of all rows; -1 for rows that only pad a group."""
    to = context.memory.offsets(out)
    padded = np.full(len(edges["bias"]) * (len(to) // len(sums.bias)), -1)
    padded[: len(to)] = to
    return padded


def group_costs(edges: Fields, sums: EdgeSum, after: int) -> np.ndarray:
    """What each group of rows costs, with what follows each of the sums."""
    costs: np.ndarray = (np.diff(edges["starts"]) + after * edges["block"]) * float(sums.height * sums.width)
    return costs / 2 if edges["block"] > 1 else costs  # inputs are loaded once for several rows
