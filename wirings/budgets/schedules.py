"""Densities that change over training, in optimizer steps or in fractions of training."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from wirings.errors import WiringError, unknown
from wirings.utils.checks import is_int, is_number
from wirings.utils.text import brief


@dataclass(frozen=True)
class Schedule(ABC):
    """A density that changes over training: ``start`` until step ``begin``, ``end`` from ``begin + steps`` on.

    Pass it in place of a density. It advances when `Wiring.step` is called, once after every optimizer step.

    Args:
        start: the density at the beginning.
        end: the density at the end.
        steps: the duration of the change: an int in optimizer steps, or a float as a fraction of training, whose length
            `Wiring.plan` sets. `over` is an easier way to write the latter.
        begin: when the change begins, in the same unit.
        every: optimizer steps from one change to the next.
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
        got = f"got steps = {brief(self.steps)} and begin = {brief(self.begin)}."
        if self.relative:
            fits = is_number(self.begin) and min(self.begin, self.steps) >= 0 and self.begin + self.steps <= 1 + 1e-9
            if not fits or (is_int(self.begin) and self.begin):
                raise WiringError(
                    f"{name} with fractions of training needs begin and begin + steps between 0.0 and 1.0; {got}"
                )
        elif not (is_int(self.steps) and is_int(self.begin)) or self.steps < 1 or self.begin < 0:
            raise WiringError(f"{name} needs steps >= 1 and begin >= 0; {got}")
        if not is_int(self.every) or self.every < 1:
            raise WiringError(f"{name} needs every >= 1, a whole number of steps; got every = {brief(self.every)}.")

    @classmethod
    def over(cls, start: float, target: float, begin: float = 0.0, end: float = 1.0, every: int = 1) -> Self:
        """A schedule from ``start`` to ``target`` between the fractions ``begin`` and ``end`` of training.

        >>> CubicSchedule.over(1.0, 0.1, end=0.5).planned(1000)
        CubicSchedule(start=1.0, end=0.1, steps=500, begin=0, every=1)
        """
        for name, value in (("begin", begin), ("end", end)):
            if not is_number(value) or not 0 <= value <= 1:
                raise WiringError(
                    f"{cls.__name__}: {name} must be a fraction of training, from 0 to 1, got {brief(value)}."
                )
        if begin > end:
            raise WiringError(f"{cls.__name__}: begin = {begin} must not be after end = {end}.")
        return cls(start, target, float(end) - float(begin), float(begin), every)

    @property
    def relative(self) -> bool:
        """Whether it is in fractions of a training whose length is not known yet."""
        return is_number(self.steps) and not is_int(self.steps)

    def planned(self, steps: int) -> Self:
        """The schedule in optimizer steps, for a training of ``steps``; unchanged if it already is in steps."""
        if not self.relative:
            return self
        begin, end = (math.floor(part * steps + 0.5) for part in (self.begin, self.begin + self.steps))
        return type(self)(self.start, self.end, max(end - begin, 1), begin, self.every)

    def __call__(self, step: int) -> float:
        """The density after ``step`` optimizer steps."""
        return self.end + (self.start - self.end) * self.left_at(step)

    def left_at(self, step: int) -> float:
        """The fraction of the change that remains after ``step`` optimizer steps, from 1 to 0."""
        if self.relative:
            if step > 0:
                raise WiringError(
                    "the density follows a schedule over training and does not know how long that is: call "
                    "wiring.plan(steps) with the number of optimizer steps before training."
                )
            return 1.0
        passed = int(step - self.begin)
        if passed >= self.steps:
            return 0.0
        return self.left(max(passed - passed % self.every, 0) / self.steps)

    @abstractmethod
    def left(self, done: float) -> float:
        """The fraction of the change that remains, from 1 to 0, after the fraction ``done`` of its steps."""


class LinearSchedule(Schedule):
    """A density that falls (or rises) by the same amount every step."""

    def left(self, done: float) -> float:
        return 1.0 - done


