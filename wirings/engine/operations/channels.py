"""Operations that select or move channels. They cost nothing: they only change where the next step reads."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from wirings.compaction.operations import Concat, Constant, Flatten, ScatterChannels, SelectChannels
from wirings.engine.lowering import Lowering, as_array
from wirings.engine.memory_layout import FeatureMaps
from wirings.engine.operations.registry import kernel_for


@kernel_for(Concat, lambda o, shapes: all(len(shape) in (1, 2, 3) for shape in shapes))
def lower_concat(lowering: Lowering, o: Concat) -> FeatureMaps:
    maps = FeatureMaps.joined([lowering.ready(name) for name in o.inputs])
    lowering.memory.join(maps)
    return maps


@kernel_for(SelectChannels, lambda o, shapes: len(shapes[0]) in (1, 2, 3))
def lower_select(lowering: Lowering, o: SelectChannels) -> FeatureMaps:
    return lowering.ready(o.inputs[0]).take(_as_index(o.index))


@kernel_for(ScatterChannels, lambda o, shapes: len(shapes[0]) in (1, 2, 3))
def lower_scatter(lowering: Lowering, o: ScatterChannels) -> FeatureMaps:
    return lowering.ready(o.inputs[0]).scattered(_as_index(o.index), o.channels)


def _as_index(x: Tensor) -> np.ndarray:
    return x.detach().cpu().numpy().astype(int)


@kernel_for(Constant, lambda o, shapes: o.map.dim() in (2, 3))
def lower_constant(lowering: Lowering, o: Constant) -> FeatureMaps:
    return lowering.memory.constant(as_array(o.map).reshape(lowering.shape(o.output)))


@kernel_for(Flatten, lambda o, shapes: len(shapes[0]) in (1, 2, 3))
def lower_flatten(lowering: Lowering, o: Flatten) -> FeatureMaps:
    maps = lowering.ready(o.inputs[0])
    pixels = maps.height * maps.width
    every = np.repeat(np.arange(len(maps)), pixels)
    y, x = np.tile(np.indices((maps.height, maps.width)).reshape(2, -1), len(maps))
    parts = (maps.buffers[every], maps.channels[every], maps.y[every] + y, maps.x[every] + x)
    return FeatureMaps(1, 1, *parts)
