"""Files that are written atomically, and folders for them."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
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


FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would be larger than the system allows (see ulimit -f)",
}
"""The system's errors for a file that has no room, and what messages call them."""


def disk_problem(error: BaseException) -> str | None:
    """Say why a file could not be written; None if the error has another cause.

    Libraries written in other languages raise errors of their own, which quote the system's.
    """
    if isinstance(error, OSError):
        return FULL.get(error.errno or 0, error.strerror or str(error))
    quoted = re.search(r"os error (\d+)", str(error))
    if quoted is None:
        return FULL[errno.ENOSPC] if "No space left" in str(error) else None
    number = int(quoted[1])
    return FULL.get(number, os.strerror(number))


@contextlib.contextmanager
def disk_errors(path: Path, remedy: str = "Free some space, or choose another path.") -> Iterator[None]:
    """Turn the errors of a full disk, a read-only folder and the like into a `WiringError` that names the file."""
    try:
        yield
    except WiringError:
        raise
    except Exception as error:
        reason = disk_problem(error)
        if reason is None:
            raise
        raise WiringError(f"{path} could not be written: {reason}. {remedy}") from error


def read_regular(path: Path) -> bytes:
    """The contents of a file; raises an OSError for pipes and devices, whose contents may never come, or never end.

    Folders of others may hold links to them under any name.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    opened = os.open(path, flags)
    try:
        mode = os.fstat(opened).st_mode
        if not stat.S_ISREG(mode):
            number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
            raise OSError(number, "it is a folder, a pipe or a device, not a file", str(path))
        with open(opened, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(opened)


def read_regular_text(path: Path) -> str:
    """The text in a file in UTF-8; see `read_regular`."""
    return read_regular(path).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


_LONGEST_NAME = 255
"""The longest file name that most file systems allow, in bytes."""


def check_path(path: str | os.PathLike[str], what: str = "a path") -> Path:
    """Raise if a path is invalid or cannot be accessed; a path that does not exist is fine.

    Args:
        path: what was given as a path.
        what: what messages call it, such as "a folder".
    """
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise WiringError(f"expected {what} as a str or a pathlib.Path, got {type(path).__name__}.")
    text = str(path)
    short = text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"
    try:
        if any(len(os.fsencode(part)) > _LONGEST_NAME for part in Path(path).parts):
            raise WiringError(f"the path {short} cannot be used: a name in it is too long. Give another one.")
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        if isinstance(error, WiringError):
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise WiringError(f"the path {short!r} cannot be used: {reason}. Give another one.") from error
    return Path(path)


def check_file(path: str | os.PathLike[str]) -> Path:
    """Raise if a path is invalid, or is a folder, so that no file can be written there."""
    checked = check_path(path, "a file")
    if not checked.name or checked.is_dir():
        raise WiringError(f"expected the path of a file, got the folder {str(checked)!r}. Add the name of a file.")
    return checked


def check_folder(folder: str | os.PathLike[str], option: str) -> None:
    """Raise if no folder can be made or written there: before hours of work, not after."""
    try:
        folder = check_path(folder, "a folder")
        first = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except WiringError as error:
        raise WiringError(f"{option}: {error}") from error
    except OSError as error:
        raise WiringError(f"{option}: the folder cannot be used: {error.strerror}. Give another one.") from error
    if not first.is_dir():
        raise WiringError(f"{option} takes a folder, but {first} is a file: give another one.")
    if not os.access(first, os.W_OK):
        raise WiringError(f"{option}: nothing can be written in {first}; give another folder.")
