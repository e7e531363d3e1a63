"""One self-contained HTML page that plays a wiring's history: no server, no network, nothing to install.

Its parts are the files in ``page/``. The page carries the records as the history's file has them, in one piece.
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

from wirings.draw.coarse import coarse, too_large
from wirings.errors import WiringError
from wirings.history import History, file_format
from wirings.utils.files import whole_file

SCRIPTS = (
    *("film.js", "ink.js", "layout.js", "view.js", "zoom.js", "over.js", "panel.js"),
    *("times.js", "finding.js", "controls.js", "main.js"),
)


def page(history: History, title: str, whole: bool = False) -> str:
    """The page that plays a history.

    Args:
        history: one record will do.
        title: at the head of the page.
        whole: draw node by node what is too large for it, too; else neighbouring nodes are drawn as one, and the page
            says so.
    """
    if not len(history):
        raise WiringError("this history has no record yet, so there is nothing to show. Train on.")
    if not whole and too_large(history.state()):
        history = coarse(history)
    folder = files("wirings.draw") / "page"
    style = (folder / "style.css").read_text(encoding="utf-8")
    parts = "".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS)
    script = f'(() => {{\n"use strict";\n{parts}}})();\n'
    return Template((folder / "page.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(title),
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        data=base64.b64encode(_carried(history)).decode(),
    )


def write_page(history: History, path: str | Path, title: str, whole: bool = False) -> Path:
    """Write the page to a file, completely or not at all. Arguments as for `page`."""
    text = page(history, title, whole)
    try:
        with whole_file(Path(path)) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise WiringError(f"the page could not be written to {path}: {error.strerror}. Give another path.") from error
    return Path(path)


def _carried(history: History) -> bytes:
    """All chunks, uncompressed and then compressed as one; the head says at which strengths the colours change."""
    head = {"structure": history.structure.to_json(), "about": history.about, "bounds": _bounds(history)}
    contents = [(file_format.HEAD, json.dumps(head).encode())]
    contents += [(chunk.kind, file_format.unpack(chunk)) for chunk in history.chunks]
    framed = (kind + struct.pack("<I", len(content)) + content for kind, content in contents)
    return zlib.compress(b"".join(framed), 9)


def _bounds(history: History) -> list[int]:
    """The sizes of codes that half, 80 % and 95 % of the last edges do not exceed; none if all are about as strong."""
    sizes = np.abs(history.state().codes.astype(int))
    if len(sizes) < 8:
        return []
    bounds = np.quantile(sizes, (0.5, 0.8, 0.95), method="lower").tolist()
    return [] if bounds[0] == bounds[-1] else bounds


def _hash(text: str) -> str:
    """What the page's security policy names a script or style by, so that no other runs."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
