"""Tables as plain text or Markdown.

Cells are strings, integers (printed with thousands separators) or None (an empty cell). Columns of numbers are aligned
to the right, all others to the left, unless ``align`` says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from wirings.errors import WiringError
from wirings.utils.text import printable

Cell = str | int | None

_NUMBER = re.compile(
    r"[+\-−]?[\d,.]*\d(e[+-]?\d+)?( ± [\d.]+)?( ?[^\s\d]{1,4})?"
)  # such as 1,024, 89.5 ± 0.2 % or 12 ms


def text_table(
    header: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    align: str | None = None,
    rule: bool = True,
    footer: Sequence[Sequence[Cell]] = (),
) -> list[str]:
    r"""Format a table as lines of plain text.

    Args:
        header: one title for each column.
        rows: the cells of each row, one for each column.
        align: ``"l"`` or ``"r"`` for each column, such as ``"llrr"``; by default, columns of numbers are aligned to
            the right.
        rule: whether to draw a line below the header, and one above the footer.
        footer: rows at the end, such as totals.

    Returns:
        The lines, without trailing spaces.

    >>> print("\n".join(text_table(["layer", "edges"], [["conv1", 1024], ["fc", 10]], footer=[["total", 1034]])))
    layer  edges
    -----  -----
    conv1  1,024
    fc        10
    -----  -----
    total  1,034
    """
    columns, body = _align(header, [*rows, *footer], align)
    widths = [max(len(row[i]) for row in [header, *body]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(cells, widths, columns, strict=True)
        ]
        return "  ".join(padded).rstrip()

    ruler = ["  ".join("-" * width for width in widths)] if rule else []
    lines = [line(cells) for cells in body]
    split = len(rows)
    return [line(header), *ruler, *lines[:split], *(ruler if footer else []), *lines[split:]]


def markdown_table(
    header: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    align: str | None = None,
    footer: Sequence[Sequence[Cell]] = (),
) -> list[str]:
    r"""Format a table as lines of Markdown. The arguments are those of `text_table`.

    >>> print("\n".join(markdown_table(["layer", "edges"], [["`conv1`", 1024], ["`fc`", 10]])))
    | layer | edges |
    | --- | ---: |
    | `conv1` | 1,024 |
    | `fc` | 10 |
    """
    columns, body = _align(header, [*rows, *footer], align)
    rule = ["---:" if side == "r" else "---" for side in columns]
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in [header, *body]]
    return ["| " + " | ".join(cells) + " |" for cells in (escaped[0], rule, *escaped[1:])]


def _align(header: Sequence[str], rows: Sequence[Sequence[Cell]], align: str | None) -> tuple[str, list[list[str]]]:
    """The alignment of each column, and the cells as text."""
    for row in rows:
        if len(row) != len(header):
            raise WiringError(f"a table of {len(header)} columns has a row of {len(row)} cells: {list(row)}.")
    text = [[_text(cell) for cell in row] for row in rows]
    if align is None:
        return "".join("r" if _numeric([row[i] for row in text]) else "l" for i in range(len(header))), text
    if len(align) != len(header) or set(align) - set("lr"):
        raise WiringError(f"align must have 'l' or 'r' for each of {len(header)} columns, got {align!r}.")
    return align, text


def _text(cell: Cell) -> str:
    if cell is None:
        return ""
    return printable(cell) if isinstance(cell, str) else f"{cell:,}"  # names of layers may come from a file


def _numeric(column: Sequence[str]) -> bool:
    filled = [cell for cell in column if cell]
    return bool(filled) and all(_NUMBER.fullmatch(cell) for cell in filled)
