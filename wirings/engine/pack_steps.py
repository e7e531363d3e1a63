"""Pack steps, with all their arrays, for the compiled kernels."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from wirings.engine.bounds import as_int32, check, expect_int32
from wirings.engine.fused_steps import CallerInput, EdgeSum, LinearLayer, LoweredStep, NodeConvolution
from wirings.engine.kernel_step import MAPS, PHASES, KernelStep, StepKind
from wirings.engine.lowering import Lowering
from wirings.engine.memory_layout import LINE, FeatureMaps
from wirings.engine.pack_weights import filled, grouped, sliced
from wirings.engine.row_bands import rows_of
from wirings.engine.token_steps import OwnStep, StepContext

SPEED = 30_000
"""The approximate number of multiply-adds per microsecond and thread, which determines how finely work is divided."""
PIECE = 3.0
"""Microseconds of the smallest piece of work that is worth scheduling."""
PIECES = 8
"""The most pieces of work per thread."""


@dataclass(frozen=True)
class StepChoice:
    """How a step is computed: sparse (edge by edge) or dense, and into how many strips of rows its maps are cut."""

    way: str = "sparse"
    strips: int = 1


@dataclass(frozen=True)
class KernelSizes:
    """The vector and tile sizes that the kernels were compiled with."""

    lanes: int
    block: int
    tile: int
    dense_tile: int
    panel: int

    @staticmethod
    def of(library: ctypes.CDLL) -> KernelSizes:
        return KernelSizes(
            library.wirings_lanes(),
            library.wirings_block(),
            library.wirings_tile(1),
            library.wirings_tile(0),
            library.wirings_panel(),
        )


class PackedStep:
    """A step for the kernels, and the arrays that it points to."""

    def __init__(
        self, lowered: LoweredStep, lowering: Lowering, machine: KernelSizes, threads: int, choice: StepChoice
    ) -> None:
        memory = lowering.memory
        self.lowered, self.memory, self.machine, self.threads, self.choice = lowered, memory, machine, threads, choice
        self.bands, self.floats = lowering.bands, lowering.floats
        self.step = KernelStep()
        self.arrays: list[np.ndarray] = []
        if lowered.own is not None:
            self._pack_own(lowered.own, lowering)
            return
        numbers: dict[str, Any] = {"kind": int(lowered.kind), "strips": choice.strips, "block": 1, "source": -1}
        numbers |= {name: value for name, value in lowered.fields.items() if name not in ("second", "low", "high")}
        if lowered.source is not None:
            numbers |= {"in_": memory.offsets(lowered.source), "pitch": memory.pitch(lowered.source)}
        if lowered.out is not None:
            numbers |= {
                "out": memory.offsets(lowered.out),
                "out_height": lowered.out.height,
                "out_width": lowered.out.width,
                "out_pitch": memory.pitch(lowered.out),
            }
        fused = lowered.fused
        low, high = lowered.fields.get("low", -np.inf), lowered.fields.get("high", np.inf)
        self.step.activation.low, self.step.activation.high = low, high
        self.step.activation2.low, self.step.activation2.high = -np.inf, np.inf
        if isinstance(fused, EdgeSum):
            numbers |= self._sums(fused)
            if not fused.terms:
                numbers["pitch"] = memory.pitch(lowered.out) if lowered.out is not None else fused.width
            numbers["length"] = (fused.height - 1) * numbers["pitch"] + fused.width
            numbers["mask"] = self._mask(lowered.out, fused.height, fused.width, numbers["pitch"])
            numbers["scale"] = 1 / (fused.height * fused.width)
        elif isinstance(fused, NodeConvolution):
            numbers |= self._sums(fused.sums, fused.caller)
            rows = len(numbers["bias"])
            numbers |= {"kernels": filled(fused.kernel, rows), "kernel_bias": filled(fused.bias, rows)}
            numbers["stride_y"] = numbers["stride_x"] = fused.stride
            numbers |= self._strips(fused)
            if fused.caller is not None:
                numbers |= self._caller(fused, numbers)
            self.step.activation2.low, self.step.activation2.high = fused.low, fused.high
        elif isinstance(fused, LinearLayer):
            numbers |= self._linear(fused)
        if "second" in lowered.fields:
            numbers["in2"] = memory.offsets(lowered.fields["second"])
        if lowered.kind == StepKind.COPY and lowered.source is None:
            numbers |= self._callers(numbers)
        numbers |= self._chunks(numbers)
        check(lowered.name, numbers, machine.lanes, lowering)
        self._set(numbers)

    def _pack_own(self, own: OwnStep, lowering: Lowering) -> None:
        """Pack a step that has a struct of its own."""
        program = lowering.program
        inputs = tuple(math.prod(shape) for shape in program.inputs.values())
        outputs = tuple(math.prod(lowering.shapes[name]) for name in program.outputs)
        context = StepContext(self.memory, lowering.floats, self.machine.lanes, self.threads, inputs, outputs)
        self.own, tasks, self.arrays = own.pack(self.lowered.name, context)
        self.step.kind, self.step.strips, self.step.chunk_count = int(own.kind), 1, tasks
        self.step.own = ctypes.addressof(self.own)

    def _set(self, numbers: dict[str, Any]) -> None:
        for name, value in numbers.items():
            if isinstance(value, np.ndarray):
                floating = value.dtype.kind == "f"
                kept = np.ascontiguousarray(value, np.float32) if floating else as_int32(value, self.lowered.name)
                kept = kept if kept.size else np.zeros(1, kept.dtype)
                self.arrays.append(kept)
                value = kept.ctypes.data
            elif isinstance(value, (int, np.integer)) and name != "band_floats":
                expect_int32(self.lowered.name, int(value))
            setattr(self.step, name, value)

    # ---- sums over edges --------------------------------------------------------------------------------------------

    def _sums(self, sums: EdgeSum, caller: CallerInput | None = None) -> dict[str, Any]:
        memory, machine = self.memory, self.machine
        pitch = next((memory.pitch(maps) for maps in sums.sources()), sums.width)
        places = []
        for term in sums.terms:
            start = memory.offsets(term.source)[term.channel]
            if caller is not None:  # in scratch memory: the rows of a strip of one map after the other
                start = term.channel * self._phase_floats(sums, pitch) - term.dy.min() * pitch
            places.append(start + term.dy * pitch + term.dx)
        row = np.concatenate([*(term.row for term in sums.terms), np.zeros(0, int)])
        place = np.concatenate([*places, np.zeros(0, int)])
        value = np.concatenate([*(term.value for term in sums.terms), np.zeros(0, np.float32)])
        block = 1 if self.choice.way == "sparse" else machine.block
        groups = -(-len(sums.bias) // block)
        starts, records = grouped(row, as_int32(place, self.lowered.name), value, block, groups)
        assert self.lowered.out is not None
        to = memory.offsets(self.lowered.out)
        out = np.full(groups * block * (len(to) // len(sums.bias)), -1)
        out[: len(to)] = to
        self.step.activation.low, self.step.activation.high = sums.low, sums.high
        return {
            "block": block,
            "tile": machine.tile if block == 1 else machine.dense_tile,
            "starts": starts,
            "records": records,
            "bias": filled(sums.bias, groups * block),
            "out": out,
            "pitch": pitch,
            "height": sums.height,
            "width": sums.width,
            "channels": len(sums.bias),
        }

    def _phase_floats(self, sums: EdgeSum, pitch: int) -> int:
        """Floats of the part of a map that a strip reads, including rows above and below it."""
        assert isinstance(self.lowered.fused, NodeConvolution)
        (term,) = sums.terms
        tables = self._strips(self.lowered.fused)["strip"]
        rows = int((tables[:, 1] - tables[:, 0]).max() - 1) * self.lowered.fused.stride + 3
        rows = min(rows, sums.height) + int(term.dy.max() - term.dy.min())
        return -(-(rows * pitch + LINE + self._zeros_before(sums)) // LINE) * LINE

    @staticmethod
    def _zeros_before(sums: EdgeSum) -> int:
        """Floats before the first row of a map that are read, in whole cache lines."""
        return max(1, -(-max(0, -int(sums.terms[0].dx.min())) // LINE)) * LINE

    def _caller(self, nodes: NodeConvolution, numbers: dict[str, Any]) -> dict[str, Any]:
        """The fields of a step that reads the caller's input in place."""
        assert nodes.caller is not None
        (term,) = nodes.sums.terms
        caller = nodes.caller
        return {
            "source": caller.number,
            "inputs": caller.channels,
            "flag": self._phase_floats(nodes.sums, numbers["pitch"]),
            "length": self._zeros_before(nodes.sums),
            "pad_y": -int(term.dy.min()),
            "pad_x": int(term.dy.max()),
            "kernel_y": caller.height,
            "kernel_x": caller.width,
            "dilate_y": caller.stride[0],
            "dilate_x": caller.stride[1],
        }

    def _strips(self, nodes: NodeConvolution) -> dict[str, Any]:
        """Strips of rows of the output, each within one band if maps are cut into bands."""
        assert self.lowered.out is not None
        sources = [] if nodes.caller is not None else nodes.sums.sources()
        kept = next((b.kept for maps in sources for b in self.memory.of(maps)), None)
        out_kept = next(b.kept for b in self.memory.of(self.lowered.out))
        bands = self.bands if kept or out_kept else 1
        each = max(1, self.choice.strips // bands)
        table = []
        for band in range(bands):
            start, stop = rows_of(nodes.height, band, bands)
            count = max(1, min(each, stop - start))
            for i in range(count):
                first, last = (start + (stop - start) * j // count for j in (i, i + 1))
                place = (band, kept[band][0]) if kept else (0, 0)
                out_place = (band, out_kept[band][0]) if out_kept else (0, 0)
                table.append((first, last, *place, *out_place))
        return {
            "strip": np.array(table),
            "strips": len(table),
            "kept": np.array(out_kept) if out_kept else 0,
            "bands": bands,
            "band_floats": self.floats,
        }

    def _mask(self, out: FeatureMaps | None, height: int, width: int, pitch: int) -> np.ndarray | int:
        """The mask that keeps zeros between rows, if the next convolution or a mean reads them; otherwise 0."""
        assert out is not None
        (buffer,) = self.memory.of(out)
        what = self.lowered.fields["flag"]
        if what == PHASES or (what == MAPS and not buffer.zeros):
            return 0
        mask = np.zeros(height * pitch + 2 * self.machine.lanes, np.int32)
        mask[: height * pitch].reshape(height, pitch)[:, :width] = -1
        return mask

    # ---- other steps ------------------------------------------------------------------------------------------------

    def _linear(self, layer: LinearLayer) -> dict[str, Any]:
        self.step.activation.low, self.step.activation.high = layer.low, layer.high
        places = self.memory.offsets(layer.source)
        assert self.lowered.out is not None
        out = self.memory.offsets(self.lowered.out)
        if self.choice.way == "sparse":
            return {
                "kind": int(StepKind.SPARSE_LINEAR),
                **sliced(layer, as_int32(places, self.lowered.name), out, self.machine.lanes),
            }
        rows, panel = layer.weight.shape[0], self.machine.panel
        panels = -(-rows // panel)
        weight = filled(layer.weight, panels * panel).reshape(panels, panel, -1).transpose(0, 2, 1)
        apart = len(places) == 0 or not np.array_equal(places, places[0] + np.arange(len(places)))
        return {
            "weights": weight,
            "bias": filled(layer.bias, panels * panel),
            "in_": places if len(places) else np.zeros(1, int),
            "flag": int(apart),
            "inputs": len(places),
            "channels": rows,
        }

    def _callers(self, numbers: dict[str, Any]) -> dict[str, Any]:
        """The fields of a copy from the caller's input, in which channels are contiguous."""
        size = numbers["height"] * numbers["width"]
        channels = len(numbers["out"]) // (numbers["stride_y"] * numbers["stride_x"])
        return {"in_": np.arange(channels) * size, "pitch": numbers["width"]}

    def _chunks(self, numbers: dict[str, Any]) -> dict[str, Any]:
        """Divide the work: chunks of groups of rows, panels or channels that take about equally long."""
        kind, strips = numbers["kind"], numbers["strips"]
        if kind in (StepKind.SUMS, StepKind.NODES):
            pixels = numbers["height"] * numbers["width"]
            own = 20 if kind == StepKind.NODES else 4  # for what follows the sums
            costs = (np.diff(numbers["starts"]) + own * numbers["block"]) * float(pixels)
            if numbers["block"] > 1:
                costs = costs / 2  # inputs are loaded once for several rows
        elif kind == StepKind.LINEAR:
            costs = np.full(len(numbers["bias"]) // self.machine.panel, 2.0 * self.machine.panel * numbers["inputs"])
        elif kind == StepKind.SPARSE_LINEAR:
            costs = np.diff(numbers["starts"]) * 8.0
        else:
            count = len(numbers["in_"])
            costs = np.full(count, 8.0 * numbers["height"] * numbers["width"])
        pieces = float(costs.sum()) / SPEED / PIECE
        pieces = min(max(pieces, self.threads), PIECES * self.threads)
        count = int(np.clip(round(pieces / strips), 1, max(len(costs), 1)))
        if kind == StepKind.NODES and numbers["source"] >= 0:
            count = 1  # several tasks would compute the same phases
        bounds = np.searchsorted(np.cumsum(costs), costs.sum() * np.arange(1, count) / count, side="right")
        chunks = np.unique([0, *bounds.tolist(), len(costs)])
        return {"chunks": chunks, "chunk_count": len(chunks) - 1}
