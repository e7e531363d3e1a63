"""What a node of a graph does: sums over edges, an activation and a depthwise convolution in one step.

The kernel is in ``source/fused_node_convolution.h``.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from wirings.engine.bounds import expect_inside
from wirings.engine.edge_sums import (
    EdgeGroups,
    EdgeSum,
    divided,
    edge_fields,
    group_costs,
    padded_offsets,
    pitch_of,
    place_of,
)
from wirings.engine.fused_steps import FusedStep
from wirings.engine.kernel_step import ClampRange
from wirings.engine.memory_layout import LINE, FeatureMaps
from wirings.engine.pack_weights import filled
from wirings.engine.quantize_steps import ByteResults, BytesOfNodes
from wirings.engine.row_bands import rows_of
from wirings.engine.step import (
    Fields,
    LoweredStep,
    StepContext,
    WorkDivision,
    integers,
    long_integers,
    pointers,
    ways_by_density,
)
from wirings.engine.tiled_sums import places_read, with_tiling

if TYPE_CHECKING:
    from wirings.engine.lowering import Lowering

AFTER_SUMS = 20
"""What the convolution of one of the sums costs, in multiply-adds."""
L1_BYTES = 24 * 1024
"""Bytes of maps between the sums and the convolution of nodes that stay in the level-1 cache."""


@dataclass(frozen=True)
class CallerInput:
    """An input of the caller that a step reads in place."""

    number: int
    channels: int
    height: int
    width: int
    stride: tuple[int, int]


@dataclass(eq=False)
class NodeConvolution(FusedStep):
    """Sums over edges fused with the depthwise 3 × 3 convolution that follows them: what a node of a graph does."""

    sums: EdgeSum
    kernel: np.ndarray
    """(channels, 9)."""
    bias: np.ndarray
    stride: int
    height: int
    width: int
    caller: CallerInput | None = None
    """The caller's input that the sums are over, if it is not copied; its phases are computed for each strip."""

    def close(self, lowering: Lowering) -> FeatureMaps:
        sums = self.sums
        lowering.memory.join(*sums.sources())
        out = lowering.memory.new(len(self.bias), self.height, self.width)
        work = sums.edges * sums.height * sums.width + 9 * len(self.bias) * self.height * self.width
        lowering.emit(NodesStep(self.name, out, out, self, work=work))
        return out


CALLER_FIELDS = (
    "source", "channels", "height", "width", "stride_y", "stride_x", "above", "below", "floats", "zeros",
)  # fmt: skip


class CallerPhases(ctypes.Structure):
    """A caller's input that a step reads in place; see ``source/stride_phases.h``."""

    _fields_ = list(integers(*CALLER_FIELDS))


