"""Other orders of dimensions, rolled maps and repeated pixels: copies of single numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from wirings.compaction.operations import Arrange, RepeatPixels, Reshape, Roll
from wirings.engine.copies import GatherStep
from wirings.engine.lowering import Lowering
from wirings.engine.memory_layout import FeatureMaps
from wirings.engine.operations.registry import Shape, is_maps, kernel_for

MAX_GATHERED = 2**24
"""The most numbers that are copied one by one, each of which has an offset of 4 bytes."""


def _supports_arrange(o: Arrange, shapes: Sequence[Shape]) -> bool:
    plain = o.shape[:1] == (-1,) and o.order[:1] == (0,) and len(o.shape) in (2, 3, 4)
    within = math.prod(o.shape[1:]) == math.prod(shapes[0]) <= MAX_GATHERED  # nothing becomes part of the batch
    return plain and within and len(shapes[0]) in (1, 2, 3)


@kernel_for(Arrange, _supports_arrange)
def lower_arrange(lowering: Lowering, o: Arrange) -> FeatureMaps | GatherStep:
    sizes = [size for own in o.factors for size in own]
    index = np.arange(math.prod(sizes)).reshape(sizes).transpose([n - 1 for n in o.order[1:]]).reshape(o.shape[1:])
    return gather(lowering, o.output, o.inputs[0], index)


@kernel_for(Reshape, lambda o, shapes: len(shapes[0]) in (1, 2, 3) and len(o.shape) < 3)
def lower_reshape(lowering: Lowering, o: Reshape) -> FeatureMaps | GatherStep:
    shape = lowering.shapes[o.inputs[0]]
    if math.prod(shape[1:]) == 1 and math.prod(o.shape) == 1:
        return lowering.ready(o.inputs[0])  # a map of one pixel is one number
    return gather(lowering, o.output, o.inputs[0], np.arange(math.prod(shape)).reshape(shape[0], *o.shape))


def gather(lowering: Lowering, name: str, source_name: str, index: np.ndarray) -> FeatureMaps | GatherStep:
    """Copies to another order. What is an output of the network and nothing else is copied to the caller at once."""
    outside = source_name in lowering.program.inputs and source_name not in lowering.values
    source: FeatureMaps | int
    if outside and lowering.users[source_name] == 1:
        source = lowering.input_number(source_name)
    else:
        source = lowering.solid(lowering.ready(source_name))
    index = index.reshape(-1, index.shape[-1])
    if name in lowering.program.outputs and lowering.users[name] == 1:
        return GatherStep(name, None, index, source, lowering.program.outputs.index(name))
    out = lowering.new_like(name)
    if len(lowering.shapes[name]) == 1:  # single numbers
        index = index.reshape(-1, 1)
    lowering.emit(GatherStep(name, out, index, source))
    return out


def numbered(lowering: Lowering, name: str) -> np.ndarray:
    """The numbers of a tensor's entries, in its shape."""
    return np.arange(math.prod(lowering.shapes[name])).reshape(lowering.shapes[name])


@kernel_for(Roll, lambda o, shapes: is_maps(*shapes) and math.prod(shapes[0]) <= MAX_GATHERED)
def lower_roll(lowering: Lowering, o: Roll) -> FeatureMaps | GatherStep:
    axes = tuple(range(1, 1 + len(o.shifts)))
    return gather(lowering, o.output, o.inputs[0], np.roll(numbered(lowering, o.inputs[0]), o.shifts, axes))


def _supports_repeat(o: RepeatPixels, shapes: Sequence[Shape]) -> bool:
    return is_maps(*shapes) and math.prod(shapes[0]) * math.prod(o.factors) <= MAX_GATHERED


@kernel_for(RepeatPixels, _supports_repeat)
def lower_repeat(lowering: Lowering, o: RepeatPixels) -> FeatureMaps | GatherStep:
    index = numbered(lowering, o.inputs[0])
    for axis, factor in enumerate(o.factors, 1):
        index = index.repeat(factor, axis)
    return gather(lowering, o.output, o.inputs[0], index)
