"""How many runs share a GPU: the number that makes the most steps a second, found while they train.

The search adds one run at a time. It measures the speed of all runs together over a window in which each of them is
warmed up, and adds another one as long as the last one paid off and there is memory for it. Runs of one network are
searched once; when a sweep goes on to another network, the search continues from the number that it has.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from wirings.train.run.heartbeat import Beat

GAIN = 0.03
"""What another run must add to the speed of all together, as a fraction, to be kept."""
WARM_UP = 3.0
"""Seconds after a run's first heartbeat, which follows its first steps and their compilation, before it counts."""
WINDOW, LONGEST_WINDOW = 10.0, 60.0
"""Seconds of a window. It grows up to the second number until each run has finished `EPOCHS` epochs, since a run does
other things between epochs."""
EPOCHS, STEPS = 2, 10
"""Epochs of a window that is shorter than the longest, and the least number of steps of any window, for each run."""
RESERVE = 1.2
"""Memory that must be free for another run, as a multiple of what a run took so far."""
MOST = 16
"""Runs that share a GPU at most."""


@dataclass(frozen=True)
class Memory:
    """Memory of a device or of the machine, in any unit."""

    name: str
    used: float
    total: float


@dataclass(frozen=True)
class ObservedRun:
    """A run on the GPU."""

    network: str
    """What its network is called: runs of the same network are searched together."""
    recipe: str
    """Its recipe and changed settings, without the seed: its steps are compared with those of the same recipe."""
    beat: Beat | None
    """What it last told; None before its first heartbeat."""


@dataclass
class _Search:
    """What is known about runs of one network."""

    speeds: dict[int, list[float]] = field(default_factory=dict)
    """For each number of runs, the speed of all together in every window, in units of a run alone."""
    reference: dict[str, float] = field(default_factory=dict)
    """For each recipe, the steps a second that count as a speed of 1."""
    most: int = MOST
    """The number of runs that there is memory for."""
    settled: int | None = None
    """The number of runs that the search ended with."""

    def means(self) -> dict[int, float]:
        return {runs: statistics.fmean(speeds) for runs, speeds in self.speeds.items()}

    def pays_off(self, runs: int) -> bool:
        """Whether so many runs are enough faster than the next smaller number that was measured."""
        means = self.means()
        fewer = max((number for number in means if number < runs), default=None)
        return fewer is None or means[runs] >= (1 + GAIN) ** (runs - fewer) * means[fewer]

    def next(self) -> tuple[int, bool]:
        """The number of runs to measure next, and whether the search is over and that number is the best one."""
        top = max(self.speeds)
        best = top if self.pays_off(top) else top - 1
        if best == top < self.most:
            return top + 1, False
        best = min(best, self.most)
        while best > 1:
            if best - 1 not in self.speeds:
                return best - 1, False
            if best in self.speeds and self.pays_off(best):
                break
            best -= 1
        return best, True


