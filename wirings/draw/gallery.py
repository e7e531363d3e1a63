"""All pictures of a history that make sense for it, as files."""

from __future__ import annotations

from pathlib import Path

from wirings import draw
from wirings.draw.common import save
from wirings.errors import WiringError
from wirings.history import History


def album(history: History, folder: str | Path, kind: str = "png", title: str = "") -> list[Path]:
    """Write the pictures of a history to a folder: as .png or, with ``kind="svg"``, as .svg files."""
    if kind not in ("png", "svg"):
        raise WiringError(f"pictures are png or svg, not {kind!r}.")
    state, structure = history.state(), history.structure
    wanted: dict[str, tuple[object, ...]] = {
        "adjacency": (draw.adjacency, state, (6, 6)),
        "degrees": (draw.degrees, state, (7, 4)),
        "density": (draw.density, state, (8, 2 + 0.22 * min(60, max(6, len(structure.layers))))),
    }
    if structure.layout == "circle":
        wanted |= {"circle": (draw.circle, state, (7, 5)), "spring": (draw.spring, state, (6, 6))}
    else:
        wanted["blocks"] = (draw.blocks, state, (9, 5))
    if len(structure.layers) > 1:
        wanted["layers"] = (draw.layers, state, (11, 8))
    if len(history) > 1:
        for of in ("edges", "nodes"):
            wanted[f"births-and-deaths-{of}"] = (
                lambda ax, what, title, of=of: draw.births_and_deaths(ax, what, title, of),
                history,
                (8, 4),
            )
    for of in ("accuracy", "loss"):
        if len(history.series(of)[0]) > 1:
            wanted[of] = (lambda ax, what, title, of=of: draw.progress(ax, what, title, of), history, (8, 4))
    return [
        save(Path(folder) / f"{name}.{kind}", function, what, size=size, title=title)  # type: ignore[arg-type]
        for name, (function, what, size) in sorted(wanted.items())
    ]
