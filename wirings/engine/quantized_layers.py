"""Layers in int8 in plain PyTorch: the reference for the kernels, and what a layer's loss is measured with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wirings.compaction.operation import Tensors
from wirings.compaction.operations import Conv, Linear
from wirings.compaction.program import Program
from wirings.engine.int8_weights import BYTES, byte_ranges, round_rows

Ranges = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""The smallest and the largest number of every channel, by tensor."""


@dataclass(frozen=True, eq=False)
class Int8Conv(Conv):
    """A convolution in int8."""

    low: Any = None
    high: Any = None

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        x, weight = _rounded(inputs[0], own["weight"], self.groups, self.low, self.high)
        return super().compute([x], {"weight": weight, "bias": own["bias"]})


@dataclass(frozen=True, eq=False)
class Int8Linear(Linear):
    """A linear layer in int8."""

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        x, weight = _rounded(inputs[0], own["weight"], 1, None, None)
        return super().compute([x], {"weight": weight, "bias": own["bias"]})


def int8_layer(o: Conv | Linear, ranges: Ranges) -> Int8Conv | Int8Linear:
    """A layer in int8. Inputs that have no ranges are quantised pixel by pixel."""
    own = {f.name: getattr(o, f.name) for f in fields(o)}
    if isinstance(o, Linear):
        return Int8Linear(**own)
    low, high = ranges.get(o.inputs[0], (None, None))
    return Int8Conv(**own, low=low, high=high)


def quantized_program(program: Program, layers: set[str], ranges: Ranges) -> Program:
    """A program with some of its layers in int8, by the names of their outputs."""
    made = [
        int8_layer(o, ranges) if o.output in layers and isinstance(o, (Conv, Linear)) else o for o in program.operations
    ]
    return Program(program.inputs, made, program.outputs, program.notes)


def _rounded(
    x: Tensor, weight: Tensor, groups: int, low: np.ndarray | None, high: np.ndarray | None
) -> tuple[Tensor, Tensor]:
    """The numbers that the bytes of an input and of a weight stand for."""
    around = (1, -1, *[1] * (x.dim() - 2))
    if low is None or high is None:
        least, most = x.amin(1, keepdim=True).clamp_max(0), x.amax(1, keepdim=True).clamp_min(0)
        span = most - least
        scale, inverse = span * (1 / BYTES), torch.where(span > 0, BYTES / span, 0.0)
        zero = (-least * inverse).round()
        by_channel = torch.ones(x.shape[1])
    else:
        parts = (torch.from_numpy(part).view(around) for part in byte_ranges(low, high))
        scale, inverse, zero = parts
        by_channel = scale.view(-1)
    rounded = ((x * inverse).round() + zero).clamp(0, BYTES) - zero
    return rounded * scale, _rounded_weight(weight, groups, by_channel)


def _rounded_weight(weight: Tensor, groups: int, by_channel: Tensor) -> Tensor:
    """Weights that are rounded as their products with the scales of their inputs are."""
    each = by_channel.view(groups, 1, weight.shape[1], *[1] * (weight.dim() - 2))
    scaled = (weight.reshape(groups, -1, *weight.shape[1:]) * each).reshape(len(weight), -1).numpy()
    row, column = np.nonzero(scaled)
    made = round_rows(row, scaled[row, column], len(scaled))
    whole = np.zeros(scaled.shape, np.float32)
    whole[row, column] = made.value * made.scale[row]
    return (torch.from_numpy(whole).reshape(groups, -1, *weight.shape[1:]) / each).reshape(weight.shape)
