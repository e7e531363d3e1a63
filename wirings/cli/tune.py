"""``wirings tune``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wirings.cli.options import (
    DataOption,
    DeviceOption,
    DryRunOption,
    JobsOption,
    MinutesOption,
    OnOption,
    PerGpuOption,
    RetriesOption,
    SeedOption,
    check_path,
    out_option,
)
from wirings.cli.sweep import check_sweep_options, execute, executor_for, list_runs, report_failures, split_seeds
from wirings.utils.tables import text_table

if TYPE_CHECKING:
    from wirings.train.sweep.display import SweepDisplay
    from wirings.train.sweep.plan import SweepRun
    from wirings.train.sweep.schedule import RunProgress
    from wirings.train.sweep.tuning import TunedRecipe


def tune(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE", help="Recipes, patterns such as 'text/*-10', or YAML files.", callback=check_path
        ),
    ],
    out: Annotated[Path, out_option("Folder of the search. The same command continues there.")],
    seed: SeedOption = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting for all runs. The search begins at optimizer.lr."),
    ] = None,
    jobs: JobsOption = None,
    per_gpu: PerGpuOption = None,
    on: OnOption = "local",
    data: DataOption = None,
    device: DeviceOption = None,
    results: Annotated[
        Path | None,
        typer.Option("--results", help="Folder in which to keep a record of all rates.", callback=check_path),
    ] = None,
    retries: RetriesOption = 3,
    max_minutes: MinutesOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Find the best learning rates on held-out data, such as: wirings tune text/dense text/dnw-10 --out tuning."""
    from wirings.train.sweep import folder, preflight
    from wirings.train.sweep.rate_records import check_records, write_rates
    from wirings.train.sweep.tuning import Tuning, has_diverged
    from wirings.utils.files import check_folder

    check_sweep_options(on, device, max_minutes)
    what, seeds = split_seeds(what, seed)
    tuning = Tuning(what, seeds or [0], change or [])
    runs = tuning.first_runs(out)
    preflight.check_runs(runs, data)
    if dry_run:
        list_runs(runs)
        return
    folder.check_sweep_folder(out, runs, tuning.belongs)
    if results is not None:
        check_folder(results, "--results")
        check_records(results, tuning.recipes)
    executor = executor_for(on, jobs, per_gpu, device)  # before anything is written: it may raise

    dropped: set[str] = set()

    def more(states: Sequence[RunProgress]) -> list[SweepRun]:
        new = tuning.more(states)
        if new:
            folder.claim_sweep_folder(out, [*(state.run for state in states), *new], tuning.belongs)
        for state in states:
            if state.run.requested and state.result is not None and state.attempts and state.run.path not in dropped:
                dropped.add(state.run.path)
                folder.drop_networks(state.folder)
        return new

    def interrupted() -> str:
        over = sum(recipe.over for recipe in tuning.recipes)
        return f"the search is over for {over} of {len(tuning.recipes)} recipes."

    def ended(shown: SweepDisplay) -> None:
        for path in [] if results is None else write_rates(results, tuning.recipes):
            shown.say(f"wrote {path}")

    count = len(tuning.recipes)
    what_for = f"Learning rates of {count} recipe{'s' if count > 1 else ''}"
    states, shown = execute(
        runs, out, executor, what_for, interrupted, ended, belongs=tuning.belongs,
        data=data, device=device, retries=retries, max_minutes=max_minutes, more=more,
    )  # fmt: skip
    shown.say("\n".join(rates_table(tuning.recipes)))
    report_failures([state for state in states if not (state.run.requested and has_diverged(state))], shown)


def rates_table(recipes: Sequence[TunedRecipe]) -> list[str]:
    """A line for each recipe: its best rate, what it gave, and what all of them gave."""
    rows = []
    for recipe in recipes:
        values, best, metric = recipe.values, recipe.best, recipe.metric
        shown = ("–", "") if best is None else (f"{best:g}", metric.format(values[best]))
        sides = ("yes" if recipe.bracketed else "no") if recipe.over else "not yet"
        numbers = (metric.number(value) if math.isfinite(value) else "diverged" for value in values.values())
        tried = ", ".join(f"{rate:g}: {number}" for rate, number in zip(values, numbers, strict=True))
        rows.append((recipe.name, *shown, sides, tried))
    head = ("recipe", "best rate", "on held-out data", "worse on both sides", "all rates")
    return text_table(head, rows, align="lrrll")