class CubicSchedule(Schedule):
    """A density that falls fast at first and slowly at the end: (1 - t)³, as in Zhu and Gupta (2017)."""

    def left(self, done: float) -> float:
        return (1.0 - done) ** 3


@dataclass(frozen=True)
class ConstantSchedule:
    """The same density at every step, like a plain number."""

    density: float

    def __post_init__(self) -> None:
        check_density(self.density, "ConstantSchedule.density")

    def __call__(self, step: int) -> float:
        return self.density


Density = float | Schedule | ConstantSchedule
KINDS = {"linear": LinearSchedule, "cubic": CubicSchedule}
RAMP = {"kind": "cubic", "start": 1.0, "begin": 0.0, "end": 0.5, "every": 1}
"""The settings of a rule's ``schedule``, with their defaults."""


@dataclass(frozen=True)
class Ramp:
    """How every layer's number of edges decreases to its budget over training: a rule's ``schedule``.

    A layer whose budget is larger than the starting number has its budget from the beginning.

    >>> ramp = Ramp.of({"kind": "linear", "end": 1.0}).planned(4)
    >>> [ramp.counts([20], [100], step) for step in range(5)]
    [[100], [80], [60], [40], [20]]
    """

    way: Schedule
    """The start and the timing; the end is the budget."""

    @classmethod
    def of(cls, given: Any) -> Ramp:
        """Make a ramp from ``"cubic"``, ``"linear"`` or a mapping with kind, start, begin, end and every."""
        if isinstance(given, str):
            given = {"kind": given}
        if not isinstance(given, Mapping):
            raise WiringError(
                f'a rule\'s schedule must be "cubic", "linear", or a mapping such as {{"kind": "cubic", "start": 1.0, '
                f'"begin": 0.0, "end": 0.5}}, got {brief(given)}.'
            )
        for key in given:
            if key not in RAMP:
                raise unknown("setting of a rule's schedule", str(key), RAMP)
        kind, start, begin, end, every = ({**RAMP, **given}[key] for key in RAMP)
        if not isinstance(kind, str) or kind not in KINDS:
            raise unknown("kind of schedule", str(kind), KINDS)
        return cls(KINDS[kind].over(start, start, begin, end, every))

    def planned(self, steps: int) -> Ramp:
        """The ramp in optimizer steps, for a training of ``steps``."""
        return Ramp(self.way.planned(steps))

    def counts(self, ks: Sequence[int], allowed: Sequence[int], step: int) -> list[int]:
        """The number of edges after ``step`` steps of layers with budgets of ``ks`` of their ``allowed`` edges."""
        start, left = self.way.start, self.way.left_at(step)
        if not left:
            return list(ks)
        firsts = allowed if start == 1 else [max(floor_of(start, n), k) for k, n in zip(ks, allowed, strict=True)]
        return [k + math.floor((first - k) * left + 1e-6) for k, first in zip(ks, firsts, strict=True)]


def check_density(density: object, where: str, else_: str = "") -> None:
    """Raise unless ``density`` is a number in (0, 1]; ``where`` is its name in the message."""
    if not is_number(density) or not 0 < density <= 1:
        hint = f" For {density} % write {density / 100}." if is_number(density) and 1 < density <= 100 else ""
        raise WiringError(
            f"{where} must be in (0, 1], the fraction of edges that is real, got {brief(density)}.{hint}{else_}"
        )


def at(density: Density, step: int) -> float:
    """The value of a density or of a schedule at ``step``."""
    return density(step) if isinstance(density, (Schedule, ConstantSchedule)) else float(density)


def floor_of(density: float, allowed: int) -> int:
    """``density × allowed`` rounded down, but not by a rounding error (0.29 of 100 is 29); at least 1."""
    return min(max(math.floor(density * allowed + 1e-6), 1), allowed)
