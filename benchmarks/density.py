"""Plot accuracy against density for each rule: the ResNet recipes on CIFAR-10, from the records in `results/`.

python -m benchmarks.density [--results results] [--out docs/images/resnet-density.png]
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
from wirings.train import recipes
from wirings.train.tables import paper as tables

TABLE = "resnet"
BEYOND = "ste/resnet-soft_threshold-"  # the leaderboard's best rule at low densities


class Measured(NamedTuple):
    """Density and mean accuracy of a row in percent, standard deviation over seeds, and number of seeds."""

    density: float
    mean: float
    std: float
    seeds: int


def measured(results: Path) -> dict[str, list[Measured]]:
    """The measured points of every rule, sorted by density. The dense network has 100 %."""
    found: dict[str, list[Measured]] = {}
    beyond = [row for row in tables.table("ste", results) if row.recipe.startswith(BEYOND)]
    for row in [*tables.table(TABLE, results), *beyond]:
        settings = recipes.get(row.recipe).settings
        if row.mean is not None:
            density = 100 * settings.model.options.get("density", 1.0)
            point = Measured(density, row.mean, row.std or 0.0, len(row.seeds))
            found.setdefault(settings.rule.name, []).append(point)
    return {rule: sorted(points) for rule, points in found.items()}


def draw(found: dict[str, list[Measured]], path: Path) -> None:
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    ax = figure.subplots()
    dense = found.get("dense")
    if dense:
        ax.axhline(dense[0].mean, color="#8a8d93", linewidth=1, linestyle="--", label="dense, all weights")
    lines = {rule: points for rule, points in found.items() if rule != "dense"}
    for (rule, points), colour, mark in zip(lines.items(), COLOURS, MARKS, strict=False):
        x, y, std, _ = zip(*points, strict=True)
        ax.errorbar(x, y, std, color=colour, marker=mark, markersize=5, capsize=3, label=rule)
    ax.set_xscale("log")
    ticks = sorted({point.density for points in lines.values() for point in points})
    ax.set_xticks(ticks, [f"{tick:g} %" for tick in ticks], minor=False)
    ax.minorticks_off()
    ax.set_xlabel("density: share of real weights")
    ax.set_ylabel("accuracy, %")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    options = picture_options(__doc__, "resnet-density.png")
    found = measured(options.results)
    if not any(rule != "dense" for rule in found):
        sys.exit(
            f"{options.results} has no results of {TABLE}: wirings train {TABLE}/dnw-10 --results {options.results}"
        )
    for rule, points in found.items():
        for point in points:
            print(f"{rule:16} {point.density:5g} %: {point.mean:.2f} ± {point.std:.2f} %, seeds: {point.seeds}")
    draw(found, options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
