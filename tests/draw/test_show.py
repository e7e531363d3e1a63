"""`wirings show`: a summary in the terminal, a page, pictures; and what it says where there is no history."""

from pathlib import Path
from typing import Any

import pytest
from histories import five, small
from typer.testing import CliRunner

from wirings import WiringError
from wirings.cli.app import app
from wirings.draw.terminal import sparkline, summary
from wirings.history import History, still
from wirings.models import get

TINY = ["epochs=2", "data.name=synthetic", "batch=20"]
TINY += ["history_every=1", "data.options={shape: [1, 8, 8], examples: 50, test_examples: 40}"]


def call(*arguments: Any) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    changes = [text for change in TINY for text in ("--set", change)]
    call("train", "digits/static-dnw", "--device", "cpu", "--out", "run", *changes)
    return tmp_path / "run"


def test_a_run_in_the_terminal_as_a_page_and_as_pictures(run: Path) -> None:
    said = call("show", "run").splitlines()
    assert said[0] == "digits/static-dnw, seed 0"
    assert said[1] == "rule dnw, 114 nodes, 200 of 4,880 possible edges real (4.1 %)"
    assert said[2] == "7 records, steps 0 to 6"
    assert [line.split()[0] for line in said[4:8]] == ["accuracy", "loss", "swapped", "alive"]
    assert [line.split("  ")[0] for line in said[10:15]] == [f"block {i}" for i in range(5)]
    assert said[-1].endswith("were real from the beginning.")
    assert "wrote run/history.html (0." in call("show", "run", "--html")
    page = (run / "history.html").read_text()
    assert "<title>digits/static-dnw, seed 0</title>" in page
    call("show", run / "history.wirings", "--html", "-o", "film.html")
    assert Path("film.html").read_text() == page
    said_files = call("show", "run", "--pictures", "pictures", "--svg").splitlines()
    names = ["accuracy", "adjacency", "births-and-deaths-edges", "births-and-deaths-nodes", "blocks", "degrees"]
    assert said_files == [f"wrote pictures/{name}.svg" for name in [*names, "density", "loss"]]


def test_a_run_without_history(run: Path) -> None:
    (run / "history.wirings").unlink()
    said = call("show", "run")
    assert "run has no history (history.wirings): what you see is its wiring at the end." in said
    assert "records" not in said
    assert "114 nodes, 200 of 4,880" in said
    said = call("show", "run", "--html")
    assert "has no history" in said
    assert "wrote run/history.html" in said


def test_a_damaged_history(run: Path) -> None:
    path = run / "history.wirings"
    good = path.read_bytes()
    path.write_bytes(good[:-10])
    said = call("show", "run")
    assert "history.wirings is damaged: it ends inside chunk" in said
    assert "What you see is good, up to step 6." in said
    path.write_bytes(good[:40])
    with pytest.raises(WiringError, match="is damaged, and nothing of it can be read: it ends inside chunk 1"):
        call("show", "run")
    path.write_bytes(b"")
    with pytest.raises(WiringError, match="is no history of a wiring"):
        call("show", "run")


def test_a_network_that_comes_with_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = call("show", "table1/static-dnw")
    assert "900 nodes, 32,000 of 325,760 possible edges real" in said
    assert "wrote table1-static-dnw.html (" in call("show", "table1/static-dnw", "--html")


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WiringError, match="nothing is no folder of a run"):
        call("show", "nothing")
    with pytest.raises(WiringError, match="Add --html"):
        call("show", "nothing", "-o", "x.html")
    with pytest.raises(WiringError, match="Add --pictures FOLDER"):
        call("show", "nothing", "--svg")
    five().save("five.wirings")
    with pytest.raises(WiringError, match=r"the page could not be written to five\.wirings/x\.html"):
        call("show", "five.wirings", "--html", "-o", "five.wirings/x.html")
    (tmp_path / "some.txt").write_text("text")
    with pytest.raises(WiringError, match="is no history"):
        call("show", "some.txt")


def test_sparklines() -> None:
    assert sparkline([1, 1, 1]) == "▁▁▁"
    assert sparkline([]) == ""
    assert sparkline([0, 7]) == "▁█"
    assert len(sparkline(range(1000))) == 48


def test_summaries() -> None:
    assert "block 0      2     1         0          3" in summary(five(), "five")  # node 1 leads nowhere
    assert "accuracy                         " in summary(five())  # nothing is known before half of the time
    with pytest.raises(WiringError, match="no record yet"):
        summary(History(small().structure, {}))
    layers = summary(still(get("resnet18", rule="dnw", density=0.05)))
    assert "no edge" in layers  # of layers in a row nobody knows what is dead
    assert "dead" not in layers
