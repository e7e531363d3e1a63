"""What all pictures share: colours that are safe for every kind of colour vision, inputs, captions and files."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from wirings.errors import WiringError
from wirings.history import History, WiringState, snapshot_of
from wirings.selection.structure import FREE
from wirings.utils.files import check_path, whole_file
from wirings.utils.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POSITIVE, NEGATIVE = "#0068a8", "#c85200"
ALIVE, DEAD, SOFT = "#2a2c30", "#c4c7cb", "#66696e"
BORN, DIED = POSITIVE, "#8c25f4"

Drawable = WiringState | History | nn.Module
"""What pictures take: a wiring at one moment, a history (its last record is drawn), or a wired or finalized model."""


def state_of(what: Drawable) -> WiringState:
    """The wiring to draw."""
    if isinstance(what, WiringState):
        return what
    if isinstance(what, History):
        return what.state()
    if isinstance(what, nn.Module):
        return snapshot_of(what).state()
    raise WiringError(f"a picture expects a WiringState, a History or a model, got {type(what).__name__}.")


def history_of(what: Any) -> History:
    """``what``, checked to be a history with records."""
    if not isinstance(what, History):
        raise WiringError(
            f"this picture expects a History, got {type(what).__name__}. Record one with wirings.Recorder."
        )
    check_has_records(what)
    return what


def rule_label(history: History) -> str:
    """The rule of a history and the groups that it chooses, such as ``"dnw in 32x32"``; empty if it is unknown."""
    rule, groups = history.about.get("rule"), history.structure.edge_groups
    return "" if rule is None else str(rule) if groups == FREE else f"{rule} in {groups}"


def check_has_records(history: History) -> None:
    """Raise if a history has nothing to show."""
    if not len(history):
        raise WiringError(f"{history.path or 'this history'} has no records yet. Train for some steps first.")


def save(
    path: str | Path, picture: Callable[..., Any], *what: Any, size: tuple[float, float] = (8, 5), **options: Any
) -> Path:
    """Draw a picture and write it to a file, atomically.

    Args:
        path: a file name that ends in .png or .svg.
        picture: one of the functions of `wirings.draw` that take a matplotlib Axes.
        what: what to draw.
        size: width and height in inches; a PNG has 120 pixels per inch.
        options: further arguments of the function.
    """
    from matplotlib import rc_context

    path = check_path(path, "a file")
    if path.suffix not in (".png", ".svg"):
        raise WiringError(f"expected a file name that ends in .png or .svg, got {path.name}.")
    figure = figure_of(picture, *what, size=size, **options)
    # The same picture gives the same file: no date and no random ids in it.
    with rc_context({"svg.hashsalt": "wirings"}):
        try:
            with whole_file(path) as part:
                metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
                figure.savefig(part, format=path.suffix[1:], dpi=120, metadata=metadata)
        except OSError as error:
            raise WiringError(f"cannot write {path}: {error.strerror}. Choose another path.") from error
    return path


def figure_of(picture: Callable[..., Any], *what: Any, size: tuple[float, float] = (8, 5), **options: Any) -> Figure:
    """Draw a picture on a new matplotlib Figure. The arguments are those of `save`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    picture(figure if getattr(picture, "whole_figure", False) else figure.add_subplot(), *what, **options)
    return figure


def add_title(ax: Axes, title: str, note: str = "") -> None:
    """Add a title above a picture, and a note below it."""
    if title:
        ax.set_title(title, fontsize=11)
    if note:
        characters = int(14 * ax.figure.bbox.width / ax.figure.dpi)  # about 14 of this size fit in an inch
        ax.annotate(
            textwrap.fill(note, characters),
            (0.5, 0),
            (0, -6),
            "axes fraction",
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=8,
        ).set_color(SOFT)


def as_label(name: str) -> str:
    """A name as matplotlib text, in which ``$`` would otherwise begin a formula."""
    return printable(name).replace("$", r"\$")


def relative_strengths(state: WiringState) -> np.ndarray:
    """For each edge the fraction of edges that are at most as strong, from 0 to 1."""
    sizes = np.abs(state.codes.astype(int))
    return np.searchsorted(np.sort(sizes), sizes, side="right") / max(len(sizes), 1)
