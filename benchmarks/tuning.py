"""Tables of learning rates that were tried on held-out data, from `results/tuning`; `benchmarks.readme` writes them.

`wirings tune --results results` adds to these files; `wirings.train.tables.tuned` describes them.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS
from wirings.train.data.metrics import METRICS
from wirings.train.tables.tuned import TriedRates, read_lines, tried_rates
from wirings.utils.tables import markdown_table

DENSE = "dense"


@dataclass(frozen=True)
class TunedRow(TriedRates):
    """The learning rates that were tried for one network and rule."""

    name: str
    """Such as ``dnw-10``, with what differs from the recipe."""

    @property
    def bracketed(self) -> str:
        """On which sides of the best rate others were tried."""
        return {
            (True, True): "yes",
            (True, False): "no higher rate",
            (False, True): "no lower rate",
            (False, False): "only this rate",
        }[self.sides]


def read(name: str, folder: Path = RESULTS / "tuning") -> list[TunedRow]:
    """The rows of a file, in the order of their first runs."""
    runs = read_lines(folder / f"{name}.json")
    usual = Counter(run["steps"] for run in runs).most_common(1)[0][0]
    found: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        label = run["recipe"].removeprefix(f"{name}/")
        label = f"`{label}`" + (", `scale_weights`" if run["scale_weights"] else "")
        label += "" if run["steps"] == usual else f", {run['steps']:,} steps"
        found.setdefault(label, []).append(run)
    tried = {label: tried_rates(mine) for label, mine in found.items()}
    return [TunedRow(one.values, one.metric, label) for label, one in tried.items()]


def table(name: str, folder: Path = RESULTS / "tuning") -> str:
    """A Markdown table of one file: a row for each rule, a column for each rate, the best of each row in bold."""
    rows = read(name, folder)
    rates = sorted({rate for row in rows for rate in row.values})
    dense = next((row.best for row in rows if row.name == f"`{DENSE}`"), None)
    cells = []
    for row in rows:
        shown = {rate: f"{value:.3f}" if math.isfinite(value) else "diverged" for rate, value in row.values.items()}
        shown[row.best] = f"**{shown[row.best]}**"
        times = "" if dense is None or row.name == f"`{DENSE}`" else f"{row.best / dense:.2g} ×"
        cells.append((row.name, *(shown.get(rate, "") for rate in rates), times, row.bracketed))
    head = ("learning rate", *(f"{rate:g}" for rate in rates), "best, to dense's", "worse on both sides")
    return "\n".join(markdown_table(head, cells, align="l" + "r" * (len(rates) + 1) + "l"))


def tables(folder: Path = RESULTS / "tuning") -> str:
    """The tables of all files, each with a line that says what was measured."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        runs = json.loads(path.read_text())
        metric, steps = METRICS[runs[0]["metric"]], Counter(run["steps"] for run in runs).most_common(1)[0][0]
        seeds = len({run["seed"] for run in runs})
        better = "higher" if metric.higher_is_better else "lower"
        of = "one seed" if seeds == 1 else f"the mean of up to {seeds} seeds"
        title = f"`{path.stem}/…`: {metric.label} on held-out data after {steps:,} steps, {of}; {better} is better."
        parts += [title, "", table(path.stem, folder), ""]
    return "\n".join(parts[:-1])


def ratios(name: str, folder: Path = RESULTS / "tuning") -> str:
    """A sentence on the best rates of wired networks, in multiples of the dense network's."""
    rows = read(name, folder)
    dense = next(row for row in rows if row.name == f"`{DENSE}`")
    wired = [row for row in rows if not row.name.startswith(f"`{DENSE}")]
    times = sorted(row.best / dense.best for row in wired)
    sides = sum(row.bracketed == "yes" for row in wired)
    return (
        f"In the runs on `{name}` so far, the best rates of {len(wired)} wired networks are {times[0]:.2g} to "
        f"{times[-1]:.2g} times that of the dense one ({dense.best:g}); for {sides} of them, rates on both sides were "
        "worse ([table](transformers.md#which-rule-which-rate))."
    )
