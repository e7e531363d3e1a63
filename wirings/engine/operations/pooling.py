"""Pooling, and means of maps; their kernels are in ``source/pooling.h``."""

from __future__ import annotations

from ctypes import c_float
from dataclasses import dataclass, replace

from wirings.compaction.operations import Mean, Pooling
from wirings.engine.bounds import expect_inside
from wirings.engine.edge_sums import EdgeSum, SumsResult
from wirings.engine.int8_lowering import close_int8, is_int8
from wirings.engine.lowering import Lowering
from wirings.engine.memory_layout import FeatureMaps
from wirings.engine.operations.registry import is_maps, kernel_for
from wirings.engine.step import Fields, LoweredStep, StepContext, integers, pointers

POOLS = ("max", "avg", "avg inside", "adaptive_avg", "adaptive_max")
"""Kinds of pooling, in the order of ``PoolKind``."""
SIZES = ("kernel", "stride", "pad", "dilate")


@dataclass(eq=False)
class PoolStep(LoweredStep):
    """Pooling of all kinds."""

    kind = "pool"
    layout = (
        *pointers("in_", "out", "chunks"),
        *integers("pooling", "height", "width", "pitch", "out_height", "out_width", "out_pitch"),
        *integers(*(f"{name}_{side}" for name in SIZES for side in "yx")),
    )
    out: FeatureMaps
    source: FeatureMaps
    pooling: str
    """One of `POOLS`."""
    sizes: dict[str, tuple[int, ...]]
    """The `SIZES` for y and x. Adaptive pooling has none of them."""

    def reads(self) -> list[FeatureMaps]:
        return [self.source]

    def fields(self, context: StepContext) -> tuple[Fields, int]:
        source, out, memory = self.source, self.out, context.memory
        expect_inside(self.name, memory.offsets(source), context.extent(source), context.floats)
        expect_inside(self.name, memory.offsets(out), context.extent(out), context.floats)
        chunks = context.channel_chunks(len(source), source.height, source.width)
        values = {
            "in_": memory.offsets(source),
            "out": memory.offsets(out),
            "chunks": chunks,
            "pooling": POOLS.index(self.pooling),
            "height": source.height,
            "width": source.width,
            "pitch": memory.pitch(source),
            "out_height": out.height,
            "out_width": out.width,
            "out_pitch": memory.pitch(out),
        }
        for name in SIZES:
            sizes = self.sizes.get(name, (1, 1) if name == "dilate" else (0, 0))
            values |= {f"{name}_{side}": size for side, size in zip("yx", sizes, strict=True)}
        return values, len(chunks) - 1


@dataclass(eq=False)
class MeanStep(LoweredStep):
    """The mean of each map."""

    kind = "mean"
    layout = (*pointers("in_", "out", "chunks"), *integers("height", "width", "pitch"), ("share", c_float))
    out: FeatureMaps
    source: FeatureMaps

    def reads(self) -> list[FeatureMaps]:
        return [self.source]

    def fields(self, context: StepContext) -> tuple[Fields, int]:
        source, memory = self.source, context.memory
        in_, out = memory.offsets(source), memory.offsets(self.out)
        expect_inside(self.name, in_, context.extent(source), context.floats)
        expect_inside(self.name, out, 1, context.floats)
        chunks = context.channel_chunks(len(in_), source.height, source.width)
        values = {
            "in_": in_,
            "out": out,
            "chunks": chunks,
            "height": source.height,
            "width": source.width,
            "pitch": memory.pitch(source),
            "share": 1 / (source.height * source.width),
        }
        return values, len(chunks) - 1


@kernel_for(Mean, lambda o, shapes: is_maps(*shapes))
def lower_mean(lowering: Lowering, o: Mean) -> FeatureMaps:
    name = o.inputs[0]
    out = lowering.memory.new(lowering.shape(name)[0], 1, 1, packed=len(lowering.shapes[o.output]) == 1)
    value = lowering.values.get(name)
    if isinstance(value, EdgeSum) and lowering.users[name] == 1:
        sums = replace(value, name=o.output)
        if is_int8(sums):
            return close_int8(lowering, sums, means=out)
        sums.emit(lowering, out, SumsResult.MEANS)
        return out
    lowering.emit(MeanStep(o.output, out, lowering.solid(lowering.ready(name))))
    return out


@kernel_for(Pooling, lambda o, shapes: len(shapes[0]) == 3 and len(o.kernel) == 2)
def lower_pooling(lowering: Lowering, o: Pooling) -> FeatureMaps:
    source = lowering.solid(lowering.ready(o.inputs[0]))
    out = lowering.memory.new(*lowering.shape(o.output))
    pooling = "avg inside" if o.kind == "avg" and not o.count_padding else o.kind
    plain = o.kind in ("max", "avg")
    sizes = {"kernel": o.kernel, "stride": o.stride, "pad": o.padding} if plain else {}
    if o.kind == "max":
        sizes["dilate"] = o.dilation
    lowering.emit(PoolStep(o.output, out, source, pooling, sizes))
    return out
