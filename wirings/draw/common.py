"""What all pictures share: colours that all kinds of colour vision tell apart, what can be drawn, and files."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from wirings.errors import WiringError
from wirings.history import History, WiringState, snapshot_of
from wirings.utils.files import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POSITIVE, NEGATIVE = "#0068a8", "#c85200"
ALIVE, DEAD, SOFT = "#2a2c30", "#c4c7cb", "#66696e"
BORN, DIED = POSITIVE, "#8c25f4"

Drawn = WiringState | History | nn.Module
"""What pictures take: a wiring at one moment, a history (its last record counts), or a model, wired or finalized."""


def state_of(what: Drawn) -> WiringState:
    """The wiring to draw."""
    if isinstance(what, WiringState):
        return what
    if isinstance(what, History):
        return what.state()
    if isinstance(what, nn.Module):
        return snapshot_of(what).state()
    raise WiringError(
        f"a picture takes a WiringState, a History or a model, not {type(what).__name__}; see wirings.history."
    )


def history_of(what: Any) -> History:
    if not isinstance(what, History) or not len(what):
        raise WiringError(
            f"this picture needs a History with at least one record, but {what!r} came; Wiring.history records one."
        )
    return what


def save(
    path: str | Path, draw: Callable[..., Any], *what: Any, size: tuple[float, float] = (8, 5), **how: Any
) -> Path:
    """Draw one picture and write it to a PNG or SVG file, whole or not at all.

    Args:
        path: ends in .png or .svg.
        draw: one of the functions of `wirings.draw` that take a matplotlib Axes.
        what: what it draws.
        size: in inches, of which a PNG has 120 pixels each.
        how: further arguments of the function.
    """
    from matplotlib import rc_context

    path = Path(path)
    if path.suffix not in (".png", ".svg"):
        raise WiringError(f"a picture is a .png or an .svg file, but {path.name} came.")
    figure = figure_of(draw, *what, size=size, **how)
    # The same picture is the same file: no date in it, and no random names.
    with rc_context({"svg.hashsalt": "wirings"}):
        try:
            with whole_file(path) as part:
                metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
                figure.savefig(part, format=path.suffix[1:], dpi=120, metadata=metadata)
        except OSError as error:
            raise WiringError(f"{path} could not be written: {error.strerror}. Give another path.") from error
    return path


def figure_of(draw: Callable[..., Any], *what: Any, size: tuple[float, float] = (8, 5), **how: Any) -> Figure:
    """One picture as a matplotlib Figure. Arguments as for `save`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    draw(figure if getattr(draw, "whole_figure", False) else figure.add_subplot(), *what, **how)
    return figure


def say(ax: Axes, title: str, note: str = "") -> None:
    """A title, and below the picture what a reader must know."""
    if title:
        ax.set_title(title, fontsize=11)
    if note:
        wide = int(15 * ax.figure.bbox.width / ax.figure.dpi)  # letters of this size in so many inches
        ax.annotate(
            textwrap.fill(note, wide),
            (0.5, 0),
            (0, -6),
            "axes fraction",
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=8,
        ).set_color(SOFT)


def strengths(state: WiringState) -> np.ndarray:
    """The part of the edges that each is at least as strong as, from 0 to 1, whatever the weights are."""
    sizes = np.abs(state.codes.astype(int))
    return np.searchsorted(np.sort(sizes), sizes, side="right") / max(len(sizes), 1)
