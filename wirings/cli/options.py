"""Arguments and options that several commands share, so that each has one name, one meaning and one set of checks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from wirings.errors import WiringError
from wirings.utils import files
from wirings.utils.text import brief

LARGEST = 2**31 - 1
"""The largest number that an option takes."""


def check_path(value: Any) -> Any:
    """Raise if a path, or one of several, is invalid or cannot be accessed; a path that does not exist is fine."""
    for path in value if isinstance(value, list) else [] if value is None else [value]:
        files.check_path(path)
    return value


def check_device(device: str | None) -> str | None:
    """Raise unless ``device`` is None, ``cpu``, ``cuda``, or a GPU of this machine such as ``cuda:1``."""
    if device is None:
        return None
    match = re.fullmatch(r"cpu|cuda(?::(\d{1,4}))?", device)
    if match is None:
        raise WiringError(
            f"--device must be cuda or cpu, got {brief(device)}. By default a GPU is used if there is one."
        )
    if match[1] is not None:
        import torch

        count = torch.cuda.device_count()
        if int(match[1]) >= count:
            raise WiringError(f"--device is {device}, but PyTorch finds {count} CUDA devices on this machine.")
    return device


def check_minutes(minutes: float | None) -> float | None:
    """Raise unless ``minutes`` is None or a number that is not negative."""
    if minutes is not None and not 0 <= minutes < float("inf"):
        raise WiringError(f"--max-minutes must be 0 or more, got {minutes:g}.")
    return minutes


def at_least(option: str, least: int) -> Callable[[int | None], int | None]:
    """Return a check that a number is None, or at least ``least`` and not absurdly large."""

    def check(number: int | None) -> int | None:
        if number is not None and number < least:
            raise WiringError(f"{option} must be at least {least}, got {brief(number)}.")
        if number is not None and number > LARGEST:
            raise WiringError(f"{option} must be at most {LARGEST:,}, got {brief(number)}.")
        return number

    return check


def out_option(text: str) -> Any:
    """The option for where a command writes, with its help text."""
    return typer.Option("--out", "-o", help=text, show_default=False, callback=check_path)


RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Folder of a run, or name of a trained network that comes with the package, such as table1/static-dnw.",
        callback=check_path,
    ),
]
RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="Name of a recipe (see `wirings recipes`), or path of a YAML file.", callback=check_path
    ),
]
DataOption = Annotated[Path | None, typer.Option("--data", help="Folder that holds the data.", callback=check_path)]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", help="cuda or cpu. By default a GPU if there is one.", callback=check_device),
]
SeedOption = Annotated[
    list[str] | None,
    typer.Option("--seed", help="Random seeds, such as 3, 0,1,2 or 0-4. May be given several times; one run each."),
]
ResultsOption = Annotated[
    Path | None,
    typer.Option("--results", help="Folder in which to keep results as well, for tables.", callback=check_path),
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace results in the --results folder.")]
MinutesOption = Annotated[
    float | None,
    typer.Option("--max-minutes", help="Stop at a checkpoint after this many minutes.", callback=check_minutes),
]
BestOption = Annotated[bool, typer.Option("--best", help="Use the checkpoint of the best epoch instead of the last.")]
ImageSizeOption = Annotated[
    int | None,
    typer.Option(
        "--image-size", help="Height and width of the images in pixels.", callback=at_least("--image-size", 1)
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JobsOption = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        help="Runs at a time. By default as --per-gpu says or, without a GPU, one for every two cores.",
        callback=at_least("--jobs", 1),
    ),
]
PerGpuOption = Annotated[
    int | None,
    typer.Option(
        "--per-gpu",
        help="Runs that share a GPU. By default as many as train fastest, which the sweep finds out; on Ray, one.",
        callback=at_least("--per-gpu", 1),
    ),
]
OnOption = Annotated[str, typer.Option("--on", help="Run on this machine (local) or on a Ray cluster (ray).")]
RetriesOption = Annotated[
    int, typer.Option("--retries", help="How often a killed run is restarted.", callback=at_least("--retries", 0))
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="List the runs and exit.")]
