"""Bars that compare a network before and after it was shipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.ticker import MaxNLocator

from wirings.draw.common import ALIVE, DEAD, NEGATIVE, POSITIVE, as_label
from wirings.engine.ship_report import ORIGINAL, ShipReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def gains(figure: Figure, report: ShipReport, title: str = "") -> None:
    """Draw the time, the size of the file and the multiply-adds of a network, before (orange) and after (blue).

    Other ways to run the shipped network are grey.

    Args:
        figure: the Figure to draw on.
        report: from `wirings.ship`.
        title: shown above the picture; by default, the network, its input and the machine.
    """
    time, size, work = figure.subplots(3, 1, height_ratios=(max(2, len(report.sides)), 2, 2))
    names, colours = [], []
    for side in report.sides:
        names.append(f"{ORIGINAL}, before" if side.name == ORIGINAL else side.name)
        colours.append(NEGATIVE if side.name == ORIGINAL else POSITIVE if side == report.shipped else DEAD)
    medians, low, high = ([1e3 * getattr(s.timing, key) for s in report.sides] for key in ("median", "q1", "q3"))
    _bars(time, names, medians, colours, "milliseconds: medians and quartiles", high)
    time.hlines(range(len(names)), low, high, color=ALIVE, linewidth=1)
    kind = "" if report.dtype is None else f", {report.dtype}"
    both = (NEGATIVE, POSITIVE)
    _bars(size, ["before", f"after{kind}"], [report.bytes_before, report.bytes_after], both, "bytes of the file")
    sizes = report.sizes
    _bars(work, ["before", "after"], [sizes.before.mult_adds, sizes.after.mult_adds], both, "multiply-adds")
    threads = f"{report.threads} thread{'' if report.threads == 1 else 's'}"
    lines = [title] if title else [f"{report.model}, input {report.example}", f"{threads}, {report.machine}"]
    if (metric := report.metric) is not None:
        lines.append(f"{metric.label}: {metric.format(metric.before)} before, {metric.format(metric.after)} after")
    figure.suptitle("\n".join(as_label(line) for line in lines), fontsize=10)


gains.whole_figure = True  # type: ignore[attr-defined]


def _bars(
    ax: Axes,
    names: Sequence[str],
    values: Sequence[float],
    colours: Sequence[str],
    label: str,
    ends: Sequence[float] | None = None,
) -> None:
    """Draw horizontal bars with their values, and how many times smaller they are than the first.

    Args:
        ax: the Axes to draw on.
        names: of the bars.
        values: their lengths.
        colours: their colours.
        label: below the axis.
        ends: where the values are written, if not at the ends of the bars.
    """
    ax.barh(range(len(names)), values, color=list(colours), height=0.7)
    ax.set_yticks(range(len(names)), [as_label(name) for name in names], fontsize=9)
    ax.invert_yaxis()
    for bar, (value, end) in enumerate(zip(values, ends or values, strict=True)):
        shown = f"{value:,.0f}" if isinstance(value, int) else f"{value:.3g}"
        shown += f" ({values[0] / value:.3g} ×)" if bar and value else ""
        ax.annotate(shown, (end, bar), (4, 0), textcoords="offset points", va="center", fontsize=8)
    ax.set_xlim(0, 1.35 * max(ends or values) or 1)
    ax.set_xlabel(label, fontsize=9)
    ax.tick_params(axis="x", labelsize=8)
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1000 else f"{value:.4g}")
    ax.spines[["top", "right"]].set_visible(False)
