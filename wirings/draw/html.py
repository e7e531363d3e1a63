"""One self-contained HTML page that plays a history: no server, no network, nothing to install.

The page is assembled from the files in ``page/``. It contains the records in the format of history files.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import struct
import zlib
from importlib.resources import files
from pathlib import Path
from string import Template

import numpy as np

from wirings.draw.block_data import block_data
from wirings.draw.coarsen import coarsen, too_large
from wirings.draw.common import check_has_records, rule_label
from wirings.errors import WiringError
from wirings.history import History, file_format
from wirings.utils.files import check_file, whole_file
from wirings.utils.text import printable

SCRIPTS = (
    "dom.js",
    "notes.js",
    "replay.js",
    "node_positions.js",
    "edge_raster.js",
    "view.js",
    "zoom.js",
    "draw_edges.js",
    "draw_changes.js",
    "draw_selection.js",
    "draw_nodes.js",
    "draw_labels.js",
    "node_panel.js",
    "timeline.js",
    "filters.js",
    "search.js",
    "player.js",
    "controls.js",
    "main.js",
)
"""The files of the page's script, in order: those with methods of `View` come after view.js, and main.js starts it."""
TRANSFORMER_SCRIPTS = (
    "dom.js",
    "notes.js",
    "line_chart.js",
    "density_charts.js",
    "block_grid.js",
    "timeline.js",
    "player.js",
    "transformer.js",
)
"""The files of the script of a transformer's page, in order; transformer.js starts it."""


def page(history: History, title: str, whole: bool = False) -> str:
    """The HTML page that plays a history.

    Args:
        history: a history with at least one record.
        title: shown at the top of the page; plain text.
        whole: whether to draw every node and edge even if there are many. By default, the page of a transformer shows
            its layers by block and its heads, and each dot of another page with more than 3,000 nodes or 60,000 edges
            stands for several nodes, and the page says so.
    """
    check_has_records(history)
    if not whole and history.structure.transformer is not None:
        data = zlib.compress(json.dumps(block_data(history)).encode(), 9)
        return _assemble("transformer.html", ("style.css", "transformer.css"), TRANSFORMER_SCRIPTS, title, data)
    if not whole and too_large(history.state()):
        history = coarsen(history)
    return _assemble("page.html", ("style.css",), SCRIPTS, title, _page_data(history))


def _assemble(template: str, styles: tuple[str, ...], scripts: tuple[str, ...], title: str, data: bytes) -> str:
    """Put a page together from its files and its compressed data."""
    folder = files("wirings.draw") / "page"
    style = "".join((folder / name).read_text(encoding="utf-8") for name in styles)
    parts = "".join((folder / name).read_text(encoding="utf-8") for name in scripts)
    script = f'(() => {{\n"use strict";\n{parts}}})();\n'
    return Template((folder / template).read_text(encoding="utf-8")).substitute(
        title=html.escape(printable(title)),
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        data=base64.b64encode(data).decode(),
    )


def write_page(history: History, path: str | Path, title: str, whole: bool = False) -> Path:
    """Write the page to a file, atomically. The arguments are those of `page`."""
    text = page(history, title, whole)
    try:
        with whole_file(check_file(path)) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise WiringError(f"cannot write the page to {path}: {error.strerror}. Choose another path.") from error
    return Path(path)


def _page_data(history: History) -> bytes:
    """All chunks, compressed together, which is smaller than each of them alone."""
    about = {**history.about, **({"rule": rule_label(history)} if "rule" in history.about else {})}
    head = {"structure": history.structure.to_json(), "about": about, "bounds": _level_bounds(history)}
    contents = [(file_format.HEAD, json.dumps(head).encode())]
    contents += [(chunk.kind, file_format.unpack(chunk)) for chunk in history.chunks]
    framed = (kind + struct.pack("<I", len(content)) + content for kind, content in contents)
    return zlib.compress(b"".join(framed), 9)


def _level_bounds(history: History) -> list[int]:
    """The codes between the four levels of strength: the 50th, 80th and 95th percentile of the last edges.

    Empty if there are few edges, or if all are about equally strong.
    """
    sizes = np.abs(history.state().codes.astype(int))
    if len(sizes) < 8:
        return []
    bounds = np.quantile(sizes, (0.5, 0.8, 0.95), method="lower").tolist()
    return [] if bounds[0] == bounds[-1] else bounds


def _hash(text: str) -> str:
    """The hash by which the page's Content-Security-Policy admits a script or a style, and no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
