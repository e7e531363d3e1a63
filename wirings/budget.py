"""Budgets: how many edges, how they are shared out over layers, and how that changes over training.

A budget is a density (a float: the fraction of allowed edges that is real), a number of edges k (an int), or a mapping
from layer patterns to either. It is shared out

- ``uniform``: the same density everywhere;
- ``erk``: the Erdős–Rényi kernel rule: a layer's density goes with (sum of its dimensions) / (product of them), so
  that small layers stay denser; no layer above 1;
- ``global``: one number for all, and the edges of all layers are ranked together.
"""

from __future__ import annotations

import fnmatch
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wirings.errors import WiringError, unknown

SHARES = ("uniform", "erk", "global")


@dataclass(frozen=True)
class Schedule(ABC):
    """A density that changes over training: ``start`` until step ``begin``, ``end`` from ``steps`` later on.

    Give it in place of a density. It moves when `Wiring.step` is called, once after every optimizer step.
    """

    start: float
    end: float
    steps: int
    begin: int = 0

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            check_density(getattr(self, name), f"{type(self).__name__}.{name}")
        if self.steps < 1 or self.begin < 0:
            raise WiringError(
                f"{type(self).__name__} needs steps >= 1 and begin >= 0, "
                f"but steps = {self.steps} and begin = {self.begin}."
            )

    def __call__(self, step: int) -> float:
        """The density after ``step`` optimizer steps."""
        done = min(max((step - self.begin) / self.steps, 0.0), 1.0)
        return self.end + (self.start - self.end) * self.left(done)

    @abstractmethod
    def left(self, done: float) -> float:
        """How much of the way is still to go, from 1 to 0, when the fraction ``done`` of the steps is over."""


class LinearSchedule(Schedule):
    """The density falls (or rises) by the same amount every step."""

    def left(self, done: float) -> float:
        return 1.0 - done


class CubicSchedule(Schedule):
    """Fast first, slowly at the end: (1 - t)³, as in gradual magnitude pruning (Zhu and Gupta, 2017)."""

    def left(self, done: float) -> float:
        return (1.0 - done) ** 3


@dataclass(frozen=True)
class ConstantSchedule:
    """The same density at every step; what a plain number means."""

    density: float

    def __post_init__(self) -> None:
        check_density(self.density, "ConstantSchedule.density")

    def __call__(self, step: int) -> float:
        return self.density


Density = float | Schedule | ConstantSchedule
Amount = int | Density


@dataclass(frozen=True)
class Size:
    """What a budget needs to know of a layer: its name, its weight's shape, how many edges are allowed."""

    names: tuple[str, ...]
    """All names of the weight: more than one if it is tied."""
    shape: tuple[int, ...]
    allowed: int

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class Budget:
    """A number of edges, shared out over layers. Exactly one of ``density``, ``k`` and ``mapping`` is given."""

    density: Density | None = None
    k: int | None = None
    mapping: Mapping[str, Amount] | None = None
    share: str = "uniform"

    def __post_init__(self) -> None:
        given = {"density": self.density, "k": self.k, "budget": self.mapping}
        came = " and ".join(name for name, value in given.items() if value is not None) or "none"
        if came not in given:
            raise WiringError(
                f"a budget is one of density=, k= or budget= (a mapping from layer patterns), but {came} came."
            )
        if self.share not in SHARES:
            raise unknown("share", str(self.share), SHARES)
        if self.mapping is not None:
            self._check_mapping(self.mapping)
        elif self.density is not None:
            if not isinstance(self.density, (Schedule, ConstantSchedule)):
                check_density(self.density, "density", " For a number of edges use k.")
        elif not _is_whole(self.k) or self.k < 1:  # type: ignore[operator]
            raise WiringError(
                f"k must be a whole number of edges, at least 1, not {self.k!r}. A fraction is density=…."
            )

    def _check_mapping(self, mapping: object) -> None:
        if not isinstance(mapping, Mapping):
            raise WiringError(
                f"budget= is a mapping from layer patterns to densities or numbers of edges, not {mapping!r}; for one "
                "number for all layers use density= or k=."
            )
        if self.share != "uniform":
            raise WiringError(
                f"a budget by layer patterns says itself how edges are shared out; drop share={self.share!r}, "
                "or give one density= or k= for all layers."
            )
        if not mapping:
            raise WiringError("budget= is an empty mapping; give at least one layer pattern with a density or k.")
        for pattern, amount in mapping.items():
            where = f"budget[{pattern!r}]"
            if not isinstance(pattern, str):
                raise WiringError(f"{where}: a pattern is a string; write {str(pattern)!r}.")
            if isinstance(amount, (Schedule, ConstantSchedule)):
                continue
            if _is_whole(amount):
                if amount < 1:
                    raise WiringError(
                        f"{where} must be at least 1 edge, but it is {amount}; leave the layer out instead."
                    )
            else:
                check_density(amount, where, " A number of edges is an int.")

    @property
    def changes(self) -> bool:
        """Whether the numbers depend on the step."""
        amounts = self.mapping.values() if self.mapping is not None else [self.density]
        return any(isinstance(amount, Schedule) for amount in amounts)

    def amount_for(self, names: Sequence[str]) -> Amount | None:
        """With a mapping: what the first pattern that matches one of a weight's names says, or None."""
        assert self.mapping is not None
        return next((a for p, a in self.mapping.items() if any(matches(name, p) for name in names)), None)

    def counts(self, sizes: Sequence[Size], step: int = 0) -> list[int]:
        """How many edges each layer has after ``step`` steps; one number for all of them if shared globally."""
        total = sum(size.allowed for size in sizes)
        if self.mapping is not None:
            amounts = [self.amount_for(size.names) for size in sizes]
            return [
                _count(1.0 if amount is None else amount, size, step)
                for amount, size in zip(amounts, sizes, strict=True)
            ]
        if self.k is not None:
            if self.k > total:
                names = (
                    sizes[0].name if len(sizes) == 1 else f"the {len(sizes)} layers {sizes[0].name} … {sizes[-1].name}"
                )
                raise WiringError(f"k = {self.k} edges were asked for, but {names} allow only {total}; lower k.")
            edges = int(self.k)
        else:
            assert self.density is not None
            if self.share == "uniform":
                return [_floor(_at(self.density, step), size.allowed) for size in sizes]
            edges = _floor(_at(self.density, step), total)
        if self.share == "global":
            return [edges]
        wanted = [edges / total * size.allowed for size in sizes] if self.share == "uniform" else _erk(sizes, edges)
        return _whole(wanted, [size.allowed for size in sizes], edges)


