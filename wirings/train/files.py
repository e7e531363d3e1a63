"""Write the files of a run: each is complete, or not there at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from wirings.utils.files import disk_errors, whole_file

RESUME = "The earlier file is unchanged. Free some space or give another --out, then continue with --resume."
"""What to do if a file of a run cannot be written."""


def write_file(path: Path, write: Callable[[str], object], remedy: str = RESUME) -> None:
    """Call ``write`` with a temporary path, then rename that file to ``path``.

    Args:
        path: the file.
        write: writes to the path that it is given.
        remedy: what to do if that is impossible, for the message.

    Raises:
        WiringError: if the file cannot be written, such as on a full disk. An earlier file at ``path`` is kept.
    """
    with disk_errors(path, remedy), whole_file(path) as part:
        write(str(part))


def write_text(path: Path, text: str, remedy: str = RESUME) -> None:
    """Write a text file, complete or not at all."""
    write_file(path, lambda part: Path(part).write_text(text, encoding="utf-8"), remedy)


def remove_partial_files(folder: Path) -> None:
    """Remove the temporary files that a killed process left behind, ours and those of safetensors."""
    for part in [*folder.glob(".*.part"), *folder.glob(".tmp??????")]:
        part.unlink(missing_ok=True)
