"""Which layers of a network are slower in int8 than in float32 on this machine, and gain nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from wirings.engine.execution_plan import ExecutionPlan
from wirings.engine.int8_steps import Int8LinearStep, Int8SumsStep
from wirings.engine.tune import step_seconds

RUNS = 40
SECONDS = 0.5
"""The approximate limit on the time for measuring one plan."""
SLOWER = 1.2
"""A layer is slower in int8 if it takes this many times as long; anything closer may be noise."""


def slower_layers(plan: ExecutionPlan, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[float, float]]:
    """The layers of a plan that are slower in int8, with their seconds in int8 and in float32.

    A layer's time includes that of the step that quantises its input. Where several layers read the same input, or are
    computed by one step, they are judged together. Two measurements have to agree, since the machine may be busy.
    """
    first = _measured(plan, shapes)
    second = _measured(plan, shapes) if first else {}
    return {name: seconds for name, seconds in second.items() if name in first}


def _measured(plan: ExecutionPlan, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[float, float]]:
    floats = ExecutionPlan(plan.library, plan.program, shapes, plan.threads, plan.together)
    floats.choose([floats.usual(step) for step in floats.steps])
    inputs = plan.program.zeros(1 if plan.together else plan.threads)
    taken: list[list[np.ndarray]] = [[], []]
    start = time.perf_counter()
    for number in range(RUNS):
        for own, times in zip((plan, floats), taken, strict=True):
            own.run(inputs)
            times.append(step_seconds(own, inputs))
        if number > 2 and time.perf_counter() - start > SECONDS:
            break
    mine, other = (_by_name(own, np.min(times, 0)) for own, times in zip((plan, floats), taken, strict=True))
    found: dict[str, tuple[float, float]] = {}
    for group in _groups(plan):
        if not all(name in other for name in group):
            continue
        seconds = sum(mine[name] + mine.get(f"{name} quantised", 0.0) for name in group)
        before = sum(other[name] for name in group)
        if seconds > SLOWER * before:
            found |= {layer: (seconds, before) for layers in group.values() for layer in layers}
    return found


def _by_name(plan: ExecutionPlan, seconds: np.ndarray) -> dict[str, float]:
    found: dict[str, float] = {}
    for step, own in zip(plan.steps, seconds.tolist(), strict=True):
        found[step.name] = found.get(step.name, 0.0) + own
    return found


def _groups(plan: ExecutionPlan) -> list[Mapping[str, frozenset[str]]]:
    """Steps in int8 that read the same bytes, each with its layers."""
    buffers: dict[int, int] = {}  # of bytes, and the group that reads them
    groups: list[dict[str, frozenset[str]]] = []
    for step in plan.steps:
        if isinstance(step, Int8LinearStep):
            groups.append({step.name: step.layers})
        elif isinstance(step, Int8SumsStep):
            read = np.unique(step.edges.source.buffers).tolist()
            number = next((buffers[b] for b in read if b in buffers), len(groups))
            if number == len(groups):
                groups.append({})
            groups[number][step.name] = step.layers
            buffers |= {b: buffers.get(b, number) for b in read}
    return list(groups)
