"""Pictures of wirings (they need matplotlib: ``pip install "wirings[demo]"``), and an HTML page that plays a history.

Every picture is a function that takes a matplotlib Axes (those with several charts: a Figure) and what to draw: a
`WiringState`, a `History` or a model. `save` writes one to a PNG or SVG file, `save_pictures` writes all that suit a
history, and `figures` returns them, such as for TensorBoard. `write_page` writes the HTML page, and `summary` returns a
summary for the terminal; neither needs matplotlib.
"""

from typing import TYPE_CHECKING, Any

from wirings.draw.common import save
from wirings.draw.html import page, write_page
from wirings.draw.terminal import summary

if TYPE_CHECKING:
    from wirings.draw.before_after import gains
    from wirings.draw.by_block import density_over_time, transformer
    from wirings.draw.by_layer import density, layers
    from wirings.draw.columns import layered
    from wirings.draw.curves import Point, accuracy_against_mult_adds, births_and_deaths, degrees, progress
    from wirings.draw.gallery import figures, save_pictures
    from wirings.draw.nodes import adjacency, blocks, circle, spring

__all__ = [
    "Point",
    "accuracy_against_mult_adds",
    "adjacency",
    "births_and_deaths",
    "blocks",
    "circle",
    "degrees",
    "density",
    "density_over_time",
    "figures",
    "gains",
    "layered",
    "layers",
    "page",
    "progress",
    "save",
    "save_pictures",
    "spring",
    "summary",
    "transformer",
    "write_page",
]

_MODULES = {
    "gallery": ("figures", "save_pictures"),
    "curves": ("Point", "accuracy_against_mult_adds", "births_and_deaths", "degrees", "progress"),
    "columns": ("layered",),
    "before_after": ("gains",),
    "by_layer": ("density", "layers"),
    "nodes": ("adjacency", "blocks", "circle", "spring"),
    "by_block": ("density_over_time", "transformer"),
}


def __getattr__(name: str) -> Any:
    """Import pictures on first use, so that the page and the summary do not need matplotlib."""
    from importlib import import_module

    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"wirings.draw.{module}"), name)
    raise AttributeError(f"module 'wirings.draw' has no attribute {name!r}")
