"""The leaderboard at equal cost: rows with at most the multiply-adds of ``dnw``, and accuracy against multiply-adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from wirings.draw import Point
from wirings.train import recipes
from wirings.train.tables import leaderboard
from wirings.train.tables.agreement import ENOUGH
from wirings.train.tables.leaderboard import Leaderboard, Standing
from wirings.train.tables.paper import TableRow, row_of

ON_CIFAR_100 = "cifar100"
"""The table of the second data set."""
BASELINES = ("table2/mobilenetv1-0.25", "table2/mobilenetv1-0.375", "table2/mobilenetv1-0.5")
"""Dense networks beside the rules on the network of Table 2."""
PAPER = {
    "table2/mobilenetv1-0.25": "MobileNetV1, paper",
    "table2/random": "random graph, paper",
    "table2/dnw": "DNW, paper",
}
"""Rows of Table 2 that the paper reports, and what they are called. Their multiply-adds are those of our networks: the
paper does not give them for each row."""


def boards(folder: Path) -> list[Leaderboard]:
    """For each network and budget the leaderboard at equal edges, then that with at most dnw's multiply-adds."""
    found = [*leaderboard.boards(folder), *leaderboard.boards(folder, ON_CIFAR_100)]
    return [each for board in found for each in (board, at_equal_cost(board)) if each.standings]


def at_equal_cost(board: Leaderboard) -> Leaderboard:
    """The rows of a leaderboard that have no more multiply-adds than ``dnw``; without results, those bounded by it."""
    dnw = next(one for one in board.standings if leaderboard.is_dnw(one.row.recipe))
    title = f"{board.title}; at most the multiply-adds of `dnw`"
    if dnw.row.mult_adds is not None:
        title += f" ({dnw.row.mult_adds / 1e6:.2f}M)"
    return replace(board, title=title, standings=tuple(one for one in board.standings if _fits(one, dnw)))


def _fits(one: Standing, dnw: Standing) -> bool:
    if one is dnw:
        return True
    if one.row.mult_adds is None or dnw.row.mult_adds is None:
        return recipes.get(one.row.recipe).settings.model.options.get("mult_adds") is not None
    return one.row.mult_adds <= dnw.row.mult_adds


def points(folder: Path, board: Leaderboard) -> list[Point]:
    """The measured rows of a leaderboard as points, with a line for each rule.

    On the network of Table 2, dense MobileNets of several widths and what the paper reports are added.
    """
    found = [_point(one.row, _line(one)) for one in board.standings]
    if any(one.row.recipe == "table2/dnw" for one in board.standings):
        dense = [row_of(recipes.get(name), folder) for name in BASELINES]
        found += [_point(row, "MobileNetV1") for row in dense]
        for name, line in PAPER.items():
            row = row_of(recipes.get(name), folder)
            if row.mult_adds is not None and row.paper is not None:
                found.append(Point(row.mult_adds, row.paper, line, row.paper_std or 0.0))
    return [point for point in found if point is not None]


def _point(row: TableRow, line: str) -> Point | None:
    """A measured row as a point; None if it was not measured."""
    if row.mult_adds is None or row.mean is None:
        return None
    return Point(row.mult_adds, row.mean, line, row.std or 0.0, len(row.seeds) < ENOUGH)


def _line(one: Standing) -> str:
    optimizer = recipes.get(one.row.recipe).settings.optimizer
    return f"{one.rule} with HAM" if optimizer.ham_alpha or optimizer.ham_beta else one.rule


def figure(folder: Path, found: Sequence[Leaderboard], path: Path) -> list[Path]:
    """Draw accuracy against multiply-adds for each leaderboard with results; one file each, numbered from 1.

    Args:
        folder: the results.
        found: the leaderboards at equal edges.
        path: where to save, such as ``cost.png``; the pictures are ``cost-1.png`` and so on.
    """
    from wirings import draw

    saved = []
    for number, board in enumerate(found, 1):
        shown = points(folder, board)
        if shown:
            target = path.with_name(f"{path.stem}-{number}{path.suffix or '.png'}")
            draw.save(target, draw.accuracy_against_mult_adds, shown, size=(9, 6), title=board.title.partition(";")[0])
            saved.append(target)
    return saved
