"""Measuring on this machine which way of doing a step is the fastest."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from wirings.engine.plan import Plan

ROUNDS = 16
SECONDS = 3.0
"""What measuring takes at most, roughly."""


def tune(plan: Plan, inputs: Sequence[Tensor], seconds: float = SECONDS) -> None:
    """Choose for every step of a plan what takes the least time here.

    Each way is measured where it stands, with the steps around it, since what they leave in the caches counts. All
    steps take turns with their ways at once; the machine's own noise goes by taking the fastest runs of each.
    """
    ways = [plan.choices_of(step) for step in plan.steps]
    most = max(len(way) for way in ways)
    taken = [[[] for _ in way] for way in ways]  # type: list[list[list[float]]]
    start = time.perf_counter()
    for round_number in range(ROUNDS):
        for turn in range(most):
            chosen = [turn % len(way) for way in ways]
            plan.choose([way[i] for way, i in zip(ways, chosen, strict=True)])
            plan.run(inputs)
            for _ in range(3):
                for step, seconds_taken in enumerate(timed(plan, inputs)):
                    taken[step][chosen[step]].append(seconds_taken)
        if round_number and time.perf_counter() - start > seconds:
            break
    best = [min(range(len(way)), key=lambda i, own=own: _typical(own[i])) for way, own in zip(ways, taken, strict=True)]  # type: ignore[misc]
    plan.choose([way[i] for way, i in zip(ways, best, strict=True)])
    plan.settle()


def timed(plan: Plan, inputs: Sequence[Tensor]) -> np.ndarray:
    """Seconds of every step, in one run."""
    times = np.zeros(len(plan.steps))
    plan.run(inputs, times)
    return times


def _typical(taken: list[float]) -> float:
    """The mean of the fastest quarter."""
    return float(np.mean(sorted(taken)[: -(-len(taken) // 4)]))
