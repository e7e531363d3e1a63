"""Which learning rates to try: by factors of two until the best has a worse one on both sides, then those between."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

FACTOR = 2.0
"""Between two rates of the search; between the best one and its neighbours it is the square root of that."""
FURTHEST = 10
"""How many factors away from the first rate the search ends."""


@dataclass(frozen=True)
class RateSearch:
    """A search for the learning rate with the smallest loss, among at least five.

    It keeps no state: what to try next follows from what was measured. All rates that can be tried at the same time are
    asked for together.

    >>> search = RateSearch(0.1)
    >>> search.missing({})
    [0.05, 0.1, 0.2]
    >>> search.missing({0.05: 1.5, 0.1: 1.3, 0.2: 1.2})
    [0.4]
    >>> search.missing({0.05: 1.5, 0.1: 1.3, 0.2: 1.2, 0.4: math.inf})  # it diverged
    [0.141, 0.283]
    """

    start: float
    """The rate to begin with."""

    def rate(self, half_steps: int) -> float:
        """The rate that is so many square roots of a factor above the first one, to three digits."""
        if half_steps == 0:
            return self.start
        return float(f"{self.start * FACTOR ** (half_steps / 2):.3g}")

    def missing(self, losses: Mapping[float, float]) -> list[float]:
        """The rates to try next, given the losses by rate so far; none if the search is over."""
        coarse = {step: losses[rate] for step, rate in self._rates(2).items() if rate in losses}
        if first := [self.rate(step) for step in (-2, 0, 2) if step not in coarse]:
            return first
        # Rates that are too low give equal losses, those of guessing; rates that are too high give infinite ones.
        best = min(coarse, key=lambda step: (coarse[step], -step if math.isfinite(coarse[step]) else step))
        further = {min(coarse): best - 2, max(coarse): best + 2}.get(best)
        if further in self._rates(2):
            return [self.rate(further)]
        return [rate for rate in (self.rate(best - 1), self.rate(best + 1)) if rate not in losses]

    def _rates(self, every: int) -> dict[int, float]:
        return {step: self.rate(step) for step in range(-2 * FURTHEST, 2 * FURTHEST + 1, every)}


def best_rate(losses: Mapping[float, float]) -> float | None:
    """The rate with the smallest loss, the lowest of equal ones; None if no training has a finite loss.

    >>> best_rate({0.1: 1.2, 0.2: 1.0, 0.4: math.inf})
    0.2
    """
    finite = [rate for rate, loss in losses.items() if math.isfinite(loss)]
    return min(finite, key=lambda rate: (losses[rate], rate), default=None)
