"""All pictures of a history that make sense for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from wirings import draw
from wirings.draw.common import figure_of, save
from wirings.errors import WiringError
from wirings.history import History, WiringState

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Picture(NamedTuple):
    """A function that draws, what it draws, and how large in inches."""

    function: Callable[..., Any]
    what: WiringState | History
    size: tuple[float, float]
    how: dict[str, str] = {}  # noqa: RUF012 - never changed

    def figure(self, title: str = "") -> Figure:
        return figure_of(self.function, self.what, size=self.size, title=title, **self.how)

    def save(self, path: Path, title: str = "") -> Path:
        return save(path, self.function, self.what, size=self.size, title=title, **self.how)


def pictures(history: History) -> dict[str, Picture]:
    """The pictures by name: of the wiring at the end, and, with several records, of how it came to be."""
    state, structure = history.state(), history.structure
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


def over_time(history: History) -> dict[str, Picture]:
    """The pictures of what changed, as far as there is more than one record or note."""
    found = {}
    for of in ("edges", "nodes") if len(history) > 1 else ():
        found[f"births-and-deaths-{of}"] = Picture(draw.births_and_deaths, history, (8, 4), {"of": of})
    for of in ("accuracy", "loss"):
        if len(history.series(of)[0]) > 1:
            found[of] = Picture(draw.progress, history, (8, 4), {"of": of})
    return found


def album(history: History, folder: str | Path, kind: str = "png", title: str = "") -> list[Path]:
    """Write the pictures of a history to a folder: as .png or, with ``kind="svg"``, as .svg files."""
    if kind not in ("png", "svg"):
        raise WiringError(f"pictures are png or svg, not {kind!r}.")
    return [picture.save(Path(folder) / f"{name}.{kind}", title) for name, picture in pictures(history).items()]
