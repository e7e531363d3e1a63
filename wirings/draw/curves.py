"""Charts: degrees of nodes, births and deaths of edges, values over training, accuracy against cost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.ticker import MaxNLocator

from wirings.draw.common import BORN, DIED, NEGATIVE, POSITIVE, Drawable, add_title, as_label, history_of, state_of
from wirings.errors import WiringError
from wirings.history import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0068a8", "#c85200", "#2a2c30", "#a0407a", "#007d5c", "#8a6d00", "#5cb8f2", "#f0a043", "#8d9096", "#d98ac0")
MARKS = "os^Dv*Pp<X"


def degrees(ax: Axes, what: Drawable, title: str = "") -> None:
    """Draw histograms of the in-degrees (blue) and out-degrees (orange) of nodes, counting real edges.

    Nodes that cannot have such edges are left out: the inputs of a static graph receive none, its outputs send none.

    Args:
        ax: the Axes to draw on.
        what: the wiring to draw.
        title: shown above the picture.
    """
    state = state_of(what)
    into, out_of = state.degrees()
    structure = state.structure
    possible = np.zeros((2, structure.nodes), bool)
    for tile in structure.tiles:
        if tile.pairs is not None:
            possible[0, tile.pairs[0]] = possible[1, tile.pairs[1]] = True
            continue
        receive, send = (tile.cols, tile.rows) if tile.flip else (tile.rows, tile.cols)
        possible[0, tile.targets : tile.targets + receive] = possible[1, tile.sources : tile.sources + send] = True
    counts = {"in": into[possible[0]], "out": out_of[possible[1]]}
    most = max(int(count.max(initial=1)) for count in counts.values())
    step = max(1, -(-most // 40))
    edges = np.arange(0, most + step + 1, step) - 0.5
    for (name, count), colour in zip(counts.items(), (POSITIVE, NEGATIVE), strict=True):
        label = f"{name}: mean {count.mean():.1f}, zero for {int((count == 0).sum()):,} of {len(count):,} nodes"
        ax.stairs(np.histogram(count, edges)[0], edges, label=label, color=colour, linewidth=1.6, fill=False)
    ax.set_xlabel("real edges per node" + (f" (bins of {step})" if step > 1 else ""))
    ax.set_ylabel("nodes")
    ax.set_ylim(0, 1.25 * ax.get_ylim()[1])  # room for the legend
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    _finish(ax, title)


def births_and_deaths(ax: Axes, what: History, title: str = "", of: str = "edges") -> None:
    """Draw how many edges (or nodes) were born and died between consecutive records.

    Args:
        ax: the Axes to draw on.
        what: a history with at least two records.
        title: shown above the picture.
        of: ``"edges"``, or ``"nodes"``, which are born when they become live and die when they become dead.
    """
    history = history_of(what)
    if of not in ("edges", "nodes"):
        raise WiringError(f"of must be 'edges' or 'nodes', got {of!r}.")
    if len(history) < 2:
        raise WiringError("births_and_deaths needs a history with at least two records, got one.")
    if of == "edges":
        born, died = history.births[1:], history.deaths[1:]
    else:
        alive = np.array([state.alive for state in history.states()])
        born, died = ((alive[1:] & ~alive[:-1]).sum(1), (~alive[1:] & alive[:-1]).sum(1))
    steps = np.array(history.steps, float)
    middles, widths = (steps[1:] + steps[:-1]) / 2, np.diff(steps)
    ax.bar(middles, born, widths, color=BORN, label=f"born, {born.sum():,} in total")
    ax.bar(middles, -died, widths, color=DIED, label=f"died, {died.sum():,} in total")
    ax.axhline(0, color="#2a2c30", linewidth=0.6)
    most = max(1, int(born.max(initial=0)), int(died.max(initial=0)))
    ax.set_ylim(-1.1 * most, 1.1 * most)
    ax.yaxis.set_major_formatter(lambda value, _: f"{abs(value):,.0f}")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    ax.set_xlim(steps[0], steps[-1])
    ax.set_xlabel("optimizer step")
    ax.set_ylabel(of)
    _finish(ax, title)


def progress(ax: Axes, what: History, title: str = "", of: str = "accuracy") -> None:
    """Draw a noted value over training.

    Args:
        ax: the Axes to draw on.
        what: a history.
        title: shown above the picture.
        of: the name of the value, such as ``"accuracy"`` (in percent) or ``"loss"``.
    """
    history = history_of(what)
    steps, values = history.series(of)
    if not len(steps):
        known = sorted({name for _, noted in history.notes for name in noted})
        raise WiringError(f"this history has no values of {of!r}; it has {', '.join(known) or 'none'}.")
    ax.plot(steps, values, color=POSITIVE if of == "accuracy" else NEGATIVE, linewidth=1.6)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    ax.set_xlabel("optimizer step")
    ax.set_ylabel("accuracy, %" if of == "accuracy" else as_label(of))
    ax.spines[["top", "right"]].set_visible(False)
    add_title(ax, title)


class Point(NamedTuple):
    """One network: multiply-adds per image, accuracy in percent, and the line that it belongs to."""

    mult_adds: float
    accuracy: float
    line: str
    std: float = 0.0
    few: bool = False
    """Whether it comes from fewer than three seeds. Its mark is then hollow."""


def accuracy_against_mult_adds(ax: Axes, points: Iterable[Point | Any], title: str = "") -> None:
    """Draw accuracy against multiply-adds on a logarithmic scale, with a line for each kind of network.

    Args:
        ax: the Axes to draw on.
        points: `Point`s or results (`wirings.train.results.Result`); the line of a result is its recipe's name without
            the width.
        title: shown above the picture.
    """
    lines: dict[str, list[Point]] = {}
    for given in points:
        point = given if isinstance(given, Point) else _point(given)
        lines.setdefault(point.line, []).append(point)
    if not lines:
        raise WiringError("accuracy_against_mult_adds needs at least one point, got none.")
    for i, (name, found) in enumerate(sorted(lines.items())):
        found = sorted(found)
        colour, mark = COLOURS[i % len(COLOURS)], MARKS[(i + i // len(COLOURS)) % len(MARKS)]
        x, y, std = ([p[k] for p in found] for k in (0, 1, 3))
        look: dict[str, Any] = {"linewidth": 1.4, "markersize": 5, "capsize": 2}
        ax.errorbar(x, y, std, label=name, color=colour, marker=mark, **look)
        if few := [(p.mult_adds, p.accuracy) for p in found if p.few]:
            ax.plot(*zip(*few, strict=True), mark, color=colour, markerfacecolor="white", markersize=5, zorder=3)
    any_few = any(p.few for found in lines.values() for p in found)
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(lambda value, _: _with_unit(value))
    ax.xaxis.set_minor_formatter(lambda value, _: _with_unit(value) if f"{value:e}"[0] in "25" else "")
    ax.set_xlabel("multiply-adds per image" + (" (hollow: fewer than three seeds)" if any_few else ""))
    ax.set_ylabel("accuracy, %")
    ax.grid(color="#e4e5e7", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.legend(fontsize=8, frameon=False, loc="lower right")
    ax.spines[["top", "right"]].set_visible(False)
    add_title(ax, title)


def _point(result: Any) -> Point:
    if getattr(result, "mult_adds", None) is None:
        name = getattr(result, "recipe", repr(result))
        raise WiringError(f"the result of {name} has no multiply-adds. Leave it out of this picture.")
    return Point(float(result.mult_adds), float(result.accuracy), result.recipe.rpartition("-")[0] or result.recipe)


def _with_unit(value: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _finish(ax: Axes, title: str) -> None:
    """Add the legend and the title, and remove the frame above and to the right."""
    ax.legend(fontsize=8, frameon=False, loc="upper right")
    ax.spines[["top", "right"]].set_visible(False)
    add_title(ax, title)
