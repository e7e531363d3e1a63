"""Measure on this machine which way of computing a step is the fastest."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from wirings.engine.execution_plan import ExecutionPlan

ROUNDS = 16
SECONDS = 3.0
"""The approximate limit on the time for measuring."""


def tune(plan: ExecutionPlan, inputs: Sequence[Tensor], seconds: float = SECONDS) -> None:
    """Choose the fastest way of computing every step of a plan.

    Each way is measured in place, among the other steps, since what these leave in the caches matters. All steps try
    their ways at the same time. Noise is reduced by averaging over the fastest runs only.
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
                for step, seconds_taken in enumerate(step_seconds(plan, inputs)):
                    taken[step][chosen[step]].append(seconds_taken)
        if round_number and time.perf_counter() - start > seconds:
            break
    best = [min(range(len(way)), key=lambda i, own=own: _typical(own[i])) for way, own in zip(ways, taken, strict=True)]  # type: ignore[misc]
    plan.choose([way[i] for way, i in zip(ways, best, strict=True)])
    plan.settle()


def step_seconds(plan: ExecutionPlan, inputs: Sequence[Tensor]) -> np.ndarray:
    """The seconds of every step, in one run."""
    times = np.zeros(len(plan.steps))
    plan.run(inputs, times)
    return times


def fastest_of(*calls: Callable[[], object], seconds: float = 0.5, clear: float = np.inf) -> list[float]:
    """The seconds of the fastest run of each call; they take turns.

    Args:
        calls: what to measure.
        seconds: the approximate limit on the time for measuring.
        clear: once all others take this many times as long as the first, they are not measured any further.
    """
    best = [np.inf] * len(calls)
    start, rounds = time.perf_counter(), 0
    while rounds < 1 or (rounds < 100 and time.perf_counter() - start < (seconds if rounds > 2 else 4 * seconds)):
        for number, call in enumerate(calls):
            for _ in range(2):  # the second run has warm caches
                began = time.perf_counter()
                call()
                best[number] = min(best[number], time.perf_counter() - began)
        rounds += 1
        if rounds > 1 and all(other > clear * best[0] for other in best[1:]):
            break
    return best


def _typical(taken: list[float]) -> float:
    """The mean of the fastest quarter."""
    return float(np.mean(sorted(taken)[: -(-len(taken) // 4)]))
