"""Where the commands print their tables."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console

WIDEST = 1000
"""Columns of tables in a file."""


def output(file: TextIO | None = None) -> Console:
    """The standard output: as wide as the terminal; where it is a file or a pipe, so wide that nothing is cut off."""
    console = Console(file=file)
    return console if console.is_terminal else Console(file=file, width=WIDEST)
