"""Activations: clamps are fused with the step before them, others have a kernel, in ``source/elementwise.h``."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float
from dataclasses import dataclass, replace

import numpy as np

from wirings.compaction.operations import Activation
from wirings.engine.edge_sums import EdgeSum
from wirings.engine.fused_steps import INFINITY, FusedStep
from wirings.engine.kernel_step import ClampRange
from wirings.engine.lowering import Lowering
from wirings.engine.memory_layout import FeatureMaps
from wirings.engine.operations.registry import Shape, kernel_for
from wirings.engine.step import Fields, LoweredStep, StepContext, integers, pointers

FUNCTIONS = (
    "leaky_relu", "elu", "tanh", "sigmoid", "silu", "gelu", "gelu_tanh", "hardswish", "hardsigmoid", "softplus", "mish",
    "clamp",
)  # fmt: skip
"""Activations, in the order of ``Function``. ReLU is a clamp."""


@dataclass(eq=False)
class FunctionStep(LoweredStep):
    """A function of every pixel."""

    kind = "function"
    layout = (
        *pointers("in_", "out", "chunks"),
        ("range", ClampRange),
        *integers("function", "height", "width", "pitch", "out_pitch"),
        ("parameter", c_float),
    )
    out: FeatureMaps
    source: FeatureMaps
    function: str
    """One of `FUNCTIONS`."""
    parameter: float = 1.0
    """The slope of a leaky ReLU, or the alpha of an ELU."""
    low: float = -INFINITY
    high: float = INFINITY
    """The range of a clamp."""

    def reads(self) -> list[FeatureMaps]:
        return [self.source]

    def fields(self, context: StepContext) -> tuple[Fields, int]:
        source = self.source
        chunks = context.channel_chunks(len(source), source.height, source.width)
        values = {
            **context.map_fields(self.name, source, self.out),
            "chunks": chunks,
            "range": {"low": self.low, "high": self.high},
            "function": FUNCTIONS.index(self.function),
            "parameter": self.parameter,
        }
        return values, len(chunks) - 1


def _supports(o: Activation, shapes: Sequence[Shape]) -> bool:
    """The kernels have these functions with their usual parameters."""
    if len(shapes[0]) not in (1, 2, 3):
        return False
    if o.kind == "softplus":
        return o.values in ((), (1.0,), (1.0, 20.0))
    return len(o.values) == {"clamp": 2, "leaky_relu": 1, "elu": 1}.get(o.kind, 0)


@kernel_for(Activation, _supports)
def lower_activation(lowering: Lowering, o: Activation) -> FusedStep | FeatureMaps:
    limits = {"relu": (0.0, INFINITY), "clamp": o.values}.get(o.kind)
    low, high = (-INFINITY, INFINITY) if limits is None else limits
    if limits is not None:
        before = lowering.fusible(o.inputs[0])
        if before is not None:
            return replace(before, name=o.output, low=low, high=high)
        if len(lowering.shapes[o.output]) > 1:
            channels, height, width = lowering.shape(o.output)
            bias = np.zeros(channels, np.float32)
            return EdgeSum(o.output, height, width, [lowering.identity(o.inputs[0])], bias, low=low, high=high)
    single = len(lowering.shapes[o.output]) == 1
    source = lowering.as_row(o.inputs[0]) if single else lowering.solid(lowering.ready(o.inputs[0]))
    out = lowering.memory.new(len(source), source.height, source.width)
    function = "clamp" if limits is not None else o.kind
    parameter = o.values[0] if o.values and limits is None else 1.0
    lowering.emit(FunctionStep(o.output, out, source, function, parameter, low, high))
    return lowering.as_numbers(out) if single else out
