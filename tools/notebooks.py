"""Run the notebooks and write what they print and draw into them, without Jupyter.

    python -m tools.notebooks [NOTEBOOK ...]

Every code cell is plain Python. What a cell prints is its output, and so is every figure of pyplot that it leaves open,
as in Jupyter.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "notebooks"
DPI, COLOURS = 80, 64


def notebooks() -> list[Path]:
    """All notebooks, in the order in which to read them."""
    return sorted(FOLDER.glob("*.ipynb"))


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The code cells of a notebook, from top to bottom."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(path: Path) -> list[list[dict[str, Any]]]:
    """Run a notebook from top to bottom, in an empty folder; returns the outputs of each code cell."""
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("Agg")
    found, names, home = [], {"__name__": "__main__"}, Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for number, cell in enumerate(code_cells(json.loads(path.read_text(encoding="utf-8"))), 1):
                printed = io.StringIO()
                code = compile("".join(cell["source"]), f"{path.name}, code cell {number}", "exec")
                with contextlib.redirect_stdout(printed):
                    exec(code, names)
                found.append([*_text(printed.getvalue()), *_figures()])
        finally:
            os.chdir(home)
            pyplot.close("all")  # what a failed cell left open
    return found


def _text(printed: str) -> list[dict[str, Any]]:
    lines = printed.splitlines(keepends=True)
    return [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []


def _figures() -> list[dict[str, Any]]:
    """The open figures of pyplot as outputs, in few colours to keep notebooks small; closes them."""
    from matplotlib import pyplot
    from PIL import Image

    found = []
    for number in pyplot.get_fignums():
        drawn, small = io.BytesIO(), io.BytesIO()
        pyplot.figure(number).savefig(drawn, format="png", dpi=DPI, bbox_inches="tight", metadata={"Software": None})
        Image.open(drawn).convert("RGB").quantize(COLOURS).save(small, format="png", optimize=True)
        data = {"image/png": base64.b64encode(small.getvalue()).decode(), "text/plain": ["<Figure>"]}
        found.append({"data": data, "metadata": {}, "output_type": "display_data"})
    pyplot.close("all")
    return found


def write_outputs(path: Path, outputs: list[list[dict[str, Any]]]) -> None:
    """Write the outputs of each code cell into a notebook."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for number, (cell, found) in enumerate(zip(code_cells(notebook), outputs, strict=True), 1):
        cell |= {"execution_count": number, "outputs": found}
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    for path in [Path(name).resolve() for name in sys.argv[1:]] or notebooks():
        write_outputs(path, run(path))
        print(f"wrote {path} ({path.stat().st_size / 1000:.0f} kB)")


if __name__ == "__main__":
    main()
