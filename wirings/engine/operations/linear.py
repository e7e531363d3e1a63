"""Linear layers on single numbers; their kernels are in ``source/linear.h``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wirings.compaction.operations import Linear
from wirings.engine.bfloat16_steps import SUFFIX, Bfloat16LinearStep, Bfloat16SparseLinearStep, bfloat16_ways
from wirings.engine.bounds import as_int32, expect_inside
from wirings.engine.fused_steps import FusedStep
from wirings.engine.int8_steps import Int8LinearStep
from wirings.engine.int8_weights import round_rows
from wirings.engine.kernel_step import ClampRange
from wirings.engine.lowering import Lowering, as_array
from wirings.engine.memory_layout import EMPTY, LINE, FeatureMaps
from wirings.engine.operations.registry import kernel_for
from wirings.engine.pack_weights import filled, sliced
from wirings.engine.step import EVEN, Fields, LoweredStep, StepChoice, StepContext, integers, pointers


@dataclass(eq=False)
class LinearLayer(FusedStep):
    """A linear layer on single numbers."""

    source: FeatureMaps
    weight: np.ndarray
    bias: np.ndarray

    def close(self, lowering: Lowering) -> FeatureMaps:
        out = lowering.memory.new(len(self.bias), 1, 1, packed=True)
        lowering.emit(LinearStep(self.name, out, self, work=int(np.count_nonzero(self.weight))))
        return out


@dataclass(eq=False)
class LinearStep(LoweredStep):
    """A linear layer; this kernel is the dense one."""

    kind = "linear"
    layout = (
        *pointers("in_", "weights", "bias", "chunks"),
        ("activation", ClampRange),
        *integers("inputs", "outputs", "apart", "out"),
    )
    out: FeatureMaps
    layer: LinearLayer

    def reads(self) -> list[FeatureMaps]:
        return [self.layer.source]

    @property
    def words(self) -> int:
        rows, columns = self.layer.weight.shape
        return 2 * -(-rows // LINE) * LINE * columns  # rows are padded to whole vectors

    def ways(self) -> list[str]:
        density = float(np.count_nonzero(self.layer.weight) / max(self.layer.weight.size, 1))
        return bfloat16_ways(["sparse", "dense"] if density < EVEN else ["dense", "sparse"], self.layer.weight)

    def chosen(self, choice: StepChoice) -> LoweredStep:
        kinds: dict[str, type[SparseLinearStep | Bfloat16LinearStep | Bfloat16SparseLinearStep]] = {
            "sparse": SparseLinearStep,
            "sparse" + SUFFIX: Bfloat16SparseLinearStep,
            "dense" + SUFFIX: Bfloat16LinearStep,
        }
        kind = kinds.get(choice.way)
        return self if kind is None else kind(self.name, self.out, self.layer)

    def fields(self, context: StepContext) -> tuple[Fields, int]:
        layer, panel = self.layer, context.machine.panel
        (rows, inputs), panels = layer.weight.shape, -(-len(layer.weight) // panel)
        places, out = context.memory.offsets(layer.source), context.memory.offsets(self.out)
        expect_inside(self.name, places, 1, context.floats)
        expect_inside(self.name, out[:1], rows, context.floats)
        chunks = context.chunks(np.full(panels, 2.0 * panel * inputs))
        values = {
            "in_": places if inputs else np.zeros(1, int),
            "weights": filled(layer.weight, panels * panel).reshape(panels, panel, -1).transpose(0, 2, 1),
            "bias": filled(layer.bias, panels * panel),
            "chunks": chunks,
            "activation": layer.activation,
            "inputs": inputs,
            "outputs": rows,
            "apart": inputs == 0 or not np.array_equal(places, places[0] + np.arange(inputs)),
            "out": out[0],
        }
        return values, len(chunks) - 1


@dataclass(eq=False)
class SparseLinearStep(LoweredStep):
    """A linear layer, edge by edge."""

    kind = "sparse_linear"
    layout = (*pointers("starts", "records", "bias", "out", "chunks"), ("activation", ClampRange))
    out: FeatureMaps
    layer: LinearLayer

    def reads(self) -> list[FeatureMaps]:
        return [self.layer.source]

    def fields(self, context: StepContext) -> tuple[Fields, int]:
        layer, lanes = self.layer, context.lanes
        places = as_int32(context.memory.offsets(layer.source), self.name)
        starts, records, order = sliced(layer.weight, places, lanes)
        out = np.full((len(starts) - 1) * lanes, -1)
        out[: len(order)] = context.memory.offsets(self.out)[order]
        expect_inside(self.name, records.reshape(-1, 2, lanes)[:, 0], 1, context.floats)
        expect_inside(self.name, out[: len(order)], 1, context.floats)
        chunks = context.chunks(np.diff(starts) * 8.0)
        values = {
            "starts": starts,
            "records": records,
            "bias": filled(layer.bias[order], len(out)),
            "out": out,
            "chunks": chunks,
            "activation": layer.activation,
        }
        return values, len(chunks) - 1


@dataclass(eq=False)
class Int8LinearLayer(LinearLayer):
    """A linear layer on single numbers in int8."""

    layer: str
    """Its name, which that of what is fused with it replaces."""

    def close(self, lowering: Lowering) -> FeatureMaps:
        out = lowering.memory.new(len(self.bias), 1, 1, packed=True)
        row, column = np.nonzero(self.weight)
        rows = round_rows(row, self.weight[row, column], len(self.bias))
        weight = np.zeros(self.weight.shape, np.int8)
        weight[row, column] = rows.value
        step = Int8LinearStep(self.name, out, self.source, weight, rows, self.bias, self.low, self.high, work=len(row))
        step.layers = frozenset({self.layer})
        lowering.emit(step)
        return out


@kernel_for(Linear, lambda o, shapes: len(shapes[0]) == 1)
def lower_linear(lowering: Lowering, o: Linear) -> LinearLayer:
    weight, maps = as_array(o.weight), lowering.ready(o.inputs[0])
    real = maps.buffers != EMPTY
    parts = (maps.take(real), weight[:, real], as_array(o.bias, len(weight)))
    in_int8 = lowering.in_int8(o) and real.any()  # if all inputs are always zero, there is nothing to round
    return Int8LinearLayer(o.output, *parts, o.output) if in_int8 else LinearLayer(o.output, *parts)
