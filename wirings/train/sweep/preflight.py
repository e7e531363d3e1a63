"""Checks for all runs of a sweep, so that a mistake is reported once and before the first run starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from wirings.errors import WiringError
from wirings.train import data as data_sets
from wirings.train.sweep.plan import SweepRun
from wirings.utils.importing import import_function, is_import_path


def reads_files(run: SweepRun) -> bool:
    """Whether a run reads its data from files, so that ``--data`` applies to it."""
    return data_sets.get(run.settings.data.name).reads_files


def check_runs(runs: Sequence[SweepRun], data: Path | None) -> None:
    """Raise if functions that runs name cannot be imported, or if the folder of their data does not exist.

    Args:
        runs: All runs of the sweep.
        data: The folder of ``--data``, if given.
    """
    if data is not None and not any(map(reads_files, runs)):
        raise WiringError(f"--data {data} is given, but none of these runs reads files. Leave it out.")
    if data is not None and not data.exists():
        raise WiringError(f"--data {data} does not exist.")
    for name in {run.settings.model.name: None for run in runs}:
        if is_import_path(name):
            import_function(name, "model.name")
    for run in runs:
        name, folder = run.settings.data.name, run.settings.data.directory
        dataset = data_sets.get(name)
        if data is not None or is_import_path(name) or not dataset.reads_files:
            continue
        if folder is not None and not Path(folder).exists():
            raise WiringError(f"{run.path}: data.directory {folder} does not exist. Give the folder with --data.")
        if folder is None and not dataset.can_fetch:
            raise WiringError(f"{run.path} reads the data set {name!r} from a folder. Give it with --data.")
