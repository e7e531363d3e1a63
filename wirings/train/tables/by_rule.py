"""Tables that compare rules on one network: weights, density, metric, difference to dense, learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wirings.selection.structure import FREE, Structure
from wirings.train import recipes
from wirings.train.data.metrics import METRICS, Metric
from wirings.train.settings import Settings
from wirings.train.tables.agreement import seeds_cell
from wirings.train.tables.format import millions, time_cell
from wirings.train.tables.paper import TableRow, braced, few_note, links, row_of, time_note
from wirings.train.tables.tuned import rates_of
from wirings.utils.tables import markdown_table, text_table

TABLES = ("text", "shakespeare", "translate", "vit", "pruned")
"""The tables of this kind."""
ALIGN = "lllrrrrrrlrl"
DENSE = "dense"
"""The row that the others are compared with."""


@dataclass(frozen=True)
class ComparedRow:
    """One row: a recipe, what its network is, and what was measured."""

    recipe: str
    network: str
    """Such as ``gpt 6 × 512``: the model, its layers and its width."""
    rule: str
    """The rule, and its structure if it has one: ``dnw, 32x32``."""
    density: float
    """Fraction of the weights of wired layers that is real."""
    lr: float
    """The base learning rate."""
    rates: int
    """How many learning rates were tried on held-out data."""
    tuned: bool
    """Whether this is the best of them, with worse ones on both sides."""
    measured: TableRow
    difference: float | None
    """The metric minus that of the dense network; None if either was not measured, and for the dense network."""


def table(name: str, results_folder: Path) -> list[ComparedRow]:
    """The rows of a table, in the order of its file.

    Args:
        name: one of `TABLES`.
        results_folder: the folder of results.
    """
    found = [(recipe, row_of(recipe, Path(results_folder))) for recipe in recipes.table(name)]
    reference = next(row for recipe, row in found if recipe.name.partition("/")[2] == DENSE)
    dense = reference.mean
    return [
        ComparedRow(
            recipe=recipe.name,
            network=_network(recipe.settings),
            rule=_rule(recipe.settings),
            density=_density(recipe.settings),
            lr=recipe.settings.optimizer.lr,
            **_tried(recipe, Path(results_folder)),
            measured=row,
            difference=None if row.mean is None or dense is None or row is reference else row.mean - dense,
        )
        for recipe, row in found
    ]


def render(rows: Sequence[ComparedRow]) -> str:
    """Format rows as plain text."""
    cells = [_cells(row, braced(row.measured)) for row in rows]
    return "\n".join([*text_table(_header(rows), cells, align=ALIGN), *_footnotes(rows)]) + "\n"


def markdown(rows: Sequence[ComparedRow]) -> str:
    """Format rows as a Markdown table, in which results are links relative to the working directory."""
    cells = [(f"`{row.recipe}`", *_cells(row, links(row.measured))[1:]) for row in rows]
    notes = [line for note in _footnotes(rows) for line in ("", note)]
    return "\n".join([*markdown_table(_header(rows), cells, align=ALIGN), *notes]) + "\n"


def _network(settings: Settings) -> str:
    options = settings.model.options
    size = " × ".join(str(options[key]) for key in ("layers", "width") if key in options)
    return f"{settings.model.name} {size}".rstrip()


def _rule(settings: Settings) -> str:
    structure = Structure.of(settings.model.options.get("structure", FREE))
    return settings.rule.name if structure is None else f"{settings.rule.name}, {structure}"


def _density(settings: Settings) -> float:
    structure = Structure.of(settings.model.options.get("structure", FREE))
    if structure is not None and structure.fixed is not None:
        return structure.fixed
    return float(settings.model.options.get("density", 1.0))


def _metric(rows: Sequence[ComparedRow]) -> Metric | None:
    """The metric of all rows; None if nothing was measured yet."""
    return next((METRICS[row.measured.metric] for row in rows if row.measured.seeds), None)


def _header(rows: Sequence[ComparedRow]) -> tuple[str, ...]:
    metric = _metric(rows)
    label = "result" if metric is None else metric.label
    return (
        *("recipe", "network", "rule", "weights", "density", label, "seeds", "to dense"),
        *("learning rate", "rates", "training", "results"),
    )


def _cells(row: ComparedRow, files: str) -> tuple[str, ...]:
    found, metric = row.measured, METRICS[row.measured.metric]
    std = "" if found.std is None else f" ± {metric.number(found.std)}"
    return (
        row.recipe,
        row.network,
        row.rule,
        millions(found.params),
        f"{100 * row.density:.3g} %",
        "" if found.mean is None else metric.number(found.mean) + std,
        seeds_cell(len(found.seeds)),
        "" if row.difference is None else f"{row.difference:+.{metric.digits}f}",
        f"{row.lr:g}",
        f"{row.rates or '–'}{'' if row.tuned else '‡'}",
        time_cell(found.train_s, found.alone),
        files,
    )


def _tried(recipe: recipes.Recipe, results_folder: Path) -> dict[str, Any]:
    """How many learning rates were tried for a recipe, and whether its own is the best of them."""
    found = rates_of(recipe.name, recipe.settings, results_folder)
    if found is None:
        return {"rates": 0, "tuned": False}
    best = math.isclose(found.best, recipe.settings.optimizer.lr, rel_tol=0.02)
    return {"rates": len(found.values), "tuned": best and all(found.sides)}


def _footnotes(rows: Sequence[ComparedRow]) -> list[str]:
    metric = _metric(rows)
    direction = [] if metric is None else [f"{'Higher' if metric.higher_is_better else 'Lower'} is better."]
    left_out = [
        f"{row.recipe}: {row.measured.left_out} more with settings that differ from the recipe, which do not count."
        for row in rows
        if row.measured.left_out
    ]
    measured = [row.measured for row in rows]
    rates = "Rates: how many learning rates were tried on held-out data."
    if not all(row.tuned for row in rows):
        rates += " ‡: worse ones are not known on both sides, so that another rate may be better."
    direction.append(rates)
    return [*direction, *few_note(measured), *time_note(measured), *left_out]
