"""Where prepared data are kept."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

from wirings.errors import WiringError
from wirings.utils.files import whole_file


def cache_folder() -> Path:
    """$WIRINGS_CACHE, or else ~/.cache/wirings."""
    named = os.environ.get("WIRINGS_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "wirings"


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let ``write`` fill a file of that path: under a temporary name, removed if it fails, until it is complete."""
    try:
        with whole_file(path) as part, part.open("wb") as file:
            write(file)
    except OSError as error:
        raise disk_error(path, error) from error


def disk_error(path: Path, error: OSError) -> WiringError:
    """The error for a file that could not be written."""
    why = "the disk is full" if error.errno == errno.ENOSPC else (error.strerror or str(error))
    return WiringError(f"could not write {path}: {why}. Make room, or set WIRINGS_CACHE to a folder that has it.")
