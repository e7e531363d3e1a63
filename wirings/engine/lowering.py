"""Lower a program to the steps of the compiled kernels, and fuse operations into as few steps as possible.

A sum over edges stays open while operations follow that can be fused with it: a norm, an addition, an activation,
another convolution's sum. A depthwise 3 × 3 convolution after it makes it a `NodeConvolution`. Selecting, scattering
and concatenating channels cost nothing: they only change where the next step reads. How each kind of operation is
lowered is defined in `wirings.engine.operations`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from wirings.compaction.operations import Conv, Operation
from wirings.compaction.program import Program
from wirings.engine.copies import CopyStep, GatherStep, GiveStep
from wirings.engine.edge_sums import EdgeSum, EdgeTerm, SumsResult
from wirings.engine.fused_steps import FusedStep
from wirings.engine.int8_lowering import QuantizedChannel, close_int8, fuse_quantization, is_int8
from wirings.engine.memory_layout import EMPTY, FeatureMaps, MapMemory
from wirings.engine.node_convolution import CallerInput, NodeConvolution
from wirings.engine.quantize_steps import ByteLayout
from wirings.engine.row_bands import cut_into_bands
from wirings.engine.step import LoweredStep

if TYPE_CHECKING:
    from wirings.engine.quantization import Quantization

LowerOperation = Callable[["Lowering", Operation], "FusedStep | FeatureMaps | GatherStep"]


class Lowering:
    """The steps of a program, all of whose operations the kernels support.

    Args:
        program: the program.
        shapes: the shapes of all of its tensors, without the batch dimension.
        bands: into how many bands of rows maps may be cut, one for each thread.
        lower: adds one operation; `wirings.engine.operations.lower`.
        quantization: which layers are computed in int8.
    """

    def __init__(
        self,
        program: Program,
        shapes: dict[str, tuple[int, ...]],
        bands: int,
        lower: LowerOperation,
        quantization: Quantization | None = None,
    ) -> None:
        self.program, self.shapes, self.bands, self.quantization = program, shapes, bands, quantization
        self.memory, self.steps = MapMemory(), list[LoweredStep]()
        self.values: dict[str, FeatureMaps | FusedStep | GatherStep] = {}
        """Tensors that a step has computed, and steps that are still open."""
        self.users = {name: len(users) for name, users in program.users().items()}
        for name in program.outputs:
            self.users[name] += 1
        self.phases: dict[tuple[str, int, int], tuple[FeatureMaps, LoweredStep]] = {}
        self.quantized_pixels: dict[tuple[bytes, ...], tuple[FeatureMaps, FeatureMaps]] = {}
        self.quantized_channels: dict[tuple[ByteLayout, int, int], dict[tuple[int, ...], QuantizedChannel]] = {}
        for operation in program.operations:
            self.values[operation.output] = lower(self, operation)
        for number, name in enumerate(program.outputs):
            value = self.values.get(name)
            if isinstance(value, GatherStep):
                self.emit(value)
                continue
            self.emit(GiveStep(name, None, self.solid(self.ready(name)), number))
        if quantization is not None:
            fuse_quantization(self)
        for number, step in enumerate(self.steps):
            self.memory.used(number, *step.reads(), *([step.out] if step.out is not None else []))
        if bands > 1:
            cut_into_bands(self.memory, self.steps, bands)
        if not any(buffer.kept for buffer in self.memory.buffers):
            self.bands = 1
        self.floats = self.memory.plan()
        """The size of the memory for all maps, or for those of one band."""

    def shape(self, name: str) -> tuple[int, int, int]:
        """Channels, height and width of a tensor; single numbers are maps of one pixel, tokens are maps of one row."""
        channels, *maps = self.shapes[name]
        height, width = [*[1] * (2 - len(maps)), *maps]
        return channels, height, width

    def new_like(self, name: str) -> FeatureMaps:
        """New memory for a tensor."""
        return self.memory.new(*self.shape(name), packed=len(self.shapes[name]) == 1)

    def input_number(self, name: str) -> int:
        """The number of one of the caller's inputs."""
        return list(self.program.inputs).index(name)

    # ---- inputs of an operation -------------------------------------------------------------------------------------

    def ready(self, name: str) -> FeatureMaps:
        """A tensor in memory; a step that is still open is closed."""
        if name not in self.values:
            self.values[name] = self._copy_input(name)
        value = self.values[name]
        assert not isinstance(value, GatherStep)  # nothing reads what is copied to the caller
        if not isinstance(value, FeatureMaps):
            value = self.values[name] = self.close(value)
        return value

    def fusible(self, name: str) -> FusedStep | None:
        """The open step that computes a tensor, if it may be fused with the only operation that reads it."""
        value = self.values.get(name)
        if value is None or isinstance(value, (FeatureMaps, GatherStep)) or self.users[name] != 1:
            return None
        return value if value.open else None

    def identity(self, name: str, scale: np.ndarray | None = None) -> EdgeTerm:
        """The channels of a tensor as edges, each to itself."""
        maps = self.ready(name)
        rows = np.flatnonzero(maps.buffers != EMPTY)
        zeros = np.zeros(len(rows), int)
        value = np.ones(len(maps), np.float32) if scale is None else scale
        return EdgeTerm(maps, rows, rows, value[rows], zeros, zeros, len(rows))

    def solid(self, maps: FeatureMaps) -> FeatureMaps:
        """The same tensor with maps of zeros for channels that are all zero, for steps that read every channel."""
        empty = maps.buffers == EMPTY
        if not empty.any():
            self.memory.join(maps)
            return maps
        zeros = self.memory.constant(np.zeros((1, maps.height, maps.width), np.float32))
        filled = replace(maps, buffers=np.where(empty, zeros.buffers[0], maps.buffers))
        self.memory.join(filled)
        return filled

    def as_row(self, name: str) -> FeatureMaps:
        """A tensor of single numbers as a map of one row."""
        numbers = self.solid(self.ready(name))
        buffers, count = numbers.buffers, len(numbers)
        packed = self.memory.buffers[buffers[0]].packed
        along, fixed = (numbers.channels, numbers.x) if packed else (numbers.x, numbers.channels)
        together = (buffers == buffers[0]).all() and (fixed == fixed[0]).all() and not numbers.y.any()
        if together and np.array_equal(along, along[0] + np.arange(count)):
            first = (part[:1] for part in (buffers, numbers.channels, numbers.y, numbers.x))
            return FeatureMaps(1, count, *first)
        row = self.memory.new(1, 1, count)
        self.emit(GatherStep(f"{name} together", row, np.arange(count)[None], numbers))
        return row

    @staticmethod
    def as_numbers(row: FeatureMaps) -> FeatureMaps:
        """A map of one row as a tensor of single numbers."""
        count = row.width
        buffers, channels, y = (np.repeat(part, count) for part in (row.buffers, row.channels, row.y))
        return FeatureMaps(1, 1, buffers, channels, y, row.x[0] + np.arange(count))

    def _copy_input(self, name: str) -> FeatureMaps:
        packed = len(self.shapes[name]) == 1
        maps = self.memory.new(*self.shape(name), packed=packed)
        out = FeatureMaps(1, len(maps), maps.buffers[:1], maps.channels[:1]) if packed else maps
        self.emit(CopyStep(f"{name} in", out, self.input_number(name), out.height, out.width))
        return maps

    # ---- steps ------------------------------------------------------------------------------------------------------

    def in_int8(self, o: Operation) -> bool:
        """Whether a layer is computed in int8."""
        return self.quantization is not None and o.output in self.quantization.layers

    def close(self, fused: FusedStep) -> FeatureMaps:
        """Add an open step; returns where its result is."""
        if isinstance(fused, EdgeSum) and is_int8(fused):
            return close_int8(self, fused)
        if isinstance(fused, NodeConvolution) and is_int8(fused.sums):
            return close_int8(self, fused.sums, fused)
        return fused.close(self)

    def emit(self, step: LoweredStep) -> None:
        """Add a step."""
        self.steps.append(step)

    def emit_copy(self, name: str, source: FeatureMaps, out: FeatureMaps) -> None:
        """Add a step that copies maps."""
        self.emit(CopyStep(name, out, source, source.height, source.width))

    # ---- strided convolutions ---------------------------------------------------------------------------------------

    def phases_of(self, name: str, stride: tuple[int, int]) -> FeatureMaps:
        """A tensor as maps of the pixels with equal remainders by the stride: (channels · stride · stride) of them."""
        if (name, *stride) in self.phases:
            return self.phases[(name, *stride)][0]
        channels, height, width = self.shape(name)
        sy, sx = stride
        out = self.memory.new(channels * sy * sx, -(-height // sy), -(-width // sx))
        self.memory.buffers[out.buffers[0]].own = True  # a phase may be smaller than the others
        made = self.values.get(name)
        if isinstance(made, EdgeSum) and not is_int8(made) and self._only_strided(name, stride):
            self.phases[(name, *stride)] = out, made.emit(self, out, SumsResult.PHASES, stride)
            return out
        outside = name in self.program.inputs and name not in self.values
        source = self.input_number(name) if outside else self.solid(self.ready(name))
        copy = CopyStep(f"{name} by {sy} × {sx}", out, source, height, width, stride, np.zeros(len(out), bool))
        self.emit(copy)
        self.phases[(name, *stride)] = out, copy
        return out

    def read_phases(self, name: str, stride: tuple[int, int], phases: np.ndarray) -> None:
        """Record which of the phases of a tensor a step reads."""
        _, step = self.phases[(name, *stride)]
        if isinstance(step, CopyStep) and step.needed is not None:
            step.needed[phases] = True

    def _only_strided(self, name: str, stride: tuple[int, int]) -> bool:
        """Whether only convolutions of this stride read a tensor, so that it is needed in no other form."""
        users = self.program.users()[name]
        strided = all(
            isinstance(o, Conv) and in_two_dimensions(o).stride == stride and not is_node_convolution(o) for o in users
        )
        return strided and name not in self.program.outputs

    def read_from_caller(self, sums: EdgeSum) -> CallerInput | None:
        """If sums are over one of the caller's inputs alone, that input; the step that copies it is removed."""
        for (name, *stride), (out, copy) in self.phases.items():
            if len(sums.terms) == 1 and sums.terms[0].source is out and self.users[name] == 1:
                if not isinstance(copy, CopyStep) or isinstance(copy.source, FeatureMaps) or not sums.edges:
                    return None
                self.steps.remove(copy)
                return CallerInput(copy.source, *self.shape(name), (stride[0], stride[1]))
        return None


def is_node_convolution(o: Conv) -> bool:
    """Whether the kernel for nodes can compute a convolution: depthwise, 3 × 3, with a padding of one pixel."""
    square = tuple(o.weight.shape[2:]) == (3, 3) and o.padding == (1, 1) and o.dilation == (1, 1)
    return o.depthwise and square and o.stride in ((1, 1), (2, 2))


def in_two_dimensions(o: Conv) -> Conv:
    """A convolution of rows as one of maps."""
    if len(o.stride) == 2:
        return o
    sizes = {"stride": (1, *o.stride), "padding": (0, *o.padding), "dilation": (1, *o.dilation)}
    return replace(o, weight=o.weight.unsqueeze(2), **sizes)  # type: ignore[arg-type]


def as_array(x: Tensor | None, zeros: int = 0) -> np.ndarray:
    """A weight as float32, or ``zeros`` zeros in place of None."""
    if x is None:
        return np.zeros(zeros, np.float32)
    return x.detach().cpu().float().numpy()
