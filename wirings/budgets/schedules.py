"""Densities that change over training, counted in optimizer steps or as fractions of the whole training."""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from wirings.errors import WiringError, unknown


@dataclass(frozen=True)
class Schedule(ABC):
    """A density that changes over training: ``start`` until step ``begin``, ``end`` from ``steps`` later on.

    Give it in place of a density. It moves when `Wiring.step` is called, once after every optimizer step. Whole numbers
    of ``steps`` and ``begin`` are optimizer steps; floats are fractions of the training, whose length `Wiring.plan`
    tells. `over` is the easier way to write the latter.

    ``every``: steps from one change to the next.
    """

    start: float
    end: float
    steps: float
    begin: float = 0
    every: int = 1

    def __post_init__(self) -> None:
        name = type(self).__name__
        for which in ("start", "end"):
            check_density(getattr(self, which), f"{name}.{which}")
        came = f"but steps = {self.steps!r} and begin = {self.begin!r}."
        if self.relative:
            fits = _is_number(self.begin) and min(self.begin, self.steps) >= 0 and self.begin + self.steps <= 1 + 1e-9
            if not fits or (is_whole(self.begin) and self.begin):
                raise WiringError(
                    f"{name} with fractions of training needs begin and begin + steps between 0.0 and 1.0, {came}"
                )
        elif not (is_whole(self.steps) and is_whole(self.begin)) or self.steps < 1 or self.begin < 0:
            raise WiringError(f"{name} needs steps >= 1 and begin >= 0, {came}")
        if not is_whole(self.every) or self.every < 1:
            raise WiringError(f"{name} needs every >= 1, a whole number of steps, but every = {self.every!r}.")

    @classmethod
    def over(cls, start: float, target: float, begin: float = 0.0, end: float = 1.0, every: int = 1) -> Self:
        """From ``start`` to ``target`` between the fractions ``begin`` and ``end`` of the training.

        >>> CubicSchedule.over(1.0, 0.1, end=0.5).planned(1000)
        CubicSchedule(start=1.0, end=0.1, steps=500, begin=0, every=1)
        """
        for name, value in (("begin", begin), ("end", end)):
            if not _is_number(value) or not 0 <= value <= 1:
                raise WiringError(f"{cls.__name__}: {name} is a fraction of the training, from 0 to 1, not {value!r}.")
        if begin > end:
            raise WiringError(f"{cls.__name__}: begin = {begin} must not be after end = {end}.")
        return cls(start, target, float(end) - float(begin), float(begin), every)

    @property
    def relative(self) -> bool:
        """Whether it is given in fractions of a training whose length is not known yet."""
        return _is_number(self.steps) and not is_whole(self.steps)

    def planned(self, steps: int) -> Self:
        """The same in optimizer steps, of which the training has ``steps``; it stays what it is if it says them."""
        if not self.relative:
            return self
        begin, end = (math.floor(part * steps + 0.5) for part in (self.begin, self.begin + self.steps))
        return type(self)(self.start, self.end, max(end - begin, 1), begin, self.every)

    def __call__(self, step: int) -> float:
        """The density after ``step`` optimizer steps."""
        return self.end + (self.start - self.end) * self.left_at(step)

    def left_at(self, step: int) -> float:
        """How much of the way is still to go after ``step`` optimizer steps, from 1 to 0."""
        if self.relative:
            if step > 0:
                raise WiringError(
                    "the density follows a schedule over the training and was not told how long that is: call "
                    "wiring.plan(steps) with the number of optimizer steps before it."
                )
            return 1.0
        passed = int(step - self.begin)
        if passed >= self.steps:
            return 0.0
        return self.left(max(passed - passed % self.every, 0) / self.steps)

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
KINDS = {"linear": LinearSchedule, "cubic": CubicSchedule}
RAMP = {"kind": "cubic", "start": 1.0, "begin": 0.0, "end": 0.5, "every": 1}
"""What a rule's ``schedule`` may say, and what it means where it says nothing."""


@dataclass(frozen=True)
class Ramp:
    """How every layer comes down to its budget: a rule's ``schedule``, in plain values.

    A layer whose budget is more than where it would start has its budget from the beginning.

    >>> ramp = Ramp.of({"kind": "linear", "end": 1.0}).planned(4)
    >>> [ramp.count(20, 100, step) for step in range(5)]
    [100, 80, 60, 40, 20]
    """

    way: Schedule
    """Where it starts, and when; where it ends is the budget's."""

    @classmethod
    def of(cls, given: Any) -> Ramp:
        """From a kind, ``"cubic"`` or ``"linear"``, or a mapping: kind, start, begin, end (of training) and every."""
        if isinstance(given, str):
            given = {"kind": given}
        if not isinstance(given, Mapping):
            raise WiringError(
                f'a rule\'s schedule is "cubic", "linear", or a mapping such as {{"kind": "cubic", "start": 1.0, '
                f'"begin": 0.0, "end": 0.5}}, not {given!r}.'
            )
        for key in given:
            if key not in RAMP:
                raise unknown("setting of a rule's schedule", str(key), RAMP)
        kind, start, begin, end, every = ({**RAMP, **given}[key] for key in RAMP)
        if not isinstance(kind, str) or kind not in KINDS:
            raise unknown("kind of schedule", str(kind), KINDS)
        return cls(KINDS[kind].over(start, start, begin, end, every))

    def planned(self, steps: int) -> Ramp:
        """The same in optimizer steps, of which the training has ``steps``."""
        return Ramp(self.way.planned(steps))

    def count(self, k: int, allowed: int, step: int) -> int:
        """The number of edges after ``step`` steps of a layer whose budget is ``k`` of ``allowed``."""
        first = max(floor_of(self.way.start, allowed), k)
        return k + math.floor((first - k) * self.way.left_at(step) + 1e-6)


def check_density(density: object, where: str, else_: str = "") -> None:
    """Raise unless ``density`` is one; ``where`` is what messages call it."""
    if not _is_number(density) or not 0 < density <= 1:  # type: ignore[operator]
        percent = _is_number(density) and 1 < density <= 100  # type: ignore[operator]
        hint = f" For {density} % write {density / 100}." if percent else ""  # type: ignore[operator]
        raise WiringError(
            f"{where} must lie in (0, 1]: the fraction of edges that is real. It is {density!r}.{hint}{else_}"
        )


def is_whole(amount: object) -> bool:
    """Whether it is a whole number by its type; True and False are none."""
    return isinstance(amount, numbers.Integral) and not isinstance(amount, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def at(density: Density, step: int) -> float:
    """A density, or what a schedule of it says at ``step``."""
    return density(step) if isinstance(density, (Schedule, ConstantSchedule)) else float(density)


def floor_of(density: float, allowed: int) -> int:
    """Rounded down, as the paper's authors do, but not by a rounding error (0.29 of 100 is 29); at least 1."""
    return min(max(math.floor(density * allowed + 1e-6), 1), allowed)
