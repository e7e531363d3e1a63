"""The leaderboard: every rule on the same networks and budgets, with its accuracy and its cost."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from wirings import rules
from wirings.errors import WiringError
from wirings.train import recipes
from wirings.train.recipes import Recipe
from wirings.train.tables.agreement import FEW_NOTE, seeds_cell
from wirings.train.tables.format import time_cell, with_commas, with_std
from wirings.train.tables.paper import TableRow, braced, in_columns, in_markdown, links, row_of
from wirings.utils.files import read_regular_text
from wirings.utils.text import brief
from wirings.wire.finalize import finalize_
from wirings.wire.wire import wire_

TABLE = "ste"
HEADER = (
    *("recipe", "accuracy", "seeds", "above dnw", "edges", "mult-adds", "training", "step"),
    *("first edges", "gradient", "memory", "results"),
)
NOTE = (
    "Above dnw: percentage points and, where both have two seeds or more, pooled standard deviations (sd) of the two. "
    "Training: the time of all training steps, including those of the network that a row starts from, of runs that "
    "were alone on their GPU; ≤: it is not known whether they were. Step: the time of a step relative to `dnw`, "
    "measured side by side by `benchmarks.rules`. First edges: those that the first step uses. Gradient: the edges "
    "whose gradients training needs. Memory: bytes per allowed edge, besides the weight and the optimizer's state. "
    f"{FEW_NOTE}"
)
NOT_YET = "not measured yet"


@dataclass(frozen=True)
class RuleNeeds:
    """What training with a rule needs."""

    first: str
    """The edges that the first step uses: ``"all"``, ``"k"`` (the budget), or a percentage of all."""
    gradient: str
    """The edges whose gradients it needs, see `wirings.rules.Rule.reaches`."""
    remembered: int
    """Bytes per allowed edge, besides the weight and the optimizer's state."""


@dataclass(frozen=True)
class Standing:
    """One row of the leaderboard."""

    row: TableRow
    rule: str
    above: float | None
    """Percentage points above the mean accuracy of ``dnw`` on the same network; None if either was not measured."""
    deviations: float | None
    """The same in pooled standard deviations of the two; None for ``dnw`` itself and without two seeds of both."""
    seconds: float | None
    """The duration of training, including that of the network that the row starts from."""
    alone: bool
    """Whether the runs of ``seconds`` are known to have been alone on their GPU."""
    ratio: float | None
    """The time of a step relative to ``dnw``, if the two were measured side by side."""
    needs: RuleNeeds


@dataclass(frozen=True)
class Leaderboard:
    """All rules on one network with one budget, best first; those without results are last."""

    title: str
    standings: tuple[Standing, ...]


def boards(folder: Path, table: str = TABLE) -> list[Leaderboard]:
    """The leaderboards of the results in a folder, one for each network and budget.

    Args:
        folder: the results.
        table: the table whose rows are compared. Rows without a budget, such as dense networks, are left out.
    """
    groups: dict[str, list[Recipe]] = {}
    for recipe in recipes.table(table):
        if recipe.settings.rule.name == "dense":
            continue
        groups.setdefault(_title(recipe), []).append(recipe)
    costs = step_costs(Path(folder))
    return [Leaderboard(title, _ranked(rows, Path(folder), costs)) for title, rows in groups.items()]


def step_costs(folder: Path) -> dict[str, float]:
    """For each recipe, the time of a step relative to ``dnw``, from the latest record of `benchmarks.rules`."""
    dated: list[tuple[str, dict[str, float]]] = []
    for path in (folder / "benchmarks").glob("rules-*.json"):
        try:
            record = json.loads(read_regular_text(path))
            rows = [row for network in record["networks"] for row in network["rows"]]
            dated.append((str(record["date"]), {str(row["recipe"]): float(row["ratio"]) for row in rows}))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise WiringError(f"{path} is not a record of benchmarks.rules: {brief(error)}. Remove it.") from error
    return {recipe: ratio for _, costs in sorted(dated, key=lambda one: one[0]) for recipe, ratio in costs.items()}


def _title(recipe: Recipe) -> str:
    """What comparable rows share: network, budget and epochs. Names end with the percentage of weights."""
    s = recipe.settings
    width = s.model.options.get("width", 1)
    if s.model.name == "mobilenetv1_dnw":
        return f"MobileNetV1-DNW × {width}, the network of Table 2; {s.epochs} epochs"
    data = "CIFAR-100, " if s.data.name == "cifar100" else ""
    return f"{data}ResNet18 × {width} with {recipe.name.rpartition('-')[2]} % of its weights; {s.epochs} epochs"


