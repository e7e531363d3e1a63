"""Files that are written atomically, and folders for them."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from wirings.errors import WiringError


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path to write to. Afterwards the file is flushed to the disk and renamed atomically."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")  # pids repeat on a shared disk
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        mode = part.stat().st_mode  # as the user's files have it; some writers would leave one that only they can read
        yield part
        part.chmod(mode)
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:  # already renamed, or discarded
        with contextlib.suppress(OSError):
            part.unlink()


def check_folder(folder: Path, option: str) -> None:
    """Raise if no folder can be made or written there: before hours of work, not after."""
    try:
        first = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:  # a name that is too long, for instance
        raise WiringError(f"{option}: the folder cannot be used: {error.strerror}. Give another one.") from error
    if not first.is_dir():
        raise WiringError(f"{option} takes a folder, but {first} is a file: give another one.")
    if not os.access(first, os.W_OK):
        raise WiringError(f"{option}: nothing can be written in {first}; give another folder.")
