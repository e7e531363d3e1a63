"""All pictures that suit a history."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from wirings import draw
from wirings.draw.by_block import picture_size
from wirings.draw.common import as_label, check_has_records, figure_of, save
from wirings.errors import WiringError
from wirings.history import History, WiringState, snapshot_of
from wirings.utils.files import check_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Picture(NamedTuple):
    """A function that draws, what it draws, and the size in inches."""

    function: Callable[..., Any]
    what: WiringState | History
    size: tuple[float, float]
    options: dict[str, str] = {}  # noqa: RUF012 - never changed

    def figure(self, title: str = "") -> Figure:
        """Draw the picture on a new matplotlib Figure. The title is plain text."""
        return figure_of(self.function, self.what, size=self.size, title=as_label(title), **self.options)

    def save(self, path: Path, title: str = "") -> Path:
        """Write the picture to a file. The title is plain text."""
        return save(path, self.function, self.what, size=self.size, title=as_label(title), **self.options)


def pictures(history: History) -> dict[str, Picture]:
    """The pictures of a history by name: those of its last record and those of `over_time`."""
    state, structure = history.state(), history.structure
    if structure.transformer is not None:
        found = {
            "transformer": Picture(draw.transformer, state, picture_size(history)),
            "density": Picture(draw.density, state, (8, 2 + 0.22 * min(60, max(6, len(structure.layers))))),
            "layers": Picture(draw.layers, state, (11, 8)),
        }
        return dict(sorted((found | over_time(history)).items()))
    found = {
        "adjacency": Picture(draw.adjacency, state, (6, 6)),
        "degrees": Picture(draw.degrees, state, (7, 4)),
        "density": Picture(draw.density, state, (8, 2 + 0.22 * min(60, max(6, len(structure.layers))))),
    }
    if structure.layout == "circle":
        found |= {"circle": Picture(draw.circle, state, (7, 5)), "spring": Picture(draw.spring, state, (6, 6))}
    else:
        found["blocks"] = Picture(draw.blocks, state, (9, 5))
    if len(structure.layers) > 1:
        found["layers"] = Picture(draw.layers, state, (11, 8))
    return dict(sorted((found | over_time(history)).items()))


def figures(what: nn.Module | History, title: str = "") -> dict[str, Figure]:
    """Draw all pictures that suit a model or a history on matplotlib Figures, such as for TensorBoard.

    Args:
        what: a wired or finalized model, or a history.
        title: shown above each picture; plain text.

    Returns:
        The figures by name, such as ``"density"``.
    """
    history = what if isinstance(what, History) else snapshot_of(what)
    check_has_records(history)
    return {name: picture.figure(title) for name, picture in pictures(history).items()}


def over_time(history: History) -> dict[str, Picture]:
    """The pictures of how a wiring changed, as far as there are at least two records or values."""
    found, is_transformer = {}, history.structure.transformer is not None
    for of in (("edges",) if is_transformer else ("edges", "nodes")) if len(history) > 1 else ():
        found[f"births-and-deaths-{of}"] = Picture(draw.births_and_deaths, history, (8, 4), {"of": of})
    if is_transformer and len(history) > 1:
        found["density-over-time"] = Picture(draw.density_over_time, history, (10, 5))
    for of in history.curves():
        if len(history.series(of)[0]) > 1:
            found[re.sub(r"\W", "-", of)] = Picture(draw.progress, history, (8, 4), {"of": of})
    return found


def save_pictures(history: History, folder: str | Path, kind: str = "png", title: str = "") -> list[Path]:
    """Write all pictures that suit a history to a folder.

    Args:
        history: what to draw.
        folder: where to write; created if it does not exist.
        kind: ``"png"`` or ``"svg"``.
        title: shown above each picture; plain text.

    Returns:
        The files.
    """
    if kind not in ("png", "svg"):
        raise WiringError(f"kind must be 'png' or 'svg', got {kind!r}.")
    place = check_path(folder, "a folder")
    return [picture.save(place / f"{name}.{kind}", title) for name, picture in pictures(history).items()]
