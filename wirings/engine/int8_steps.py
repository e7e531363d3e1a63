"""Steps in int8, each with a struct of its own; ``source/int8_kernels.h`` has the same fields in the same order.

As all steps do, they check that everything they will access is inside of the memory.
"""

from __future__ import annotations

from ctypes import c_float
from dataclasses import dataclass, field

import numpy as np

from wirings.engine.bounds import expect_inside
from wirings.engine.int8_weights import Int8Rows, in_fours
from wirings.engine.kernel_step import ClampRange
from wirings.engine.memory_layout import FeatureMaps
from wirings.engine.quantize_steps import ByteResults, BytesOfNodes
from wirings.engine.step import Fields, LoweredStep, StepContext, WorkDivision, integers, pointers

PIXELS, ROWS, QUAD = 64, 4, 5
"""Pixels of a tile, rows of a dense group, and words of four edges, as in ``source/int8_kernels.h``."""
EVEN, COMMON = 0.3, 0.6
"""Densities: at the first, sparse and dense are about equally fast; above the second, sparse is never faster."""
RARE = 0.12
"""Below this density, dense is never faster."""
L1_FLOATS = 6 * 1024
"""Sums of a row that stay in the level-1 cache."""
WORK = 100_000
"""Multiply-adds of the smallest piece of work that is worth scheduling."""


@dataclass(eq=False)
class ByteEdges:
    """The edges of sums in int8, from maps of bytes."""

    source: FeatureMaps
    """Maps of bytes."""
    row: np.ndarray
    channel: np.ndarray
    """Which of the maps an edge reads."""
    shift: np.ndarray
    """Bytes from the start of the map to the pixel that the first sum reads."""


@dataclass(eq=False)
class AddedEdges:
    """Edges in floats that are added to sums in int8: out[row] += value · source[channel], pixel by pixel."""

    source: FeatureMaps
    row: np.ndarray
    channel: np.ndarray
    value: np.ndarray


@dataclass(eq=False)
class DepthwiseKernels:
    """The depthwise convolution of nodes that follows sums."""

    kernel: np.ndarray
    bias: np.ndarray
    stride: int
    low: float
    high: float


