"""The paper's tables, with its figures beside the measured ones."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wirings import recipes
from wirings.train import results

HEADER = (
    "recipe",
    "paper",
    "measured",
    "seeds",
    "difference",
    "edges",
    "usable edges",
    "dead nodes",
    "training",
    "results",
)


@dataclass(frozen=True)
class Row:
    """One row of a table: a recipe, what the paper reports and what was measured. Accuracies are in percent."""

    recipe: str
    paper: float | None
    paper_std: float | None
    mean: float | None
    """Over seeds; None if nothing was measured."""
    std: float | None
    """The sample's, over seeds; None if there are fewer than two."""
    seeds: tuple[int, ...]
    edges: float | None
    """Real edges; this and what follows are means over seeds, None if not known for all."""
    usable_edges: float | None
    dead_nodes: float | None
    train_s: float | None
    files: tuple[Path, ...]
    left_out: int
    """Results that do not count, since they have overrides."""

    @property
    def difference(self) -> float | None:
        """By how much the measured accuracy is above the paper's, in points."""
        return None if self.mean is None or self.paper is None else self.mean - self.paper


def table(number: int | str, results_folder: Path) -> list[Row]:
    """The rows of one of the paper's tables, in its order, with the results in a folder."""
    return [_row(recipe, Path(results_folder)) for recipe in recipes.table(number)]


def _row(recipe: recipes.Recipe, folder: Path) -> Row:
    found = results.find(folder, recipe.name)
    ours = [result for result in found if not result.overrides]
    paper = recipe.paper or {}
    accuracies = [result.accuracy for result in ours]
    return Row(
        recipe=recipe.name,
        paper=paper.get("accuracy"),
        paper_std=paper.get("std"),
        mean=_mean(accuracies),
        std=statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        seeds=tuple(result.seed for result in ours),
        edges=_mean([result.edges for result in ours]),
        usable_edges=_mean([result.usable_edges for result in ours]),
        dead_nodes=_mean([result.dead_nodes for result in ours]),
        train_s=_mean([result.train_s for result in ours]),
        files=tuple(results.path_of(folder, result.recipe, result.seed) for result in ours),
        left_out=len(found) - len(ours),
    )


def render(rows: Sequence[Row]) -> str:
    """The rows as plain text."""
    lines = [HEADER, *(_cells(row, _braced(row)) for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(HEADER))]
    text = []
    for line in lines:
        first, *middle, last = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        text.append("  ".join([first.strip().ljust(widths[0]), *middle, last.strip()]).rstrip())
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*text, *_footnotes(rows)]) + "\n"


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table; results are links, from the folder that the results' folder was named in."""
    lines = [HEADER, ("---", *("---:" for _ in HEADER[2:]), "---")]
    for row in rows:
        links = ", ".join(f"[{seed}]({path.as_posix()})" for seed, path in zip(row.seeds, row.files, strict=True))
        name, *rest = _cells(row, links)
        lines.append((f"`{name}`", *rest))
    text = ["| " + " | ".join(line) + " |" for line in lines]
    notes = _footnotes(rows)
    return "\n".join([*text, *(["", *notes] if notes else [])]) + "\n"


def _cells(row: Row, files: str) -> tuple[str, ...]:
    return (
        row.recipe,
        _with_std(row.paper, row.paper_std, 1),
        _with_std(row.mean, row.std, 2),
        str(len(row.seeds)),
        "" if row.difference is None else f"{row.difference:+.2f}",
        _number(row.edges),
        _number(row.usable_edges),
        _number(row.dead_nodes),
        _duration(row.train_s),
        files,
    )


def _footnotes(rows: Sequence[Row]) -> list[str]:
    return [
        f"{row.recipe}: {row.left_out} more with settings that are not the recipe's, which do not count."
        for row in rows
        if row.left_out
    ]


def _braced(row: Row) -> str:
    """All files in one word, as a shell takes it."""
    if len(row.files) < 2:
        return "".join(path.as_posix() for path in row.files)
    seeds = ",".join(str(seed) for seed in row.seeds)
    return (row.files[0].parent / results.FILE.format(f"{{{seeds}}}")).as_posix()


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def _with_std(mean: float | None, std: float | None, digits: int) -> str:
    if mean is None:
        return ""
    return f"{mean:.{digits}f} %" if std is None else f"{mean:.{digits}f} ± {std:.{digits}f} %"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
