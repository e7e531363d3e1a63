"""The command line. Each group of commands is a module; they parse arguments, call the library and print."""

from __future__ import annotations

from typing import Annotated

import typer

from wirings.cli import data, demo, generate, inspect, models, push, recipes, ship, sweep, train, tune
from wirings.utils.console import echo
from wirings.version import __version__

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Learn how a neural network is wired while it trains."
)


def _print_version(wanted: bool) -> None:
    if wanted:
        echo(f"wirings {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


app.command()(demo.demo)
app.command()(recipes.recipes)
app.command()(models.models)
app.command()(train.train)
app.command()(sweep.sweep)
app.command()(tune.tune)
app.command("eval")(inspect.evaluate)
app.command()(inspect.bleu)
app.command()(inspect.predict)
app.command()(generate.generate)
app.command()(recipes.table)
app.command()(inspect.profile)
app.command()(ship.compact)
app.command()(ship.ship)
app.command()(push.push)
app.command()(inspect.show)
app.command()(data.data)
