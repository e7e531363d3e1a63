"""The notebooks run from top to bottom, and are valid files with small outputs."""

import base64
import json
import re
import time
from pathlib import Path

import pytest

pytest.importorskip("PIL")
from tools import notebooks

PATHS = notebooks.notebooks()
ROOT = Path(__file__).parents[1]


def test_there_are_four() -> None:
    names = ["1_wire_your_model", "2_watch_a_wiring", "3_a_pruned_model_goes_on_training", "4_ship_it"]
    assert [path.stem for path in PATHS] == names


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path: Path) -> None:
    begun = time.perf_counter()
    outputs = notebooks.run(path)
    assert time.perf_counter() - begun < 60  # a few seconds on an idle machine
    stored = [cell["outputs"] for cell in notebooks.code_cells(json.loads(path.read_text(encoding="utf-8")))]
    # Figures and words may differ from machine to machine, but not what kinds of outputs there are.
    assert [[o["output_type"] for o in cell] for cell in stored] == [
        [o["output_type"] for o in cell] for cell in outputs
    ], "run python -m tools.notebooks"
    assert any(o["output_type"] == "display_data" for cell in outputs for o in cell)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_files_are_valid_and_small(path: Path) -> None:
    """What nbformat 4.5 asks for, as far as it is used."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert set(notebook) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-zA-Z0-9-_]{1,64}", one) for one in ids)
    keys = {"cell_type", "id", "metadata", "source"}
    for cell in notebook["cells"]:
        more = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert cell["cell_type"] in ("code", "markdown")
        assert set(cell) == keys | more
        assert all(isinstance(line, str) for line in cell["source"])
        for output in cell.get("outputs", ()):
            if output["output_type"] == "display_data":
                assert base64.b64decode(output["data"]["image/png"]).startswith(b"\x89PNG")
    assert notebook["cells"][0]["source"][0].startswith("# ")
    assert path.stat().st_size < 250_000


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "".join(line for cell in cells if cell["cell_type"] == "markdown" for line in cell["source"])
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    assert links
    assert all((path.parent / link).exists() for link in links), links


def test_a_failing_cell_is_named(tmp_path: Path) -> None:
    cells = [{"cell_type": "code", "source": ["print(1)\n"]}, {"cell_type": "code", "source": ["x = 1\n", "1 / 0"]}]
    (tmp_path / "bad.ipynb").write_text(json.dumps({"cells": cells}))
    before = Path.cwd()
    with pytest.raises(ZeroDivisionError) as error:
        notebooks.run(tmp_path / "bad.ipynb")
    assert str(error.traceback[-1].path).endswith("bad.ipynb, code cell 2")
    assert error.traceback[-1].lineno == 1
    assert Path.cwd() == before
