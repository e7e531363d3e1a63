"""Transformers in the terminal, as pictures and on the page: blocks, kinds of layers, heads, and dead ones."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import call
from torch import nn

import wirings
from wirings import WiringError, draw, models
from wirings.draw.html import page as page_of
from wirings.draw.terminal import summary
from wirings.history import History
from wirings.utils.layers import original_weight

Open = Callable[..., Any]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width)})
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def decoder(width: int = 32, heads: int = 4) -> History:
    """Five records of a decoder; at the third, head 1 of block 2 loses its values, and the density falls to 10 %."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"h": nn.ModuleList(Block(width, heads) for _ in range(3)), "head": nn.Linear(width, 7)})
    wiring = wirings.wire_(model, "dnw", density=wirings.CubicSchedule(start=0.5, end=0.1, steps=3))
    recorder = wirings.Recorder(wiring, every=1)
    size = width // heads
    for i in range(4):
        with torch.no_grad():
            for layer in wiring.layers:
                layer.weight.add_(torch.randn_like(layer.weight) * 0.02)
            if i:
                values = original_weight(model["h"][2].attn["c_attn"], "weight")  # type: ignore[index, union-attr]
                values[2 * width + size : 2 * width + 2 * size] *= 1e-6
        wiring.step()
        recorder.step(loss=2.0 / (i + 1))
    return recorder.history()


def test_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = summary(decoder(), "a decoder").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("density"))
    assert lines[start].split() == ["density", "q", "k", "v", "out", "MLP", "in", "MLP", "out", "live", "heads"]
    assert [line[:7] for line in lines[start + 1 : start + 4]] == ["block 0", "block 1", "block 2"]
    assert lines[start + 3].endswith("3 of 4")
    assert lines[start + 4].startswith("outside the blocks: head ")
    assert "block 2, attention: head 1 (v)" in lines
    names = [line[:10].strip() for line in lines[4:start]]
    assert names == ["loss", "swapped", "live heads", "q", "k", "v", "out", "MLP in", "MLP out", ""]
    history = decoder()
    history.structure.heads.clear()  # as in files of earlier releases
    monkeypatch.chdir(tmp_path)
    history.save("old.wirings")
    assert "live heads" not in call("show", "old.wirings")
    assert "block 2, attention: head 1 (v)" in call("show", "old.wirings", "--heads", "4")
    with pytest.raises(WiringError, match="cannot be split into 5 heads"):
        call("show", "old.wirings", "--heads", "5")


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from wirings.draw.common import figure_of

    history = decoder()
    names = [path.stem for path in draw.save_pictures(history, tmp_path)]
    assert names == ["births-and-deaths-edges", "density", "density-over-time", "layers", "loss", "transformer"]
    grid, heads = figure_of(draw.transformer, history).axes
    assert [text.get_text() for text in grid.get_xticklabels()] == ["q", "k", "v", "out", "MLP\nin", "MLP\nout"]
    assert [text.get_text() for text in grid.get_yticklabels()] == ["block 0", "block 1", "block 2"]
    assert [text.get_text() for text in heads.texts].count("no v") == 1
    assert heads.get_title() == "real edges of each head\n1 of 12 dead"
    figure = figure_of(draw.density_over_time, history)
    charts = figure.axes[:6]
    assert [chart.get_title() for chart in charts] == ["q", "k", "v", "out", "MLP in", "MLP out"]
    assert charts[0].get_ylabel() == "density, %"
    assert charts[3].get_xlabel() == "optimizer step"
    assert charts[5].lines[0].get_xydata()[0].tolist() == [0, pytest.approx(50, abs=0.1)]
    assert charts[5].lines[0].get_xydata()[-1].tolist() == [4, pytest.approx(10, abs=0.1)]
    with pytest.raises(WiringError, match="no blocks with attention"):
        figure_of(draw.transformer, wirings.StaticGraph([2, 3, 2], edges=4))
    with pytest.raises(WiringError, match="at least two records"):
        figure_of(draw.density_over_time, History(history.structure, {}, history.chunks[:1]))


