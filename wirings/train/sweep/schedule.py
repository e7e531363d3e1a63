"""The loop of a sweep: start what can be started, watch what runs, tell how it ends, until nothing is left to do."""

from __future__ import annotations

import csv
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from wirings.train.results import Result, read
from wirings.train.run.folder import RESULT
from wirings.train.sweep import folder as place
from wirings.train.sweep import work
from wirings.train.sweep.plan import Run

PAUSE = 0.3
"""Seconds from one look at all runs to the next."""
WAITING, RUNNING, FINISHED, FAILED, STOPPED = "waiting", "running", "finished", "failed", "stopped"


class Executor(Protocol):
    """Where runs go: `wirings.train.sweep.local.Local` or `wirings.train.sweep.on_ray.OnRay`."""

    def free(self) -> bool: ...
    def start(self, words: Sequence[str], folder: Path) -> Any: ...
    def poll(self, started: Any) -> int | None: ...
    def where(self, started: Any) -> str: ...
    def stop(self) -> None: ...


@dataclass
class State:
    """Where one run of a sweep stands."""

    run: Run
    folder: Path
    status: str = WAITING
    attempts: int = 0
    """How often it was started in this sweep."""
    started: Any = None
    """The executor's handle, while it runs."""
    where: str = ""
    since: float = 0.0
    reason: str = ""
    """Why it failed."""
    result: Result | None = None
    line: dict[str, str] | None = None
    """The last line of its log."""
    before: bool = False
    """Whether it was finished before this sweep began."""

    def look(self) -> None:
        """Read the last line of the run's log, if there is another."""
        try:
            with (self.folder / "log.csv").open(newline="", encoding="utf-8") as file:
                self.line = list(csv.DictReader(file))[-1]
        except (OSError, IndexError):
            return  # it has made no epoch yet


class Told(Protocol):
    """Told of what happens, for the user."""

    def update(self, states: Sequence[State]) -> None: ...
    def say(self, text: str) -> None: ...


def sweep(
    runs: Sequence[Run],
    out: Path,
    executor: Executor,
    told: Told,
    *,
    retries: int = 3,
    max_minutes: float | None = None,
    command: Any = work.command,
    **options: Any,
) -> list[State]:
    """Train all runs that are not finished, and say how each stands at the end.

    Args:
        runs: the plan.
        out: the sweep's folder, which `wirings.train.sweep.folder.enter` has made it.
        executor: where runs go.
        told: told of what happens.
        retries: how often a run that was killed is started again; one that ends with an error is not.
        max_minutes: begin nothing after so long, and let what runs stop at a checkpoint.
        command: gives the command line of a run.
        options: for it, such as ``data`` and ``device``.
    """
    states = [State(run, out / run.place) for run in runs]
    for state in states:
        if place.finished(state.folder):
            state.status, state.result, state.before = FINISHED, read(state.folder / RESULT), True
    by_place = {state.run.place: state for state in states}
    deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
    try:
        while any(state.status in (WAITING, RUNNING) for state in states):
            left = None if deadline is None else (deadline - time.monotonic()) / 60
            for state in states:
                if state.status == RUNNING:
                    _watch(state, executor, told, out, retries, left)
                elif state.status == WAITING:
                    _start_if_ready(state, by_place, executor, told, out, left, command, options)
            told.update(states)
            time.sleep(PAUSE)
    finally:
        executor.stop()
        for state in states:
            if state.status == RUNNING:
                state.status = STOPPED
                place.note(out, f"stopped {state.run.place}")
    return states


def _start_if_ready(
    state: State,
    by_place: dict[str, State],
    executor: Executor,
    told: Told,
    out: Path,
    left: float | None,
    command: Any,
    options: dict[str, Any],
) -> None:
    first = None if state.run.start is None else by_place[state.run.start.place]
    if first is not None and first.status in (FAILED, STOPPED):
        state.status, state.reason = first.status, f"it starts from {first.run.place}, which has {first.status}"
        return
    if left is not None and left <= 0:
        state.status = STOPPED
        return
    if not executor.free() or (first is not None and first.status != FINISHED):
        return
    words = command(state.run, out, max_minutes=left, **options)
    try:
        state.started = executor.start(words, state.folder)
    except OSError as error:
        _fail(state, told, out, f"its folder {state.folder} cannot be used: {error.strerror or error}")
        return
    if state.started is None:
        if not state.where:
            state.where = "another process is at it"
            told.say(f"{state.run.place}: {state.where}, in {state.folder}; waiting for it")
        return
    state.status, state.attempts, state.since = RUNNING, state.attempts + 1, time.monotonic()
    state.where = executor.where(state.started)
    place.note(out, f"started {state.run.place}")
    told.say(f"{state.run.place}: started, {state.where}")


def _watch(state: State, executor: Executor, told: Told, out: Path, retries: int, left: float | None) -> None:
    state.look()
    state.where = executor.where(state.started)
    status = executor.poll(state.started)
    if status is None:
        return
    state.started = None
    name = state.run.place
    if place.finished(state.folder):
        state.status, state.result = FINISHED, read(state.folder / RESULT)
        place.note(out, f"finished {name}")
        told.say(f"{name}: {state.result.accuracy:.2f} % after {state.result.wall_s:.0f} s")
    elif status == 0:  # it has stopped at a checkpoint, since time was up
        state.status = STOPPED
        place.note(out, f"stopped {name}")
    elif status < 0 and state.attempts <= retries:
        state.status = WAITING
        place.note(out, f"killed {name}")
        told.say(f"{name}: was killed (signal {-status}); it goes on from its last checkpoint")
    else:
        what = f"was killed {state.attempts} times" if status < 0 else f"ended with exit status {status}"
        end = f"the end of {state.folder / work.OUTPUT}:\n{work.last_words(state.folder)}"
        _fail(state, told, out, f"{what}; {end}")


def _fail(state: State, told: Told, out: Path, reason: str) -> None:
    state.status, state.reason = FAILED, reason
    place.note(out, f"failed {state.run.place}")
    told.say(f"{state.run.place}: failed, {reason}")


@dataclass(frozen=True)
class Line:
    """What the runs of one recipe and one set of changes have come to."""

    name: str
    changes: tuple[str, ...]
    seeds: tuple[int, ...]
    """Of the finished runs."""
    mean: float | None
    std: float | None
    train_s: float | None
    left: int
    """Runs that are not finished."""


def summary(states: Sequence[State]) -> list[Line]:
    """A line for every recipe and set of changes that was asked for, over seeds."""
    groups: dict[tuple[str, tuple[str, ...]], list[State]] = {}
    for state in states:
        if state.run.wanted:
            groups.setdefault((state.run.name, state.run.changes), []).append(state)
    lines = []
    for (name, changes), members in groups.items():
        found = [state.result for state in members if state.result is not None]
        accuracies = [result.accuracy for result in found]
        lines.append(
            Line(
                name,
                changes,
                tuple(result.seed for result in found),
                statistics.fmean(accuracies) if found else None,
                statistics.stdev(accuracies) if len(found) > 1 else None,
                statistics.fmean(result.train_s for result in found) if found else None,
                len(members) - len(found),
            )
        )
    return lines
