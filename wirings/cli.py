"""The command line: parses, calls the library, prints."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import rich
import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from wirings import demo as demonstration
from wirings.errors import WiringError
from wirings.version import __version__

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Learn how a neural network is wired while it trains."
)


def _version(wanted: bool) -> None:
    if wanted:
        rich.print(f"wirings {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


@app.command()
def demo(
    seeds: Annotated[int, typer.Option(help="Networks to train for each rule.")] = 5,
    out: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("demo.png"),
) -> None:
    """Learn a wiring on embedded digits, beside a random one with as many edges; under a minute."""
    if not out.parent.is_dir() or out.suffix != ".png":
        raise WiringError(f"--out must be a .png file in a folder that exists, but it is {out}.")
    settings = demonstration.Settings(seeds=seeds)
    started = time.perf_counter()
    torch.set_num_threads(1)  # the matrices are small: a second thread would only wait
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("", total=2 * settings.runs)
        begun = 0

        def progress(what: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, description=what.ljust(28))
            begun += 1

        outcomes = demonstration.compare(settings, progress=progress)
        bar.update(task, completed=begun, description="done".ljust(28))
    images = len(demonstration.splits()[1].y_test)
    table = Table(title=f"8×8 digits, {settings.seeds} seeds, accuracy on {images} test images")
    for column in ("rule", "learning rate", "edges", "density", "edges swapped", "accuracy"):
        table.add_column(column, justify="left" if column == "rule" else "right")
    for outcome in outcomes:
        swapped = sum(outcome.swapped) / len(outcome.swapped)
        accuracy = f"{outcome.mean:.2f} ± {outcome.std:.2f} %"
        edges, density = f"{outcome.edges:,}", f"{100 * settings.density:g} %"
        table.add_row(outcome.rule, f"{outcome.lr:g}", edges, density, f"{swapped:,.0f}", accuracy)
    rich.print(table)
    best, other = sorted(outcomes, key=lambda outcome: -outcome.mean)
    pooled = ((best.std**2 + other.std**2) / 2) ** 0.5
    gap = best.mean - other.mean
    rich.print(f"{best.rule} is ahead by {gap:.2f} points, {gap / max(pooled, 1e-9):.1f} pooled standard deviations.")
    demonstration.draw(outcomes, str(out))
    rich.print(f"Wrote the two wirings to {out}. It took {time.perf_counter() - started:.0f} s.")