@dataclass(eq=False)
class Int8SumsStep(LoweredStep):
    """Sums over edges in int8, with what is added to them in floats, or with the convolution of nodes after them."""

    kind = "int8_sums"
    layout = (
        *pointers("starts", "edges", "weights", "scale", "bias", "offset", "added_starts", "added", "out", "chunks"),
        *pointers("kernels", "kernel_bias"),
        ("bytes", ByteResults),
        ("activation", ClampRange),
        ("activation2", ClampRange),
        *integers("scales", "zeros", "rows", "quads", "chunk_count", "strips", "height", "width", "pitch"),
        *integers("added_pitch", "out_height", "out_width", "out_pitch", "stride", "mean"),
        ("share", c_float),
    )
    out: FeatureMaps
    """The memory that it writes: the results, or their bytes, or both."""
    results: FeatureMaps
    edges: ByteEdges
    weights: Int8Rows
    bias: np.ndarray
    height: int
    width: int
    pitch: int
    """The size of the sums, and bytes from one row of a map of bytes to the next."""
    low: float
    high: float
    layers: frozenset[str] = frozenset()
    """The names of the layers whose edges it has."""
    about: FeatureMaps | None = None
    """The scales and zeros of the pixels, unless those of channels are used."""
    added: list[AddedEdges] = field(default_factory=list)
    nodes: DepthwiseKernels | None = None
    bytes: BytesOfNodes | None = None
    mean: bool = False
    """Whether the results are the means of the maps."""

    def reads(self) -> list[FeatureMaps]:
        return [self.edges.source, *([self.about] if self.about else []), *(term.source for term in self.added)]

    @property
    def density(self) -> float:
        return len(self.edges.row) / max(1, len(self.bias) * self._taps)

    @property
    def _taps(self) -> int:
        return len(np.unique(self.edges.channel * (1 << 32) + self.edges.shift))

    def ways(self) -> list[str]:
        density = self.density
        ways = ["sparse", "dense"] if density < EVEN else ["dense", "sparse"]
        return ways if RARE < density < COMMON else ways[:1]

    def strips(self, division: WorkDivision) -> list[int]:
        threads = division.threads
        if self.mean:
            return [1]
        if self.height == 1:
            tiles = -(-self.width // PIXELS)
            return [1, *(n for n in (threads, 2 * threads) if 1 < n <= tiles)]
        fit = -(-self.height * self.pitch // L1_FLOATS)
        most = max(1, (self.results.height if self.nodes else self.height) // 3)
        return list(dict.fromkeys(min(n, most) for n in (fit, 1, 2 * fit, threads * -(-fit // threads))))

    def fields(self, context: StepContext) -> tuple[Fields, int]:
        memory, rows, strips = context.memory, len(self.bias), context.choice.strips
        place = 4 * memory.offsets(self.edges.source)[self.edges.channel] + self.edges.shift
        end = self._end(strips)
        expect_inside(self.name, place, end, 4 * context.floats)
        only_bytes = self.bytes is not None and self.bytes.only  # then the results have no place in memory
        out = np.zeros(len(self.results), int) if only_bytes else memory.offsets(self.results)
        expect_inside(self.name, out, 1 if only_bytes else context.extent(self.results), context.floats)
        expect_inside(self.name, np.array([rows - 1]), 1, len(out))
        values: Fields = {
            "scale": self.weights.scale,
            "bias": self.bias,
            "offset": self.weights.offset,
            "out": out,
            "activation": {"low": self.low, "high": self.high},
            "activation2": {"low": -np.inf, "high": np.inf},
            "scales": -1,
            "zeros": -1,
            "rows": rows,
            "strips": strips,
            "height": self.height,
            "width": self.width,
            "pitch": self.pitch,
            "out_height": self.results.height,
            "out_width": self.results.width,
            "out_pitch": memory.pitch(self.results),
            "mean": int(self.mean),
            "share": 1 / (self.height * self.width),
            **dict.fromkeys(("starts", "weights", "quads", "kernels", "kernel_bias", "stride"), 0),
            "bytes": BytesOfNodes.fields(self.bytes, self.name, self.results, rows, context),
        }
        if self.about is not None:
            about = memory.offsets(self.about)
            expect_inside(self.name, about, end + context.lanes, context.floats)
            values |= {"scales": int(about[0]), "zeros": int(about[1])}
        counts = np.bincount(self.edges.row, minlength=rows)
        if context.choice.way == "dense":
            places, weights = in_fours(self.edges.row, place, self.weights.value, rows, ROWS)
            values |= {"edges": places, "weights": weights, "quads": len(places) // 4}
            costs = np.full(-(-rows // ROWS), 2.0 * len(places))
        else:
            starts, edges = quads(self.edges.row, place, self.weights.value, rows)
            values |= {"starts": starts, "edges": edges}
            costs = 1.0 * counts
        values |= self._added(context)
        if self.nodes is not None:
            values |= {"kernels": self.nodes.kernel, "kernel_bias": self.nodes.bias, "stride": self.nodes.stride}
            values |= {"activation2": {"low": self.nodes.low, "high": self.nodes.high}}
        costs = (costs + (20 if self.nodes else 8)) * self.height * self.pitch
        pieces = int(np.clip(costs.sum() / WORK, context.threads, 8 * context.threads))
        values["chunks"] = cut_evenly(costs, max(1, pieces // strips))
        values["chunk_count"] = len(values["chunks"]) - 1
        return values, values["chunk_count"] * strips

    def _end(self, strips: int) -> int:
        """Bytes that are read from the place of an edge: the last strip's end in whole tiles."""
        flat = (self.height - 1) * self.pitch + self.width
        return flat + PIXELS - 1 if strips > 1 and self.height > 1 else -(-flat // PIXELS) * PIXELS

    def _added(self, context: StepContext) -> Fields:
        rows, pitch = len(self.bias), self.width
        row, place, value = [np.zeros(0, int)], [np.zeros(0, int)], [np.zeros(0, np.float32)]
        for term in self.added:
            own = context.memory.offsets(term.source)[term.channel]
            pitch = context.memory.pitch(term.source)
            expect_inside(self.name, own, context.vector_extent(term.source), context.floats)
            row.append(term.row)
            place.append(own)
            value.append(term.value.astype(np.float32))
        every = np.concatenate(row)
        order = np.argsort(every, kind="stable")
        records = np.empty((len(order), 2), np.int32)
        records[:, 0] = np.concatenate(place)[order]
        records[:, 1] = np.concatenate(value)[order].view(np.int32)
        starts = np.concatenate([[0], np.cumsum(np.bincount(every, minlength=rows))])
        return {"added_starts": starts, "added": records, "added_pitch": pitch}


@dataclass(eq=False)
class Int8LinearStep(LoweredStep):
    """A linear layer on single numbers in int8."""

    kind = "int8_linear"
    layout = (
        *pointers("in_", "out", "masks", "weights", "starts", "scale", "bias", "offset", "chunks"),
        ("activation", ClampRange),
        *integers("inputs", "words"),
    )
    out: FeatureMaps
    source: FeatureMaps
    weight: np.ndarray
    """(rows, inputs), in int8."""
    rows: Int8Rows
    bias: np.ndarray
    low: float
    high: float
    layers: frozenset[str] = frozenset()

    def reads(self) -> list[FeatureMaps]:
        return [self.source]

    def ways(self) -> list[str]:
        density = np.count_nonzero(self.weight) / max(self.weight.size, 1)
        return ["sparse", "dense"] if density < EVEN else ["dense", "sparse"]

    def fields(self, context: StepContext) -> tuple[Fields, int]:
        memory, (rows, inputs) = context.memory, self.weight.shape
        in_, out = memory.offsets(self.source), memory.offsets(self.out)
        expect_inside(self.name, in_, 1, context.floats)
        expect_inside(self.name, out, 1, context.floats)
        expect_inside(self.name, np.array([rows - 1]), 1, len(out))
        expect_inside(self.name, np.array([inputs - 1]), 1, len(in_))
        words = -(-inputs // 64)
        padded = np.zeros((rows, 64 * words), np.int8)
        padded[:, :inputs] = self.weight
        values: Fields = {"masks": 0, "weights": padded, "starts": 0}
        if context.choice.way == "sparse":
            real = padded != 0
            counts = np.count_nonzero(real, 1)
            values = {
                "masks": np.packbits(real, axis=1, bitorder="little").view("<u8").astype(np.uint64),
                "weights": np.concatenate([padded[real], np.zeros(64, np.int8)]),
                "starts": np.concatenate([[0], np.cumsum(counts)]),
            }
        chunks = cut_evenly(np.full(rows, 1.0), max(1, min(context.threads, rows * inputs * 4 // WORK + 1)))
        values |= {"in_": in_, "out": out, "scale": self.rows.scale, "bias": self.bias, "offset": self.rows.offset}
        values |= {"chunks": chunks, "activation": {"low": self.low, "high": self.high}}
        values |= {"inputs": inputs, "words": words}
        return values, len(chunks) - 1


def quads(row: np.ndarray, place: np.ndarray, value: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Edges four at a time: where those of each row begin in words, and offsets followed by weights, four bytes."""
    order = np.lexsort((place, row))
    row, place, value = row[order], place[order], value[order]
    counts = np.bincount(row, minlength=rows)
    padded = -(-counts // 4) * 4
    starts = np.concatenate([[0], np.cumsum(padded)])
    within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    to = starts[row] + within
    places, weights = np.zeros(starts[-1], np.int64), np.zeros(starts[-1], np.int8)
    if len(row):  # edges that fill up four read what the first of their row reads
        first = np.repeat(place[np.minimum(np.cumsum(counts) - counts, len(place) - 1)], padded)
        places[:] = first
    places[to], weights[to] = place, value
    made = np.empty((len(places) // 4, QUAD), np.int64)
    made[:, :4] = places.reshape(-1, 4)
    made[:, 4] = weights.view("<i4")
    return starts // 4 * QUAD, made


def cut_evenly(costs: np.ndarray, count: int) -> np.ndarray:
    """Where to cut a list so that each part costs about as much."""
    bounds = np.searchsorted(np.cumsum(costs), costs.sum() * np.arange(1, count) / count, side="right")
    return np.unique([0, *bounds.tolist(), len(costs)])
