"""Linear layers whose weights are stored in bfloat16; their kernels are in ``source/bfloat16_linear.h``.

The kernels widen weights as they read them and round nothing. So they compute what those in ``source/linear.h`` do, for
weights that bfloat16 can represent, with half of the memory traffic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from wirings.engine.bounds import expect_inside
from wirings.engine.kernel_step import ClampRange
from wirings.engine.memory_layout import FeatureMaps
from wirings.engine.pack_weights import filled, sliced
from wirings.engine.step import Fields, LoweredStep, StepContext, integers, pointers

if TYPE_CHECKING:
    from wirings.engine.operations.linear import LinearLayer

SUFFIX = " bf16"
"""Ends the names of the ways that read weights in bfloat16."""
MAX_INPUTS = 2**16 - 1
"""The most inputs of a sparse layer, whose numbers take 16 bits; one more number stands for zero."""


def fits_bfloat16(weight: np.ndarray) -> bool:
    """Whether bfloat16 represents all weights exactly."""
    return not (np.ascontiguousarray(weight, np.float32).view(np.uint32) & 0xFFFF).any()


def bfloat16_ways(ways: list[str], weight: np.ndarray) -> list[str]:
    """The ways of computing a linear layer, first those that read weights in bfloat16, if they can."""
    if not weight.size or not fits_bfloat16(weight):
        return ways
    fitting = [way for way in ways if way == "dense" or weight.shape[1] <= MAX_INPUTS]
    return [*(way + SUFFIX for way in fitting), *ways]


@dataclass(eq=False)
class Bfloat16LinearStep(LoweredStep):
    """A dense linear layer with weights in bfloat16."""

    kind = "bfloat16_linear"
    layout = (
        *pointers("in_", "weights", "bias", "chunks"),
        ("activation", ClampRange),
        *integers("inputs", "outputs", "apart", "out"),
    )
    out: FeatureMaps
    layer: LinearLayer

    def reads(self) -> list[FeatureMaps]:
        return [self.layer.source]

    def fields(self, context: StepContext) -> tuple[Fields, int]:
        layer, panel = self.layer, context.machine.panel
        (rows, inputs), panels = layer.weight.shape, -(-len(layer.weight) // panel)
        places, out = context.memory.offsets(layer.source), context.memory.offsets(self.out)
        expect_inside(self.name, places, 1, context.floats)
        expect_inside(self.name, out[:1], rows, context.floats)
        chunks = context.chunks(np.full(panels, 1.5 * panel * inputs))
        values = {
            "in_": places,
            "weights": _pairs(filled(layer.weight, panels * panel), panels),
            "bias": filled(layer.bias, panels * panel),
            "chunks": chunks,
            "activation": layer.activation,
            "inputs": inputs,
            "outputs": rows,
            "apart": _are_apart(places),
            "out": out[0],
        }
        return values, len(chunks) - 1


@dataclass(eq=False)
class Bfloat16SparseLinearStep(LoweredStep):
    """A linear layer with weights in bfloat16, edge by edge."""

    kind = "bfloat16_sparse_linear"
    layout = (
        *pointers("in_", "starts", "edges", "bias", "out", "chunks"),
        ("activation", ClampRange),
        *integers("inputs", "apart"),
    )
    out: FeatureMaps
    layer: LinearLayer

    def reads(self) -> list[FeatureMaps]:
        return [self.layer.source]

    def fields(self, context: StepContext) -> tuple[Fields, int]:
        layer, lanes, inputs = self.layer, context.lanes, self.layer.weight.shape[1]
        places = context.memory.offsets(layer.source)
        starts, records, order = sliced(layer.weight, np.arange(inputs, dtype=np.int32), lanes, inputs)
        numbers, weights = records.reshape(-1, 2, lanes).transpose(1, 0, 2)
        out = np.full((len(starts) - 1) * lanes, -1)
        out[: len(order)] = context.memory.offsets(self.out)[order]
        expect_inside(self.name, places, 1, context.floats)
        expect_inside(self.name, numbers.reshape(-1), 1, inputs + 1)
        expect_inside(self.name, np.array([inputs]), 1, MAX_INPUTS + 1)
        expect_inside(self.name, out[: len(order)], 1, context.floats)
        chunks = context.chunks(np.diff(starts) * 8.0)
        values = {
            "in_": places,
            "starts": starts // 2,
            "edges": weights | numbers,  # a weight is the upper half of its word
            "bias": filled(layer.bias[order], len(out)),
            "out": out,
            "chunks": chunks,
            "activation": layer.activation,
            "inputs": inputs,
            "apart": _are_apart(places),
        }
        return values, len(chunks) - 1


def _are_apart(places: np.ndarray) -> bool:
    return not np.array_equal(places, places[0] + np.arange(len(places)))


def _pairs(weight: np.ndarray, panels: int) -> np.ndarray:
    """The weights of two inputs in every word: (panels, pairs of inputs, rows of a panel)."""
    rows, inputs = weight.shape
    padded = np.zeros((rows, inputs + inputs % 2), np.float32)
    padded[:, :inputs] = weight
    words = padded.view(np.uint32).reshape(panels, -1, padded.shape[1] // 2, 2)
    return (words[..., 0] >> 16 | words[..., 1]).transpose(0, 2, 1).view(np.int32)
