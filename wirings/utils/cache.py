"""The cache folder, where prepared data sets and compiled code are kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

from wirings.errors import WiringError
from wirings.utils.files import disk_problem, whole_file


def cache_folder() -> Path:
    """Return ``$WIRINGS_CACHE``, or ``~/.cache/wirings`` if it is not set."""
    named = os.environ.get("WIRINGS_CACHE")
    return Path(named).expanduser() if named else default_cache_folder()


def default_cache_folder() -> Path:
    """Return ``~/.cache/wirings``."""
    return Path.home() / ".cache" / "wirings"


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file atomically: under a temporary name until it is complete, and not at all if ``write`` fails.

    Args:
        path: The file.
        write: Called with the open file to fill it.
    """
    try:
        with whole_file(path) as part, part.open("wb") as file:
            write(file)
    except OSError as error:
        raise disk_error(path, error) from error


def disk_error(path: Path, error: OSError) -> WiringError:
    """Return the error for a file that could not be written."""
    return WiringError(
        f"could not write {path}: {disk_problem(error)}. Free some space, or set WIRINGS_CACHE to another folder."
    )
