"""``wirings models``: the trained networks that come with the package."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from wirings.cli.options import JsonOption
from wirings.errors import WiringError
from wirings.utils.console import echo, open_console
from wirings.utils.text import printable


def models(
    patterns: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATTERN", help="Networks or patterns, such as table2/dnw, table2 or '*dnw*'."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List trained networks that come with the package; wirings.load("NAME") opens one."""
    from wirings.train import bundled

    names = _selected(patterns or [], bundled.names())
    described = {name: _described(name) for name in names}
    if as_json:
        echo(json.dumps(described, indent=1))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    columns = ["network", "rule", "data", "on the test set", "over seeds", "edges", "multiply-adds", "kB"]
    console = open_console()
    if console.width < 110:
        columns = [column for column in columns if column not in ("data", "over seeds")]
    for column in columns:
        right = column in ("edges", "multiply-adds", "kB")
        table.add_column(column, justify="right" if right else "left", no_wrap=column == "network")
    for name, entry in described.items():
        cells = {
            "network": name,
            "rule": entry["rule"],
            "data": entry["data"],
            "on the test set": entry["shown"],
            "over seeds": entry["over_seeds"],
            "edges": "" if entry["edges"] is None else f"{entry['edges']:,}",
            "multiply-adds": "" if entry["mult_adds"] is None else f"{entry['mult_adds']:,}",
            "kB": f"{entry['bytes'] / 1000:,.0f}",
        }
        table.add_row(*(Text(printable(cells[column])) for column in columns))
    console.print(table)
    echo(
        f'\nOpen one with wirings.load("{names[0]}"); eval, show, ship, profile --trained and push take its name, too.'
    )


def _selected(patterns: list[str], names: list[str]) -> list[str]:
    import fnmatch

    from wirings.errors import unknown

    if not names:
        raise WiringError("this installation has no trained networks. Install wirings again.")
    chosen: set[str] = set()
    for pattern in patterns:
        found = {x for x in names if x == pattern or x.startswith(f"{pattern}/") or fnmatch.fnmatchcase(x, pattern)}
        if not found:
            raise unknown("trained network", pattern, names)
        chosen |= found
    return [name for name in names if name in chosen or not patterns]


def _described(name: str) -> dict[str, Any]:
    from wirings.train import bundled

    card, folder = bundled.card_of(name), bundled.folder_of(name)
    result = card.result
    return {
        "recipe": result.recipe,
        "rule": str(result.settings.get("rule", {}).get("name", "")),
        "data": str(result.settings.get("data", {}).get("name", "")),
        "metric": result.measured_by.name,
        "value": card.measured,
        "shown": card.quality,
        "seed": result.seed,
        "scores": card.scores,
        "over_seeds": card.over_seeds,
        "edges": result.edges,
        "params": result.params,
        "mult_adds": card.mult_adds,
        "dtype": card.dtype,
        "sha256": card.model_sha256,
        "history": card.history_sha256 is not None,
        "bytes": sum(path.stat().st_size for path in folder.iterdir()),
    }
