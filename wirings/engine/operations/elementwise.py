"""Affine operations, activations, sums and products. Where possible, they are fused with the sums before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from wirings.compaction.operations import Activation, Add, AddMap, Affine, InstanceNorm, Multiply
from wirings.engine.fused_steps import INFINITY, EdgeSum, EdgeTerm, FusedStep, LoweredStep, NodeConvolution
from wirings.engine.kernel_step import FUNCTIONS, MAPS, StepKind
from wirings.engine.lowering import Lowering, as_array, height_and_width
from wirings.engine.memory_layout import FeatureMaps
from wirings.engine.operations.registry import Shape, is_maps, kernel_for

MAX_PIXEL_KINDS = 33
"""Constant maps with no more kinds of pixels than this are composed of that many maps."""


@kernel_for(Affine, lambda o, shapes: is_maps(*shapes))
def lower_affine(lowering: Lowering, o: Affine) -> FusedStep:
    scale, shift = as_array(o.scale), as_array(o.shift)
    before = lowering.fusible(o.inputs[0])
    if isinstance(before, NodeConvolution):
        kernel, bias = before.kernel * scale[:, None], before.bias * scale + shift
        return replace(before, name=o.output, kernel=kernel, bias=bias)
    if isinstance(before, EdgeSum):
        terms = [replace(t, value=t.value * scale[t.row]) for t in before.terms]
        return replace(before, name=o.output, terms=terms, bias=before.bias * scale + shift)
    _, height, width = lowering.shape(o.output)
    return EdgeSum(o.output, height, width, [lowering.identity(o.inputs[0], scale)], shift)


def _supports_activation(o: Activation, shapes: Sequence[Shape]) -> bool:
    """The kernels have these functions with their usual parameters."""
    if len(shapes[0]) not in (1, 2, 3):
        return False
    if o.kind == "softplus":
        return o.values in ((), (1.0,), (1.0, 20.0))
    return len(o.values) == {"clamp": 2, "leaky_relu": 1, "elu": 1}.get(o.kind, 0)


@kernel_for(Activation, _supports_activation)
def lower_activation(lowering: Lowering, o: Activation) -> FusedStep | FeatureMaps:
    limits = {"relu": (0.0, INFINITY), "clamp": o.values}.get(o.kind)
    low, high = (-INFINITY, INFINITY) if limits is None else limits
    if limits is not None:
        before = lowering.fusible(o.inputs[0])
        if before is not None:
            return replace(before, name=o.output, low=low, high=high)
        if len(lowering.shapes[o.output]) > 1:
            channels, height, width = lowering.shape(o.output)
            bias = np.zeros(channels, np.float32)
            return EdgeSum(o.output, height, width, [lowering.identity(o.inputs[0])], bias, low=low, high=high)
    single = len(lowering.shapes[o.output]) == 1
    source = lowering.as_row(o.inputs[0]) if single else lowering.solid(lowering.ready(o.inputs[0]))
    out = lowering.memory.new(len(source), source.height, source.width)
    kind = "clamp" if limits is not None else o.kind
    scale = o.values[0] if o.values and limits is None else 1.0
    fields = {"flag": FUNCTIONS.index(kind), "scale": scale, "low": low, "high": high, **height_and_width(source)}
    lowering.emit(LoweredStep(o.output, StepKind.FUNCTION, out, source, fields=fields))
    return lowering.as_numbers(out) if single else out


@kernel_for(Add, lambda o, shapes: all(len(shape) in (1, 2, 3) for shape in shapes))
def lower_add(lowering: Lowering, o: Add) -> FusedStep | FeatureMaps:
    if len(lowering.shapes[o.output]) == 1:
        return _add_rows(lowering, o)
    terms: list[EdgeTerm] = []
    channels, height, width = lowering.shape(o.output)
    bias = np.zeros(channels, np.float32)
    for name in o.inputs:
        before = lowering.fusible(name)
        if isinstance(before, EdgeSum):
            terms += before.terms
            bias = bias + before.bias
        else:
            terms.append(lowering.identity(name))
    return EdgeSum(o.output, height, width, terms, bias)


def _add_rows(lowering: Lowering, o: Add) -> FeatureMaps:
    """The sum of tensors of single numbers, each of which is one row."""
    one, zero = np.ones(1, np.float32), np.zeros(1, int)
    terms = [EdgeTerm(lowering.as_row(name), zero, zero, one, zero, zero, 1) for name in o.inputs]
    count = lowering.shapes[o.output][0]
    out = lowering.memory.new(1, 1, count)
    lowering.memory.join(*(term.source for term in terms), out)
    lowering.emit_sums(EdgeSum(o.output, 1, count, terms, np.zeros(1, np.float32)), out, {"flag": MAPS})
    return lowering.as_numbers(out)


@kernel_for(AddMap, lambda o, shapes: is_maps(*shapes) and tuple(o.map.shape) == shapes[0])
def lower_add_map(lowering: Lowering, o: AddMap) -> FusedStep:
    added = as_array(o.map).reshape(lowering.shape(o.output))
    before = lowering.fusible(o.inputs[0])
    if not isinstance(before, EdgeSum):
        _, height, width = lowering.shape(o.output)
        bias = np.zeros(len(added), np.float32)
        before = EdgeSum(o.output, height, width, [lowering.identity(o.inputs[0])], bias)
    maps, row, channel, value, bias = _as_few_maps(added)
    if not len(row):
        return replace(before, name=o.output, bias=before.bias + bias)
    zeros = np.zeros(len(row), int)
    term = EdgeTerm(lowering.memory.constant(maps), row, channel, value, zeros, zeros, len(maps))
    return replace(before, name=o.output, terms=[*before.terms, term], bias=before.bias + bias)


def _as_few_maps(added: np.ndarray) -> tuple[np.ndarray, ...]:
    """Constant maps as a bias and edges from a few maps: maps, row, channel, value, bias.

    What a constant node contributes differs from pixel to pixel near the border only, so that most pixels have the same
    values in all rows. Each kind of pixel except the most frequent one gets a map that is 1 there.
    """
    flat = added.reshape(len(added), -1)
    kinds, first, kind, counts = np.unique(flat, axis=1, return_index=True, return_inverse=True, return_counts=True)
    if len(first) > MAX_PIXEL_KINDS:
        rows = np.flatnonzero(flat.any(1))
        return added[rows], rows, np.arange(len(rows)), np.ones(len(rows), np.float32), np.zeros(len(added), np.float32)
    usual = int(counts.argmax())
    bias = kinds[:, usual]
    rest = np.delete(np.arange(len(first)), usual)
    maps = (kind.reshape(1, *added.shape[1:]) == rest[:, None, None]).astype(np.float32)
    value = kinds[:, rest] - bias[:, None]
    row, channel = np.nonzero(value)
    return maps, row, channel, value[row, channel], bias


@kernel_for(InstanceNorm, lambda o, shapes: is_maps(*shapes))
def lower_instance_norm(lowering: Lowering, o: InstanceNorm) -> FeatureMaps:
    source = lowering.solid(lowering.ready(o.inputs[0]))
    out = lowering.memory.new(*lowering.shape(o.output))
    fields = {
        "weights": as_array(o.scale),
        "weights2": as_array(o.shift),
        "scale": o.epsilon,
        **height_and_width(source),
    }
    lowering.emit(LoweredStep(o.output, StepKind.INSTANCE_NORM, out, source, fields=fields))
    return out


def _supports_multiply(o: Multiply, shapes: Sequence[Shape]) -> bool:
    if len(shapes[0]) == 1:
        return shapes[0] == shapes[1]
    return is_maps(*shapes) and (shapes[0] == shapes[1] or set(shapes[1][1:]) == {1})


@kernel_for(Multiply, _supports_multiply)
def lower_multiply(lowering: Lowering, o: Multiply) -> FeatureMaps:
    single = len(lowering.shapes[o.output]) == 1
    read = lowering.as_row if single else lambda name: lowering.solid(lowering.ready(name))
    source, second = (read(name) for name in o.inputs)
    one = not single and lowering.shape(o.inputs[1])[1:] == (1, 1)
    if not one:
        lowering.memory.join(source, second)
    out = lowering.memory.new(len(source), source.height, source.width)
    fields = {"second": second, "flag": int(one), **height_and_width(source)}
    lowering.emit(LoweredStep(o.output, StepKind.MULTIPLY, out, source, fields=fields))
    return lowering.as_numbers(out) if single else out
