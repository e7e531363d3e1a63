"""``wirings demo``."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Annotated

import typer

from wirings.cli.options import out_option
from wirings.errors import WiringError
from wirings.utils.console import echo, open_console


def demo(
    seeds: Annotated[int, typer.Option("--seeds", help="Number of networks to train for each rule.")] = 5,
    out: Annotated[Path, out_option("PNG file for the picture of both wirings; demo.png by default.")] = Path(
        "demo.png"
    ),
) -> None:
    """Learn a wiring on embedded digits and compare it with a random one. Takes less than a minute."""
    import torch
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Table

    from wirings.cli.comparison import ComparisonSettings, compare, draw_networks, splits

    if not out.parent.is_dir() or out.suffix != ".png":
        raise WiringError(f"--out must be a .png file in an existing folder, got {out}.")
    settings = ComparisonSettings(seeds=seeds)
    started = time.perf_counter()
    torch.set_num_threads(1)  # the matrices are small: a second thread would only wait
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task, begun = bar.add_task("", total=2 * settings.runs), itertools.count()
        outcomes = compare(
            settings,
            progress=lambda what: bar.update(task, completed=next(begun), description=what.ljust(28)),
        )
        bar.update(task, completed=2 * settings.runs, description="done".ljust(28))
    images = len(splits()[1].y_test)
    table = Table(title=f"8×8 digits, {settings.seeds} seeds, accuracy on {images} test images")
    for column in ("rule", "learning rate", "edges", "density", "edges swapped", "accuracy"):
        table.add_column(column, justify="left" if column == "rule" else "right")
    for outcome in outcomes:
        swapped = sum(outcome.swapped) / len(outcome.swapped)
        accuracy = f"{outcome.mean:.2f} ± {outcome.std:.2f} %"
        edges, density = f"{outcome.edges:,}", f"{100 * settings.density:g} %"
        table.add_row(outcome.rule, f"{outcome.lr:g}", edges, density, f"{swapped:,.0f}", accuracy)
    open_console().print(table)
    best, other = sorted(outcomes, key=lambda outcome: -outcome.mean)
    gap, pooled = best.mean - other.mean, best.ahead_of(other)
    echo(f"{best.rule} is ahead by {gap:.2f} points, {pooled:.1f} pooled standard deviations.")
    draw_networks(outcomes, str(out))
    echo(f"Wrote the two wirings to {out}. It took {time.perf_counter() - started:.0f} s.")
