"""A summary of a history for the terminal: sparklines, and a table of blocks or layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wirings.draw.common import check_has_records
from wirings.history import History, WiringState
from wirings.utils.tables import text_table
from wirings.utils.text import printable

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 48
MAX_ROWS = 30
"""The most blocks or layers that get a row in the table."""


def sparkline(values: Sequence[float] | np.ndarray, width: int = WIDTH) -> str:
    """Values as a row of bars; if there are more than ``width``, each bar is the mean of several values.

    >>> sparkline([0, 1, 2, 4, 7])
    '▁▂▃▅█'
    """
    numbers = np.asarray(values, float)
    if len(numbers) > width:
        numbers = np.array([part.mean() for part in np.array_split(numbers, width)])
    low, high = numbers.min(initial=np.inf), numbers.max(initial=-np.inf)
    share = (numbers - low) / (high - low) if high > low else np.zeros(len(numbers))
    return "".join(BARS[round(7 * value)] for value in share.tolist())


def summary(history: History, title: str = "") -> str:
    """Summarize a history as text: how training went, and the wiring at the end."""
    check_has_records(history)
    states = list(history.states())
    last, structure = states[-1], history.structure
    rule = f"rule {printable(str(history.about['rule']))}, " if "rule" in history.about else ""
    lines = [
        printable(title),
        f"{rule}{structure.nodes:,} nodes, {len(last):,} of {structure.edges:,} possible edges real "
        f"({100 * len(last) / structure.edges:.3g} %)",
    ]
    if len(history) > 1:
        lines += [
            f"{len(history)} records, steps {history.steps[0]:,} to {history.steps[-1]:,}",
            "",
            *_curves(history, states),
        ]
    lines += ["", *_group_table(last), "", _signs_and_ages(last)]
    return "\n".join(line.rstrip() for line in lines).strip("\n")


def _curves(history: History, states: list[WiringState]) -> list[str]:
    """One line with a sparkline for each of accuracy, loss, swapped edges and live nodes."""
    rows, steps = [], np.array(history.steps)
    for name, unit in (("accuracy", " %"), ("loss", "")):
        at, values = history.series(name)
        if len(values):
            rows.append((name, at, values, f"{values[0]:.3g} → {values[-1]:.3g}{unit}"))
    births = history.births[1:]
    rows.append(("swapped", steps[1:], births, f"{births.sum():,} edges in total"))
    alive = np.array([np.count_nonzero(state.alive) for state in states])
    name = "alive" if history.structure.paths_known else "with edges"
    rows.append((name, steps, alive, f"{alive[0]:,} → {alive[-1]:,} of {history.structure.nodes:,} nodes"))
    return [f"{name:10} {_timeline(at, values, steps)}  {text}" for name, at, values, text in rows]


def _timeline(at: np.ndarray, values: np.ndarray, steps: np.ndarray) -> str:
    """A sparkline whose bars are equal intervals of training, so that those of several values line up."""
    bins = np.clip((at - steps[0]) * WIDTH // max(steps[-1] - steps[0], 1), 0, WIDTH - 1)
    known = np.unique(bins)
    means = np.array([values[bins == one].mean() for one in known])
    latest = np.searchsorted(known, np.arange(known[0], WIDTH), side="right") - 1  # repeat the value before a gap
    return " " * int(known[0]) + sparkline(means[latest])


def _group_table(state: WiringState) -> list[str]:
    """A row for each group of nodes: nodes, dead nodes, edges in and out, and in-degrees node by node."""
    into, out_of = state.degrees()
    structure = state.structure
    dead_title = "dead" if structure.paths_known else "no edge"
    head = ["", "nodes", dead_title, "edges in", "edges out", "edges in, node by node"]
    rows = []
    groups = structure.groups
    for group in groups if len(groups) <= MAX_ROWS else [*groups[: MAX_ROWS - 1], groups[-1]]:
        here = slice(group.start, group.stop)
        count = group.stop - group.start
        dead = count - int(np.count_nonzero(state.alive[here]))
        numbers = [f"{count:,}", f"{dead:,}", f"{into[here].sum():,}", f"{out_of[here].sum():,}"]
        rows.append([printable(group.name), *numbers, sparkline(into[here], 32) if into[here].any() else ""])
    lines = text_table(head, rows, align="lrrrrl", rule=False)
    if len(groups) > MAX_ROWS:
        lines.insert(-1, f"… {len(groups) - MAX_ROWS} more …")
    return lines


def _signs_and_ages(state: WiringState) -> str:
    """How many edges are positive, and how many have been real since the start."""
    positive = 100 * np.count_nonzero(state.codes > 0) / max(len(state), 1)
    text = f"{positive:.0f} % of the edges are positive"
    if state.step > 0 and len(state):
        first = 100 * np.count_nonzero(state.born == state.born.min()) / len(state)
        if state.born.min() == 0:
            text += f"; {first:.0f} % have been real since the start"
    return f"{text}."
