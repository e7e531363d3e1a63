"""The files in a run's folder, and whether a run there is new."""

from __future__ import annotations

from pathlib import Path

from wirings.errors import WiringError

SETTINGS = "settings.yaml"
"""The recipe's name, what differs from it, and all settings."""
LOG = "log.csv"
"""One line for each epoch."""
INITIAL = "initial.safetensors"
"""The model before its first step."""
LAST, BEST = "last.safetensors", "best.safetensors"
"""The checkpoint to resume from, and the one of the epoch with the best accuracy."""
HISTORY, DAMAGED_HISTORY = "history.wirings", "history.damaged.wirings"
"""How the wiring changed; and the name of such a file that was damaged when the run was resumed."""
PROGRESS = "progress.json"
"""Steps made and runs on the same device, written about once a second by runs of a sweep."""
RESULT = "result.json"
"""The result, written when the run is finished."""


def is_new(folder: Path, resume: bool) -> bool:
    """Whether a run in this folder starts from its first step, rather than from a checkpoint.

    Raises:
        WiringError: if a new run would overwrite another one.
    """
    if not (folder / LAST).exists():
        if (folder / RESULT).exists():
            raise WiringError(f"{folder} has the result of a run, but no {LAST}. Give another --out.")
        return True
    if not resume:
        raise WiringError(f"{folder} already holds a run. Continue it with --resume, or give another --out.")
    return False


def is_finished(folder: Path) -> bool:
    """Whether a folder holds a finished run."""
    return (folder / LAST).exists() and (folder / RESULT).exists()
