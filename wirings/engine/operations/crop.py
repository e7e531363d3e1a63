"""Slices of maps, and zeros around them: copies."""

from __future__ import annotations

import math
from collections.abc import Sequence

from wirings.compaction.operations import Crop, Pad
from wirings.engine.copies import GatherStep
from wirings.engine.lowering import Lowering
from wirings.engine.memory_layout import FeatureMaps
from wirings.engine.operations.arrange import MAX_GATHERED, gather, numbered
from wirings.engine.operations.registry import Shape, is_maps, kernel_for


def _supports_crop(o: Crop, shapes: Sequence[Shape]) -> bool:
    return is_maps(*shapes) and (set(o.steps) == {1} or math.prod(shapes[0]) <= MAX_GATHERED)


@kernel_for(Crop, _supports_crop)
def lower_crop(lowering: Lowering, o: Crop) -> FeatureMaps | GatherStep:
    if set(o.steps) != {1}:
        taken = (slice(*limits) for limits in zip(o.starts, o.stops, o.steps, strict=True))
        return gather(lowering, o.output, o.inputs[0], numbered(lowering, o.inputs[0])[:, *taken])
    maps = lowering.solid(lowering.ready(o.inputs[0]))
    _, height, width = lowering.shape(o.output)
    size = (maps.height, maps.width)
    starts, stops = ((*[fill] * (2 - len(own)), *own) for own, fill in ((o.starts, 0), (o.stops, 1)))
    top, left = (slice(a, b).indices(n)[0] for a, b, n in zip(starts, stops, size, strict=True))
    part = FeatureMaps(height, width, maps.buffers, maps.channels, maps.y + top, maps.x + left)
    out = lowering.memory.new(len(maps), height, width)
    lowering.emit_copy(o.output, part, out)
    return out


def _supports_pad(o: Pad, shapes: Sequence[Shape]) -> bool:
    return is_maps(*shapes) and min(*o.before, *o.after) >= 0


@kernel_for(Pad, _supports_pad)
def lower_pad(lowering: Lowering, o: Pad) -> FeatureMaps:
    maps = lowering.solid(lowering.ready(o.inputs[0]))
    out = lowering.memory.new(*lowering.shape(o.output))
    lowering.memory.buffers[out.buffers[0]].own = True
    top, left = (*[0] * (2 - len(o.before)), *o.before)
    inner = FeatureMaps(maps.height, maps.width, out.buffers, out.channels, out.y + top, out.x + left)
    lowering.emit_copy(o.output, maps, inner)
    return out