def matches(name: str, pattern: str) -> bool:
    """Whether ``pattern`` names a weight, or a module that contains it.

    ``name`` is the weight's full name, such as ``layer1.0.conv1.weight``. A pattern may have ``*``, ``?`` and ``[…]``.

    >>> [matches("layer1.0.conv1.weight", p) for p in ("layer1", "layer1.0.conv1", "*.conv1", "layer*.weight", "conv1")]
    [True, True, True, True, False]
    """
    parts = name.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[: i + 1]), pattern) for i in range(len(parts)))


def check_density(density: object, where: str, else_: str = "") -> None:
    number = isinstance(density, numbers.Real) and not isinstance(density, bool)
    if not number or not 0 < density <= 1:  # type: ignore[operator]
        hint = f" For {density} % write {density / 100}." if number and 1 < density <= 100 else ""  # type: ignore[operator]
        raise WiringError(
            f"{where} must lie in (0, 1]: the fraction of edges that is real. It is {density!r}.{hint}{else_}"
        )


def _is_whole(amount: object) -> bool:
    return isinstance(amount, numbers.Integral) and not isinstance(amount, bool)


def _at(density: Density, step: int) -> float:
    return density(step) if isinstance(density, (Schedule, ConstantSchedule)) else float(density)


def _floor(density: float, allowed: int) -> int:
    """Rounded down, as the paper's authors do, but not by a rounding error (0.29 of 100 is 29); at least 1."""
    return min(max(math.floor(density * allowed + 1e-6), 1), allowed)


def _count(amount: Amount, size: Size, step: int) -> int:
    if not _is_whole(amount):
        return _floor(_at(amount, step), size.allowed)
    if amount > size.allowed:  # type: ignore[operator]
        raise WiringError(
            f"k = {amount} edges were asked for in {size.name}, but its weight of shape {size.shape} allows only "
            f"{size.allowed}; lower k for this layer."
        )
    return int(amount)  # type: ignore[arg-type]


def _erk(sizes: Sequence[Size], edges: int) -> list[float]:
    """Shares that go with sum(shape) / prod(shape); layers that would be more than full are full."""
    raw = [sum(size.shape) / math.prod(size.shape) for size in sizes]
    full: set[int] = set()
    while True:
        open_ = [i for i in range(len(sizes)) if i not in full]
        left = edges - sum(sizes[i].allowed for i in full)
        weight = sum(raw[i] * sizes[i].allowed for i in open_)
        scale = left / weight if weight else 0.0
        over = [i for i in open_ if scale * raw[i] > 1]
        if not over:
            return [float(s.allowed) if i in full else scale * raw[i] * s.allowed for i, s in enumerate(sizes)]
        full.update(over)


def _whole(wanted: Sequence[float], most: Sequence[int], total: int) -> list[int]:
    """Whole numbers near ``wanted`` that add up to ``total``, none above ``most`` and, if it can be, none below 1.

    Rounded down, then the largest remainders up.
    """
    least = 1 if total >= len(wanted) else 0
    counts = [min(max(math.floor(w + 1e-9), least), m) for w, m in zip(wanted, most, strict=True)]
    while (missing := total - sum(counts)) != 0:
        sign = 1 if missing > 0 else -1
        free = [i for i in range(len(counts)) if (counts[i] < most[i] if sign > 0 else counts[i] > least)]
        free.sort(key=lambda i: (sign * (counts[i] - wanted[i]), i))
        for i in free[: abs(missing)]:
            counts[i] += sign
    return counts
