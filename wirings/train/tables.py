"""The paper's tables, with its figures beside the measured ones."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from wirings.errors import WiringError
from wirings.train import data as data_sets
from wirings.train import recipes, results
from wirings.train.settings import first_difference, from_mapping
from wirings.train.sizes import Size, millions, remarks, size_of

HEADER = (
    "recipe",
    "paper",
    "measured",
    "seeds",
    "difference",
    "best epoch",
    "edges",
    "usable edges",
    "dead nodes",
    "training",
    "results",
)
TOP5 = ("paper's top 5", "top 5")
"""Columns of tables that the paper has both accuracies in, after the difference."""
LEGENDS = {
    "table4": "The number in a name is the percentage of weights that is kept. `all`: of every convolution, the "
    "classifier too; `first_dense`: of all but the first, which keeps all. `sparse_momentum`: Sparse Networks from "
    "Scratch, by that rule; `dense`: all weights."
}
"""What the names of a table's rows mean, where they do not say it."""
SIZES = ("paper's params", "params", "paper's mult-adds", "mult-adds")
"""Columns of tables that are about how large networks are, after the first."""


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
    """Results that do not count: they have overrides, or the recipe was another then."""
    size: Size | None = None
    """In tables that the paper has sizes in, where they are asked for."""
    note: str | None = None
    """The recipe's."""
    published: bool = False
    """Whether ``paper`` is what the authors published with their code, of a row that the paper does not have."""
    paper_top5: float | None = None
    top5: float | None = None
    """A mean over seeds, as ``mean`` is."""
    data: str = ""
    """The name of the data set."""
    mult_adds: float | None = None
    """For an image; a mean over seeds."""
    best: float | None = None
    """The accuracy of each run's best epoch, which the test set itself picked; a mean over seeds."""

    @property
    def difference(self) -> float | None:
        """By how much the measured accuracy is above the paper's, in points."""
        return None if self.mean is None or self.paper is None else self.mean - self.paper


def table(number: int | str, results_folder: Path, count: bool = False) -> list[Row]:
    """The rows of one of the paper's tables, in its order, with the results in a folder.

    With ``count``, where the paper says how large networks are: those without results are made and counted now.
    """
    found = recipes.table(number)
    sizes = count and any({"params", "mult_adds"} & (recipe.paper or {}).keys() for recipe in found)
    return [row_of(recipe, Path(results_folder), sizes) for recipe in found]


def row_of(recipe: recipes.Recipe, folder: Path, sizes: bool = False) -> Row:
    """What the results in a folder say of a recipe; ``sizes``: how large its network is, too."""
    found = results.find(folder, recipe.name)
    ours = [result for result in found if _counts(result, recipe)]
    paper = recipe.paper or {}
    accuracies = [result.accuracy for result in ours]
    return Row(
        recipe=recipe.name,
        paper=paper.get("accuracy", paper.get("published")),
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
        size=size_of(recipe, ours) if sizes else None,
        note=recipe.note,
        published="accuracy" not in paper and "published" in paper,
        paper_top5=paper.get("top5"),
        top5=_mean([result.top5 for result in ours]),
        data=recipe.settings.data.name,
        mult_adds=_mean([result.mult_adds for result in ours]),
        best=_mean([result.best_accuracy for result in ours]),
    )


def _counts(result: results.Result, recipe: recipes.Recipe) -> bool:
    """Whether a result is the recipe's as it is now: nothing was changed for the run, nor in the recipe since."""
    if result.overrides:
        return False
    try:
        then = from_mapping(result.settings)
    except WiringError:  # settings that are no more
        return False
    return first_difference(replace(then, seed=recipe.settings.seed), recipe.settings) is None


def render(rows: Sequence[Row]) -> str:
    """The rows as plain text."""
    top5 = _has_top5(rows)
    text = in_columns(_header(rows), [_cells(row, braced(row), top5) for row in rows])
    return "\n".join([*text, *_footnotes(rows)]) + "\n"


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table; results are links, from the folder that the results' folder was named in."""
    top5 = _has_top5(rows)
    text = in_markdown(_header(rows), [_cells(row, links(row), top5) for row in rows])
    notes = _footnotes(rows)
    return "\n".join([*text, *(line for note in notes for line in ("", note))]) + "\n"


