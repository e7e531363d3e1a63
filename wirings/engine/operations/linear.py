"""Linear layers."""

from __future__ import annotations

from wirings.compaction.operations import Linear
from wirings.engine.fused_steps import LinearLayer
from wirings.engine.lowering import Lowering, as_array
from wirings.engine.memory_layout import EMPTY
from wirings.engine.operations.registry import kernel_for


@kernel_for(Linear, lambda o, shapes: len(shapes[0]) == 1)
def lower_linear(lowering: Lowering, o: Linear) -> LinearLayer:
    weight, maps = as_array(o.weight), lowering.ready(o.inputs[0])
    real = maps.buffers != EMPTY
    return LinearLayer(o.output, maps.take(real), weight[:, real], as_array(o.bias, len(weight)))
