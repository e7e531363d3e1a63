"""Plot the paper's accuracies and the measured ones, a line for each row, from the records in `results/`.

python -m benchmarks.agreement [--results results] [--out docs/images/paper-measured.png]
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a script: keep this folder's select.py from shadowing Python's select
    sys.path[0] = str(Path(__file__).parents[1])

from matplotlib.figure import Figure

from benchmarks.common import picture_options
from wirings.draw.curves import COLOURS
from wirings.train.tables import paper as tables
from wirings.train.tables.agreement import MARK, agreement, seeds_cell
from wirings.train.tables.format import with_std

TABLES = ("table1", "table2", "appendix_b", "table4", "resnet")
"""The tables that may have rows of the paper."""
GREY = "#8a8d93"


def compared(results: Path) -> list[tables.TableRow]:
    """The rows of the paper that have results, in its order."""
    rows = [row for name in TABLES for row in tables.table(name, results)]
    return [row for row in rows if row.mean is not None and row.paper is not None]


def table(results: Path) -> str:
    """The same rows as a Markdown table."""
    lines = ["| | the paper | last epoch | best epoch | agrees | seeds |", "|---|---|---|---|---|---|"]
    for row in compared(results):
        figures = [with_std(row.paper, row.paper_std, 1), with_std(row.mean, row.std, 1)]
        figures += [with_std(row.best, row.best_std, 1), agreement(row.standard_errors, row.best_standard_errors)]
        lines.append(f"| `{row.recipe}` | {' | '.join(figures)} | {seeds_cell(len(row.seeds))} |")
    note = (
        "(Agrees: the difference of the means is within two of its standard errors, in both epochs, in one of them, or "
        f"in neither. {MARK}: fewer than three seeds; one run has no deviation.)"
    )
    return "\n".join([*lines, "", note])


def draw(rows: list[tables.TableRow], path: Path) -> None:
    """Draw the paper's mean ± standard deviation as bars, and the measured ones as points on them."""
    figure = Figure(figsize=(7.2, 0.8 + 0.36 * len(rows)), layout="constrained")
    ax = figure.subplots()
    places = list(range(len(rows)))
    for place, row in zip(places, rows, strict=True):
        assert row.paper is not None
        assert row.mean is not None
        wide = max(row.paper_std or 0.0, 0.05)
        ax.barh(place, 2 * wide, 0.7, row.paper - wide, color=GREY, alpha=0.35, linewidth=0)
        ax.plot([row.paper, row.paper], [place - 0.35, place + 0.35], color=GREY, linewidth=2)
        for up, mean, std, colour, mark in (
            (-0.14, row.mean, row.std, COLOURS[0], "o"),
            (0.14, row.best, row.best_std, COLOURS[1], "D"),
        ):
            if mean is not None:
                ax.errorbar(mean, place + up, xerr=std, color=colour, marker=mark, markersize=4.5, capsize=2)
    ax.plot([], [], color=GREY, linewidth=7, alpha=0.35, label="the paper: mean ± standard deviation of 5 runs")
    ax.plot([], [], color=COLOURS[0], marker="o", markersize=4.5, label="measured, last epoch")
    ax.plot([], [], color=COLOURS[1], marker="D", markersize=4.5, label="measured, best epoch")
    ax.set_yticks(places, [f"{row.recipe} ({seeds_cell(len(row.seeds))})" for row in rows])
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xlabel(f"accuracy, %   (number of seeds in brackets; {MARK}: fewer than three)")
    ax.grid(axis="x", color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    options = picture_options(__doc__, "paper-measured.png")
    rows = compared(options.results)
    if not rows:
        sys.exit(f"{options.results} has no results of rows of the paper: wirings train table1/static-dnw --results …")
    draw(rows, options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
