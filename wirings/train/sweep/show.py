"""What a sweep shows while it goes: a live table in a terminal, else a line for everything that happens."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table

from wirings.cli.console import output
from wirings.train.sweep.schedule import FAILED, FINISHED, RUNNING, STOPPED, WAITING, Line, State
from wirings.train.tables.format import with_std

MOST = 30
"""Runs in the live table, those that run first."""
WIDE = 110
"""Letters in a line from which on the live table has all its columns."""


class Shown:
    """A table that is kept up to date in a terminal; in a file, lines."""

    def __init__(self, console: Console | None = None, every: float = 1.0) -> None:
        self.console, self.every = console or output(), every
        self._live: Live | None = None
        self._last = 0.0

    def __enter__(self) -> Shown:
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, states: Sequence[State]) -> None:
        """Show where all runs stand, if the last time is long enough ago."""
        if self._live is None or time.monotonic() - self._last < self.every:
            return
        self._last = time.monotonic()
        self._live.update(progress(states, self.console.width), refresh=True)

    def say(self, text: str) -> None:
        """Tell something; above the table, where there is one."""
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)


def progress(states: Sequence[State], width: int = WIDE) -> Table:
    """A table of the runs: those that run, then those that have failed, finished or wait.

    Where there is little room, only what tells runs apart, and how far they are; a long name takes several lines.
    """
    order = (RUNNING, FAILED, STOPPED, FINISHED, WAITING)
    counts = {status: sum(state.status == status for state in states) for status in order}
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    table = Table(title=f"{len(states)} runs: {told}")
    columns = ("run", "status", "epoch", "train loss", "accuracy", "time left")
    shown = [i for i, column in enumerate(columns) if width >= WIDE or column != "train loss"]
    for i in shown:
        text = columns[i] in ("run", "status")
        table.add_column(columns[i], justify="left" if text else "right", overflow="fold", no_wrap=not text)
    ranked = sorted(states, key=lambda state: order.index(state.status))
    for state in ranked[:MOST]:
        said = state.where and state.status in (RUNNING, WAITING) and width >= WIDE
        status = f"{state.status}, {state.where}" if said else state.status
        cells = (state.run.place, status, *_figures(state))
        table.add_row(*(cells[i] for i in shown))
    if len(ranked) > MOST:
        table.caption = f"and {len(ranked) - MOST} more"
    return table


def _figures(state: State) -> tuple[str, str, str, str]:
    epochs, line = state.run.settings.epochs, state.line or {}
    if state.result is not None:
        return f"{epochs}/{epochs}", "", f"{state.result.accuracy:.2f} %", ""
    done = int(line.get("epoch") or 0)
    accuracy, loss = line.get("accuracy"), line.get("train_loss")
    seconds = float(line.get("seconds") or 0)
    left = _duration(seconds / done * (epochs - done)) if done and state.status == RUNNING else ""
    return (
        f"{done}/{epochs}",
        f"{float(loss):.4f}" if loss else "",
        f"{float(accuracy):.2f} %" if accuracy else "",
        left,
    )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def results(lines: Sequence[Line]) -> Table:
    """What came of a sweep: a line for every recipe and set of changes, over seeds."""
    shared = set.intersection(*(set(line.changes) for line in lines)) if lines else set()
    table = Table(caption=f"all with {' '.join(sorted(shared))}" if shared else None)
    for column in ("recipe", "changes", "seeds", "accuracy", "training", "not finished"):
        table.add_column(column, justify="left" if column in ("recipe", "changes") else "right", overflow="fold")
    for line in lines:
        accuracy = with_std(line.mean, line.std, 2)
        training = "" if line.train_s is None else _duration(line.train_s)
        own = " ".join(change for change in line.changes if change not in shared)
        table.add_row(line.name, own, ",".join(map(str, line.seeds)), accuracy, training, str(line.left or ""))
    return table
