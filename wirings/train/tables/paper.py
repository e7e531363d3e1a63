"""The paper's tables: its figures beside the measured ones."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from wirings.errors import WiringError
from wirings.train import data as data_sets
from wirings.train import recipes, results
from wirings.train.data.metrics import ACCURACY
from wirings.train.settings import first_difference, from_mapping
from wirings.train.tables.agreement import (
    ENOUGH,
    FEW_NOTE,
    NOTE,
    agreement,
    difference_cell,
    in_standard_errors,
    seeds_cell,
)
from wirings.train.tables.format import AT_MOST_NOTE, millions, time_cell, with_commas, with_std
from wirings.train.tables.sizes import CountedSize, count_size, remarks
from wirings.utils.tables import markdown_table, text_table

HEADER = (
    "recipe",
    "paper",
    "last epoch",
    "last − paper",
    "best epoch",
    "best − paper",
    "agrees",
    "seeds",
    "edges",
    "usable edges",
    "dead nodes",
    "training",
    "results",
)
TOP5 = ("paper's top 5", "top 5")
"""Columns after the seeds, in tables in which the paper reports top-5 accuracies."""
LEGENDS = {
    "table4": "The number in a name is the percentage of weights that are kept. `all`: in every convolution and the "
    "classifier. `first_dense`: the same, but the first convolution keeps all its weights. `sparse_momentum`: Sparse "
    "Networks from Scratch, with that rule. `dense`: all weights are kept."
}
"""What the names of a table's rows mean."""
SIZES = ("paper's params", "params", "paper's mult-adds", "mult-adds")
"""Columns after the first, in tables in which the paper reports sizes."""


@dataclass(frozen=True)
class TableRow:
    """One row of a table: a recipe, what the paper reports and what was measured. Accuracies are in percent."""

    recipe: str
    paper: float | None
    paper_std: float | None
    mean: float | None
    """The mean over seeds of the accuracy, or of another metric; None if nothing was measured."""
    std: float | None
    """The sample standard deviation over seeds; None for fewer than two."""
    seeds: tuple[int, ...]
    edges: float | None
    """Real edges. This and the following counts are means over seeds, None if not known for all of them."""
    usable_edges: float | None
    dead_nodes: float | None
    train_s: float | None
    """The mean seconds of training steps of runs that were alone on their GPU; without such runs, of those that may
    have been. None if all are known to have shared it."""
    files: tuple[Path, ...]
    left_out: int
    """The number of results that do not count: they have overrides, or the recipe has changed since."""
    size: CountedSize | None = None
    """The size of the network, if asked for."""
    note: str | None = None
    """The recipe's note."""
    published: bool = False
    """Whether ``paper`` was published by the authors with their code, since the paper does not have the row."""
    paper_top5: float | None = None
    top5: float | None = None
    """The mean top-5 accuracy over seeds."""
    data: str = ""
    """The name of the data set."""
    mult_adds: float | None = None
    """Multiply-adds for one image; a mean over seeds."""
    best: float | None = None
    """The mean over seeds of the accuracy in the best epoch, which is selected on the test set."""
    metric: str = "accuracy"
    """The metric of ``mean``, ``std`` and ``best``; one of `wirings.train.data.metrics.METRICS`."""
    higher_is_better: bool = True
    """Whether higher values of the metric are better."""
    params: float | None = None
    """Parameters; a mean over seeds."""
    best_std: float | None = None
    """The sample standard deviation of the accuracy in the best epoch; None for fewer than two seeds."""
    alone: bool = False
    """Whether the runs of ``train_s`` are known to have been alone on their GPU."""

    @property
    def difference(self) -> float | None:
        """The measured accuracy minus the paper's, in percentage points."""
        return None if self.mean is None or self.paper is None else self.mean - self.paper

    @property
    def best_difference(self) -> float | None:
        """The accuracy in the best epoch minus the paper's, in percentage points."""
        return None if self.best is None or self.paper is None else self.best - self.paper

    @property
    def standard_errors(self) -> float | None:
        """``difference`` in standard errors; None if either side has no deviation."""
        return in_standard_errors(self.mean, self.std, len(self.seeds), self.paper, self.paper_std)

    @property
    def best_standard_errors(self) -> float | None:
        """``best_difference`` in standard errors; None if either side has no deviation."""
        return in_standard_errors(self.best, self.best_std, len(self.seeds), self.paper, self.paper_std)


