"""Affine operations and sums. They are fused with the sums before them, or become edges of weight one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from wirings.compaction.operations import Add, AddMap, Affine
from wirings.engine.edge_sums import EdgeSum, EdgeTerm
from wirings.engine.fused_steps import FusedStep
from wirings.engine.lowering import Lowering, as_array
from wirings.engine.memory_layout import FeatureMaps
from wirings.engine.node_convolution import NodeConvolution
from wirings.engine.operations.registry import is_maps, kernel_for

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
    EdgeSum(o.output, 1, count, terms, np.zeros(1, np.float32)).emit(lowering, out)
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
