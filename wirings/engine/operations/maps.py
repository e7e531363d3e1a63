"""Operations on the pixels of maps: group norms, means, pooling, slices, padding and repeated pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from wirings.compaction.operations import AddNumbers, Crop, GroupNorm, Mean, Pad, Pooling, RepeatPixels, Roll
from wirings.engine.fused_steps import EdgeSum, LoweredStep
from wirings.engine.group_norm_step import GroupNormStep
from wirings.engine.kernel_step import MEANS, POOLS, StepKind
from wirings.engine.lowering import Lowering, as_array, height_and_width
from wirings.engine.memory_layout import FeatureMaps
from wirings.engine.operations.registry import Shape, is_maps, kernel_for
from wirings.engine.operations.tokens import MAX_GATHERED, gather
from wirings.engine.token_steps import GatherStep


@kernel_for(Mean, lambda o, shapes: is_maps(*shapes))
def lower_mean(lowering: Lowering, o: Mean) -> FeatureMaps:
    name = o.inputs[0]
    channels, height, width = lowering.shape(name)
    out = lowering.memory.new(channels, 1, 1, packed=len(lowering.shapes[o.output]) == 1)
    value = lowering.values.get(name)
    if isinstance(value, EdgeSum) and lowering.users[name] == 1:
        lowering.emit_sums(replace(value, name=o.output), out, {"flag": MEANS})
        return out
    source = lowering.solid(lowering.ready(name))
    fields = {"scale": 1 / (height * width), **height_and_width(source)}
    lowering.emit(LoweredStep(o.output, StepKind.MEAN, out, source, fields=fields))
    return out


@kernel_for(Pooling, lambda o, shapes: len(shapes[0]) == 3 and len(o.kernel) == 2)
def lower_pooling(lowering: Lowering, o: Pooling) -> FeatureMaps:
    source = lowering.solid(lowering.ready(o.inputs[0]))
    out = lowering.memory.new(*lowering.shape(o.output))
    kind = "avg inside" if o.kind == "avg" and not o.count_padding else o.kind
    pairs = {"kernel": o.kernel, "stride": o.stride, "pad": o.padding, "dilate": o.dilation}
    if o.kind.startswith("adaptive"):
        pairs = {"dilate": (1, 1)}
    if o.kind == "avg":
        pairs["dilate"] = (1, 1)
    fields = {f"{name}_{side}": pair[i] for name, pair in pairs.items() for i, side in enumerate("yx")}
    fields = {"flag": POOLS.index(kind), **fields, **height_and_width(source)}
    lowering.emit(LoweredStep(o.output, StepKind.POOL, out, source, fields=fields))
    return out


def _supports_crop(o: Crop, shapes: Sequence[Shape]) -> bool:
    return is_maps(*shapes) and (set(o.steps) == {1} or math.prod(shapes[0]) <= MAX_GATHERED)


@kernel_for(Crop, _supports_crop)
def lower_crop(lowering: Lowering, o: Crop) -> FeatureMaps | GatherStep:
    if set(o.steps) != {1}:
        taken = (slice(*limits) for limits in zip(o.starts, o.stops, o.steps, strict=True))
        return gather(lowering, o.output, o.inputs[0], _numbered(lowering, o.inputs[0])[:, *taken])
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


@kernel_for(GroupNorm, lambda o, shapes: len(shapes[0]) in (1, 2, 3))
def lower_group_norm(lowering: Lowering, o: GroupNorm) -> FeatureMaps:
    source = lowering.solid(lowering.ready(o.inputs[0]))
    out = lowering.new_like(o.output)
    own = GroupNormStep(source, out, as_array(o.scale), as_array(o.shift), o.sizes, o.features, o.epsilon)
    lowering.emit(LoweredStep(o.output, StepKind.GROUP_NORM, out, own=own))
    return out


@kernel_for(AddNumbers, lambda o, shapes: is_maps(*shapes))
def lower_add_numbers(lowering: Lowering, o: AddNumbers) -> FeatureMaps:
    source, second = (lowering.solid(lowering.ready(name)) for name in o.inputs)
    out = lowering.new_like(o.output)
    fields = {"second": second, "flag": 1, **height_and_width(source)}
    lowering.emit(LoweredStep(o.output, StepKind.ADD_NUMBERS, out, source, fields=fields))
    return out


def _numbered(lowering: Lowering, name: str) -> np.ndarray:
    """The numbers of a tensor's entries, in its shape."""
    return np.arange(math.prod(lowering.shapes[name])).reshape(lowering.shapes[name])


@kernel_for(Roll, lambda o, shapes: is_maps(*shapes) and math.prod(shapes[0]) <= MAX_GATHERED)
def lower_roll(lowering: Lowering, o: Roll) -> FeatureMaps | GatherStep:
    axes = tuple(range(1, 1 + len(o.shifts)))
    return gather(lowering, o.output, o.inputs[0], np.roll(_numbered(lowering, o.inputs[0]), o.shifts, axes))


def _supports_repeat(o: RepeatPixels, shapes: Sequence[Shape]) -> bool:
    return is_maps(*shapes) and math.prod(shapes[0]) * math.prod(o.factors) <= MAX_GATHERED


@kernel_for(RepeatPixels, _supports_repeat)
def lower_repeat(lowering: Lowering, o: RepeatPixels) -> FeatureMaps | GatherStep:
    index = _numbered(lowering, o.inputs[0])
    for axis, factor in enumerate(o.factors, 1):
        index = index.repeat(factor, axis)
    return gather(lowering, o.output, o.inputs[0], index)
