"""A history in a terminal: a few lines with sparklines, and a table of blocks or layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wirings.errors import WiringError
from wirings.history import History, WiringState

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 48
ROWS = 30
"""Blocks or layers that have a line of their own."""


def sparkline(values: Sequence[float] | np.ndarray, width: int = WIDTH) -> str:
    """Numbers as bars, at most ``width`` of them; where there are more, means of neighbours.

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
    """What a terminal shows of a history: how it went, and how the wiring ended."""
    if not len(history):
        raise WiringError("this history has no record yet, so there is nothing to show. Train on.")
    states = list(history.states())
    last, structure = states[-1], history.structure
    rule = f"rule {history.about['rule']}, " if "rule" in history.about else ""
    lines = [
        title,
        f"{rule}{structure.nodes:,} nodes, {len(last):,} of {structure.edges:,} possible edges real "
        f"({100 * len(last) / structure.edges:.3g} %)",
    ]
    if len(history) > 1:
        lines += [
            f"{len(history)} records, steps {history.steps[0]:,} to {history.steps[-1]:,}",
            "",
            *_curves(history, states),
        ]
    lines += ["", *_table(last), "", _ages(last)]
    return "\n".join(line.rstrip() for line in lines).strip("\n")


def _curves(history: History, states: list[WiringState]) -> list[str]:
    rows, steps = [], np.array(history.steps)
    for name, unit in (("accuracy", " %"), ("loss", "")):
        at, values = history.series(name)
        if len(values):
            rows.append((name, at, values, f"{values[0]:.3g} → {values[-1]:.3g}{unit}"))
    births = history.births[1:]
    rows.append(("swapped", steps[1:], births, f"{births.sum():,} edges in all"))
    alive = np.array([np.count_nonzero(state.alive) for state in states])
    name = "alive" if history.structure.paths_known else "joined"
    rows.append((name, steps, alive, f"{alive[0]:,} → {alive[-1]:,} of {history.structure.nodes:,} nodes"))
    return [f"{name:9} {_in_time(at, values, steps)}  {said}" for name, at, values, said in rows]


def _in_time(at: np.ndarray, values: np.ndarray, steps: np.ndarray) -> str:
    """A sparkline whose bars are equal stretches of training, so that those of several numbers stand side by side."""
    places = np.clip((at - steps[0]) * WIDTH // max(steps[-1] - steps[0], 1), 0, WIDTH - 1)
    known = np.unique(places)
    means = np.array([values[places == place].mean() for place in known])
    last = np.searchsorted(known, np.arange(known[0], WIDTH), side="right") - 1  # where nothing is new, what was before
    return " " * int(known[0]) + sparkline(means[last])


def _table(state: WiringState) -> list[str]:
    """A line for each group of nodes: how many, how many are dead, their edges, and how those are spread."""
    into, out_of = state.degrees()
    structure = state.structure
    word = "dead" if structure.paths_known else "no edge"
    head = ["", "nodes", word, "edges in", "edges out", "edges in, node by node"]
    rows = []
    groups = structure.groups
    for group in groups if len(groups) <= ROWS else [*groups[: ROWS - 1], groups[-1]]:
        here = slice(group.start, group.stop)
        count = group.stop - group.start
        dead = count - int(np.count_nonzero(state.alive[here]))
        numbers = [f"{count:,}", f"{dead:,}", f"{into[here].sum():,}", f"{out_of[here].sum():,}"]
        rows.append([group.name, *numbers, sparkline(into[here], 32) if into[here].any() else ""])
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [
            cell.rjust(w) if 0 < i < 5 else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells))
    if len(groups) > ROWS:
        lines.insert(-1, f"… {len(groups) - ROWS} more …")
    return lines


def _ages(state: WiringState) -> str:
    """How old the edges are, and of which sign."""
    positive = 100 * np.count_nonzero(state.codes > 0) / max(len(state), 1)
    text = f"{positive:.0f} % of the edges are positive"
    if state.step > 0 and len(state):
        first = 100 * np.count_nonzero(state.born == state.born.min()) / len(state)
        if state.born.min() == 0:
            text += f"; {first:.0f} % were real from the beginning"
    return f"{text}."
