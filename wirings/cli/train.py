"""``wirings train``."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from wirings.cli.options import (
    DataOption,
    DeviceOption,
    MinutesOption,
    OverwriteOption,
    RecipeArgument,
    ResultsOption,
    SeedOption,
    check_path,
    out_option,
)
from wirings.errors import WiringError
from wirings.utils.console import echo
from wirings.utils.signals import StopSignals

INTERRUPTED = "Interrupted. To continue from the last checkpoint, repeat the command with --resume."
UNSAVED = "Interrupted before the first checkpoint. To start over, repeat the command."


def train(
    recipe: RecipeArgument,
    seed: SeedOption = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", help="Change a setting, such as optimizer.lr=0.2. Repeatable.")
    ] = None,
    data: DataOption = None,
    out: Annotated[Path | None, out_option("Folder of the run; runs/RECIPE/seedN by default.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last checkpoint in the folder, if there is one.")
    ] = False,
    start: Annotated[
        Path | None,
        typer.Option(
            "--start", help="Folder of the trained run that a recipe such as a ticket starts from.", callback=check_path
        ),
    ] = None,
    max_minutes: MinutesOption = None,
    device: DeviceOption = None,
    results: ResultsOption = None,
    overwrite: OverwriteOption = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write TensorBoard files to the run's folder.")
    ] = False,
    wandb: Annotated[
        str | None,
        typer.Option("--wandb", metavar="PROJECT", help="Log to this project of Weights & Biases."),
    ] = None,
) -> None:
    """Train a recipe, such as: wirings train table1/static-dnw --seed 1."""
    from wirings.train import recipes
    from wirings.train.distributed import leave
    from wirings.train.phases import train as train_recipe
    from wirings.train.results import write
    from wirings.train.run.folder import LAST
    from wirings.train.run.log import ConsoleLog, Log
    from wirings.train.settings import with_overrides
    from wirings.train.sweep.plan import parse_seeds

    found = recipes.get(recipe)
    settings, overrides = with_overrides(found.settings, change or [])
    seeds = parse_seeds(seed) if seed else [settings.seed]
    _check(found.name, seeds, out, start, results, overwrite)
    if data is not None:  # where the data is does not change the recipe
        settings = replace(settings, data=replace(settings.data, directory=str(data)))
    first = os.environ.get("RANK", "0") == "0"
    again = "Saving a checkpoint. Press Ctrl-C again to end without it."
    with StopSignals(again if first else "") as signals:
        for number in seeds:
            folder = out or Path("runs") / found.name / f"seed{number}"
            log = ConsoleLog(tensorboard, wandb) if first else Log()
            try:
                result = train_recipe(
                    found.name,
                    replace(settings, seed=number),
                    folder,
                    first_run=start,
                    device=device,
                    resume=resume,
                    max_minutes=max_minutes,
                    overrides=overrides,
                    log=log,
                    signals=signals,
                )
            except KeyboardInterrupt:
                if first:
                    echo(f"\n{INTERRUPTED if (folder / LAST).exists() else UNSAVED}", err=True)
                raise typer.Exit(signals.exit_status) from None
            if result is not None:
                log.say(f"{found.name}, seed {number}: {result} after {result.wall_s:.0f} s; see {folder}")
                if results is not None:
                    log.say(f"wrote {write(result, results, overwrite=overwrite)}")
            if signals.received is not None:
                leave()
                raise typer.Exit(signals.exit_status)
    leave()


def _check(
    name: str, seeds: list[int], out: Path | None, start: Path | None, results: Path | None, overwrite: bool
) -> None:
    """Raise for options that do not fit together: before hours of training, not after."""
    from wirings.train.results import path_of
    from wirings.utils.files import check_folder

    if len(set(seeds)) < len(seeds):
        raise WiringError(f"--seed {max(seeds, key=seeds.count)} is given twice. Remove one.")
    for option, folder in (("--out", out), ("--start", start)):
        if len(seeds) > 1 and folder is not None:
            raise WiringError(f"{option} is the folder of one run, got {len(seeds)} seeds. Leave it out, or give one.")
    if results is not None:
        check_folder(results, "--results")
        for number in () if overwrite else seeds:
            if (path := path_of(results, name, number)).exists():
                raise WiringError(f"{path} holds a result already. Give --overwrite, or another --results folder.")
