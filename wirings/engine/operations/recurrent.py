"""Recurrent layers; the kernel of the recurrence is in ``source/recurrent.h``.

What a layer takes from its tokens does not depend on its states, so it is computed for all tokens at once, as sums over
edges. The recurrence itself is one step, for all tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wirings.compaction.operations import Recurrent
from wirings.compaction.operations.recurrent import GATES
from wirings.compaction.report import operation_counts
from wirings.engine.bounds import as_int32, expect_inside, expect_int32
from wirings.engine.edge_sums import EdgeSum, EdgeTerm
from wirings.engine.lowering import Lowering, as_array
from wirings.engine.memory_layout import EMPTY, LINE, FeatureMaps
from wirings.engine.operations.registry import Shape, kernel_for
from wirings.engine.pack_weights import filled, sliced
from wirings.engine.step import SPEED, Fields, LoweredStep, StepContext, WorkDivision, integers, pointers

KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""In the order of ``RecurrentKind``."""
WAIT = 0.5
"""Microseconds that it takes threads to wait for each other after each token."""
SPARSE = 0.25
"""The density at which sparse and dense are about equally fast. An edge costs a load of its own."""


@dataclass(eq=False)
class RecurrentStep(LoweredStep):
    """The recurrence of a layer."""

    kind = "recurrent"
    layout = (
        *pointers("in_", "out", "bias", "weights", "starts", "records", "places", "slices", "panels", "parts"),
        *integers(
            "layer", "gates", "units", "tokens", "count", "reverse", "gives_cell", "first", "first_cell", "states",
            "other_states", "cells", "counters", "longest",
        ),
    )  # fmt: skip
    out: FeatureMaps
    given: FeatureMaps
    """What comes from the tokens: (gates · units) maps of one row."""
    weight: np.ndarray
    """(gates · units, units)."""
    bias: np.ndarray
    layer: str
    """One of `KINDS`."""
    reverse: bool
    gives_cell: bool
    first: tuple[FeatureMaps, ...]
    """The states before the first token, then the cells, as maps of one row; nothing if they are zero."""
    own: FeatureMaps
    """Memory of its own: two rows of states, and one of cells."""
    counters: FeatureMaps
    """A number for each thread, and two more, each in a map of its own; zero between runs."""

    def reads(self) -> list[FeatureMaps]:
        return [self.given, *self.first, self.own, self.counters]

    @property
    def words(self) -> int:
        rows, units = self.weight.shape
        return 2 * -(-rows // LINE + 4 * len(self.counters)) * LINE * units

    @property
    def units(self) -> int:
        return int(self.weight.shape[1])

    def ways(self) -> list[str]:
        density = float(np.count_nonzero(self.weight) / self.weight.size)
        return ["sparse", "dense"] if density < SPARSE else ["dense", "sparse"]

    def strips(self, division: WorkDivision) -> list[int]:
        """The parts that units are divided into; in one part, nothing has to wait."""
        most = min(division.threads if division.together else 1, -(-self.units // LINE), len(self.counters) - 2)
        worth = self.work / max(self.given.width, 1) / SPEED > 2 * WAIT
        return list(dict.fromkeys([most, 1] if worth else [1, most]))

    def fields(self, context: StepContext) -> tuple[Fields, int]:
        memory, lanes, panel, units = context.memory, context.lanes, context.machine.panel, self.units
        gates, tokens = len(self.weight) // units, self.given.width
        given, out = as_int32(memory.offsets(self.given), self.name), memory.offsets(self.out)
        first = [int(memory.offsets(maps)[0]) for maps in self.first]
        own, counters = memory.offsets(self.own), memory.offsets(self.counters)
        expect_inside(self.name, given, tokens, context.floats)
        expect_inside(self.name, out, tokens + self.gives_cell, context.floats)
        expect_inside(self.name, np.array([*first, *own]), units, context.floats)
        expect_inside(self.name, counters, 1, context.floats)
        expect_inside(self.name, np.abs(np.diff(counters) - LINE), 1, 1)
        count = context.choice.strips
        expect_inside(self.name, np.array([count]), 2, len(counters))
        expect_int32(self.name, tokens * count)
        cuts = [units * i // count for i in range(count + 1)]
        parts: list[tuple[int, int, int]] = []
        rows: list[np.ndarray] = []
        for start, stop in itertools.pairwise(cuts):
            width = -(-(stop - start) // lanes) * lanes
            taken = np.full((gates, width), -1)
            taken[:, : stop - start] = np.arange(gates)[:, None] * units + np.arange(start, stop)
            parts.append((start, stop - start, sum(len(own_rows) for own_rows in rows)))
            rows.append(taken.reshape(-1))
        every = np.concatenate(rows)
        longest = max(-(-len(own_rows) // panel) * panel for own_rows in rows)
        values = {
            "in_": np.where(every < 0, -1, given[every]),
            "out": out,
            "bias": np.where(every < 0, np.float32(0), self.bias[every]),
            **(self._sparse(rows, lanes) if context.choice.way == "sparse" else self._dense(rows, panel)),
            "parts": np.array(parts),
            "layer": KINDS.index(self.layer),
            "gates": gates,
            "units": units,
            "tokens": tokens,
            "count": count,
            "reverse": self.reverse,
            "gives_cell": self.gives_cell,
            "first": first[0] if first else -1,
            "first_cell": first[1] if len(first) > 1 else -1,
            "states": own[0],
            "other_states": own[1],
            "cells": own[2],
            "counters": counters[0],
            "longest": longest,
        }
        return values, count

    def _sparse(self, rows: list[np.ndarray], lanes: int) -> Fields:
        """The edges of each part, ``lanes`` rows at a time."""
        starts, records, places, slices = [0], [], [], [0]
        for own in rows:
            real = np.flatnonzero(own >= 0)
            begins, made, order = sliced(self.weight[own[real]], np.arange(self.units), lanes)
            place = np.full((len(begins) - 1) * lanes, -1)
            place[: len(order)] = real[order]
            starts += (starts[-1] + begins[1:]).tolist()
            records.append(made)
            places.append(place)
            slices.append(len(starts) - 1)
        whole = {"starts": np.array(starts), "records": np.concatenate(records), "places": np.concatenate(places)}
        return {**whole, "slices": np.array(slices), "weights": 0, "panels": 0}

    def _dense(self, rows: list[np.ndarray], panel: int) -> Fields:
        """The weights of each part in panels of rows, as those of a dense linear layer."""
        made, panels = [], [0]
        for own in rows:
            weight = np.where(own[:, None] < 0, np.float32(0), self.weight[own])
            count = -(-len(own) // panel)
            made.append(filled(weight, count * panel).reshape(count, panel, -1).transpose(0, 2, 1))
            panels.append(panels[-1] + count)
        empty = dict.fromkeys(("starts", "records", "places", "slices"), 0)
        return {**empty, "weights": np.concatenate(made), "panels": np.array(panels)}


def _supports(o: Recurrent, shapes: Sequence[Shape]) -> bool:
    return o.kind in GATES and len(shapes[0]) == 2


@kernel_for(Recurrent, _supports)
def lower_recurrent(lowering: Lowering, o: Recurrent) -> FeatureMaps:
    weight, source = as_array(o.weight), lowering.ready(o.inputs[0])
    row, channel = np.nonzero(weight)
    real = source.buffers[channel] != EMPTY
    row, channel = row[real], channel[real]
    zeros = np.zeros(len(row), int)
    taps = int(np.count_nonzero(weight.any(0)))
    term = EdgeTerm(source, row, channel, weight[row, channel], zeros, zeros, taps)
    sums = EdgeSum(f"{o.output} from tokens", 1, source.width, [term], as_array(o.bias, len(weight)))
    given, memory = sums.close(lowering), lowering.memory
    own, counters = memory.new(3, 1, o.units), memory.new(lowering.bands + 2, 1, 1)
    memory.buffers[counters.buffers[0]].own = True
    out = lowering.new_like(o.output)
    step = RecurrentStep(
        o.output, out, given, as_array(o.recurrent), as_array(o.recurrent_bias, len(weight)), o.kind, o.reverse, o.cell,
        tuple(lowering.as_row(name) for name in o.inputs[1:]), own, counters,
        work=operation_counts(o, lowering.shapes).mult_adds - sums.edges * source.width,
    )  # fmt: skip
    lowering.emit(step)
    return out
