"""Output to a terminal or a file, with control characters escaped, so that names in files cannot do any harm."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

from wirings.utils.text import printable

if TYPE_CHECKING:
    from rich.console import Console

FILE_WIDTH = 1000
"""Columns of tables that are written to a file or a pipe."""


def echo(text: str, err: bool = False) -> None:
    """Print a line to the standard output (or to the standard error) with control characters escaped."""
    print(printable(text, keep="\n\t"), file=sys.stderr if err else sys.stdout, flush=True)


def open_console(file: TextIO | None = None) -> Console:
    """Return a console on the standard output: as wide as the terminal, or wide enough not to cut anything off."""
    from rich.console import Console

    console = Console(file=file)
    return console if console.is_terminal else Console(file=file, width=FILE_WIDTH)
