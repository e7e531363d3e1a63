"""The leaderboard: every rule at one budget on the same networks, with what it reached and what it cost."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from wirings import rules
from wirings.train import recipes, tables
from wirings.train.recipes import Recipe
from wirings.wire.wire import wire_

TABLE = "ste"
HEADER = (
    *("recipe", "accuracy", "seeds", "above dnw", "edges", "mult-adds", "training", "a step"),
    *("edges at first", "gradient", "remembers", "results"),
)
NOTE = (
    "Training: the time of training steps, with that of the network that a row starts from; several runs may have "
    "shared a GPU. A step: its time over `dnw`'s, measured side by side by `benchmarks.rules`. Edges at first: those "
    "that the first step uses. Gradient: which edges training needs it of. Remembers: bytes an allowed edge, beside "
    "the weight and the optimizer's."
)
NOT_YET = "not measured yet"


@dataclass(frozen=True)
class Needs:
    """What training with a rule takes."""

    first: str
    """The edges that the first step uses: ``"all"``, ``"k"``, the budget's number, or a percentage of all."""
    gradient: str
    """Of which edges: see `wirings.rules.Rule.reaches`."""
    remembered: int
    """Bytes an allowed edge, beside the weight and the optimizer's memory."""


@dataclass(frozen=True)
class Standing:
    """One row."""

    row: tables.Row
    rule: str
    above: float | None
    """Points of accuracy above ``dnw``'s mean on the same network; None where either was not measured."""
    seconds: float | None
    """Of training; with those of the network that it starts from, where it does."""
    ratio: float | None
    """Of a step's time over ``dnw``'s, where the two were measured side by side."""
    needs: Needs


@dataclass(frozen=True)
class Board:
    """All rules on one network with one budget, the best first, those without results last."""

    title: str
    standings: tuple[Standing, ...]


def boards(folder: Path) -> list[Board]:
    """The leaderboard of the results in a folder, one a network and budget."""
    groups: dict[str, list[Recipe]] = {}
    for recipe in recipes.table(TABLE):
        groups.setdefault(_title(recipe), []).append(recipe)
    costs = step_costs(Path(folder))
    return [Board(title, _ranked(rows, Path(folder), costs)) for title, rows in groups.items()]


def step_costs(folder: Path) -> dict[str, float]:
    """By recipe: the time of a step over ``dnw``'s, as `benchmarks.rules` measured it; the latest record counts."""
    found = (folder / "benchmarks").glob("rules-*.json")
    records = sorted((json.loads(path.read_text(encoding="utf-8")) for path in found), key=lambda one: one["date"])
    rows = (row for record in records for network in record["networks"] for row in network["rows"])
    return {row["recipe"]: row["ratio"] for row in rows}


def _title(recipe: Recipe) -> str:
    """What rows that can be compared have in common: network, budget and epochs. Names end with the percentage."""
    s = recipe.settings
    width = s.model.options.get("width", 1)
    if s.model.name == "mobilenetv1_dnw":
        return f"MobileNetV1-DNW × {width}, the network of Table 2; {s.epochs} epochs"
    return f"ResNet18 × {width} with {recipe.name.rpartition('-')[2]} % of its weights; {s.epochs} epochs"


def _ranked(rows: Sequence[Recipe], folder: Path, costs: Mapping[str, float]) -> tuple[Standing, ...]:
    found = {recipe.name: tables.row_of(recipe, folder) for recipe in rows}
    dnw = next(found[recipe.name] for recipe in rows if recipe.name.split("/")[1].split("-")[0] == "dnw")
    density = next((r.settings.model.options["density"] for r in rows if "density" in r.settings.model.options), 0.02)
    standings = [_standing(recipe, found[recipe.name], dnw, folder, density, costs.get(recipe.name)) for recipe in rows]
    return tuple(sorted(standings, key=lambda one: -(one.row.mean or 0)))


def _standing(
    recipe: Recipe, row: tables.Row, dnw: tables.Row, folder: Path, density: float, ratio: float | None
) -> Standing:
    seconds = row.train_s
    if recipe.settings.start.recipe is not None:
        first = tables.row_of(recipes.get(recipe.settings.start.recipe), folder).train_s
        seconds = None if seconds is None or first is None else seconds + first
    return Standing(
        row=row,
        rule=recipe.settings.rule.name,
        above=None if row.mean is None or dnw.mean is None else row.mean - dnw.mean,
        seconds=seconds,
        ratio=ratio,
        needs=needs(rules.get(recipe.settings.rule.name, **recipe.settings.rule.options), density),
    )


def needs(rule: rules.Rule, density: float) -> Needs:
    """What training with a rule takes, as a small layer tells.

    >>> needs(rules.GMP(), 0.1)
    Needs(first='all', gradient='some', remembered=1)
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = nn.Linear(160, 100, bias=False)
        wiring = wire_(layer, rule, density=None if rule.own_budget else density)
        used = layer.weight
    edges, count = wiring.layers[0].edges, int(used.count_nonzero())
    memory = edges.memory().values()
    percent = f"{100 * count / used.numel():.0f} %"
    return Needs(
        first="all" if count == used.numel() else "k" if count == int(edges.k) else percent,
        gradient=rule.reaches,
        remembered=sum(kept.element_size() for kept in memory if kept.shape == used.shape),
    )


def _cells(one: Standing, files: str) -> tuple[str, ...]:
    row, needs = one.row, one.needs
    return (
        row.recipe,
        tables.with_std(row.mean, row.std, 2) or NOT_YET,
        str(len(row.seeds)),
        "" if one.above is None else f"{one.above:+.2f}",
        tables.number(row.edges),
        "" if row.mult_adds is None else f"{row.mult_adds / 1e6:.1f}M",
        tables.duration(one.seconds),
        "" if one.ratio is None else f"{one.ratio:.2f} ×",
        needs.first,
        needs.gradient,
        str(needs.remembered),
        files,
    )


def render(found: Sequence[Board]) -> str:
    """The boards as plain text."""
    text = []
    for board in found:
        rows = [_cells(one, tables.braced(one.row)) for one in board.standings]
        text += [board.title, "", *tables.in_columns(HEADER, rows, ruled=False), ""]
    return "\n".join([*text, NOTE]) + "\n"


def markdown(found: Sequence[Board]) -> str:
    """The boards as Markdown; results are links, as in `wirings.train.tables.markdown`."""
    text = []
    for board in found:
        rows = [_cells(one, tables.links(one.row)) for one in board.standings]
        text += [f"### {board.title}", "", *tables.in_markdown(HEADER, rows), ""]
    return "\n".join([*text, NOTE]) + "\n"
