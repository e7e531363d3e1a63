"""Experts, and the shares that tokens have of them; their kernels are in ``source/experts.h``.

Each expert computes its own tokens only: their numbers are copied together, go through its two layers, sparse or dense,
and its results are added to those of the other experts, with the share that each token has.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wirings.compaction.operations import Experts, TopShares
from wirings.compaction.report import operation_counts
from wirings.engine.bounds import expect_inside
from wirings.engine.edge_sums import EdgeGroups, EdgeSum, EdgeTerm, edge_fields
from wirings.engine.fused_steps import INFINITY
from wirings.engine.kernel_step import ClampRange
from wirings.engine.lowering import Lowering, as_array
from wirings.engine.memory_layout import LINE, FeatureMaps
from wirings.engine.operations.activation import FUNCTIONS
from wirings.engine.operations.registry import Shape, kernel_for
from wirings.engine.step import Fields, LoweredStep, StepContext, integers, pointers, ways_by_density

TASKS = 4
"""Tasks for each thread, since experts have different numbers of tokens."""


class RoutedTokens(ctypes.Structure):
    """The tokens of each expert; see ``source/experts.h``."""

    _fields_ = integers("starts", "counts", "tokens", "shares")


@dataclass(eq=False)
class TopSharesStep(LoweredStep):
    """The largest channels of each token."""

    kind = "top_shares"
    layout = (*pointers("in_", "out"), *integers("channels", "tokens", "count", "softmax", "normalized", "tiles"))
    out: FeatureMaps
    source: FeatureMaps
    count: int
    softmax: bool
    normalized: bool

    def reads(self) -> list[FeatureMaps]:
        return [self.source]

    def fields(self, context: StepContext) -> tuple[Fields, int]:
        in_, out = context.memory.offsets(self.source), context.memory.offsets(self.out)
        expect_inside(self.name, in_, context.vector_extent(self.source), context.floats)
        expect_inside(self.name, out, context.extent(self.out), context.floats)
        tiles = context.tiles(-(-self.source.width // context.lanes), 1)
        sizes = {"channels": len(in_), "tokens": self.source.width, "count": self.count, "tiles": tiles}
        return {"in_": in_, "out": out, "softmax": self.softmax, "normalized": self.normalized, **sizes}, tiles


@dataclass(eq=False)
class RouteStep(LoweredStep):
    """The tokens of each expert, as its shares say."""

    kind = "route"
    layout = (*pointers("in_"), ("routed", RoutedTokens), *integers("experts", "tokens", "count"))
    out: FeatureMaps
    """Four rows: where each expert's tokens begin, how many it has, and the token and the share at each place."""
    shares: FeatureMaps
    count: int

    def reads(self) -> list[FeatureMaps]:
        return [self.shares]

    def fields(self, context: StepContext) -> tuple[Fields, int]:
        in_, tokens = context.memory.offsets(self.shares), self.shares.width
        expect_inside(self.name, in_, tokens, context.floats)
        expect_inside(self.name, np.array([places(len(in_), tokens, self.count)]), 0, self.out.width)
        values = {
            "in_": in_,
            "routed": routed_fields(self.name, self.out, context),
            "experts": len(in_),
            "tokens": tokens,
            "count": self.count,
        }
        return values, 1


def places(experts: int, tokens: int, count: int) -> int:
    """The most places that experts with ``count`` times the tokens take, each from a multiple of a line on."""
    return max(experts, tokens * min(count, experts) + experts * (LINE - 1))


def routed_fields(name: str, routed: FeatureMaps, context: StepContext) -> Fields:
    """The fields of `RoutedTokens`."""
    rows = context.memory.offsets(routed)
    expect_inside(name, rows, routed.width, context.floats)
    return dict(zip(("starts", "counts", "tokens", "shares"), rows.tolist(), strict=True))


