"""What a sweep shows: a live table in a terminal, otherwise a line for every event; at the end a table of results."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from wirings.train.data.metrics import metric_of
from wirings.train.sweep.schedule import FAILED, FINISHED, RUNNING, STOPPED, WAITING, RunProgress, SweepResult
from wirings.utils.console import open_console
from wirings.utils.text import printable

MOST_ROWS = 30
"""Rows of the live table. Running runs come first."""
FULL_WIDTH = 110
"""Width of the terminal from which the live table has all its columns."""


class SweepDisplay:
    """A `wirings.train.sweep.schedule.SweepListener` that shows a live table in a terminal, and lines in a file.

    Args:
        console: Where to print; by default the standard output.
        every: Seconds between two updates of the table.
    """

    def __init__(self, console: Console | None = None, every: float = 1.0) -> None:
        self.console, self.every = console or open_console(), every
        self._live: Live | None = None
        self._last = 0.0

    def __enter__(self) -> SweepDisplay:
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, states: Sequence[RunProgress]) -> None:
        """Redraw the table if the last update was at least ``every`` seconds ago."""
        if self._live is None or time.monotonic() - self._last < self.every:
            return
        self._last = time.monotonic()
        self._live.update(progress_table(states, self.console.width), refresh=True)

    def say(self, text: str) -> None:
        """Print a line, above the live table."""
        self.console.print(printable(text, keep="\n\t"), highlight=False, soft_wrap=True, markup=False)


def progress_table(states: Sequence[RunProgress], width: int = FULL_WIDTH) -> Table:
    """Return a table of the runs: running ones first, then failed, stopped, finished and waiting ones.

    In a narrow terminal it has fewer columns, and long names are wrapped.
    """
    order = (RUNNING, FAILED, STOPPED, FINISHED, WAITING)
    counts = {status: sum(state.status == status for state in states) for status in order}
    total = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    table = Table(title=f"{len(states)} runs: {total}")
    columns = ("run", "status", "epoch", "train loss", "result", "time left")
    shown = [i for i, column in enumerate(columns) if width >= FULL_WIDTH or column != "train loss"]
    for i in shown:
        text = columns[i] in ("run", "status")
        table.add_column(columns[i], justify="left" if text else "right", overflow="fold", no_wrap=not text)
    ranked = sorted(states, key=lambda state: order.index(state.status))
    for state in ranked[:MOST_ROWS]:
        detailed = state.where and state.status in (RUNNING, WAITING) and width >= FULL_WIDTH
        status = f"{state.status}, {state.where}" if detailed else state.status
        cells = (state.run.path, status, *_figures(state))
        table.add_row(*(_cell(cells[i]) for i in shown))
    if len(ranked) > MOST_ROWS:
        table.caption = f"and {len(ranked) - MOST_ROWS} more"
    return table


def _figures(state: RunProgress) -> tuple[str, str, str, str]:
    """Epoch or step, training loss, metric and time left."""
    settings, line = state.run.settings, state.last_epoch or {}
    total = settings.epochs if settings.steps is None else settings.steps
    if state.result is not None:
        return f"{total}/{total}", "", str(state.result), ""
    done = int(line.get("epoch" if settings.steps is None else "steps") or 0)
    metric = metric_of(line)
    value, loss = line.get(metric.name), line.get("train_loss")
    seconds = float(line.get("seconds") or 0)
    left = _clock(seconds / done * (total - done)) if done and state.status == RUNNING else ""
    return (
        f"{done}/{total}",
        f"{float(loss):.4f}" if loss else "",
        metric.format(float(value)) if value else "",
        left,
    )


def _cell(text: str) -> Text:
    """A cell that shows ``text`` as it is: no markup, no control characters."""
    return Text(printable(text))


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def results_table(results: Sequence[SweepResult]) -> Table:
    """Return a table of a sweep's results: a row for every recipe and set of changes, over seeds."""
    shared = set.intersection(*(set(result.changes) for result in results)) if results else set()
    table = Table(caption=_cell(f"all with {' '.join(sorted(shared))}") if shared else None)
    for column in ("recipe", "changes", "seeds", "result", "training", "not finished"):
        table.add_column(column, justify="left" if column in ("recipe", "changes") else "right", overflow="fold")
    for result in results:
        value = result.metric.format(result.mean, result.std)
        training = "" if result.train_s is None else _clock(result.train_s)
        own = " ".join(change for change in result.changes if change not in shared)
        seeds = ",".join(map(str, result.seeds))
        cells = (result.name, own, seeds, value, training, str(result.unfinished or ""))
        table.add_row(*map(_cell, cells))
    return table
