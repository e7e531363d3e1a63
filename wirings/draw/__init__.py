"""Pictures of wirings (they need matplotlib: ``pip install "wirings[demo]"``), and a page that plays a history.

Every picture is a function that takes a matplotlib Axes (`layers`: a Figure) and what to draw: a state, a history, or a
model. `save` makes a PNG or SVG file of one. `write_page` writes the HTML page, which needs nothing.
"""

from typing import TYPE_CHECKING, Any

from wirings.draw.common import save
from wirings.draw.html import page, write_page
from wirings.draw.terminal import summary

if TYPE_CHECKING:
    from wirings.draw.by_layer import density, layers
    from wirings.draw.columns import layered
    from wirings.draw.curves import Point, accuracy_against_mult_adds, births_and_deaths, degrees, progress
    from wirings.draw.gallery import album
    from wirings.draw.nodes import adjacency, blocks, circle, spring

__all__ = [
    "Point",
    "accuracy_against_mult_adds",
    "adjacency",
    "album",
    "births_and_deaths",
    "blocks",
    "circle",
    "degrees",
    "density",
    "layered",
    "layers",
    "page",
    "progress",
    "save",
    "spring",
    "summary",
    "write_page",
]

_WHERE = {
    "gallery": ("album",),
    "curves": ("Point", "accuracy_against_mult_adds", "births_and_deaths", "degrees", "progress"),
    "columns": ("layered",),
    "by_layer": ("density", "layers"),
    "nodes": ("adjacency", "blocks", "circle", "spring"),
}


def __getattr__(name: str) -> Any:
    """Pictures are imported when they are asked for: the page needs no matplotlib."""
    from importlib import import_module

    for module, names in _WHERE.items():
        if name in names:
            return getattr(import_module(f"wirings.draw.{module}"), name)
    raise AttributeError(f"module 'wirings.draw' has no attribute {name!r}")
