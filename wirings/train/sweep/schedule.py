"""The loop of a sweep: start the runs that can start, watch those that are running, and report how they end."""

from __future__ import annotations

import csv
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from wirings.train.data.metrics import ACCURACY, Metric
from wirings.train.results import Result, read
from wirings.train.run.folder import RESULT
from wirings.train.sweep import process
from wirings.train.sweep.folder import has_result, log_event
from wirings.train.sweep.plan import SweepRun

PAUSE = 0.3
"""Seconds between two checks of all runs."""
WAITING, RUNNING, FINISHED, FAILED, STOPPED = "waiting", "running", "finished", "failed", "stopped"


class SweepExecutor(Protocol):
    """Executes runs: `wirings.train.sweep.local.LocalExecutor` or `wirings.train.sweep.on_ray.RayExecutor`."""

    def is_free(self) -> bool: ...
    def start(self, words: Sequence[str], folder: Path, network: str) -> Any: ...
    def poll(self, run: Any) -> int | None: ...
    def excuse(self, run: Any) -> str | None: ...
    def observe(self) -> list[str]: ...
    def where(self, run: Any) -> str: ...
    def stop(self) -> None: ...


@dataclass
class RunProgress:
    """The state of one run of a sweep."""

    run: SweepRun
    """The run."""
    folder: Path
    """Its folder."""
    status: str = WAITING
    """One of `WAITING`, `RUNNING`, `FINISHED`, `FAILED`, `STOPPED`."""
    attempts: int = 0
    """How often this sweep has started it."""
    handle: Any = None
    """The executor's handle while it is running."""
    where: str = ""
    """What it is executed on, or what it is waiting for."""
    reason: str = ""
    """Why it failed."""
    result: Result | None = None
    """Its result, once it is finished."""
    last_epoch: dict[str, str] | None = None
    """The last line of its log."""

    def read_log(self) -> None:
        """Read the last line of the run's log, if there is one."""
        try:
            with (self.folder / "log.csv").open(newline="", encoding="utf-8") as file:
                self.last_epoch = list(csv.DictReader(file))[-1]
        except (OSError, IndexError):
            return  # no epoch is finished yet


def state_of(run: SweepRun, out: Path) -> RunProgress:
    """The state of a run before a sweep starts in its folder: waiting, or finished."""
    state = RunProgress(run, out / run.path)
    if has_result(state.folder):
        state.status, state.result = FINISHED, read(state.folder / RESULT)
    return state


class SweepListener(Protocol):
    """Receives the events of a sweep."""

    def update(self, states: Sequence[RunProgress]) -> None: ...
    def say(self, text: str) -> None: ...


def run_sweep(
    runs: Sequence[SweepRun],
    out: Path,
    executor: SweepExecutor,
    listener: SweepListener,
    *,
    retries: int = 3,
    max_minutes: float | None = None,
    command: Callable[..., list[str]] = process.train_command,
    more: Callable[[Sequence[RunProgress]], Sequence[SweepRun]] = lambda _: (),
    **options: Any,
) -> list[RunProgress]:
    """Train all runs that are not finished, and return the final state of each.

    Args:
        runs: The runs, each after the one that it starts from.
        out: The sweep's folder, claimed with `wirings.train.sweep.folder.claim_sweep_folder`.
        executor: Executes the runs.
        listener: Receives the events of the sweep.
        retries: How often a killed run is restarted. A run that ends with an error is not.
        max_minutes: Start no run after this many minutes, and stop running ones at a checkpoint.
        command: Returns the command line of a run.
        more: Returns runs to add, given the state of all runs; it is asked again and again, also at the end.
        options: Arguments for ``command``, such as ``data`` and ``device``.
    """
    return _Sweep(runs, out, executor, listener, retries, max_minutes, command, more, options).run()


