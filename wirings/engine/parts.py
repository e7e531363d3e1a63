"""What steps are made of before it is known where everything lies: sums over edges, nodes, linear layers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wirings.engine.layout import LINE, Maps
from wirings.engine.steps import Kind

INFINITY = math.inf


@dataclass(eq=False)
class Term:
    """Edges from one tensor: out[row] += value · source[channel], moved by dy rows and dx columns."""

    source: Maps
    row: np.ndarray
    channel: np.ndarray
    value: np.ndarray
    dy: np.ndarray
    dx: np.ndarray
    taps: int
    """Different places that the rows read."""


@dataclass(eq=False)
class Sum:
    """Sums over edges, maybe open for more."""

    name: str
    height: int
    width: int
    terms: list[Term]
    bias: np.ndarray
    low: float = -INFINITY
    high: float = INFINITY

    @property
    def open(self) -> bool:
        return self.low == -INFINITY and self.high == INFINITY

    @property
    def edges(self) -> int:
        return sum(len(term.row) for term in self.terms)

    @property
    def density(self) -> float:
        """The share of edges among all pairs of a row and a place that some row reads."""
        return self.edges / max(1, len(self.bias) * sum(term.taps for term in self.terms))

    def sources(self) -> list[Maps]:
        return [term.source for term in self.terms]


@dataclass(frozen=True)
class Caller:
    """An input of the caller's, which a step reads where it lies."""

    number: int
    channels: int
    height: int
    width: int
    stride: tuple[int, int]


@dataclass(eq=False)
class Nodes:
    """Sums, then a depthwise 3 × 3 convolution."""

    name: str
    sums: Sum
    kernel: np.ndarray
    """(channels, 9)."""
    bias: np.ndarray
    stride: int
    height: int
    width: int
    caller: Caller | None = None
    """Whose input the sums are over, if it is not a map in memory; phases of it are made for each strip."""
    low: float = -INFINITY
    high: float = INFINITY

    @property
    def open(self) -> bool:
        return self.low == -INFINITY and self.high == INFINITY


@dataclass(eq=False)
class Dense:
    """A linear layer of single numbers."""

    name: str
    source: Maps
    weight: np.ndarray
    bias: np.ndarray
    low: float = -INFINITY
    high: float = INFINITY

    @property
    def open(self) -> bool:
        return self.low == -INFINITY and self.high == INFINITY


Pending = Sum | Nodes | Dense


@dataclass(eq=False)
class Lowered:
    """One step, before it is known where everything lies."""

    name: str
    kind: Kind
    out: Maps | None
    source: Maps | None = None
    pending: Pending | None = None
    numbers: dict[str, Any] = field(default_factory=dict)
    """Fields of `wirings.engine.steps.Step`; arrays are kept and pointed to."""
    work: int = 0
    """Multiply-adds."""

    @property
    def words(self) -> int:
        """Of weights and places, at most."""
        if isinstance(self.pending, Dense):
            rows, columns = self.pending.weight.shape
            return 2 * -(-rows // LINE) * LINE * columns  # rows side by side fill vectors up
        sums = self.pending.sums if isinstance(self.pending, Nodes) else self.pending
        return 0 if sums is None else 9 * sums.edges

    def reads(self) -> list[Maps]:
        found = [x for x in (self.source, self.numbers.get("second")) if x is not None]
        if isinstance(self.pending, Sum):
            found += self.pending.sources()
        elif isinstance(self.pending, Nodes) and self.pending.caller is None:
            found += self.pending.sums.sources()
        elif isinstance(self.pending, Dense):
            found.append(self.pending.source)
        return found
