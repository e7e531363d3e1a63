"""``wirings recipes`` and ``wirings table``: what there is to train, and how the results compare with the paper's."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wirings.cli.options import JsonOption, check_path
from wirings.errors import WiringError, unknown
from wirings.utils.console import echo, open_console
from wirings.utils.text import brief, printable

if TYPE_CHECKING:
    from wirings.train.recipes import Recipe

COLUMNS: dict[str, tuple[int, Callable[[Recipe], str]]] = {
    "recipe": (0, lambda recipe: recipe.name),
    "model": (110, lambda recipe: recipe.settings.model.name),
    "rule": (0, lambda recipe: recipe.settings.rule.name),
    "data": (90, lambda recipe: recipe.settings.data.name),
    "epochs": (110, lambda recipe: _length(recipe)),
    "paper": (0, lambda recipe: _paper(recipe)),
    "note": (200, lambda recipe: recipe.note or ""),
}
"""Columns of the list: the smallest terminal width at which each is shown, and what it shows."""


def recipes(
    patterns: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATTERN", help="Tables, recipes or patterns, such as table2, table2/dnw or '*dnw*'."),
    ] = None,
    rule: Annotated[str | None, typer.Option("--rule", help="Only recipes with this rule.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Only recipes with this model.")] = None,
    dataset: Annotated[str | None, typer.Option("--dataset", help="Only recipes with this data set.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List recipes with the accuracy that the paper reports; for a single one, also its note and settings."""
    from rich.table import Table
    from rich.text import Text

    from wirings.train.settings import to_mapping
    from wirings.train.yaml_io import dump_yaml

    found = _selected(patterns or [], rule, model, dataset)
    if as_json:
        described = [
            {"name": one.name, "paper": one.paper, "note": one.note, "settings": to_mapping(one.settings)}
            for one in found
        ]
        echo(json.dumps(described, indent=1))
        return
    console = open_console()
    columns = {name: cell for name, (width, cell) in COLUMNS.items() if console.width >= width}
    if len(found) == 1:
        columns.pop("note", None)  # it is printed below
    table = Table(box=None, pad_edge=False, padding=(0, 2 if console.width >= 110 else 1, 0, 0))
    for name in columns:
        table.add_column(name, overflow="fold", justify="right" if name == "epochs" else "left")
    for one in found:
        table.add_row(*(Text(printable(cell(one))) for cell in columns.values()))
    console.print(table)
    if len(found) == 1:
        echo(f"\n{found[0].note or ''}\n{dump_yaml(to_mapping(found[0].settings))}".replace("\n\n", "\n", 1).rstrip())


def _length(recipe: Recipe) -> str:
    """The length of training, in epochs unless it is given in steps."""
    settings = recipe.settings
    return str(settings.epochs) if settings.steps is None else f"{settings.steps:,} steps"


def _paper(recipe: Recipe) -> str:
    """The accuracy that the paper or the authors' code reports."""
    paper = recipe.paper or {}
    accuracy = paper.get("accuracy", paper.get("published"))
    std = f" ± {paper['std']}" if "std" in paper else ""
    return "" if accuracy is None else f"{accuracy}{std} %"


def _selected(patterns: Sequence[str], rule: str | None, model: str | None, dataset: str | None) -> list[Recipe]:
    """The recipes that match, table by table, in the paper's order."""
    from wirings.train import recipes as library

    # In the order of their own tables: others may include a row by its name.
    rows = [row.name for table in library.tables() for row in library.table(table) if row.name.startswith(f"{table}/")]
    place = {name: number for number, name in enumerate(dict.fromkeys(rows))}
    names = sorted(library.names(), key=lambda name: (name.partition("/")[0], place.get(name, len(place)), name))
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in names):
            if any(letter in pattern for letter in "*?["):
                raise WiringError(f"no recipe matches {brief(pattern)}. `wirings recipes` lists them.")
            raise unknown("recipe or table", pattern, [*names, *library.tables()], listed=library.tables())
    chosen = [name for name in names if not patterns or any(_matches(name, pattern) for pattern in patterns)]
    found = [library.get(name) for name in chosen]
    for what, value, column in (("rule", rule, "rule"), ("model", model, "model"), ("data set", dataset, "data")):
        if value is not None:
            present = {COLUMNS[column][1](library.get(name)) for name in names}
            if value not in present:
                raise unknown(what, value, present)
            found = [one for one in found if COLUMNS[column][1](one) == value]
    return found


def _matches(name: str, pattern: str) -> bool:
    """Whether a recipe matches a table's name or number, its own name, or a pattern with wildcards."""
    table = name.partition("/")[0]
    return pattern in (table, table.removeprefix("table"), name) or fnmatch.fnmatchcase(name, pattern)


def table(
    number: Annotated[
        str,
        typer.Argument(
            metavar="TABLE",
            help="Number of a table in the paper, appendix_b, resnet, cifar100 or growth; or, to compare rules, ste, "
            "text, shakespeare, translate, vit or pruned.",
        ),
    ],
    results: Annotated[
        Path, typer.Option("--results", help="Folder that holds the results.", callback=check_path)
    ] = Path("results"),
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    count: Annotated[
        bool, typer.Option(help="Count the parameters and multiply-adds of networks that have no result.")
    ] = True,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="With ste, also draw accuracy against multiply-adds: FILE-1.png and so on."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print a table of the paper with its figures beside the measured ones, or a comparison of rules."""
    from wirings.train.tables import by_rule, equal_cost, leaderboard
    from wirings.train.tables import paper as tables

    if as_json and markdown:
        raise WiringError("--json and --markdown exclude each other. Give one of them.")
    if plot is not None and number != leaderboard.TABLE:
        raise WiringError(f"--plot draws the rules of table ste, got table {number}.")
    if number == leaderboard.TABLE:
        boards = equal_cost.boards(results)
        echo(_as_json(boards) if as_json else leaderboard.markdown(boards) if markdown else leaderboard.render(boards))
        if plot is not None:
            of_rules = [*leaderboard.boards(results), *leaderboard.boards(results, equal_cost.ON_CIFAR_100)]
            for path in equal_cost.figure(results, of_rules, plot):
                echo(f"saved {path}", err=True)
    elif number in by_rule.TABLES:
        compared = by_rule.table(number, results)
        echo(_as_json(compared) if as_json else by_rule.markdown(compared) if markdown else by_rule.render(compared))
    else:
        rows = tables.table(number, results, count)
        echo(_as_json(rows) if as_json else tables.markdown(rows) if markdown else tables.render(rows))
    if not results.is_dir():
        echo(f"There is no folder {results}, so no row has a result. Give another one with --results.", err=True)


def _as_json(rows: Sequence[Any]) -> str:
    """Dataclasses as JSON, paths as strings."""
    return json.dumps([asdict(row) for row in rows], indent=1, default=str)
