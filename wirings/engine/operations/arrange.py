"""Other orders of dimensions: copies of single numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from wirings.compaction.operations import Arrange, Reshape
from wirings.engine.copies import GatherStep
from wirings.engine.lowering import Lowering
from wirings.engine.memory_layout import FeatureMaps
from wirings.engine.operations.registry import Shape, kernel_for

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
    return _gather(lowering, o.output, o.inputs[0], index)


@kernel_for(Reshape, lambda o, shapes: len(shapes[0]) in (1, 2, 3) and len(o.shape) < 3)
def lower_reshape(lowering: Lowering, o: Reshape) -> FeatureMaps | GatherStep:
    shape = lowering.shapes[o.inputs[0]]
    if math.prod(shape[1:]) == 1 and math.prod(o.shape) == 1:
        return lowering.ready(o.inputs[0])  # a map of one pixel is one number
    return _gather(lowering, o.output, o.inputs[0], np.arange(math.prod(shape)).reshape(shape[0], *o.shape))


def _gather(lowering: Lowering, name: str, source_name: str, index: np.ndarray) -> FeatureMaps | GatherStep:
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
