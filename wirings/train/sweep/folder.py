"""A sweep's folder: which runs it holds, so that the same sweep goes on there and another one is refused."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from wirings.errors import WiringError
from wirings.train.results import load_settings
from wirings.train.run.folder import LAST, RESULT
from wirings.train.settings import first_difference
from wirings.train.sweep.plan import Run
from wirings.train.yaml_io import dump_yaml, parse_yaml
from wirings.utils.files import check_folder, whole_file
from wirings.utils.locks import LOCK

PLAN, NOTES = "sweep.yaml", "sweep.log"


def finished(folder: Path) -> bool:
    """Whether the run in a folder has come to its end; its checkpoints may be gone since, to save space."""
    return (folder / RESULT).exists()


def _has_trained(folder: Path) -> bool:
    """Whether there is anything in a run's folder that would be lost from sight."""
    return finished(folder) or (folder / LAST).exists()


def check(folder: Path, runs: Sequence[Run]) -> None:
    """Raise unless a folder is this sweep's, or a new one. A sweep that has the same runs and more may go on there, and
    one without runs that have come to nothing yet, such as those with a setting that was refused.
    """
    check_folder(folder, "--out")
    plan = folder / PLAN
    if plan.exists():
        before = _places(plan)
        now = {run.place for run in runs}
        if missing := [place for place in before if place not in now and _has_trained(folder / place)]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise WiringError(
                f"{folder} holds another sweep: {missing[0]}{more} of its {len(before)} runs is none of this one's. "
                "Give another --out; or the same recipes, settings and seeds as before, and more if you like, to go on."
            )
    elif folder.exists() and any(not path.name.startswith(".") for path in folder.iterdir()):
        raise WiringError(
            f"{folder} is not empty and holds no sweep (no {PLAN}): give another --out, a new folder for instance."
        )
    for run in runs:
        if run.place.split("/")[0] in (PLAN, NOTES, LOCK):
            raise WiringError(f"a recipe cannot be called {run.name!r}, as a file of the sweep's own is; rename it.")
        _check_run(folder / run.place, run)


def enter(folder: Path, runs: Sequence[Run]) -> None:
    """Make a folder this sweep's; nothing is written before all checks have passed."""
    check(folder, runs)
    lines = [{"place": run.place, "recipe": run.recipe, "seed": run.seed, "changes": list(run.changes)} for run in runs]
    try:
        with whole_file(folder / PLAN) as part:
            part.write_text(dump_yaml({"schema": 1, "runs": lines}), encoding="utf-8")
    except OSError as error:
        raise WiringError(
            f"{folder / PLAN} cannot be written: {error.strerror}. Make room, or give another --out."
        ) from error


def _places(plan: Path) -> list[str]:
    try:
        mapping = parse_yaml(plan.read_text(encoding="utf-8"), str(plan))
        return [str(run["place"]) for run in mapping["runs"]]
    except (OSError, TypeError, KeyError, UnicodeDecodeError) as error:
        raise WiringError(f"{plan} does not describe a sweep: {error!r}. Restore it, or give another --out.") from error


def _check_run(folder: Path, run: Run) -> None:
    """Raise if the folder holds a run that is not this one."""
    kept = folder / "settings.yaml"
    if not kept.exists():
        return
    name, then, _ = load_settings(kept)
    different = ("recipe", name, run.name) if name != run.name else first_difference(then, run.settings)
    if different is not None:
        key, before, now = different
        raise WiringError(
            f"{folder} was trained with {key} = {before!r}, in this sweep it is {now!r}; the recipe has changed since. "
            "Give another --out, or move that folder away to train it again."
        )


def note(folder: Path, text: str) -> None:
    """Add a line to the sweep's log."""
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    with suppress(OSError), (folder / NOTES).open("a", encoding="utf-8") as file:  # a full disk ends no run
        file.write(f"{now} {os.uname().nodename if hasattr(os, 'uname') else ''} {text}\n")