class Packing:
    """The search on one GPU.

    Args:
        memory: Returns the memory of the GPU and of the machine, or nothing if that is not known.
        limit: A fixed number of runs, if there is nothing to search for.

    Attributes:
        limit: The number of runs that may share the GPU now.
    """

    def __init__(self, memory: Callable[[], Sequence[Memory]], limit: int | None = None) -> None:
        self.searches, self.limit = limit is None, limit or 1
        self._memory = memory
        self._before = {each.name: each.used for each in memory()} if self.searches else {}
        self._of: dict[str, _Search] = {}
        self._first: dict[str, Beat] = {}  # the first heartbeat of each run
        self._begin: dict[str, Beat] = {}  # the heartbeat of each run at the beginning of the window

    def observe(self, runs: Mapping[str, ObservedRun]) -> str | None:
        """Take note of the runs on the GPU, by name. A restarted run has another name.

        Returns:
            What there is to report, if anything.
        """
        if not self.searches or not runs:
            return None
        beats = {name: run.beat for name, run in runs.items() if run.beat is not None}
        for name in self._first.keys() - runs.keys():
            del self._first[name]
        for name, beat in beats.items():
            self._first.setdefault(name, beat)
        if self._begin.keys() != runs.keys():
            warm = [name for name, beat in beats.items() if beat.time - self._first[name].time >= WARM_UP]
            self._begin = beats if len(warm) == len(runs) else {}
            return None
        if not all(_is_complete(self._begin[name], beat) for name, beat in beats.items()) or len(beats) < len(runs):
            return None
        rates = {name: _rate(self._begin[name], beat) for name, beat in beats.items()}
        self._begin = {}
        return self._measured(runs, rates)

    def too_many(self, runs: Mapping[str, ObservedRun]) -> None:
        """Take note that so many runs do not fit: one of them ran out of memory."""
        fitting = max(len(runs) - 1, 1)
        for network in {run.network for run in runs.values()}:
            search = self._of.setdefault(network, _Search())
            search.most = min(search.most, fitting)
            if search.settled is not None:
                search.settled = min(search.settled, fitting)
        self.limit = min(self.limit, fitting)

    def _measured(self, runs: Mapping[str, ObservedRun], rates: Mapping[str, float]) -> str | None:
        """A window is complete: go on with the search, if all runs are of one network."""
        networks = {run.network for run in runs.values()}
        if len(networks) > 1:
            return None
        search = self._of.setdefault(networks.pop(), _Search())
        if search.settled is not None:
            self.limit = search.settled
            return None
        number = len(runs)
        speed = _speed(search, {name: run.recipe for name, run in runs.items()}, rates)
        search.speeds.setdefault(number, []).append(speed)
        if number != self.limit:  # there are no more runs to start
            return None
        if not search.pays_off(number) and len(search.speeds[number]) < 2:
            return None  # measure again, since that would end the search
        short = self._short_of(number)
        if short:
            search.most = min(search.most, number)
        self.limit, over = search.next()
        return _report(search, number, self.limit, over, f", since there is no {short} for another" if short else "")

    def _short_of(self, runs: int) -> str | None:
        """What another run would lack, such as ``"GPU memory"``, if each takes as much as those so far."""
        for each in self._memory():
            of_each = (each.used - self._before.get(each.name, 0.0)) / runs
            if each.total - each.used < RESERVE * of_each:
                return each.name
        return None


def _is_complete(begin: Beat, now: Beat) -> bool:
    passed = now.time - begin.time
    long_enough = passed >= (WINDOW if now.epoch - begin.epoch >= EPOCHS else LONGEST_WINDOW)
    return long_enough and now.steps - begin.steps >= STEPS


def _rate(begin: Beat, now: Beat) -> float:
    return (now.steps - begin.steps) / (now.time - begin.time)


def _speed(search: _Search, recipes: Mapping[str, str], rates: Mapping[str, float]) -> float:
    """The speed of all runs together.

    Rules differ in the time of a step, so that steps of different recipes cannot be added. Each run counts relative to
    the steps a second of its recipe. A recipe that is new is assumed to be slowed down as the others are.
    """
    known = [rates[run] / search.reference[recipe] for run, recipe in recipes.items() if recipe in search.reference]
    earlier = search.means().get(len(rates))
    slowed = statistics.fmean(known) if known else 1.0 if earlier is None else earlier / len(rates)
    for recipe in set(recipes.values()) - search.reference.keys():
        own = [rates[run] for run, name in recipes.items() if name == recipe]
        search.reference[recipe] = statistics.fmean(own) / slowed
    return sum(rates[run] / search.reference[recipe] for run, recipe in recipes.items())


def _report(search: _Search, number: int, limit: int, over: bool, why: str) -> str:
    """What the search has found. Speeds are relative to one run, or else to the number that the search began with."""
    means = search.means()
    if over:
        search.settled = limit
    least = min(means)
    faster = f"{number} runs at once are {means[number] / means[least]:.2f} times as fast as {least}"
    found = faster if number > least else f"the speed of {number} at a time is measured"
    return f"{found}; {f'staying at {limit}' if over else f'trying {limit}'}{why}"
