"""Plot accuracy and the time of a step against the size of the static network, from the records in `results/`.

wirings sweep 'growth/*' --per-gpu 1 --out sweeps/growth --results results
wirings sweep table1/static-dnw --seed 4 --per-gpu 1 --out sweeps/growth-centre --results results
python -m benchmarks.growth [--results results] [--out docs/images/growth.png]

Times come from runs that had a GPU to themselves, which `--per-gpu 1` gives them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

if not __package__:  # run as a script: keep this folder's select.py from shadowing Python's select
    sys.path[0] = str(Path(__file__).parents[1])

from matplotlib.figure import Figure

from benchmarks.common import picture_options
from wirings.draw.curves import COLOURS, MARKS
from wirings.models.tiny import BLOCK, BLOCKS, EDGES
from wirings.train import recipes, results
from wirings.train.tables import paper as tables

TABLE, CENTRE = "growth", "table1/static-dnw"
"""The table, and the row that belongs to all three directions."""
AXES = {"nodes": BLOCKS * BLOCK, "edges": EDGES, "blocks": BLOCKS}
"""The directions, and the size of `CENTRE` in each."""


class Size(NamedTuple):
    """A network's size in one direction, and what was measured."""

    size: int
    accuracy: float
    """Mean over seeds, in percent."""
    std: float
    """Standard deviation over seeds; 0 for one."""
    step_ms: float | None
    """Mean time of a training step in milliseconds; None if no run is known to have had a GPU to itself."""


def measured(folder: Path) -> dict[str, list[Size]]:
    """The measured sizes in each direction, sorted."""
    found: dict[str, list[Size]] = {axis: [] for axis in AXES}
    for recipe in recipes.table(TABLE):
        row = tables.row_of(recipe, folder)
        if row.mean is None:
            continue
        runs = [result for result in results.find(folder, recipe.name) if result.seed in row.seeds]
        alone = [1e3 * result.train_s / result.steps for result in runs if result.most_others == 0]
        reached = (row.mean, row.std or 0.0, sum(alone) / len(alone) if alone else None)
        axis, _, number = recipe.name.rpartition("/")[2].partition("-")
        for name in AXES if recipe.name == CENTRE else [axis]:
            found[name].append(Size(AXES[name] if recipe.name == CENTRE else int(number), *reached))
    return {axis: sorted(sizes) for axis, sizes in found.items()}


def draw(found: dict[str, list[Size]], path: Path) -> None:
    """Draw accuracy in the upper row and the time of a step in the lower one, a column for each direction."""
    figure = Figure(figsize=(9.0, 5.0), layout="constrained")
    axes = figure.subplots(2, len(found), sharey="row", squeeze=False)
    for column, ((axis, sizes), colour, mark) in enumerate(zip(found.items(), COLOURS, MARKS, strict=False)):
        upper, lower = axes[0][column], axes[1][column]
        style = {"color": colour, "marker": mark, "markersize": 5}
        upper.errorbar(
            [one.size for one in sizes], [one.accuracy for one in sizes], [one.std for one in sizes], capsize=3, **style
        )
        timed = [one for one in sizes if one.step_ms is not None]
        lower.plot([one.size for one in timed], [one.step_ms for one in timed], **style)
        for ax in (upper, lower):
            ax.set_xscale("log", base=2)
            ax.set_xticks([one.size for one in sizes], [f"{one.size:,}" for one in sizes])
            ax.minorticks_off()
            ax.spines[["top", "right"]].set_visible(False)
            ax.grid(axis="y", color="#dddddd", linewidth=0.6)
        if not timed:
            lower.text(0.5, 0.5, "no run alone on a GPU", transform=lower.transAxes, ha="center", va="center")
        lower.set_ylim(bottom=0)
        lower.set_xlabel(axis)
    axes[0][0].set_ylabel("accuracy, %")
    axes[1][0].set_ylabel("time of a step, ms")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    options = picture_options(__doc__, "growth.png")
    found = measured(options.results)
    if all(len(sizes) < 2 for sizes in found.values()):
        sys.exit(f"{options.results} has no results of {TABLE}: see the first lines of {Path(__file__).name}")
    for axis, sizes in found.items():
        for one in sizes:
            step = "" if one.step_ms is None else f", {one.step_ms:.2f} ms a step"
            print(f"{axis:7} {one.size:6,}: {one.accuracy:.2f} ± {one.std:.2f} %{step}")
    draw(found, options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