def table(number: int | str, results_folder: Path, count: bool = False) -> list[TableRow]:
    """The rows of a table, in the paper's order.

    Args:
        number: the table, such as ``1`` or ``"table1"``.
        results_folder: the folder of results.
        count: whether to include the sizes of networks, in tables in which the paper reports them. Networks without
            results are built and counted.
    """
    found = recipes.table(number)
    sizes = count and any({"params", "mult_adds"} & (recipe.paper or {}).keys() for recipe in found)
    return [row_of(recipe, Path(results_folder), sizes) for recipe in found]


def row_of(recipe: recipes.Recipe, folder: Path, sizes: bool = False) -> TableRow:
    """The row of a recipe, from the results in a folder; with ``sizes``, it includes the size of the network."""
    found = results.find(folder, recipe.name)
    ours = [result for result in found if _counts(result, recipe)]
    paper = recipe.paper or {}
    scores = [result.score for result in ours]
    best = [result.best_accuracy if result.value is None else result.best_value for result in ours]
    metric = ours[0].measured_by if ours else ACCURACY
    timed, alone = _timed(ours)
    return TableRow(
        recipe=recipe.name,
        paper=paper.get("accuracy", paper.get("published")),
        paper_std=paper.get("std"),
        mean=_mean(scores),
        std=_std(scores),
        seeds=tuple(result.seed for result in ours),
        edges=_mean([result.edges for result in ours]),
        usable_edges=_mean([result.usable_edges for result in ours]),
        dead_nodes=_mean([result.dead_nodes for result in ours]),
        train_s=_mean([result.train_s for result in timed]),
        files=tuple(results.path_of(folder, result.recipe, result.seed) for result in ours),
        left_out=len(found) - len(ours),
        size=count_size(recipe, ours) if sizes else None,
        note=recipe.note,
        published="accuracy" not in paper and "published" in paper,
        paper_top5=paper.get("top5"),
        top5=_mean([result.top5 for result in ours]),
        data=recipe.settings.data.name,
        mult_adds=_mean([result.mult_adds for result in ours]),
        best=_mean(best),
        metric=metric.name,
        higher_is_better=metric.higher_is_better,
        params=_mean([result.params for result in ours]),
        best_std=_std(best),
        alone=alone,
    )


def _timed(ours: Sequence[results.Result]) -> tuple[list[results.Result], bool]:
    """The results whose times count, and whether their runs are known to have been alone on their GPU."""
    alone = [result for result in ours if result.most_others == 0]
    return (alone, True) if alone else ([result for result in ours if result.most_others is None], False)


def _counts(result: results.Result, recipe: recipes.Recipe) -> bool:
    """Whether a result counts for a recipe: it has no overrides, and the recipe has not changed since."""
    if result.overrides:
        return False
    try:
        then = from_mapping(result.settings)
    except WiringError:  # settings that no longer exist
        return False
    return first_difference(replace(then, seed=recipe.settings.seed), recipe.settings) is None


def render(rows: Sequence[TableRow]) -> str:
    """Format rows as plain text."""
    top5 = _has_top5(rows)
    text = in_columns(_header(rows), [_cells(row, braced(row), top5) for row in rows])
    return "\n".join([*text, *_footnotes(rows)]) + "\n"


def markdown(rows: Sequence[TableRow]) -> str:
    """Format rows as a Markdown table, in which results are links relative to the working directory."""
    top5 = _has_top5(rows)
    text = in_markdown(_header(rows), [_cells(row, links(row), top5) for row in rows])
    notes = _footnotes(rows)
    return "\n".join([*text, *(line for note in notes for line in ("", note))]) + "\n"


def in_columns(header: Sequence[str], rows: Sequence[Sequence[str]], *, rule: bool = True) -> list[str]:
    """Lines of plain text, in which the first and the last column are aligned to the left, all others to the right."""
    return text_table(header, rows, align=_align(header), rule=rule)