def is_dnw(recipe: str) -> bool:
    """Whether this is the recipe that others on the same network are compared with."""
    return recipe.split("/")[1].split("-")[0] == "dnw"


def _ranked(rows: Sequence[Recipe], folder: Path, costs: Mapping[str, float]) -> tuple[Standing, ...]:
    found = {recipe.name: row_of(recipe, folder) for recipe in rows}
    dnw = next(found[recipe.name] for recipe in rows if is_dnw(recipe.name))
    density = next((d for r in rows if (d := r.settings.model.options.get("density")) is not None), 0.02)
    standings = [_standing(recipe, found[recipe.name], dnw, folder, density, costs.get(recipe.name)) for recipe in rows]
    return tuple(sorted(standings, key=lambda one: -(one.row.mean or 0)))


def _standing(
    recipe: Recipe, row: TableRow, dnw: TableRow, folder: Path, density: float, ratio: float | None
) -> Standing:
    seconds, alone = row.train_s, row.alone
    if recipe.settings.start.recipe is not None:
        first = row_of(recipes.get(recipe.settings.start.recipe), folder)
        seconds = None if seconds is None or first.train_s is None else seconds + first.train_s
        alone = alone and first.alone
    return Standing(
        row=row,
        rule=recipe.settings.rule.name,
        above=None if row.mean is None or dnw.mean is None else row.mean - dnw.mean,
        deviations=None if row is dnw else in_deviations(row, dnw),
        seconds=seconds,
        alone=alone,
        ratio=ratio,
        needs=needs(rules.get(recipe.settings.rule.name, **recipe.settings.rule.options), density),
    )


def in_deviations(row: TableRow, dnw: TableRow) -> float | None:
    """How far the mean of a row is above that of ``dnw``, in pooled standard deviations of their seeds."""
    if row.mean is None or dnw.mean is None or row.std is None or dnw.std is None:
        return None
    more, others = len(row.seeds) - 1, len(dnw.seeds) - 1
    pooled = math.sqrt((more * row.std**2 + others * dnw.std**2) / (more + others))
    return (row.mean - dnw.mean) / pooled if pooled > 0 else None


def needs(rule: rules.Rule, density: float) -> RuleNeeds:
    """What training with a rule needs, measured on a small layer.

    >>> needs(rules.GMP(), 0.1)
    RuleNeeds(first='all', gradient='some', remembered=1)
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = nn.Linear(160, 100, bias=False)
        if rule.keeps_zeros:
            finalize_(wire_(layer, "fine_tune", density=density).model)
        wiring = wire_(layer, rule, density=None if rule.own_budget else density)
        used = layer.weight
    edges, count = wiring.layers[0].edges, int(used.count_nonzero())
    memory = edges.memory().values()
    percent = f"{100 * count / used.numel():.0f} %"
    return RuleNeeds(
        first="all" if count == used.numel() else "k" if count == int(edges.k) else percent,
        gradient=rule.reaches,
        remembered=sum(kept.element_size() for kept in memory if kept.shape == used.shape),
    )


def _cells(one: Standing, files: str) -> tuple[str, ...]:
    row, needs = one.row, one.needs
    return (
        row.recipe,
        with_std(row.mean, row.std, 2) or NOT_YET,
        seeds_cell(len(row.seeds)),
        ""
        if one.above is None
        else f"{one.above:+.2f}" + ("" if one.deviations is None else f" ({one.deviations:+.1f} sd)"),
        with_commas(row.edges),
        "" if row.mult_adds is None else f"{row.mult_adds / 1e6:.1f}M",
        time_cell(one.seconds, one.alone),
        "" if one.ratio is None else f"{one.ratio:.2f} ×",
        needs.first,
        needs.gradient,
        str(needs.remembered),
        files,
    )


def render(found: Sequence[Leaderboard]) -> str:
    """Format leaderboards as plain text."""
    text = []
    for board in found:
        rows = [_cells(one, braced(one.row)) for one in board.standings]
        text += [board.title, "", *in_columns(HEADER, rows, rule=False), ""]
    return "\n".join([*text, NOTE]) + "\n"


def markdown(found: Sequence[Leaderboard]) -> str:
    """Format leaderboards as Markdown, in which results are links as in `wirings.train.tables.paper.markdown`."""
    text = []
    for board in found:
        rows = [_cells(one, links(one.row)) for one in board.standings]
        text += [f"### {board.title}", "", *in_markdown(HEADER, rows), ""]
    return "\n".join([*text, NOTE]) + "\n"
