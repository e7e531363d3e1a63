"""The pages in the gallery are up to date with the committed histories."""

import base64
import re
import zlib
from pathlib import Path

import pytest

from wirings.draw import page
from wirings.train import recipes
from wirings.train.run_history import load_run_history

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "results" / "histories"
HISTORIES = {path.relative_to(FOLDER).with_suffix("").as_posix(): path for path in FOLDER.glob("**/*.wirings")}
DATA = re.compile(r'(?<=<script type="text/plain" id="data">)[^<]*')


@pytest.mark.parametrize("recipe", HISTORIES)
def test_histories_cover_whole_runs(recipe: str) -> None:
    path = HISTORIES[recipe]
    history, title, note = load_run_history(path)
    assert (note, history.damage) == ("", None)
    assert history.about["recipe"] == recipe
    assert title.startswith(recipe)
    assert path.stat().st_size < 5_000_000
    assert len(list(history.states())) == len(history) >= 50
    settings = recipes.get(recipe).settings
    steps, accuracy = history.series("accuracy")
    assert len(accuracy) == settings.epochs
    assert history.steps[0] == 0
    assert steps[-1] - history.steps[-1] < history.steps[-1] - history.steps[-2]


@pytest.mark.parametrize("recipe", HISTORIES)
def test_pages_are_up_to_date(recipe: str) -> None:
    history, title, _ = load_run_history(HISTORIES[recipe])
    name = recipe.replace("/", "-")
    committed = (ROOT / "docs" / "pages" / f"{name}.html").read_text()
    made = page(history, title)
    assert DATA.sub("", made) == DATA.sub("", committed), "run python -m benchmarks.gallery"
    data = [zlib.decompress(base64.b64decode(DATA.search(text)[0])) for text in (made, committed)]  # type: ignore[index]
    assert data[0] == data[1]
    assert len(committed) < 5_000_000
    for shot in ("desktop", "dark", "phone", "edges", "nodes"):
        assert (ROOT / "docs" / "images" / f"{name}-{shot}.png").exists()


def test_histories_are_committed() -> None:
    assert HISTORIES
