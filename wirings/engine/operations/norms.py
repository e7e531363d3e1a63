"""Norms: over the pixels of each channel, over the channels of each pixel, and over groups of channels.

Kernels: ``source/norms.h`` and ``source/group_norm.h``.
"""

from __future__ import annotations

from ctypes import c_float
from dataclasses import dataclass

import numpy as np

from wirings.compaction.operations import ChannelNorm, GroupNorm, InstanceNorm
from wirings.engine.bounds import expect_all_inside
from wirings.engine.lowering import Lowering, as_array
from wirings.engine.memory_layout import FeatureMaps
from wirings.engine.operations.registry import is_maps, kernel_for
from wirings.engine.step import Fields, LoweredStep, StepContext, integers, pointers


@dataclass(eq=False)
class InstanceNormStep(LoweredStep):
    """A norm over the pixels of each channel."""

    kind = "instance_norm"
    layout = (
        *pointers("in_", "out", "scale", "shift", "chunks"),
        *integers("height", "width", "pitch", "out_pitch"),
        ("epsilon", c_float),
    )
    out: FeatureMaps
    source: FeatureMaps
    scale: np.ndarray
    shift: np.ndarray
    epsilon: float

    def reads(self) -> list[FeatureMaps]:
        return [self.source]

    def fields(self, context: StepContext) -> tuple[Fields, int]:
        source = self.source
        chunks = context.channel_chunks(len(source), source.height, source.width)
        values = {
            **context.map_fields(self.name, source, self.out),
            "scale": self.scale,
            "shift": self.shift,
            "chunks": chunks,
            "epsilon": self.epsilon,
        }
        return values, len(chunks) - 1


@kernel_for(InstanceNorm, lambda o, shapes: is_maps(*shapes))
def lower_instance_norm(lowering: Lowering, o: InstanceNorm) -> FeatureMaps:
    source = lowering.solid(lowering.ready(o.inputs[0]))
    out = lowering.memory.new(*lowering.shape(o.output))
    lowering.emit(InstanceNormStep(o.output, out, source, as_array(o.scale), as_array(o.shift), o.epsilon))
    return out


@dataclass(eq=False)
class NormStep(LoweredStep):
    """A norm over the channels of each pixel."""

    kind = "norm"
    layout = (
        *pointers("in_", "out", "scale", "shift"),
        *integers("channels", "height", "width", "pitch", "out_pitch", "features", "centered", "tiles"),
        ("epsilon", c_float),
    )
    out: FeatureMaps
    source: FeatureMaps
    scale: np.ndarray
    shift: np.ndarray
    features: int
    centered: bool
    epsilon: float

    def reads(self) -> list[FeatureMaps]:
        return [self.source]

    def fields(self, context: StepContext) -> tuple[Fields, int]:
        source = self.source
        single = source.height == source.width == 1
        tiles = context.tiles(-(-source.width // context.lanes), source.height)
        values = {
            **context.map_fields(self.name, source, self.out, 1 if single else context.vector_extent(source)),
            "scale": self.scale,
            "shift": self.shift,
            "channels": len(source),
            "features": self.features,
            "centered": self.centered,
            "tiles": tiles,
            "epsilon": self.epsilon,
        }
        return values, tiles * source.height


@kernel_for(ChannelNorm, lambda o, shapes: len(shapes[0]) in (1, 2, 3))
def lower_norm(lowering: Lowering, o: ChannelNorm) -> FeatureMaps:
    source = lowering.solid(lowering.ready(o.inputs[0]))
    out = lowering.new_like(o.output)
    scale, shift = as_array(o.scale), as_array(o.shift)
    lowering.emit(NormStep(o.output, out, source, scale, shift, o.features, o.centered, o.epsilon))
    return out


@dataclass(eq=False)
class GroupNormStep(LoweredStep):
    """A norm over the channels of each group and all pixels."""

    kind = "group_norm"
    layout = (
        *pointers("in_", "out", "scale", "shift", "starts"),
        *integers("height", "width", "pitch", "out_pitch", "features"),
        ("epsilon", c_float),
    )
    out: FeatureMaps
    source: FeatureMaps
    scale: np.ndarray
    shift: np.ndarray
    sizes: tuple[int, ...]
    features: int
    epsilon: float

    def reads(self) -> list[FeatureMaps]:
        return [self.source]

    def fields(self, context: StepContext) -> tuple[Fields, int]:
        source, starts = self.source, np.cumsum([0, *self.sizes])
        own = (source, self.out, self.scale, self.shift)
        expect_all_inside(self.name, int(starts[-1]), min(len(x) for x in own))
        values = {
            **context.map_fields(self.name, source, self.out, context.vector_extent(source)),
            "scale": self.scale,
            "shift": self.shift,
            "starts": starts,
            "features": self.features,
            "epsilon": self.epsilon,
        }
        return values, len(self.sizes)


@kernel_for(GroupNorm, lambda o, shapes: len(shapes[0]) in (1, 2, 3))
def lower_group_norm(lowering: Lowering, o: GroupNorm) -> FeatureMaps:
    source = lowering.solid(lowering.ready(o.inputs[0]))
    out = lowering.new_like(o.output)
    scale, shift = as_array(o.scale), as_array(o.shift)
    lowering.emit(GroupNormStep(o.output, out, source, scale, shift, o.sizes, o.features, o.epsilon))
    return out