@dataclass(eq=False)
class NodesStep(LoweredStep):
    """The fused convolutions of nodes."""

    kind = "nodes"
    layout = (
        ("edges", EdgeGroups),
        *pointers("kernels", "kernel_bias", "out", "chunks", "strip", "kept"),
        ("caller", CallerPhases),
        ("activation", ClampRange),
        ("bytes", ByteResults),
        *integers(
            "chunk_count", "strips", "stride", "height", "width", "pitch", "out_width", "out_pitch", "bands"
        ),
        *long_integers("band_floats"),
    )  # fmt: skip
    out: FeatureMaps
    """The memory that it writes: the results, or their bytes, or both."""
    results: FeatureMaps
    nodes: NodeConvolution
    bytes: BytesOfNodes | None = None
    """How the results are quantised, if that is part of the step."""

    @property
    def only_bytes(self) -> bool:
        """Whether the results themselves have no place in memory."""
        return self.bytes is not None and self.bytes.only

    def reads(self) -> list[FeatureMaps]:
        return [] if self.nodes.caller is not None else self.nodes.sums.sources()

    @property
    def words(self) -> int:
        return 9 * self.nodes.sums.edges

    def ways(self) -> list[str]:
        sums, ways = self.nodes.sums, ways_by_density(self.nodes.sums.density)
        return ways if self.nodes.caller is not None else with_tiling(ways, sums.edges, len(sums.bias))

    def rows_read(self) -> tuple[int, int] | None:
        nodes = self.nodes
        moved = any(term.dy.any() for term in nodes.sums.terms)  # a row of the sums reads other rows
        return (nodes.height, nodes.stride) if nodes.caller is not None or not moved else None

    @property
    def writes_bands(self) -> bool:
        return True

    def strips(self, division: WorkDivision) -> list[int]:
        rows, width, least = self.nodes.height, self.nodes.sums.width * self.nodes.stride, division.bands
        fitting = max(least, -(-rows * width * 4 * 2 // L1_BYTES))
        usual = min(-(-fitting // least) * least, max(rows // 4, 1))
        return [usual, *(least * n for n in (1, 2, 4, 8, 16) if least * n <= max(rows // 3, least))]

    def fields(self, context: StepContext) -> tuple[Fields, int]:
        nodes, sums, memory = self.nodes, self.nodes.sums, context.memory
        pitch = pitch_of(sums, context, max([sums.width, *(memory.pitch(maps) for maps in sums.sources())]))
        table, kept, bands = self._strip_table(context)
        caller = self._caller(table, pitch)
        if nodes.caller is None:
            places = [place_of(term, context, pitch) for term in sums.terms]
        else:  # in scratch memory: the rows of a strip of one phase after the other
            (term,) = sums.terms
            places = [term.channel * caller["floats"] + (term.dy - term.dy.min()) * pitch + term.dx]
        edges = edge_fields(sums, places, context)
        costs, rows = group_costs(edges, sums, AFTER_SUMS), len(edges["bias"])
        whole = nodes.caller is not None  # several tasks would compute the same phases
        if whole:
            chunks = np.unique([0, len(costs)])
        else:
            rows_of_sums = min(int((table[:, 1] - table[:, 0]).max()) * nodes.stride + 1, sums.height)
            chunks, edges = divided(edges, costs, context, len(table), rows_of_sums * pitch)
        values = {
            "edges": edges,
            "kernels": filled(nodes.kernel, rows),
            "kernel_bias": filled(nodes.bias, rows),
            "out": padded_offsets(self.results, edges, sums, context),
            "chunks": chunks,
            "strip": table,
            "kept": 0 if kept is None else kept,
            "caller": caller,
            "activation": nodes.activation,
            "bytes": BytesOfNodes.fields(self.bytes, self.name, self.results, rows, context),
            "chunk_count": len(chunks) - 1,
            "strips": len(table),
            "stride": nodes.stride,
            "height": sums.height,
            "width": sums.width,
            "pitch": pitch,
            "out_width": self.results.width,
            "out_pitch": self.results.width if self.only_bytes else memory.pitch(self.results),
            "bands": bands,
            "band_floats": context.floats,
        }
        self._check(values, context)
        return values, len(table) * (len(chunks) - 1)

    def _strip_table(self, context: StepContext) -> tuple[np.ndarray, np.ndarray | None, int]:
        """Strips of rows of the output, each within one band; the rows of each band of the output; and their number."""
        memory, nodes = context.memory, self.nodes
        kept = next((b.kept for maps in self.reads() for b in memory.of(maps)), None)
        out_kept = None if self.only_bytes else next(b.kept for b in memory.of(self.results))
        bands = context.bands if kept or out_kept else 1
        each = max(1, context.choice.strips // bands)
        table = []
        for band in range(bands):
            start, stop = rows_of(nodes.height, band, bands)
            count = max(1, min(each, stop - start))
            for i in range(count):
                first, last = (start + (stop - start) * j // count for j in (i, i + 1))
                place = (band, kept[band][0]) if kept else (0, 0)
                out_place = (band, out_kept[band][0]) if out_kept else (0, 0)
                table.append((first, last, *place, *out_place))
        return np.array(table), np.array(out_kept) if out_kept else None, bands

    def _caller(self, table: np.ndarray, pitch: int) -> Fields:
        """The fields of `CallerPhases`."""
        nodes, caller = self.nodes, self.nodes.caller
        if caller is None:
            return {**dict.fromkeys(CALLER_FIELDS, 0), "source": -1}
        (term,) = nodes.sums.terms
        above, below = -int(term.dy.min()), int(term.dy.max())
        zeros = max(1, -(-max(0, -int(term.dx.min())) // LINE)) * LINE  # before the first row, in whole cache lines
        rows = int((table[:, 1] - table[:, 0]).max() - 1) * nodes.stride + 3
        rows = min(rows, nodes.sums.height) + above + below
        return {
            "source": caller.number,
            "channels": caller.channels,
            "height": caller.height,
            "width": caller.width,
            "stride_y": caller.stride[0],
            "stride_x": caller.stride[1],
            "above": above,
            "below": below,
            "floats": -(-(rows * pitch + LINE + zeros) // LINE) * LINE,
            "zeros": zeros,
        }

    def _check(self, values: Fields, context: StepContext) -> None:
        """Check every strip, each of which reads and writes the memory of one band."""
        first, last, band, origin, out_band, out_origin = values["strip"].astype(np.int64).T
        stride, pitch, floats, caller = values["stride"], values["pitch"], context.floats, values["caller"]
        top = np.maximum(first * stride - 1, 0)
        bottom = np.minimum((last - 1) * stride + 2, values["height"])
        if caller["source"] < 0:
            start = (top - origin) * pitch // LINE * LINE
            size = floats
        else:  # phases in scratch memory, which begin at the first row of the strip
            origin, start = top, np.zeros_like(top)
            size = caller["channels"] * caller["stride_y"] * caller["stride_x"] * caller["floats"] + LINE
        read = (bottom - 1 - origin) * pitch + values["width"] - start
        end = start + -(-read // context.lanes) * context.lanes
        expect_inside(self.name, places_read(values["edges"]), int(end.max()), size, int(start.min()) + caller["zeros"])
        out, out_pitch, out_width = values["out"], values["out_pitch"], values["out_width"]
        out = np.zeros(0, int) if self.only_bytes else out[out != -1]
        write = (last - 1 - out_origin) * out_pitch + out_width
        expect_inside(self.name, out, int(write.max()), floats, int(((first - out_origin) * out_pitch).min()))
        expect_inside(self.name, np.concatenate([band, out_band]), 1, context.bands)
        if isinstance(values["kept"], np.ndarray):
            rows = int((values["kept"][:, 1] - values["kept"][:, 0]).max())
            expect_inside(self.name, out, (rows - 1) * out_pitch + out_width, floats)
