"""Programs of which every layer that can be is computed in int8, and how far their outputs may be off."""

from __future__ import annotations

from torch import Tensor

from wirings.compaction.operations import Conv, Linear
from wirings.compaction.program import Program
from wirings.engine.int8_weights import widened
from wirings.engine.quantization import Quantization, is_pointwise


def all_layers(program: Program, *inputs: Tensor, static: bool) -> Quantization:
    """Every layer that int8 can compute, whatever it loses."""
    values = program.values(*inputs)
    layers = [o for o in program.operations if isinstance(o, (Conv, Linear)) and o.weight.abs().sum() > 0]
    layers = [o for o in layers if not (isinstance(o, Conv) and o.depthwise)]
    ranges = {}
    for o in layers:
        if isinstance(o, Conv) and (static or not is_pointwise(o)):
            x = values[o.inputs[0]].transpose(0, 1).flatten(1)
            ranges[o.inputs[0]] = widened(x.amin(1).numpy(), x.amax(1).numpy())
    return Quantization(frozenset(o.output for o in layers), ranges)


def loss(found: Tensor, expected: Tensor) -> float:
    """The root mean square of the difference, as a share of that of the expected numbers."""
    size = float(expected.square().mean().sqrt())
    return float((found - expected).square().mean().sqrt()) / max(size, 1e-3)
