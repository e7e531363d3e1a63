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


class Linear(Schedule):
    """The density falls (or rises) by the same amount every step."""

    def left(self, done: float) -> float:
        return 1.0 - done


class Cubic(Schedule):
    """Fast first, slowly at the end: (1 - t)³, as in gradual magnitude pruning (Zhu and Gupta, 2017)."""

    def left(self, done: float) -> float:
        return (1.0 - done) ** 3


@dataclass(frozen=True)
class Constant:
    """The same density at every step; what a plain number means."""

    density: float

    def __post_init__(self) -> None:
        check_density(self.density, "Constant.density")

    def __call__(self, step: int) -> float:
        return self.density


Density = float | Schedule | Constant
Amount = int | Density


@dataclass(frozen=True)
class Size:
    """What a budget needs to know of a layer: its name, its weight's shape, how many edges are allowed."""

    name: str
    shape: tuple[int, ...]
    allowed: int


@dataclass(frozen=True)
class Budget:
    """A number of edges, shared out over layers. Exactly one of ``density``, ``k`` and ``mapping`` is given."""

    density: Density | None = None
    k: int | None = None
    mapping: Mapping[str, Amount] | None = None
    share: str = "uniform"

    def __post_init__(self) -> None:
        given = [name for name in ("density", "k", "mapping") if getattr(self, name) is not None]
        if len(given) != 1:
            came = " and ".join(given) or "none"
            raise WiringError(
                f"a budget is one of density=, k= or budget= (a mapping from layer patterns), but {came} came."
            )
        if self.share not in SHARES:
            raise unknown("share", self.share, SHARES)
        if self.mapping is not None:
            if self.share != "uniform":
                raise WiringError(
                    f"a budget by layer patterns says itself how edges are shared out; drop share={self.share!r}, "
                    "or give one density= or k= for all layers."
                )
            if not self.mapping:
                raise WiringError("budget= is an empty mapping; give at least one layer pattern with a density or k.")
            for pattern, amount in self.mapping.items():
                _check_amount(amount, f"budget[{pattern!r}]")
        elif self.density is not None:
            if isinstance(self.density, int):
                raise WiringError(
                    f"density = {self.density} is an int; write {float(self.density)}, or k = … for a number of edges."
                )
            _check_amount(self.density, "density")
        else:
            if not isinstance(self.k, int):
                raise WiringError(
                    f"k must be a number of edges (an int), but it is {self.k!r}; a fraction is density=…"
                )
            _check_amount(self.k, "k")

    @property
    def changes(self) -> bool:
        """Whether the numbers depend on the step."""
        amounts = self.mapping.values() if self.mapping is not None else [self.density]
        return any(isinstance(amount, Schedule) for amount in amounts)

    def amount_for(self, name: str) -> Amount | None:
        """With a mapping: what the first pattern that matches ``name`` says, or None."""
        assert self.mapping is not None
        return next((amount for pattern, amount in self.mapping.items() if matches(name, pattern)), None)

    def counts(self, sizes: Sequence[Size], step: int = 0) -> list[int]:
        """How many edges each layer has after ``step`` steps; one number for all of them if shared globally."""
        total = sum(size.allowed for size in sizes)
        if self.mapping is not None:
            amounts = [self.amount_for(size.name) for size in sizes]
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
            edges = self.k
        else:
            assert self.density is not None
            if self.share == "uniform":
                return [_count(self.density, size, step) for size in sizes]
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


def check_density(density: object, where: str) -> None:
    number = isinstance(density, (int, float)) and not isinstance(density, bool)
    if not number or not 0 < density <= 1:  # type: ignore[operator]
        hint = ""
        if number and 1 < density <= 100:  # type: ignore[operator]
            hint = f" For {density} % write {density / 100}; for a number of edges use k."  # type: ignore[operator]
        raise WiringError(f"{where} must lie in (0, 1]: the fraction of edges that is real. It is {density!r}.{hint}")


def _check_amount(amount: object, where: str) -> None:
    if isinstance(amount, (Schedule, Constant)):
        return
    if isinstance(amount, int) and not isinstance(amount, bool):
        if amount < 1:
            raise WiringError(f"{where} must be at least 1 edge, but it is {amount}.")
    elif isinstance(amount, float):
        check_density(amount, where)
    else:
        raise WiringError(
            f"{where} must be a density (float), a number of edges (int) or a schedule, but it is {amount!r}."
        )


def _at(density: Density, step: int) -> float:
    return density(step) if isinstance(density, (Schedule, Constant)) else density


def _floor(density: float, allowed: int) -> int:
    """Rounded down, as the paper's authors do, but not by a rounding error (0.29 of 100 is 29); at least 1."""
    return min(max(math.floor(density * allowed + 1e-6), 1), allowed)


def _count(amount: Amount, size: Size, step: int) -> int:
    if not isinstance(amount, int):
        return _floor(_at(amount, step), size.allowed)
    if amount > size.allowed:
        raise WiringError(
            f"k = {amount} edges were asked for in {size.name}, but its weight of shape {size.shape} allows only "
            f"{size.allowed}; lower k for this layer."
        )
    return amount


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
