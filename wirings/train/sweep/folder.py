"""The folder of a sweep: it lists the runs, so that the same sweep continues there and another one is rejected."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from wirings.errors import WiringError
from wirings.train.results import load_settings
from wirings.train.run.folder import BEST, INITIAL, LAST, RESULT
from wirings.train.settings import first_difference
from wirings.train.sweep.plan import SweepRun
from wirings.train.yaml_io import dump_yaml, parse_yaml
from wirings.utils.files import check_folder, read_regular_text, whole_file
from wirings.utils.locks import LOCK
from wirings.utils.text import printable

PLAN, EVENTS = "sweep.yaml", "sweep.log"
"""Files in the folder: the list of runs, and what happened when."""


def has_result(folder: Path) -> bool:
    """Whether the run in a folder was finished. Its checkpoints may have been deleted since, to save space."""
    return (folder / RESULT).exists()


def drop_networks(folder: Path) -> None:
    """Delete the networks of a finished run, which keeps its result, its log and its history."""
    for name in (LAST, BEST, INITIAL):
        (folder / name).unlink(missing_ok=True)


def _has_trained(folder: Path) -> bool:
    """Whether a run's folder holds anything that would be lost."""
    return has_result(folder) or (folder / LAST).exists()


def check_sweep_folder(
    folder: Path, runs: Sequence[SweepRun], belongs: Callable[[Mapping[str, Any]], bool] = lambda line: False
) -> list[dict[str, Any]]:
    """Raise unless the folder is new or belongs to this sweep.

    A sweep with the same runs and more may continue there. Runs that have trained nothing yet, such as those with a
    rejected setting, may be left out.

    Args:
        folder: The folder.
        runs: The runs.
        belongs: Whether another run, given as the folder's list describes it, is of this sweep, too.

    Returns:
        What the folder's list has of such other runs.
    """
    others: list[dict[str, Any]] = []
    check_folder(folder, "--out")
    plan = folder / PLAN
    if plan.exists():
        before = _listed(plan)
        now = {run.path for run in runs}
        others = [line for line in before if line["place"] not in now and belongs(line)]
        fine = now | {line["place"] for line in others}
        if missing := [
            line["place"] for line in before if line["place"] not in fine and _has_trained(folder / line["place"])
        ]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise WiringError(
                f"{folder} holds another sweep: of its {len(before)} runs, this one lacks {missing[0]}{more}. "
                "Give another --out, or the same recipes, settings and seeds as before (and more, if you like)."
            )
    elif folder.exists() and any(not path.name.startswith(".") for path in folder.iterdir()):
        raise WiringError(f"{folder} is not empty and holds no sweep (no {PLAN}). Give a new folder as --out.")
    for run in runs:
        if run.path.split("/")[0] in (PLAN, EVENTS, LOCK):
            raise WiringError(f"a recipe cannot be called {run.name!r}, like a file of the sweep itself. Rename it.")
        _check_run(folder / run.path, run)
    return others


def claim_sweep_folder(
    folder: Path, runs: Sequence[SweepRun], belongs: Callable[[Mapping[str, Any]], bool] = lambda line: False
) -> None:
    """Write the list of runs to the folder, if `check_sweep_folder` allows it."""
    others = check_sweep_folder(folder, runs, belongs)
    lines = [{"place": run.path, "recipe": run.recipe, "seed": run.seed, "changes": list(run.changes)} for run in runs]
    try:
        with whole_file(folder / PLAN) as part:
            part.write_text(dump_yaml({"schema": 1, "runs": [*lines, *others]}), encoding="utf-8")
    except OSError as error:
        raise WiringError(
            f"{folder / PLAN} cannot be written: {error.strerror}. Make room, or give another --out."
        ) from error


def _listed(plan: Path) -> list[dict[str, Any]]:
    """The runs that a sweep's folder lists."""
    try:
        mapping = parse_yaml(read_regular_text(plan), str(plan))
        return [{**run, "place": str(run["place"])} for run in mapping["runs"]]
    except (OSError, TypeError, KeyError, UnicodeDecodeError) as error:
        raise WiringError(f"{plan} does not describe a sweep: {error!r}. Restore it, or give another --out.") from error


def _check_run(folder: Path, run: SweepRun) -> None:
    """Raise if the folder holds a different run."""
    kept = folder / "settings.yaml"
    if not kept.exists():
        return
    name, then, _ = load_settings(kept)
    different = ("recipe", name, run.name) if name != run.name else first_difference(then, run.settings)
    if different is not None:
        key, before, now = different
        raise WiringError(
            f"{folder} was trained with {key} = {before!r}, but the recipe has changed: this sweep has {now!r}. "
            "Give another --out, or move that folder away to train it again."
        )


def log_event(folder: Path, text: str) -> None:
    """Append a line to the sweep's log."""
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    with suppress(OSError), (folder / EVENTS).open("a", encoding="utf-8") as file:  # a full disk must not end a run
        file.write(f"{now} {os.uname().nodename if hasattr(os, 'uname') else ''} {printable(text)}\n")