def in_columns(header: Sequence[str], rows: Sequence[Sequence[str]], *, ruled: bool = True) -> list[str]:
    """Lines of plain text: a header, a rule if wanted, and rows; the first and the last column to the left."""
    lines = [header, *rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(header))]
    text = []
    for line in lines:
        first, *middle, last = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        text.append("  ".join([first.strip().ljust(widths[0]), *middle, last.strip()]).rstrip())
    return [text[0], *(["  ".join("-" * width for width in widths)] if ruled else []), *text[1:]]


def in_markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The same as a Markdown table, the first cell of a row as code."""
    lines = [header, ("---", *("---:" for _ in header[2:]), "---"), *((f"`{row[0]}`", *row[1:]) for row in rows)]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _header(rows: Sequence[Row]) -> tuple[str, ...]:
    before, after = HEADER[1:6], HEADER[6:]
    sizes = SIZES if any(row.size is not None for row in rows) else ()
    return (HEADER[0], *sizes, *before, *(TOP5 if _has_top5(rows) else ()), *after)


def _has_top5(rows: Sequence[Row]) -> bool:
    return any(row.paper_top5 is not None for row in rows)


def _cells(row: Row, files: str, top5: bool) -> tuple[str, ...]:
    size = row.size
    sizes = () if size is None else (
        millions(size.paper_params), millions(size.params, size.paper_params), millions(size.paper_mult_adds),
        millions(size.mult_adds, size.paper_mult_adds),
    )  # fmt: skip
    return (
        row.recipe,
        *sizes,
        with_std(row.paper, row.paper_std, 2 if row.published else 1) + ("*" if row.published else ""),
        with_std(row.mean, row.std, 2),
        str(len(row.seeds)),
        "" if row.difference is None else f"{row.difference:+.2f}",
        with_std(row.best, None, 2),
        *((with_std(row.paper_top5, None, 1), with_std(row.top5, None, 2)) if top5 else ()),
        number(row.edges),
        number(row.usable_edges),
        number(row.dead_nodes),
        duration(row.train_s),
        files,
    )


def _footnotes(rows: Sequence[Row]) -> list[str]:
    left_out = [
        f"{row.recipe}: {row.left_out} more with settings that are not the recipe's, which do not count."
        for row in rows
        if row.left_out
    ]
    told = [f"{row.recipe}: {remark}" for row in rows for remark in remarks(row.size, row.note)]
    published = ["With a star: published by the authors with their code; the paper's table does not have the row."]
    legends = [text for name, text in LEGENDS.items() if any(row.recipe.startswith(f"{name}/") for row in rows)]
    starred = published if any(row.published for row in rows) else []
    return [*legends, *starred, *left_out, *told, *_not_at_hand(rows)]


def _not_at_hand(rows: Sequence[Row]) -> list[str]:
    """Say plainly where nothing was measured since there was nothing to measure it on."""
    lines = []
    for name in sorted({row.data for row in rows if row.data}):
        dataset = data_sets.get(name)
        if dataset.can_fetch or not dataset.reads_files:
            continue
        missing = [row.recipe for row in rows if row.data == name and not row.seeds]
        if missing:
            which = "no row of this table was" if len(missing) == len(rows) else f"{len(missing)} rows were not"
            lines.append(
                f"{dataset.title} was not at hand: {which} trained here. `wirings train {missing[0]} --data DIR "
                "--results results` trains one on yours."
            )
    return lines


def links(row: Row) -> str:
    """All files as links in Markdown, by their seeds."""
    return ", ".join(f"[{seed}]({path.as_posix()})" for seed, path in zip(row.seeds, row.files, strict=True))


def braced(row: Row) -> str:
    """All files in one word, as a shell takes it."""
    if len(row.files) < 2:
        return "".join(path.as_posix() for path in row.files)
    seeds = ",".join(str(seed) for seed in row.seeds)
    return (row.files[0].parent / results.FILE.format(f"{{{seeds}}}")).as_posix()


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def with_std(mean: float | None, std: float | None, digits: int) -> str:
    """A percentage, with its deviation where there is one; empty if there is none."""
    if mean is None:
        return ""
    return f"{mean:.{digits}f} %" if std is None else f"{mean:.{digits}f} ± {std:.{digits}f} %"


def number(value: float | None) -> str:
    """A whole number with commas; empty if there is none."""
    return "" if value is None else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """In the unit that suits it; empty if it is not known."""
    if seconds is None:
        return ""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
