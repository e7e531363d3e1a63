"""Measure several ways to compute the same thing, in turns.

Some threads spin after a call (ONNX Runtime's for 40 ms) and would occupy the next side's cores, so every turn starts
with a pause, followed by calls that warm up caches and cores and are not counted.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PAUSE = 0.06
"""Seconds of a turn that are spent idle."""
BLOCK = 0.1
"""Seconds of a turn that are spent on warm-up calls, and again on measured calls; one call each may take longer."""
MIN_TURNS = 5
DISTURBED = 0.02
"""Share of a turn that threads may spend waiting for a core before the turn counts as disturbed."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, measured in several turns."""

    median: float
    q1: float
    """The lower quartile of the turns."""
    q3: float
    """The upper quartile of the turns."""
    fastest: float
    turns: int
    disturbed: int = 0
    """Turns among them in which a thread had to wait for a core, because the machine was busy."""
    left_out: int = 0
    """Further turns that were disturbed and do not count."""


def time_in_turns(sides: Mapping[str, Callable[[], Any]], seconds: float) -> dict[str, Timing]:
    """Measure what one call of each side takes.

    Disturbed turns are repeated, up to twice as many turns in all. They count only if some side has too few others:
    that is decided for all sides together, to keep them comparable.

    Args:
        sides: what to call, by name.
        seconds: the time of measured calls per side. Every side has at least five turns of at least one call.
    """
    block = min(BLOCK, seconds / MIN_TURNS)
    quiet: dict[str, list[float]] = {name: [] for name in sides}
    disturbed: dict[str, list[float]] = {name: [] for name in sides}
    spent = dict.fromkeys(sides, 0.0)

    def unfinished(name: str) -> bool:
        count, all_turns = len(quiet[name]), len(quiet[name]) + len(disturbed[name])
        enough, limit = 0.99 * seconds, 2 * MIN_TURNS
        if all_turns >= limit and spent[name] >= 2 * enough:
            return False
        return count < MIN_TURNS or spent[name] * count / all_turns < enough

    while waiting := [name for name in sides if unfinished(name)]:
        for name in waiting:
            run = sides[name]
            time.sleep(PAUSE)
            start, warm = time.perf_counter(), 0
            while not warm or time.perf_counter() - start < block:
                run()
                warm += 1
            calls = max(1, math.ceil(warm * block / (time.perf_counter() - start)))
            waited, start = _seconds_waited(), time.perf_counter()
            for _ in range(calls):
                run()
            passed = time.perf_counter() - start
            late = _seconds_waited() - waited > DISTURBED * passed
            (disturbed if late else quiet)[name].append(passed / calls)
            spent[name] += max(passed, block)  # the same number of turns for all, unless one call fills a turn
    idle = all(len(times) >= MIN_TURNS for times in quiet.values())
    return {
        name: _timing(quiet[name], 0, len(disturbed[name]))
        if idle
        else _timing(quiet[name] + disturbed[name], len(disturbed[name]), 0)
        for name in sides
    }


def _timing(times: list[float], disturbed: int, left_out: int) -> Timing:
    q1, median, q3 = np.quantile(times, (0.25, 0.5, 0.75)).tolist()
    return Timing(median, q1, q3, min(times), len(times), disturbed, left_out)


def _seconds_waited() -> float:
    """Seconds that threads of this process have waited for a core so far; 0 where the system does not tell."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError):
            total += int(path.read_text().split()[1])
    return total / 1e9
