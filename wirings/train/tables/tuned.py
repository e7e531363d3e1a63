"""Learning rates that were tried on held-out data: the records in ``results/tuning``, a file for each table.

A file is a list of lines, one for each run: ``recipe``, ``lr``, ``scale_weights``, ``seed``, ``steps``, ``holdout``,
``metric``, ``value`` (None if the training diverged) and ``commit``. `wirings tune` writes them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from statistics import fmean
from typing import Any

from wirings.errors import WiringError
from wirings.train.data.metrics import METRICS, Metric
from wirings.train.settings import Settings
from wirings.utils.files import read_regular_text

FOLDER = "tuning"
"""Where the records are in a folder of results."""
FIELDS: dict[str, Any] = {"recipe": str, "lr": float, "seed": int, "metric": str, "value": (float, int, type(None))}
"""What every line has at least."""


@dataclass(frozen=True)
class TriedRates:
    """The learning rates that were tried for one recipe."""

    values: dict[float, float]
    """The metric by learning rate, the mean if there are several seeds; infinitely bad if a training diverged."""
    metric: Metric

    @property
    def best(self) -> float:
        """The best learning rate."""
        choose = max if self.metric.higher_is_better else min
        return choose(self.values, key=lambda rate: self.values[rate])

    @property
    def sides(self) -> tuple[bool, bool]:
        """Whether a lower rate than the best one was worse, and a higher one."""
        return worse_sides(losses_of(self.values, self.metric), self.best)


def losses_of(values: Mapping[float, float], metric: Metric) -> dict[float, float]:
    """Values of a metric by rate as numbers of which the smallest is best, infinite for a training that diverged."""
    sign = -1 if metric.higher_is_better else 1
    return {rate: sign * value if math.isfinite(value) else math.inf for rate, value in values.items()}


def worse_sides(losses: Mapping[float, float], best: float) -> tuple[bool, bool]:
    """Whether a lower rate than the best one is worse, and a higher one.

    >>> worse_sides({0.1: 1.2, 0.2: 1.0, 0.4: 1.0}, 0.2)
    (True, False)
    """
    worse = [rate for rate, loss in losses.items() if loss > losses[best]]
    return any(rate < best for rate in worse), any(rate > best for rate in worse)


def record_path(results: Path, recipe: str) -> Path:
    """Where the rates of a recipe are recorded in a folder of results."""
    return results / FOLDER / f"{PurePosixPath(recipe).parts[0]}.json"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a record; none if there is no such file."""
    if not path.exists():
        return []
    try:
        lines = json.loads(read_regular_text(path))
    except (OSError, ValueError) as error:
        raise WiringError(f"{path} is not a record of learning rates: {error}. Restore or remove it.") from error
    fits = isinstance(lines, list) and all(
        isinstance(line, dict) and all(isinstance(line.get(key), kind) for key, kind in FIELDS.items())
        for line in lines
    )
    if not fits or not all(line["metric"] in METRICS for line in lines):
        raise WiringError(f"{path} is not a record of learning rates. Restore or remove it.")
    return lines


def tried_rates(lines: Sequence[dict[str, Any]]) -> TriedRates:
    """The rates of lines that differ in rate and seed alone; at least one line."""
    metric = METRICS[lines[0]["metric"]]
    worst = -math.inf if metric.higher_is_better else math.inf
    by_rate: dict[float, list[float]] = {}
    for line in lines:
        by_rate.setdefault(line["lr"], []).append(worst if line["value"] is None else line["value"])
    return TriedRates({rate: fmean(values) for rate, values in sorted(by_rate.items())}, metric)


def rates_of(recipe: str, settings: Settings, results: Path) -> TriedRates | None:
    """The rates that were tried for a recipe as it is, most of them in the same way, or None."""
    scaled = bool(settings.model.options.get("scale_weights", False))
    mine = [
        line
        for line in read_lines(record_path(results, recipe))
        if line["recipe"] == recipe
        and bool(line.get("scale_weights", False)) == scaled
        and settings.steps in (None, line.get("steps"))
    ]
    alike: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    for line in mine:
        alike.setdefault((line.get("steps"), line.get("holdout")), []).append(line)
    return tried_rates(max(alike.values(), key=len)) if alike else None