def in_markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of Markdown with the same alignment, in which the first cell of each row is code."""
    return markdown_table(header, [(f"`{first}`", *rest) for first, *rest in rows], align=_align(header))


def _align(header: Sequence[str]) -> str:
    return "l" + "r" * (len(header) - 2) + "l"


def _header(rows: Sequence[TableRow]) -> tuple[str, ...]:
    before, after = HEADER[1:8], HEADER[8:]
    sizes = SIZES if any(row.size is not None for row in rows) else ()
    return (HEADER[0], *sizes, *before, *(TOP5 if _has_top5(rows) else ()), *after)


def _has_top5(rows: Sequence[TableRow]) -> bool:
    return any(row.paper_top5 is not None for row in rows)


def _cells(row: TableRow, files: str, top5: bool) -> tuple[str, ...]:
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
        difference_cell(row.difference, row.standard_errors),
        with_std(row.best, row.best_std, 2),
        difference_cell(row.best_difference, row.best_standard_errors),
        agreement(row.standard_errors, row.best_standard_errors),
        seeds_cell(len(row.seeds)),
        *((with_std(row.paper_top5, None, 1), with_std(row.top5, None, 2)) if top5 else ()),
        with_commas(row.edges),
        with_commas(row.usable_edges),
        with_commas(row.dead_nodes),
        time_cell(row.train_s, row.alone),
        files,
    )


def _footnotes(rows: Sequence[TableRow]) -> list[str]:
    left_out = [
        f"{row.recipe}: {row.left_out} more with settings that differ from the recipe, which do not count."
        for row in rows
        if row.left_out
    ]
    sizes = [f"{row.recipe}: {remark}" for row in rows for remark in remarks(row.size, row.note)]
    published = [
        "Figures with a star were published by the authors with their code; the paper's table does not have these rows."
    ]
    legends = [text for name, text in LEGENDS.items() if any(row.recipe.startswith(f"{name}/") for row in rows)]
    starred = published if any(row.published for row in rows) else []
    compared = [NOTE] if any(row.standard_errors is not None for row in rows) else []
    return [*legends, *starred, *compared, *few_note(rows), *time_note(rows), *left_out, *sizes, *_not_at_hand(rows)]


def few_note(rows: Sequence[TableRow]) -> list[str]:
    """The note of a table in which a row has few seeds."""
    return [FEW_NOTE] if any(0 < len(row.seeds) < ENOUGH for row in rows) else []


def time_note(rows: Sequence[TableRow]) -> list[str]:
    """The note of a table with times of runs that may have shared a GPU."""
    return [AT_MOST_NOTE] if any(row.train_s is not None and not row.alone for row in rows) else []


def _not_at_hand(rows: Sequence[TableRow]) -> list[str]:
    """Say which rows were not trained because their data was not available."""
    lines = []
    for name in sorted({row.data for row in rows if row.data}):
        dataset = data_sets.get(name)
        if dataset.can_fetch or not dataset.reads_files:
            continue
        missing = [row.recipe for row in rows if row.data == name and not row.seeds]
        if missing:
            which = "no row of this table was" if len(missing) == len(rows) else f"{len(missing)} rows were not"
            lines.append(
                f"{dataset.title} was not available: {which} trained here. `wirings train {missing[0]} --data DIR "
                "--results results` trains one on yours."
            )
    return lines


def links(row: TableRow) -> str:
    """Links to all files in Markdown, named after their seeds."""
    return ", ".join(f"[{seed}]({path.as_posix()})" for seed, path in zip(row.seeds, row.files, strict=True))


def braced(row: TableRow) -> str:
    """All files as one word with braces, as a shell expands it."""
    if len(row.files) < 2:
        return "".join(path.as_posix() for path in row.files)
    seeds = ",".join(str(seed) for seed in row.seeds)
    return (row.files[0].parent / results.FILE.format(f"{{{seeds}}}")).as_posix()


def _std(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.stdev(known) if len(known) > 1 and len(known) == len(values) else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None
