"""Products of maps, and sums of maps and numbers; their kernels are in ``source/elementwise.h``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wirings.compaction.operations import AddNumbers, Multiply, MultiplyMap
from wirings.engine.bounds import expect_inside
from wirings.engine.lowering import Lowering, as_array
from wirings.engine.memory_layout import FeatureMaps
from wirings.engine.operations.registry import Shape, is_maps, kernel_for
from wirings.engine.step import Fields, LoweredStep, StepContext, integers, pointers


@dataclass(eq=False)
class MultiplyStep(LoweredStep):
    """Products of maps with others, or with one number for each channel."""

    kind = "multiply"
    layout = (
        *pointers("in_", "factors", "out", "chunks"),
        *integers("single", "height", "width", "pitch", "out_pitch"),
    )
    out: FeatureMaps
    source: FeatureMaps
    factors: FeatureMaps
    single: bool = False
    """Whether each channel has a single factor."""

    def reads(self) -> list[FeatureMaps]:
        return [self.source, self.factors]

    def fields(self, context: StepContext) -> tuple[Fields, int]:
        source = self.source
        factors = context.memory.offsets(self.factors)
        expect_inside(self.name, factors, 1 if self.single else context.extent(source), context.floats)
        chunks = context.channel_chunks(len(source), source.height, source.width)
        values = {
            **context.map_fields(self.name, source, self.out),
            "factors": factors,
            "chunks": chunks,
            "single": self.single,
        }
        return values, len(chunks) - 1


def _supports(o: Multiply, shapes: Sequence[Shape]) -> bool:
    if len(shapes[0]) == 1:
        return shapes[0] == shapes[1]
    return is_maps(*shapes) and (shapes[0] == shapes[1] or set(shapes[1][1:]) == {1})


@kernel_for(Multiply, _supports)
def lower_multiply(lowering: Lowering, o: Multiply) -> FeatureMaps:
    numbers = len(lowering.shapes[o.output]) == 1
    read = lowering.as_row if numbers else lambda name: lowering.solid(lowering.ready(name))
    source, factors = (read(name) for name in o.inputs)
    single = not numbers and lowering.shape(o.inputs[1])[1:] == (1, 1)
    if not single:
        lowering.memory.join(source, factors)
    out = lowering.memory.new(len(source), source.height, source.width)
    lowering.emit(MultiplyStep(o.output, out, source, factors, single))
    return lowering.as_numbers(out) if numbers else out


@kernel_for(MultiplyMap, lambda o, shapes: is_maps(*shapes) and tuple(o.map.shape) == tuple(shapes[0]))
def lower_multiply_map(lowering: Lowering, o: MultiplyMap) -> FeatureMaps:
    source = lowering.solid(lowering.ready(o.inputs[0]))
    factors = lowering.memory.constant(as_array(o.map).reshape(lowering.shape(o.output)))
    lowering.memory.join(source, factors)
    out = lowering.new_like(o.output)
    lowering.emit(MultiplyStep(o.output, out, source, factors))
    return out


@dataclass(eq=False)
class AddNumbersStep(LoweredStep):
    """Maps plus one number for each channel."""

    kind = "add_numbers"
    layout = (*pointers("in_", "numbers", "out", "chunks"), *integers("height", "width", "pitch", "out_pitch"))
    out: FeatureMaps
    source: FeatureMaps
    numbers: FeatureMaps

    def reads(self) -> list[FeatureMaps]:
        return [self.source, self.numbers]

    def fields(self, context: StepContext) -> tuple[Fields, int]:
        source = self.source
        numbers = context.memory.offsets(self.numbers)
        expect_inside(self.name, numbers, 1, context.floats)
        chunks = context.channel_chunks(len(source), source.height, source.width)
        values = {
            **context.map_fields(self.name, source, self.out),
            "numbers": numbers,
            "chunks": chunks,
        }
        return values, len(chunks) - 1


@kernel_for(AddNumbers, lambda o, shapes: is_maps(*shapes))
def lower_add_numbers(lowering: Lowering, o: AddNumbers) -> FeatureMaps:
    source, numbers = (lowering.solid(lowering.ready(name)) for name in o.inputs)
    out = lowering.new_like(o.output)
    lowering.emit(AddNumbersStep(o.output, out, source, numbers))
    return out
