"""Output to a terminal or a file, in which names from files cannot do anything but be read."""

from __future__ import annotations

import sys
import unicodedata
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

FILE_WIDTH = 1000
"""Columns of tables that are written to a file or a pipe."""


def printable(text: str, keep: str = "\n\t") -> str:
    r"""Return ``text`` with control characters escaped, so that a terminal shows them instead of obeying them.

    >>> print(printable("run\x1b[2J\ttwo"))
    run\x1b[2J	two
    """
    return "".join(repr(letter)[1:-1] if _is_control(letter) and letter not in keep else letter for letter in text)


def _is_control(letter: str) -> bool:
    """Whether a character is anything but a letter, mark, number, punctuation, symbol or space."""
    return not letter.isprintable() and unicodedata.category(letter) != "Zs"


def echo(text: str, err: bool = False) -> None:
    """Print a line to the standard output (or to the standard error) with control characters escaped."""
    print(printable(text), file=sys.stderr if err else sys.stdout, flush=True)


def open_console(file: TextIO | None = None) -> Console:
    """Return a console on the standard output: as wide as the terminal, or wide enough not to cut anything off."""
    from rich.console import Console

    console = Console(file=file)
    return console if console.is_terminal else Console(file=file, width=FILE_WIDTH)