def test_titles_of_attention_and_cross_attention_do_not_overlap() -> None:
    pytest.importorskip("matplotlib")
    from wirings.draw.by_block import picture_size
    from wirings.draw.common import figure_of

    options = {"layers": 2, "heads": 4, "width": 32, "hidden": 64, "density": 0.1}
    model = models.get("seq2seq", classes=20, length=8, rule="dnw", **options)
    recorder = wirings.Recorder(model.wiring, every=1)
    recorder.step()
    history = recorder.history()
    figure = figure_of(draw.transformer, history, size=picture_size(history), title="a title")
    figure.canvas.draw()
    boxes = [ax.title.get_window_extent() for ax in figure.axes]
    assert [len(ax.get_title().splitlines()) for ax in figure.axes] == [1, 2, 2]
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))
    assert boxes[-1].x1 < figure.bbox.x1


def test_page(open_page: Open) -> None:
    history = decoder()
    page = open_page(history, viewport={"width": 1400, "height": 900})
    assert "3 blocks" in page.locator("#summary").inner_text()
    assert page.locator("#grid tbody tr").count() == 3
    assert page.locator("#grid .heads button").count() == 12
    assert page.locator("#grid button.dead").count() == 0
    assert page.locator("#grid tbody tr td button").first.inner_text().startswith("5")
    page.keyboard.press("End")
    assert "1 of 12 heads dead" in page.locator("#summary").inner_text()
    dead = page.locator("#grid button.dead")
    assert dead.all_inner_texts() == ["no v"]
    dead.click()
    assert page.locator("#selected h2").inner_text() == "block 2 · head 1"
    assert page.locator("#selected tr").nth(3).inner_text().split() == ["v", "0", "256", "0", "%"]
    assert page.evaluate("wirings.records.births") == history.births.tolist()
    page.keyboard.press("Escape")
    assert not page.locator("#course").is_visible()
    box = page.locator("#charts").bounding_box()
    page.mouse.click(box["x"] + 36, box["y"] + 60)  # the start of the first chart
    assert page.locator("#position").inner_text() == "step 0 · 1 of 5"
    shown = page.locator("#grid button").evaluate_all("(all) => all.map((b) => b.scrollWidth <= b.clientWidth + 1)")
    assert all(shown)  # no text is cut off
    page.keyboard.press("d")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_charts_have_a_minimum_height_in_small_windows(open_page: Open) -> None:
    page = open_page(decoder(), viewport={"width": 800, "height": 500})

    def check(rows: int) -> None:
        assert min(page.evaluate("wirings.charts.charts.map(({ top, low }) => low - top)")) >= 80
        assert page.evaluate("new Set(wirings.charts.charts.map(({ top }) => top)).size") == rows
        box, next_box = page.locator("#charts").bounding_box(), page.locator("#timeline").bounding_box()
        assert max(page.evaluate("wirings.charts.charts.map(({ low }) => low)")) < box["height"]
        assert box["y"] + box["height"] <= next_box["y"]
        page.locator("#timeline").scroll_into_view_if_needed()
        assert page.evaluate("scrollY + innerHeight") + 1 > next_box["y"] + next_box["height"]
        page.evaluate("scrollTo(0, 0)")

    check(rows=2)
    for width, height, rows in ((1400, 900, 1), (1400, 300, 1), (360, 640, 3)):
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_function(
            f"() => {{ const box = wirings.charts.canvas.getBoundingClientRect();"
            f" return innerWidth === {width} && innerHeight === {height} && wirings.charts.rows === {rows}"
            " && wirings.charts.painted.startsWith(`${box.width} ${box.height} `); }"
        )
        check(rows)


def test_the_page_holds_counts_not_edges(open_page: Open) -> None:
    history = decoder(width=192, heads=24)
    assert len(history.state()) > 60_000
    assert len(page_of(history, "large")) < 100_000
    page = open_page(history)
    assert page.evaluate("Math.min(...wirings.records.births)") > 0
    assert page.locator("#grid .heads.many").count() == 3
    whole = open_page(decoder(), whole=True)
    assert whole.evaluate("wirings.replay.structure.nodes") > 100


def test_names_are_not_interpreted_as_markup(open_page: Open) -> None:
    evil = "<img src=x onerror=alert(1)>"
    history = decoder()
    history.about |= {"rule": evil, "note": evil}
    page = open_page(history, title=evil)
    assert page.locator("img").count() == 0
    assert page.locator("#note").inner_text() == evil


def test_one_record_has_nothing_to_play(open_page: Open) -> None:
    history = decoder()
    page = open_page(History(history.structure, {}, history.chunks[:1]))
    assert not page.locator("#player").is_visible()
    assert page.locator("#grid .heads button").count() == 12
