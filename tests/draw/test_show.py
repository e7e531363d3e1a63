"""`wirings show`: a summary in the terminal, a page and pictures, with or without a history."""

from pathlib import Path

import pytest
import torch
from commands import call
from histories import five, small

import wirings
from wirings import WiringError
from wirings.draw.terminal import sparkline, summary
from wirings.history import History, snapshot_of
from wirings.models import get

TINY = ["epochs=2", "data.name=synthetic", "batch=20"]
TINY += ["history_every=1", "data.options={shape: [1, 8, 8], examples: 50, test_examples: 40}"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    changes = [text for change in TINY for text in ("--set", change)]
    call("train", "digits/static-dnw", "--device", "cpu", "--out", "run", *changes)
    return tmp_path / "run"


def test_shows_a_run_in_the_terminal_as_a_page_and_as_pictures(run: Path) -> None:
    said = call("show", "run").splitlines()
    assert said[0] == "digits/static-dnw, seed 0"
    assert said[1] == "rule dnw, 114 nodes, 200 of 4,880 possible edges real (4.1 %)"
    assert said[2] == "7 records, steps 0 to 6"
    assert [line.split()[0] for line in said[4:8]] == ["accuracy", "loss", "swapped", "alive"]
    assert [line.split("  ")[0] for line in said[10:15]] == [f"block {i}" for i in range(5)]
    assert said[-1].endswith("have been real since the start.")
    assert "wrote run/history.html (0." in call("show", "run", "--html")
    page = (run / "history.html").read_text()
    assert "<title>digits/static-dnw, seed 0</title>" in page
    call("show", run / "history.wirings", "--html", "-o", "page.html")
    assert Path("page.html").read_text() == page
    said_files = call("show", "run", "--pictures", "pictures", "--svg").splitlines()
    names = ["accuracy", "adjacency", "births-and-deaths-edges", "births-and-deaths-nodes", "blocks", "degrees"]
    assert said_files == [f"wrote pictures/{name}.svg" for name in [*names, "density", "loss"]]


def test_shows_a_run_without_history(run: Path) -> None:
    (run / "history.wirings").unlink()
    said = call("show", "run")
    assert "run has no history (history.wirings): this is its wiring at the end." in said
    assert "records" not in said
    assert "114 nodes, 200 of 4,880" in said
    said = call("show", "run", "--html")
    assert "has no history" in said
    assert "wrote run/history.html" in said


def test_shows_the_intact_part_of_a_damaged_history(run: Path) -> None:
    path = run / "history.wirings"
    good = path.read_bytes()
    path.write_bytes(good[:-10])
    said = call("show", "run")
    assert "history.wirings is damaged: it ends inside chunk" in said
    assert "It is shown up to step 6, which is intact." in said
    path.write_bytes(good[:40])
    with pytest.raises(WiringError, match="is damaged and cannot be read: it ends inside chunk 1"):
        call("show", "run")
    path.write_bytes(b"")
    with pytest.raises(WiringError, match="is not a history of a wiring"):
        call("show", "run")


def test_shows_a_bundled_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = call("show", "table1/static-dnw")
    assert "900 nodes, 32,000 of 325,760 possible edges real" in said
    assert "wrote table1-static-dnw.html (" in call("show", "table1/static-dnw", "--html")


def test_rejects_invalid_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WiringError, match="nothing is not the folder of a run"):
        call("show", "nothing")
    with pytest.raises(WiringError, match="Add --html"):
        call("show", "nothing", "-o", "x.html")
    with pytest.raises(WiringError, match="Add --pictures FOLDER"):
        call("show", "nothing", "--svg")
    five().save("five.wirings")
    with pytest.raises(WiringError, match=r"cannot write the page to five\.wirings/x\.html"):
        call("show", "five.wirings", "--html", "-o", "five.wirings/x.html")
    (tmp_path / "some.txt").write_text("text")
    with pytest.raises(WiringError, match="is not a history"):
        call("show", "some.txt")


def test_sparklines() -> None:
    assert sparkline([1, 1, 1]) == "▁▁▁"
    assert sparkline([]) == ""
    assert sparkline([0, 7]) == "▁█"
    assert len(sparkline(range(1000))) == 48


def test_summary() -> None:
    assert "block 0      2     1         0          3" in summary(five(), "five")  # node 1 has no live outgoing edge
    assert "accuracy                         " in summary(five())  # there is no value in the first half
    with pytest.raises(WiringError, match="no records yet"):
        summary(History(small().structure, {}))
    layers = summary(snapshot_of(get("resnet18", rule="dnw", density=0.05)))
    assert "no edge" in layers  # dead nodes are unknown if paths across layers are a guess
    assert "dead" not in layers


def test_control_characters_are_escaped() -> None:
    model = torch.nn.Module()
    model.add_module("a\x1b[2J\nb", torch.nn.Linear(4, 3))
    wirings.wire_(model, k=5)
    text = summary(snapshot_of(model, {"rule": "\x07"}), "title\r")
    assert all(line.isprintable() for line in text.split("\n"))
    assert text.startswith("title\\r\nrule \\x07, 7 nodes")
    assert "a\\x1b[2J\\nb in" in text
