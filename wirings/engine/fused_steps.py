"""Steps before the memory is laid out: sums over edges, convolutions of nodes fused with them, linear layers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from wirings.engine.kernel_step import StepKind
from wirings.engine.memory_layout import LINE, FeatureMaps

if TYPE_CHECKING:
    from wirings.engine.token_steps import OwnStep

INFINITY = math.inf


@dataclass(eq=False, kw_only=True)
class ClampedStep:
    """A step whose results are clamped to low … high, such as by a ReLU."""

    low: float = -INFINITY
    high: float = INFINITY

    @property
    def open(self) -> bool:
        """Whether following operations may still be fused with it, since nothing is clamped yet."""
        return self.low == -INFINITY and self.high == INFINITY


@dataclass(eq=False)
class EdgeTerm:
    """Edges from one tensor: out[row] += value · source[channel], shifted by dy rows and dx columns."""

    source: FeatureMaps
    row: np.ndarray
    channel: np.ndarray
    value: np.ndarray
    dy: np.ndarray
    dx: np.ndarray
    taps: int
    """The number of different places (channel, dy, dx) that the rows read."""


@dataclass(eq=False)
class EdgeSum(ClampedStep):
    """Sums over edges, with a bias, clamped to low … high. It is open for fusion while nothing is clamped."""

    name: str
    height: int
    width: int
    terms: list[EdgeTerm]
    bias: np.ndarray

    @property
    def edges(self) -> int:
        return sum(len(term.row) for term in self.terms)

    @property
    def density(self) -> float:
        """The number of edges, divided by that of all pairs of a row and a place that some row reads."""
        return self.edges / max(1, len(self.bias) * sum(term.taps for term in self.terms))

    def sources(self) -> list[FeatureMaps]:
        return [term.source for term in self.terms]


@dataclass(frozen=True)
class CallerInput:
    """An input of the caller that a step reads in place."""

    number: int
    channels: int
    height: int
    width: int
    stride: tuple[int, int]


@dataclass(eq=False)
class NodeConvolution(ClampedStep):
    """Sums over edges fused with the depthwise 3 × 3 convolution that follows them: what a node of a graph does."""

    name: str
    sums: EdgeSum
    kernel: np.ndarray
    """(channels, 9)."""
    bias: np.ndarray
    stride: int
    height: int
    width: int
    caller: CallerInput | None = None
    """The caller's input that the sums are over, if it is not copied; its phases are computed for each strip."""


@dataclass(eq=False)
class LinearLayer(ClampedStep):
    """A linear layer on single numbers."""

    name: str
    source: FeatureMaps
    weight: np.ndarray
    bias: np.ndarray


FusedStep = EdgeSum | NodeConvolution | LinearLayer


@dataclass(eq=False)
class LoweredStep:
    """One step, before the memory is laid out."""

    name: str
    kind: StepKind
    out: FeatureMaps | None
    source: FeatureMaps | None = None
    fused: FusedStep | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of `wirings.engine.kernel_step.KernelStep`; arrays are passed as pointers."""
    work: int = 0
    """Multiply-adds."""
    own: OwnStep | None = None
    """For kinds that have a struct of their own."""

    @property
    def words(self) -> int:
        """An upper bound on the 32-bit words of its weights and offsets."""
        if isinstance(self.fused, LinearLayer):
            rows, columns = self.fused.weight.shape
            return 2 * -(-rows // LINE) * LINE * columns  # rows are padded to whole vectors
        sums = self.fused.sums if isinstance(self.fused, NodeConvolution) else self.fused
        return 0 if sums is None else 9 * sums.edges

    def reads(self) -> list[FeatureMaps]:
        if self.own is not None:
            return self.own.reads()
        found = [x for x in (self.source, self.fields.get("second")) if x is not None]
        if isinstance(self.fused, EdgeSum):
            found += self.fused.sources()
        elif isinstance(self.fused, NodeConvolution) and self.fused.caller is None:
            found += self.fused.sums.sources()
        elif isinstance(self.fused, LinearLayer):
            found.append(self.fused.source)
        return found
