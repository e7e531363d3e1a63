"""A summary of a history for the terminal: sparklines, and a table of blocks or layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wirings.draw.common import check_has_records, rule_label
from wirings.history import History, WiringState
from wirings.history.blocks import column_name
from wirings.history.heads import TransformerCounts, count_edges
from wirings.history.structure import WiringStructure
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
    structure, alive = history.structure, []
    counts = None if structure.transformer is None else count_edges(structure, history.states())
    if counts is None:
        alive = [int(np.count_nonzero(state.alive)) for state in history.states()]
    last = history.state()
    rule = f"rule {printable(rule_label(history))}, " if rule_label(history) else ""
    lines = [
        printable(title),
        f"{rule}{structure.nodes:,} nodes, {len(last):,} of {structure.edges:,} possible edges real "
        f"({100 * len(last) / structure.edges:.3g} %)" + _blocks_text(last),
    ]
    if len(history) > 1:
        lines += [
            f"{len(history)} records, steps {history.steps[0]:,} to {history.steps[-1]:,}",
            "",
            *_curves(history, alive if counts is None else counts),
        ]
    table = _group_table(last) if counts is None else [*_block_table(counts, structure), *_dead_heads(counts)]
    lines += ["", *table, "", _signs_and_ages(last)]
    return "\n".join(line.rstrip() for line in lines).strip("\n")


def _blocks_text(state: WiringState) -> str:
    counts = state.block_counts()
    if counts is None:
        return ""
    real, possible = (sum(side) for side in zip(*counts, strict=True))
    return f", {real:,} of {possible:,} blocks"


def _curves(history: History, known: list[int] | TransformerCounts) -> list[str]:
    """One line with a sparkline for each of accuracy, loss, swapped edges and live nodes.

    Of a transformer, the density of each kind of layer and live heads instead of live nodes.
    """
    rows, steps = [], np.array(history.steps)
    for name in history.curves():
        at, values = history.series(name)
        unit = " %" if name == "accuracy" else ""
        rows.append((printable(name), at, values, f"{values[0]:.3g} → {values[-1]:.3g}{unit}"))
    births = history.births[1:]
    rows.append(("swapped", steps[1:], births, f"{births.sum():,} edges in total"))
    if isinstance(known, TransformerCounts):
        if known.heads:
            live, total = known.live_heads(), sum(one.attention.heads for one in known.heads)
            rows.append(("live heads", steps, live, f"{live[0]:,} → {live[-1]:,} of {total:,}"))
        for column, values in zip(known.transformer.columns, known.column_densities().T, strict=True):
            if np.ptp(values) > 0.01 * values.max():  # most budgets keep the density of a layer
                text = f"{values[0]:.3g} → {values[-1]:.3g} % of the edges"
                rows.append((column_name(*column), steps, values, text))
    else:
        alive = np.array(known)
        name = "alive" if history.structure.paths_known else "with edges"
        rows.append((name, steps, alive, f"{alive[0]:,} → {alive[-1]:,} of {history.structure.nodes:,} nodes"))
    wide = max(10, *(len(row[0]) for row in rows))
    return [f"{name:{wide}} {_timeline(at, values, steps)}  {text}" for name, at, values, text in rows]


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


def _block_table(counts: TransformerCounts, structure: WiringStructure) -> list[str]:
    """A row for each block of a transformer: the density of each kind of layer, and heads; then the layers outside."""
    found = counts.transformer
    rows = []
    for block, row in enumerate(counts.densities()[-1]):
        own = [one for one in counts.heads if one.attention.block == block]
        live, total = sum(int((~one.dead[-1]).sum()) for one in own), sum(one.attention.heads for one in own)
        cells = ["" if np.isnan(value) else f"{value:.3g} %" for value in row]
        heads = "" if not own else f"{total}" if live == total else f"{live} of {total}"
        rows.append([printable(found.blocks[block]), *cells, heads])
    if len(rows) > MAX_ROWS:
        rows = [*rows[: MAX_ROWS - 1], [f"… {len(rows) - MAX_ROWS} more …", *[""] * (len(found.columns) + 1)], rows[-1]]
    head = ["density", *(column_name(*column) for column in found.columns), "live heads" if counts.heads else ""]
    lines = text_table(head, rows, align="l" + "r" * (len(head) - 1), rule=False)
    outside = []
    for layer, real in zip(found.outside, counts.outside[-1].tolist(), strict=True):
        one = structure.layers[layer]
        outside.append(f"{printable(one.name.removesuffix('.weight'))} {100 * real / (one.stop - one.start):.3g} %")
    return [*lines, *([f"outside the blocks: {', '.join(outside[:MAX_ROWS])}"] if outside else [])]


def _dead_heads(counts: TransformerCounts) -> list[str]:
    """What the dead heads of a transformer lack, a line for each attention that has any."""
    lines = []
    for one in counts.heads:
        dead = [f"{head} ({text})" for head, text in enumerate(one.missing[-1]) if text]
        if dead:
            block = printable(counts.transformer.blocks[one.attention.block])
            more = f", … {len(dead) - MAX_ROWS} more" if len(dead) > MAX_ROWS else ""
            lines.append(f"{block}, {one.attention.family}: head {', '.join(dead[:MAX_ROWS])}{more}")
    if not lines:
        return []
    rest = [f"… {len(lines) - MAX_ROWS} more blocks …"] if len(lines) > MAX_ROWS else []
    return ["", "dead heads, with what has no real edge:", *lines[:MAX_ROWS], *rest]


def _signs_and_ages(state: WiringState) -> str:
    """How many edges are positive, and how many have been real since the start."""
    positive = 100 * np.count_nonzero(state.codes > 0) / max(len(state), 1)
    text = f"{positive:.0f} % of the edges are positive"
    if state.step > 0 and len(state):
        first = 100 * np.count_nonzero(state.born == state.born.min()) / len(state)
        if state.born.min() == 0:
            text += f"; {first:.0f} % have been real since the start"
    return f"{text}."