class _Sweep:
    """A sweep while it is running. See `run_sweep`."""

    def __init__(
        self,
        runs: Sequence[SweepRun],
        out: Path,
        executor: SweepExecutor,
        listener: SweepListener,
        retries: int,
        max_minutes: float | None,
        command: Callable[..., list[str]],
        more: Callable[[Sequence[RunProgress]], Sequence[SweepRun]],
        options: dict[str, Any],
    ) -> None:
        self.out, self.executor, self.listener, self.retries = out, executor, listener, retries
        self.command, self.more, self.options = command, more, options
        self.deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self.states: list[RunProgress] = []
        self.by_path: dict[str, RunProgress] = {}
        self._add(runs)

    def _add(self, runs: Sequence[SweepRun]) -> bool:
        """Add runs that the sweep does not have yet; whether there were any."""
        new = {run.path: run for run in runs if run.path not in self.by_path}
        self.by_path |= {path: state_of(run, self.out) for path, run in new.items()}
        self.states += [self.by_path[path] for path in new]
        return bool(new)

    def run(self) -> list[RunProgress]:
        """Run the loop until there is nothing left to do."""
        try:
            while self._add(self.more(self.states)) or any(state.status in (WAITING, RUNNING) for state in self.states):
                for state in self.states:
                    if state.status == RUNNING:
                        self._watch(state)
                    elif state.status == WAITING:
                        self._start_if_ready(state)
                for found in self.executor.observe():
                    log_event(self.out, found)
                    self.listener.say(found)
                self.listener.update(self.states)
                time.sleep(PAUSE)
        except KeyboardInterrupt:
            if any(state.status == RUNNING for state in self.states):
                self.listener.say("Stopping the runs, which save checkpoints. Press Ctrl-C again to kill them.")
            raise
        finally:
            self.executor.stop()
            for state in self.states:
                if state.status == RUNNING:
                    self._stopped(state)
        return self.states

    def _start_if_ready(self, state: RunProgress) -> None:
        first = None if state.run.start is None else self.by_path[state.run.start.path]
        if first is not None and first.status in (FAILED, STOPPED):
            state.status, state.reason = first.status, f"it starts from {first.run.path}, which has {first.status}"
            return
        left = None if self.deadline is None else (self.deadline - time.monotonic()) / 60
        if left is not None and left <= 0:
            state.status = STOPPED
            return
        if not self.executor.is_free() or (first is not None and first.status != FINISHED):
            return
        words = self.command(state.run, self.out, max_minutes=left, **self.options)
        try:
            state.handle = self.executor.start(words, state.folder, network_of(state.run))
        except OSError as error:
            self._failed(state, f"its folder {state.folder} cannot be used: {error.strerror or error}")
            return
        if state.handle is None:
            if not state.where:
                state.where = "waiting for another process"
                self.listener.say(f"{state.run.path}: {state.where} that is running in {state.folder}")
            return
        state.status, state.attempts = RUNNING, state.attempts + 1
        state.where = self.executor.where(state.handle)
        log_event(self.out, f"started {state.run.path}")
        self.listener.say(f"{state.run.path}: started, {state.where}")

    def _watch(self, state: RunProgress) -> None:
        state.read_log()
        state.where = self.executor.where(state.handle)
        status = self.executor.poll(state.handle)
        if status is None:
            return
        ended, state.handle = state.handle, None
        path = state.run.path
        if has_result(state.folder):
            state.status, state.result = FINISHED, read(state.folder / RESULT)
            log_event(self.out, f"finished {path}")
            self.listener.say(f"{path}: {state.result} after {state.result.wall_s:.0f} s")
        elif status == 0:  # time was up: it has stopped at a checkpoint
            self._stopped(state)
        elif (killed := process.signal_of(status)) is not None and state.attempts <= self.retries:
            state.status = WAITING
            log_event(self.out, f"killed {path}")
            self.listener.say(f"{path}: was killed (signal {killed}); it continues from its last checkpoint")
        elif killed is None and (excuse := self.executor.excuse(ended)) is not None:
            state.status, state.attempts = WAITING, state.attempts - 1  # it was not its fault
            log_event(self.out, f"{path} {excuse}")
            self.listener.say(f"{path}: {excuse}")
        else:
            what = f"was killed {state.attempts} times" if killed is not None else f"ended with exit status {status}"
            tail = f"end of {state.folder / process.OUTPUT}:\n{process.output_tail(state.folder)}"
            self._failed(state, f"{what}; {tail}")

    def _stopped(self, state: RunProgress) -> None:
        state.status = STOPPED
        log_event(self.out, f"stopped {state.run.path}")

    def _failed(self, state: RunProgress, reason: str) -> None:
        state.status, state.reason = FAILED, reason
        log_event(self.out, f"failed {state.run.path}")
        self.listener.say(f"{state.run.path}: failed, {reason}")


def network_of(run: SweepRun) -> str:
    """What the network and the batches of a run are called; runs with the same name take a GPU about equally."""
    settings = run.settings
    options = {key: value for key, value in settings.model.options.items() if key not in ("density", "share")}
    return f"{settings.model.name} {options} {settings.data.name} {settings.batch} {settings.precision}"


@dataclass(frozen=True)
class SweepResult:
    """The results of one recipe with one set of changes, over seeds."""

    name: str
    """Name of the recipe."""
    changes: tuple[str, ...]
    """Settings that differ from the recipe's."""
    seeds: tuple[int, ...]
    """Seeds of the finished runs."""
    mean: float | None
    """Mean of the metric, such as the accuracy in percent."""
    std: float | None
    """Standard deviation of the metric; None for fewer than two runs."""
    train_s: float | None
    """Mean training time in seconds, of runs that had a GPU to themselves; None if all shared one."""
    unfinished: int
    """Number of runs that are not finished."""
    metric: Metric = ACCURACY
    """What the runs are compared by."""


def summarize_sweep(states: Sequence[RunProgress]) -> list[SweepResult]:
    """Return the results of the requested runs, one for every recipe and set of changes."""
    groups: dict[tuple[str, tuple[str, ...]], list[RunProgress]] = {}
    for state in states:
        if state.run.requested:
            groups.setdefault((state.run.name, state.run.changes), []).append(state)
    found = []
    for (name, changes), members in groups.items():
        finished = [state.result for state in members if state.result is not None]
        scores = [result.score for result in finished]
        alone = [result.train_s for result in finished if not result.most_others]
        found.append(
            SweepResult(
                name,
                changes,
                tuple(result.seed for result in finished),
                statistics.fmean(scores) if finished else None,
                statistics.stdev(scores) if len(finished) > 1 else None,
                statistics.fmean(alone) if alone else None,
                len(members) - len(finished),
                finished[0].measured_by if finished else ACCURACY,
            )
        )
    return found