def expert_edges(name: str, weight: np.ndarray, columns: np.ndarray, context: StepContext, parts: int = 1) -> Fields:
    """The fields of `EdgeGroups` for (experts, rows, columns), each expert's rows in whole groups.

    Args:
        name: that of the step.
        weight: the weights.
        columns: the place that each column reads.
        context: what determines whether they are sparse or dense.
        parts: into how many parts the rows of an expert are divided, whose groups alternate.
    """
    block = 1 if context.choice.way == "sparse" else context.machine.block
    expert, row, column = np.nonzero(weight)
    units = weight.shape[1] // parts
    part, unit = np.divmod(row, units)
    groups = -(-units // block)
    number = ((expert * groups + unit // block) * parts + part) * block + unit % block
    order = np.lexsort((column, number))
    zeros = np.zeros(0, int)
    nothing = FeatureMaps(1, 1, zeros, zeros)
    term = EdgeTerm(nothing, number[order], column[order], weight[expert, row, column][order], zeros, zeros, 0)
    bias = np.zeros(len(weight) * groups * parts * block, np.float32)
    return edge_fields(EdgeSum(name, 1, 1, [term], bias), [columns[term.channel]], context)


@dataclass(eq=False)
class ExpertUnitsStep(LoweredStep):
    """The units inside of experts, for the tokens that each has."""

    kind = "expert_units"
    layout = (
        *pointers("in_", "out"),
        ("edges", EdgeGroups),
        ("range", ClampRange),
        ("routed", RoutedTokens),
        *integers("channels", "units", "groups", "gated", "function", "pieces", "pitch"),
    )
    out: FeatureMaps
    source: FeatureMaps
    routed: FeatureMaps
    weight: np.ndarray
    """(experts, units, channels); if they are gated, the units, then their factors."""
    activation: str
    gated: bool

    def reads(self) -> list[FeatureMaps]:
        return [self.source, self.routed]

    @property
    def words(self) -> int:
        return 2 * self.weight.size + 16 * self.weight.shape[0] * self.weight.shape[2]

    def ways(self) -> list[str]:
        return ways_by_density(float(np.count_nonzero(self.weight) / max(self.weight.size, 1)))

    def fields(self, context: StepContext) -> tuple[Fields, int]:
        memory, tokens = context.memory, self.source.width
        in_, out = memory.offsets(self.source), memory.offsets(self.out)
        experts, pitch = len(self.weight), -(-tokens // LINE) * LINE
        expect_inside(self.name, in_, tokens, context.floats)
        expect_inside(self.name, out, self.routed.width, context.floats)
        parts = 2 if self.gated else 1
        edges = expert_edges(self.name, self.weight, np.arange(len(in_)) * pitch, context, parts)
        pieces = max(1, min(-(-TASKS * context.threads // experts), -(-len(out) // edges["block"])))
        relu = self.activation == "relu"
        values = {
            "in_": in_,
            "out": out,
            "edges": edges,
            "range": {"low": 0.0 if relu else -INFINITY, "high": INFINITY},
            "routed": routed_fields(self.name, self.routed, context),
            "channels": len(in_),
            "units": len(out),
            "groups": -(-len(out) // edges["block"]),
            "gated": self.gated,
            "function": FUNCTIONS.index("clamp" if relu else self.activation),
            "pieces": pieces,
            "pitch": pitch,
        }
        return values, experts * pieces


@dataclass(eq=False)
class ExpertSumsStep(LoweredStep):
    """The sums of the results of experts."""

    kind = "expert_sums"
    layout = (
        *pointers("out"),
        ("edges", EdgeGroups),
        ("routed", RoutedTokens),
        *integers("experts", "channels", "tokens", "groups", "tiles", "pitch"),
    )
    out: FeatureMaps
    units: FeatureMaps
    routed: FeatureMaps
    weight: np.ndarray
    """(experts, channels, units)."""

    def reads(self) -> list[FeatureMaps]:
        return [self.units, self.routed]

    @property
    def words(self) -> int:
        return 2 * self.weight.size + 16 * self.weight.shape[0] * self.weight.shape[2]

    def ways(self) -> list[str]:
        return ways_by_density(float(np.count_nonzero(self.weight) / max(self.weight.size, 1)))

    def fields(self, context: StepContext) -> tuple[Fields, int]:
        out, units = context.memory.offsets(self.out), context.memory.offsets(self.units)
        tokens = self.out.width
        expect_inside(self.name, out, tokens, context.floats)
        expect_inside(self.name, units, self.routed.width, context.floats)
        edges = expert_edges(self.name, self.weight, units, context)
        groups = -(-len(out) // edges["block"])
        tiles = max(1, min(groups, TASKS * context.threads))
        values = {
            "out": out,
            "edges": edges,
            "routed": routed_fields(self.name, self.routed, context),
            "experts": len(self.weight),
            "channels": len(out),
            "tokens": tokens,
            "groups": groups,
            "tiles": tiles,
            "pitch": -(-tokens // LINE) * LINE,
        }
        return values, tiles


@kernel_for(TopShares, lambda o, shapes: len(shapes[0]) == 2)
def lower_top_shares(lowering: Lowering, o: TopShares) -> FeatureMaps:
    source, out = lowering.solid(lowering.ready(o.inputs[0])), lowering.new_like(o.output)
    lowering.emit(TopSharesStep(o.output, out, source, o.count, o.softmax, o.normalized))
    return out


def _supports(o: Experts, shapes: Sequence[Shape]) -> bool:
    return len(shapes[0]) == 2 and (o.activation == "relu" or o.activation in FUNCTIONS)


@kernel_for(Experts, _supports)
def lower_experts(lowering: Lowering, o: Experts) -> FeatureMaps:
    source, shares = (lowering.solid(lowering.ready(name)) for name in o.inputs)
    into, weight = as_array(o.into), as_array(o.weight)
    tokens, units = source.width, weight.shape[2]
    most = places(len(into), tokens, o.count)
    routed, inside = lowering.memory.new(4, 1, most), lowering.memory.new(units, 1, most)
    out = lowering.new_like(o.output)
    work = operation_counts(o, lowering.shapes).mult_adds
    first, second = int(np.count_nonzero(into)), int(np.count_nonzero(weight))
    share = first / max(first + second, 1)
    lowering.emit(RouteStep(f"{o.output} route", routed, shares, o.count))
    units_name = f"{o.output} units"
    lowering.emit(
        ExpertUnitsStep(units_name, inside, source, routed, into, o.activation, o.gated, work=int(work * share))
    )
    lowering.emit(ExpertSumsStep(o.output, out, inside, routed, weight, work=work - int(work * share)))
    return out
