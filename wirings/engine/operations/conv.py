"""Convolutions: sums over edges, and depthwise convolutions of nodes, which are fused with the sums before them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wirings.compaction.operations import Conv
from wirings.engine.edge_sums import EdgeSum, EdgeTerm
from wirings.engine.int8_lowering import int8_term, is_int8, suits_nodes
from wirings.engine.lowering import Lowering, as_array, in_two_dimensions, is_node_convolution
from wirings.engine.memory_layout import EMPTY
from wirings.engine.node_convolution import NodeConvolution
from wirings.engine.operations.registry import Shape, is_maps, kernel_for

MAX_STRIDE = 16  # as in source/stride_phases.h
FEW_ZEROS = 64
"""Convolutions whose padding is larger, with weights that meet no pixel, are not computed in int8."""


def _supports(o: Conv, shapes: Sequence[Shape]) -> bool:
    return is_maps(*shapes) and len(o.stride) == len(shapes[0]) - 1 and max(o.stride) <= MAX_STRIDE


@kernel_for(Conv, _supports)
def lower_conv(lowering: Lowering, o: Conv) -> EdgeSum | NodeConvolution:
    """A convolution as a sum over edges, or fused with the sum before it if it is that of a node."""
    o = in_two_dimensions(o)
    weight, bias = as_array(o.weight), as_array(o.bias, len(o.weight))
    if is_node_convolution(o):
        return fuse_node_convolution(lowering, o, weight.reshape(-1, 9), bias)
    _, height, width = lowering.shape(o.output)
    inside = _inside(lowering, o, weight)
    if lowering.in_int8(o) and (inside is weight or max(o.padding) <= FEW_ZEROS):
        term: EdgeTerm = int8_term(lowering, o, weight)  # weights that meet no pixel are rounded with the others
    else:
        term = _edges(lowering, o, inside)
    return EdgeSum(o.output, height, width, [term], bias)


def fuse_node_convolution(lowering: Lowering, o: Conv, kernel: np.ndarray, bias: np.ndarray) -> NodeConvolution:
    """Fuse the depthwise convolution of nodes with the sums over edges before it, if nothing else reads them."""
    sums = lowering.values.get(o.inputs[0])
    fits = isinstance(sums, EdgeSum) and (not is_int8(sums) or suits_nodes(sums))
    if not (isinstance(sums, EdgeSum) and fits and lowering.users[o.inputs[0]] == 1):
        term, shape = lowering.identity(o.inputs[0]), lowering.shape(o.inputs[0])
        sums = EdgeSum(o.output, shape[1], shape[2], [term], np.zeros(shape[0], np.float32))
    _, height, width = lowering.shape(o.output)
    caller = lowering.read_from_caller(sums)
    return NodeConvolution(o.output, sums, kernel, bias, o.stride[0], height, width, caller)


def _inside(lowering: Lowering, o: Conv, weight: np.ndarray) -> np.ndarray:
    """The weights that meet a pixel at all, zeros elsewhere.

    With a large dilation or padding, some meet only zeros around the maps, and all of these would have to be stored.
    """
    kept = weight
    for axis in (0, 1):
        length, last = lowering.shape(o.inputs[0])[axis + 1], lowering.shape(o.output)[axis + 1] - 1
        place = np.arange(weight.shape[axis + 2]) * o.dilation[axis] - o.padding[axis]  # of the first output
        outside = (place >= length) | (place + last * o.stride[axis] < 0)
        if outside.any():
            kept = np.where(outside[:, None] if axis == 0 else outside, np.float32(0), kept)
    return kept


def _edges(lowering: Lowering, o: Conv, weight: np.ndarray) -> EdgeTerm:
    """The weights of a convolution as edges. A strided convolution reads phases of its input, without a stride."""
    row, within, ky, kx = np.nonzero(weight)  # 64-bit integers, since offsets are computed from them
    value = weight[row, within, ky, kx]
    channel = row // (len(weight) // o.groups) * weight.shape[1] + within
    taps = np.count_nonzero(weight.reshape(o.groups, -1, *weight.shape[1:]).any(1))
    (sy, sx), (_, out_height, out_width) = o.stride, lowering.shape(o.output)
    y, x = ky * o.dilation[0] - o.padding[0], kx * o.dilation[1] - o.padding[1]
    name = o.inputs[0]
    if o.stride == (1, 1) and (name in lowering.values or lowering.users[name] > 1):
        source = lowering.ready(name)
    else:
        source = lowering.phases_of(name, (sy, sx))
        channel = (channel * sy + y % sy) * sx + x % sx
    dy, dx = y // sy, x // sx
    real = source.buffers[channel] != EMPTY
    row, channel, value, dy, dx = (part[real] for part in (row, channel, value, dy, dx))
    if (name, sy, sx) in lowering.phases:
        lowering.read_phases(name, (sy, sx), channel)
    term = EdgeTerm(source, row, channel, value, dy, dx, int(taps))
    if not len(term.row):
        lowering.memory.reach(source, 0, 0, 0, out_width)
        return term
    up, down, left, right = (int(n) for n in (-dy.min(), dy.max(), -dx.min(), dx.max()))
    above, before = max(0, up), max(0, left)
    below, after = max(0, out_height + down - source.height), max(0, out_width + right - source.width)
    pitch = max(source.width + before, out_width + max(0, right))
    if above or before or below or after:
        # The zeros after the last row are those before the next map.
        lowering.memory.reach(source, above, below, max(before, after, 1), pitch)
    return term
