"""Lower sums over edges and linear layers to steps in int8.

A convolution in int8 is an `Int8Term` of a sum over edges. When the sum is closed, the tensors that it reads are
quantised, each once for all sums that read it, and what else is added to it, such as a residual, stays in floats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import numpy as np

from wirings.engine.edge_sums import EdgeSum, EdgeTerm
from wirings.engine.int8_steps import (
    AddedEdges,
    ByteEdges,
    DepthwiseKernels,
    Int8SumsStep,
)
from wirings.engine.int8_weights import byte_ranges, round_rows
from wirings.engine.memory_layout import EMPTY, FeatureMaps
from wirings.engine.node_convolution import NodeConvolution, NodesStep
from wirings.engine.quantize_steps import ByteLayout, BytesOfNodes, QuantizeChannelsStep, QuantizePixelsStep
from wirings.engine.step import LoweredStep

if TYPE_CHECKING:
    from wirings.compaction.operations import Conv
    from wirings.engine.lowering import Lowering


@dataclass(eq=False)
class Int8Term(EdgeTerm):
    """Edges in int8. Shifts count pixels of the source, which is read with a stride."""

    layer: str = ""
    stride: tuple[int, int] = (1, 1)
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    """The range of each channel of the source; None if every pixel has a scale of its own."""

    @property
    def pointwise(self) -> bool:
        return self.stride == (1, 1) and not self.dy.any() and not self.dx.any()


@dataclass(eq=False)
class QuantizedChannel:
    """Where the map of a channel is in bytes, and what a byte stands for."""

    buffer: int
    number: int
    scale: float
    zero: float


def int8_term(lowering: Lowering, o: Conv, weight: np.ndarray) -> Int8Term:
    """The weights of a convolution as edges in int8."""
    quantization = lowering.quantization
    assert quantization is not None
    row, within, ky, kx = np.nonzero(weight)
    value = weight[row, within, ky, kx]
    channel = row // (len(weight) // o.groups) * weight.shape[1] + within
    source = lowering.ready(o.inputs[0])
    real = source.buffers[channel] != EMPTY
    y, x = ky * o.dilation[0] - o.padding[0], kx * o.dilation[1] - o.padding[1]
    row, channel, value, y, x = (part[real] for part in (row, channel, value, y, x))
    taps = np.count_nonzero(weight.reshape(o.groups, -1, *weight.shape[1:]).any(1))
    low, high = quantization.ranges.get(o.inputs[0], (None, None))
    return Int8Term(source, row, channel, value, y, x, int(taps), o.output, (o.stride[0], o.stride[1]), low, high)


def is_int8(sums: EdgeSum) -> bool:
    """Whether a sum has edges in int8."""
    return any(isinstance(term, Int8Term) and len(term.row) for term in sums.terms)


def suits_nodes(sums: EdgeSum) -> bool:
    """Whether the convolution of nodes can follow sums in int8 in one step: they read single pixels, in one way."""
    terms = [term for term in sums.terms if isinstance(term, Int8Term) and term.pointwise]
    return len(terms) == len(sums.terms) and len({term.low is None for term in terms}) == 1


def close_int8(
    lowering: Lowering, sums: EdgeSum, nodes: NodeConvolution | None = None, means: FeatureMaps | None = None
) -> FeatureMaps:
    """Add the steps of a sum in int8; returns where the result is.

    Args:
        lowering: what the steps are added to.
        sums: the sum.
        nodes: the convolution of nodes that follows it, if any.
        means: where the means of its maps go, if nothing else reads them.
    """
    last = nodes or sums
    out = lowering.memory.new(len(last.bias), last.height, last.width) if means is None else means
    own = [term for term in sums.terms if isinstance(term, Int8Term) and len(term.row)]
    static = [term for term in own if term.low is not None]
    used = static or own
    added = []
    for term in sums.terms:
        if len(term.row) and not any(term is other for other in used):
            added.append(_in_floats(lowering, sums, term))
    if added:
        lowering.memory.join(*(term.source for term in added))
    rows = len(sums.bias)
    about: FeatureMaps | None = None
    if static:
        edges, value, zero, pitch = _by_channels(lowering, sums, static)
        weights = round_rows(edges.row, value, rows, zero)
    else:
        edges, value, about = _by_pixels(lowering, sums, own)
        weights, pitch = round_rows(edges.row, value, rows), sums.width
    work = sums.edges * sums.height * sums.width
    if nodes is not None:
        work += 9 * len(nodes.bias) * nodes.height * nodes.width
    step = Int8SumsStep(
        last.name, out, out, edges, weights, sums.bias, sums.height, sums.width, pitch, sums.low, sums.high, work=work
    )
    step.layers, step.about, step.added = frozenset(term.layer for term in used), about, added
    step.mean = means is not None
    if nodes is not None:
        step.nodes = DepthwiseKernels(nodes.kernel, nodes.bias, nodes.stride, nodes.low, nodes.high)
    lowering.emit(step)
    return out


def _in_floats(lowering: Lowering, sums: EdgeSum, term: EdgeTerm) -> AddedEdges:
    """A term as edges in floats, pixel by pixel; a convolution is computed by a step of its own."""
    plain = not isinstance(term, Int8Term) and not term.dy.any() and not term.dx.any()
    if plain and len(term.row) <= len(np.unique(term.row)) and term.source.height == sums.height:
        return AddedEdges(term.source, term.row, term.channel, term.value)
    rows = np.unique(term.row)
    bias = np.zeros(len(sums.bias), np.float32)
    made = lowering.close(EdgeSum(f"{sums.name} part", sums.height, sums.width, [term], bias))
    return AddedEdges(made, rows, rows, np.ones(len(rows), np.float32))


def _merged(row: np.ndarray, channel: np.ndarray, shift: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, ...]:
    """Edges of which no two read the same place for the same row."""
    low, channels = int(shift.min()), int(channel.max()) + 1
    key = (row.astype(np.int64) * channels + channel) * (int(shift.max()) - low + 1) + (shift - low)
    every, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    if len(every) == len(row):
        return row, channel, shift, value
    merged = np.bincount(inverse.reshape(-1), value, len(every)).astype(np.float32)
    return row[first], channel[first], shift[first], merged


def _by_pixels(lowering: Lowering, sums: EdgeSum, terms: list[Int8Term]) -> tuple[ByteEdges, np.ndarray, FeatureMaps]:
    """The edges of terms whose sources are quantised together, with a scale for every pixel."""
    source = FeatureMaps.joined([term.source.take(term.source.buffers != EMPTY) for term in terms])
    channel, start = [], 0
    for term in terms:
        number = np.cumsum(term.source.buffers != EMPTY) - 1
        channel.append(number[term.channel] + start)
        start += int(number[-1]) + 1
    key = tuple(part.tobytes() for part in (source.buffers, source.channels, source.y, source.x))
    if key not in lowering.quantized_pixels:
        lowering.memory.join(source)
        pixels = sums.height * sums.width
        out = lowering.memory.new(len(source), 1, -(-pixels // 4))
        about = lowering.memory.new(2, 1, pixels)
        both = FeatureMaps.joined([out, about])
        lowering.emit(QuantizePixelsStep(f"{sums.name} quantised", both, source, out, about))
        lowering.quantized_pixels[key] = out, about
    out, about = lowering.quantized_pixels[key]
    row, value = (np.concatenate([getattr(term, name) for term in terms]) for name in ("row", "value"))
    edges = _merged(row, np.concatenate(channel), np.zeros(len(row), int), value)
    return ByteEdges(out, *edges[:3]), edges[3], about


def _by_channels(
    lowering: Lowering, sums: EdgeSum, terms: list[Int8Term]
) -> tuple[ByteEdges, np.ndarray, np.ndarray, int]:
    """The edges of terms whose sources are quantised channel by channel; also the zeros of the edges and the pitch."""
    pitch = max(_row_bytes(term, sums) for term in terms)
    buffers: list[np.ndarray] = []
    numbers: list[np.ndarray] = []
    rows, shifts, values, zeros = [], [], [], []
    for term in terms:
        layout = _layout(term, sums, pitch)
        (sy, sx), used = layout.stride, np.unique(term.channel)
        made = _quantized(lowering, sums.name, term, used, layout)
        position = np.searchsorted(used, term.channel)
        own = [
            np.array([getattr(made[i], name) for i in range(len(made))]) for name in QuantizedChannel.__annotations__
        ]
        phase = term.dy % sy * sx + term.dx % sx
        buffers.append(own[0][position])
        numbers.append(own[1][position] * (sy * sx) + phase)
        rows.append(term.row)
        shifts.append((term.dy // sy + layout.above) * pitch + term.dx // sx + layout.before)
        values.append(term.value * own[2][position].astype(np.float32))
        zeros.append(own[3][position])
    place = np.concatenate(buffers) * (1 << 32) + np.concatenate(numbers)
    maps, number = np.unique(place, return_inverse=True)
    source = FeatureMaps(1, 1, maps >> 32, maps & 0xFFFFFFFF)
    row, channel, shift, value = _merged(
        np.concatenate(rows), number.reshape(-1), np.concatenate(shifts), np.concatenate(values)
    )
    zero = np.zeros(len(maps))
    zero[number.reshape(-1)] = np.concatenate(zeros)
    return ByteEdges(source, row, channel, shift), value, zero[channel], pitch


def _row_bytes(term: Int8Term, sums: EdgeSum) -> int:
    """The least bytes of a row, such that what is read beyond it is the border."""
    (_, sx), left = term.stride, max(0, int(-(term.dx // term.stride[1]).min()))
    right = max(0, int((term.dx // sx).max()))
    return max(-(-term.source.width // sx) + left, sums.width + right + left if left else sums.width + right)


def _layout(term: Int8Term, sums: EdgeSum, pitch: int) -> ByteLayout:
    (sy, sx), dy = term.stride, term.dy // term.stride[0]
    above, before = max(0, int(-dy.min())), max(0, int(-(term.dx // sx).min()))
    rows = max(-(-term.source.height // sy), sums.height + max(0, int(dy.max()))) + above
    if term.pointwise:
        return ByteLayout(rows, pitch)
    return ByteLayout(rows, pitch, above, before, (sy, sx))


def _quantized(
    lowering: Lowering, name: str, term: Int8Term, used: np.ndarray, layout: ByteLayout
) -> list[QuantizedChannel]:
    """The quantised maps of some channels of a source; those that are missing are added as one step."""
    source = term.source.take(used)
    keys = list(
        zip(source.buffers.tolist(), source.channels.tolist(), source.y.tolist(), source.x.tolist(), strict=True)
    )
    found = lowering.quantized_channels.setdefault((layout, source.height, source.width), {})
    missing = np.array([i for i, key in enumerate(keys) if key not in found], int)
    if len(missing):
        first = {key: i for i, key in reversed(list(enumerate(keys))) if key not in found}
        missing = np.array(sorted(first.values()), int)
        assert term.low is not None
        assert term.high is not None
        scale, inverse, zero = byte_ranges(term.low[used[missing]], term.high[used[missing]])
        phases = layout.stride[0] * layout.stride[1]
        out = lowering.memory.new(len(missing) * phases, 1, -(-layout.bytes // 4))
        own = source.take(missing)
        lowering.memory.join(own)
        lowering.emit(QuantizeChannelsStep(f"{name} quantised", out, own, inverse, zero, layout))
        for number, i in enumerate(missing.tolist()):
            found[keys[i]] = QuantizedChannel(int(out.buffers[0]), number, float(scale[number]), float(zero[number]))
    return [found[key] for key in keys]


def fuse_quantization(lowering: Lowering) -> None:
    """Let nodes write bytes themselves where a step of its own would only quantise their results."""
    made = {int(step.results.buffers[0]): step for step in lowering.steps if _has_nodes(step)}
    left: list[LoweredStep] = []
    for step in lowering.steps:
        if not isinstance(step, QuantizeChannelsStep):
            left.append(step)
            continue
        own = np.ones(len(step.source), bool)  # what the step still has to quantise
        for number in np.unique(step.source.buffers).tolist():
            part, nodes = step.source.buffers == number, made.get(number)
            if nodes is None or nodes.bytes is not None or not _whole_maps(step, part, nodes.results):
                continue
            nodes.bytes = BytesOfNodes(step.only(part))
            nodes.out = FeatureMaps.joined([nodes.results, nodes.bytes.step.out])
            own &= ~part
        if own.any():
            left.append(step if own.all() else step.only(own))
    lowering.steps = left
    read = {number for step in left for maps in step.reads() for number in np.unique(maps.buffers).tolist()}
    for number, nodes in made.items():
        if nodes.bytes is not None and number not in read:
            nodes.bytes.only, nodes.out = True, nodes.bytes.step.out


def _has_nodes(step: LoweredStep) -> TypeGuard[NodesStep | Int8SumsStep]:
    return isinstance(step, NodesStep) or (isinstance(step, Int8SumsStep) and step.nodes is not None)


def _whole_maps(step: QuantizeChannelsStep, part: np.ndarray, results: FeatureMaps) -> bool:
    """Whether a step quantises some of its channels, which are results of nodes, as whole maps without borders."""
    source = step.source
    moved = source.y[part].any() or source.x[part].any()
    same = (source.height, source.width) == (results.height, results.width)
    return bool(same and not moved and step.bytes == ByteLayout(source.height, source.width))
