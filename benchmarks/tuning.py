"""Tables of learning rates that were tried on held-out data, from `results/tuning`; `benchmarks.readme` writes them.

`wirings tune --results results` writes the files: lists of runs with ``recipe``, ``lr``, ``scale_weights``, ``seed``,
``steps``, ``holdout``, ``metric`` and ``value``, which is null for a training that diverged.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS
from wirings.train.data.metrics import METRICS, Metric
from wirings.utils.tables import markdown_table

DENSE = "dense"


@dataclass(frozen=True)
class TunedRow:
    """The learning rates that were tried for one network and rule."""

    name: str
    """Such as ``dnw-10``, with what differs from the recipe."""
    values: dict[float, float]
    """The metric by learning rate, the mean if there are several seeds."""
    metric: Metric

    @property
    def best(self) -> float:
        """The best learning rate."""
        choose = max if self.metric.higher_is_better else min
        return choose(self.values, key=lambda rate: self.values[rate])

    @property
    def bracketed(self) -> str:
        """On which sides of the best rate others were tried: all of these were worse."""
        below, above = (any(sign * rate > sign * self.best for rate in self.values) for sign in (-1, 1))
        return {
            (True, True): "yes",
            (True, False): "no higher rate",
            (False, True): "no lower rate",
            (False, False): "only this rate",
        }[below, above]


def read(name: str, folder: Path = RESULTS / "tuning") -> list[TunedRow]:
    """The rows of a file, in the order of their first runs."""
    runs: list[dict[str, Any]] = json.loads((folder / f"{name}.json").read_text())
    usual = Counter(run["steps"] for run in runs).most_common(1)[0][0]
    metric = METRICS[runs[0]["metric"]]
    worst = -math.inf if metric.higher_is_better else math.inf
    found: dict[str, dict[float, list[float]]] = {}
    for run in runs:
        label = run["recipe"].removeprefix(f"{name}/")
        label = f"`{label}`" + (", `scale_weights`" if run["scale_weights"] else "")
        label += "" if run["steps"] == usual else f", {run['steps']:,} steps"
        value = worst if run["value"] is None else run["value"]
        found.setdefault(label, {}).setdefault(run["lr"], []).append(value)
    return [
        TunedRow(label, {rate: statistics.mean(values) for rate, values in sorted(by_rate.items())}, metric)
        for label, by_rate in found.items()
    ]


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
