"""The HTML page in a real browser: what it draws, lists and hides matches the history."""

import io
import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from histories import drifting, edges_of, five, small

import wirings
from wirings import WiringError
from wirings.draw.coarsen import coarsen
from wirings.draw.html import SCRIPTS, TRANSFORMER_SCRIPTS
from wirings.draw.html import page as page_of
from wirings.history import History, snapshot_of

pytest.importorskip("PIL")
from PIL import Image

Open = Callable[..., Any]
LIGHT = {"positive": (0, 104, 168), "negative": (200, 82, 0), "ground": (252, 252, 251)}
DARK = {"positive": (92, 184, 242), "negative": (240, 160, 67), "ground": (19, 21, 25)}


def screenshot(page: Any) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(page.screenshot())).convert("RGB")).astype(int)


def settled(page: Any) -> np.ndarray:
    """A screenshot once everything is drawn."""
    page.wait_for_function("() => wirings.resting")
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return screenshot(page)


def position(page: Any, node: int) -> tuple[float, float]:
    """The position of a node on the screen."""
    x, y = page.evaluate(
        "(v) => { const b = wirings.view.overlay.getBoundingClientRect(), r = wirings.view.ratio;"
        " return [b.left + wirings.view.px[v] / r, b.top + wirings.view.py[v] / r] }",
        node,
    )
    return x, y


def colour_along(page: Any, shot: np.ndarray, source: int, target: int, colours: dict[str, tuple[int, ...]]) -> str:
    """The name of the colour nearest to the pixel a third of the way along an edge."""
    (x0, y0), (x1, y1) = position(page, source), position(page, target)
    pixel = shot[round(y0 + (y1 - y0) / 3), round(x0 + (x1 - x0) / 3)]
    return min(colours, key=lambda name: np.abs(pixel - np.array(colours[name])).sum())


def seek(page: Any, record: int) -> None:
    """Move the slider with the keyboard."""
    page.locator("#slider").focus()
    page.keyboard.press("Home")
    for _ in range(record):
        page.keyboard.press("ArrowRight")
    assert page.evaluate("wirings.replay.at") == record


def rows(page: Any, which: str) -> list[tuple[int, float]]:
    """The edges listed in the panel: the other node and the weight."""
    cells = page.locator(f"table[data-list={which}] tr").all_inner_texts()[1:]
    found = [re.split(r"\s+", text.strip().replace("−", "-")) for text in cells]
    return [(int(cell[0]), float(cell[1])) for cell in found]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_edges_have_the_colours_of_their_signs(scheme: str, open_page: Open) -> None:
    page, colours = open_page(five(), color_scheme=scheme), LIGHT if scheme == "light" else DARK
    shot = settled(page)
    wanted = {(0, 2): "positive", (1, 3): "negative", (2, 4): "positive", (3, 4): "negative"}
    wanted |= {(1, 2): "ground", (0, 3): "ground", (0, 4): "ground", (1, 4): "ground"}
    assert {edge: colour_along(page, shot, *edge, colours) for edge in wanted} == wanted
    seek(page, 2)
    after = settled(page)
    assert colour_along(page, after, 0, 2, colours) == "negative"
    assert colour_along(page, after, 0, 4, colours) == "positive"
    assert colour_along(page, after, 3, 4, colours) == "ground"


def test_new_and_dying_edges_are_highlighted(open_page: Open) -> None:
    page = open_page(five())
    seek(page, 1)
    shot = settled(page)
    (x0, y0), (x1, y1) = position(page, 0), position(page, 4)
    column = round(x0 + (x1 - x0) / 3)
    line = shot[round(y0 + (y1 - y0) / 3) - 5 : round(y0 + (y1 - y0) / 3) + 6, column]
    grey = line.max(1) - line.min(1) < 15
    assert (grey & (line.sum(1) < 300)).sum() >= 2  # the dark outline of a new edge, on both sides
    assert (line[:, 2] - line[:, 0] > 100).any()  # around the colour of its sign
    (x0, y0), (x1, y1) = position(page, 3), position(page, 4)
    steps = np.linspace(0.2, 0.8, 200)
    dashes = np.array([shot[round(y0 + (y1 - y0) * s), round(x0 + (x1 - x0) * s)] for s in steps])
    purple = np.abs(dashes - np.array([140, 37, 244])).sum(1) < 100
    assert 0.2 < purple.mean() < 0.95  # dashed, in the colour of dying edges
    seek(page, 2)
    assert np.abs(settled(page) - shot).sum() > 0


def test_the_page_reads_what_was_recorded(open_page: Open) -> None:
    models = {
        "blocks": wirings.StaticGraph([4, 12, 10, 5], edges=70),
        "dag": wirings.StaticGraph(topology=wirings.Dag(50, inputs=3), outputs=4, edges=150),
        "complete": wirings.DiscreteGraph(30, inputs=4, outputs=5, steps=3, edges=99),
    }
    histories = [drifting(graph, 30, noise=0.3) for graph in models.values()]
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.ConvTranspose2d(8, 6, 2, groups=2),
        torch.nn.Flatten(),
        torch.nn.Linear(24, 5),
    )
    wirings.wire_(network, density=0.3)
    for history in [*histories, snapshot_of(network), coarsen(histories[0], 9)]:
        page = open_page(history)
        states = list(history.states())
        for record in [*range(len(states)), *np.random.default_rng(0).permutation(len(states)).tolist()]:
            found = page.evaluate(
                "(i) => { const s = wirings.replay.seek(i), cut = (a) => Array.from(a.subarray(0, s.count));"
                " return [cut(s.indices), cut(s.codes), cut(s.targets), cut(s.sources), s.died.codes.length] }",
                record,
            )
            state = states[record]
            wanted = [state.indices, state.codes, state.targets, state.sources]
            assert found[:4] == [array.tolist() for array in wanted]
            assert found[4] == history.deaths[record]
        page.evaluate("wirings.view.findUsedNodes(wirings.replay.seek(wirings.replay.length - 1))")
        used = page.evaluate("[...wirings.view.used]")
        if history.structure.discrete_time is None:
            assert used == history.state().alive.astype(int).tolist()


def test_a_selected_node_lists_exactly_its_edges(open_page: Open) -> None:
    history = small()
    page, states = open_page(history), list(history.states())
    for record in (0, 5, 11):
        seek(page, record)
        for node in (0, 7, 18, 30):
            page.mouse.click(*position(page, node))
            into, out_of = edges_of(states[record], node)
            assert page.locator("#node h2").inner_text().startswith(f"node {node} · block ")
            for which, wanted in (("inputs", into), ("outputs", out_of)):
                found = rows(page, which)
                assert [v for v, _ in found] == [v for v, _ in wanted]
                assert [w for _, w in found] == pytest.approx([w for _, w in wanted], rel=0.06)
            kernel = states[record].kernel(node)
            cells = page.locator("#node .kernel td").all_inner_texts()
            assert len(cells) == (0 if kernel is None else 9)
            if kernel is not None:
                shown = [float(cell.replace("−", "-")) for cell in cells]
                assert shown == pytest.approx(kernel.reshape(-1).tolist(), abs=0.006)
    page.keyboard.press("ArrowLeft")  # the list follows the record
    assert [v for v, _ in rows(page, "inputs")] == [v for v, _ in edges_of(states[10], 30)[0]]
    page.locator("table[data-list=inputs] button").first.click()
    assert page.locator("#node h2").inner_text().startswith(f"node {edges_of(states[10], 30)[0][0][0]} ")
    page.keyboard.press("Escape")
    assert "Select a node" in page.locator("#node").inner_text()


def test_paths_lead_from_an_input_to_an_output(open_page: Open) -> None:
    history = small()
    page, state = open_page(history), history.state(0)
    real = set(zip(state.sources.tolist(), state.targets.tolist(), strict=True))
    inputs, outputs = history.structure.inputs.tolist(), history.structure.outputs.tolist()
    for node in range(4, 26):
        page.evaluate("(v) => wirings.select(v)", node)
        text = page.locator("#node").inner_text()
        paths = page.evaluate("wirings.view.selected.paths")
        assert len(paths) + text.count("no path ") == 2
        for path in paths:
            assert all(pair in real for pair in itertools.pairwise(path))
            assert (path[0] in inputs and path[-1] == node) or (path[0] == node and path[-1] in outputs)
            assert " → ".join(map(str, path)) in text
        assert ("no path" not in text) == bool(state.alive[node])


def test_filters_hide_edges(open_page: Open) -> None:
    history = small()
    page, states = open_page(history), list(history.states())
    group = history.structure.group_of()
    seek(page, 6)
    state = states[6]
    settled(page)
    amounts = (
        "wirings.view.raster.amounts.map((side) => side.reduce((all, ink, i) => (31 * all + ink * (i % 977)) | 0, 7))"
    )
    everything = page.evaluate(amounts)

    def shown() -> list[int]:
        settled(page)
        return page.evaluate("Array.from(wirings.view.drawn.levels, (l, i) => l ? i : -1).filter((i) => i >= 0)")

    def set_to(name: str, value: str) -> None:
        box = page.locator(f"#{name}")
        if box.evaluate("(box) => box.tagName") == "SELECT":
            box.select_option(value)
        else:
            box.fill(value)

    size = np.abs(state.codes.astype(int))
    age = state.step - state.born
    median = int(np.median(size))
    cases = {
        ("from", "1"): group[state.sources] == 1,
        ("to", "3"): group[state.targets] == 3,
        ("sign", "1"): state.codes > 0,
        ("sign", "-1"): state.codes < 0,
        ("strength", str(median)): size >= median,
        ("youngest", "500"): age >= round(0.25 * 110),
        ("oldest", "500"): age <= round(0.25 * 110),
    }
    for (name, value), wanted in cases.items():
        set_to(name, value)
        assert shown() == np.flatnonzero(wanted).tolist(), (name, value)
        assert page.locator("#shown").inner_text() == f"{int(wanted.sum())} of 70 edges"
        page.locator("#clear").click()
    assert len(shown()) == 70
    assert page.evaluate(amounts) == everything  # removed and drawn again without a trace
    set_to("sign", "1")
    seek(page, 0)
    shot, box = settled(page), page.locator("#stage").bounding_box()
    stage = shot[
        int(box["y"]) + 40 : int(box["y"] + box["height"]) - 4, int(box["x"]) + 4 : int(box["x"] + box["width"]) - 4
    ]
    orange = (stage[..., 0] - stage[..., 2] > 60).sum()
    assert orange == 0
    set_to("sign", "0")
    stage = settled(page)[
        int(box["y"]) + 40 : int(box["y"] + box["height"]) - 4, int(box["x"]) + 4 : int(box["x"] + box["width"]) - 4
    ]
    assert (stage[..., 0] - stage[..., 2] > 60).sum() > 1000


def test_keys_search_zoom_and_themes(open_page: Open) -> None:
    history = small()
    page = open_page(history)
    at = lambda: page.evaluate("wirings.replay.at")  # noqa: E731
    page.locator("#overlay").click(position={"x": 3, "y": 3})
    for key, wanted in (("End", 11), ("ArrowLeft", 10), ("Home", 0), ("ArrowRight", 1)):
        page.keyboard.press(key)
        assert at() == wanted
    assert page.locator("#position").inner_text() == "step 10 · 2 of 12"
    page.keyboard.press(" ")
    page.wait_for_function("() => wirings.replay.at === 11 && !wirings.playing", timeout=20_000)
    page.keyboard.press("Home")
    page.keyboard.press("/")
    page.keyboard.type("17")
    page.keyboard.press("Enter")
    assert page.locator("#node h2").inner_text() == "node 17 · block 2"
    page.locator("#search").fill("Block 3")
    assert page.locator("#found button").all_inner_texts() == ["block 3: nodes 26 to 30"]
    page.locator("#search").fill("nobody")
    assert "nodes are numbered 0 to 30" in page.locator("#found").inner_text()
    page.locator("#search").fill("")
    page.keyboard.press("Escape")
    before = settled(page)
    x, y = position(page, 9)
    page.mouse.move(x, y)
    page.mouse.wheel(0, -600)
    settled(page)
    assert page.evaluate("wirings.view.zoom.scale") > 2
    assert position(page, 9) == pytest.approx((x, y), abs=1.5)  # the point under the mouse stays in place
    page.mouse.down()
    page.mouse.move(x - 60, y - 40, steps=4)
    page.mouse.up()
    settled(page)
    assert position(page, 9) == pytest.approx((x - 60, y - 40), abs=1.5)
    page.locator("[data-zoom=all]").click()
    page.mouse.move(1, 1)
    page.locator("#overlay").focus()
    settled(page)
    page.evaluate("document.activeElement.blur()")
    assert np.abs(settled(page) - before)[100:400, 20:700].sum() == 0
    page.keyboard.press("m")
    assert page.evaluate("wirings.view.matrix")
    settled(page)
    page.keyboard.press("m")
    page.keyboard.press("d")
    assert np.median(settled(page).sum(2)) < 100
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("() => matchMedia('(prefers-color-scheme: dark)').matches")
    settled(page)  # otherwise the page would see no change
    page.emulate_media(color_scheme="light")
    page.wait_for_function("() => matchMedia('(prefers-color-scheme: light)').matches")
    assert np.median(settled(page).sum(2)) > 700


def test_clicking_the_timeline_seeks(open_page: Open) -> None:
    page = open_page(small())
    box = page.locator("#timeline").bounding_box()
    left = page.evaluate("120")
    page.mouse.click(box["x"] + left + 0.5 * (box["width"] - left - 8), box["y"] + 40)
    assert page.evaluate("wirings.replay.at") in (5, 6)


def test_curves_that_do_not_change_have_one_label(open_page: Open) -> None:
    graph = wirings.StaticGraph([2, 2, 1], edges=4, rule="dnw")
    recorder = wirings.Recorder(graph.wiring, every=10)
    recorder.step(10, loss=1.0)
    recorder.note(bleu=0.0)
    recorder.step(20, loss=0.5)
    page = open_page(recorder.history())
    page.evaluate(
        """() => {
            window.texts = [];
            const write = CanvasRenderingContext2D.prototype.fillText;
            CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
                window.texts.push(text);
                return write.call(this, text, ...at);
            };
        }"""
    )
    page.set_viewport_size({"width": 1000, "height": 650})
    page.wait_for_function("() => window.texts.includes('bleu')")
    texts = page.evaluate("window.texts")
    assert texts[texts.index("bleu") + 1] == "0"
    assert "1e-9" not in texts


def test_touch_on_a_phone(open_page: Open) -> None:
    history = small()
    phone = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 3, "has_touch": True, "is_mobile": True}
    page = open_page(history, **phone)
    settled(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.touchscreen.tap(*position(page, 7))
    wanted = edges_of(history.state(0), 7)[1]
    assert [v for v, _ in rows(page, "outputs")] == [v for v, _ in wanted]
    client = page.context.new_cdp_session(page)
    box = page.locator("#overlay").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def touch(kind: str, apart: float) -> None:
        points = [] if kind == "touchEnd" else [{"x": x - apart, "y": y}, {"x": x + apart, "y": y}]
        client.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", 20)
    for apart in (30, 45, 60):
        touch("touchMove", apart)
    touch("touchEnd", 0)
    settled(page)
    assert page.evaluate("wirings.view.zoom.scale") == pytest.approx(3, rel=0.2)
    labels = page.evaluate(
        "[...document.querySelectorAll('#player > *, header > *')].map((e) => e.getBoundingClientRect().right)"
    )
    assert max(labels) <= 390


def test_large_graphs_are_coarsened_with_a_note(open_page: Open) -> None:
    graph = wirings.StaticGraph([100, 2000, 1500, 10], edges=5000)
    page = open_page(drifting(graph, 3))
    note = page.locator("#note").inner_text()
    assert note.startswith("Too large to draw node by node: each dot stands for up to 11 neighbouring nodes of a block")
    assert "3,610 nodes as 330 dots · 5,000 of " in page.locator("#summary").inner_text()
    page.evaluate("wirings.select(20)")
    assert page.locator("#node h2").inner_text() == "nodes 210–220 · block 1"
    whole = open_page(drifting(graph, 2), whole=True)
    assert whole.evaluate("wirings.replay.structure.nodes") == 3610
    assert not whole.locator("#note").is_visible()


def test_swapped_edges_are_counted_in_large_networks(open_page: Open) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(400, 400), torch.nn.Linear(400, 300))
    recorder = wirings.Recorder(wirings.wire_(model, density=0.25), every=1)
    for _ in range(2):
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * weight.abs().mean() * 0.1)
        recorder.step(loss=1.0, bits=2.0)
    history = recorder.history()
    page = open_page(history)
    assert "each dot stands for" in page.locator("#note").inner_text()
    assert page.evaluate("[...wirings.replay.births]") == history.births.tolist()
    assert history.births[0] == 70_000
    assert history.births[1] > 100
    assert page.evaluate("wirings.replay.curves()") == history.curves() == ["loss", "bits"]


def test_names_are_not_interpreted_as_markup(open_page: Open) -> None:
    evil = "</script><img src=x onerror=alert(1)><b>"
    model = torch.nn.Module()
    model.add_module("<i>layer<", torch.nn.Linear(4, 3))
    wirings.wire_(model, k=5)
    page = open_page(snapshot_of(model, {"rule": evil, "note": evil}), title=evil)
    assert page.locator("img, b:not(.node)").count() == 0
    assert page.title() == evil
    assert page.locator("#note").inner_text() == evil
    page.evaluate("wirings.select(0)")
    assert "<i>layer< in" in page.locator("#node h2").inner_text()
    assert not page.locator("#player").is_visible()  # with one record there is nothing to play


def test_the_page_contains_every_script() -> None:
    folder = Path(wirings.__file__).parent / "draw" / "page"
    assert {*SCRIPTS, *TRANSFORMER_SCRIPTS} == {path.name for path in folder.glob("*.js")}
    html = page_of(five(), "five")
    assert all((folder / name).read_text(encoding="utf-8") in html for name in SCRIPTS)


def test_rejects_a_history_without_records() -> None:
    with pytest.raises(WiringError, match="no records yet"):
        page_of(History(small().structure, {}), "empty")


@pytest.mark.slow
def test_plays_smoothly_with_800_nodes_and_32000_edges(open_page: Open) -> None:
    """Draws within 2 s and plays at 30 frames per second; the best of several tries on a machine that may be busy."""
    from wirings import models

    history = drifting(models.get("tiny_static", rule="dnw").graph, 60, noise=0.05, every=78)
    assert len(history.state()) == 32_000
    assert 500 < history.births[1:].mean() < 3000
    first, rate = [], []
    for _ in range(6):
        page = open_page(history, viewport={"width": 1280, "height": 800})
        first.append(page.evaluate("wirings.drawn"))
        page.evaluate("wirings.frames.length = 0; wirings.play(true)")
        page.wait_for_timeout(3000)
        frames = page.evaluate("wirings.frames")
        assert page.evaluate("wirings.replay.at") > 5
        rate.append(1000 * (len(frames) - 1) / (frames[-1] - frames[0]))
        page.context.close()
        if min(first) < 2000 and max(rate) >= 30:
            break
    measured = f"first drawing {min(first):.0f} ms, {max(rate):.1f} frames per second"
    print(measured)
    if (min(first) >= 2000 or max(rate) < 30) and os.getloadavg()[0] > 1.5 * (os.cpu_count() or 1):
        pytest.skip(f"the machine is too busy to measure: {measured} at a load of {os.getloadavg()[0]:.1f}")
    assert min(first) < 2000
    assert max(rate) >= 30


def test_the_title_shows_control_characters() -> None:
    text = page_of(small(), "a\x1b[2J\u202e<b>")
    assert "a\\x1b[2J\\u202e&lt;b&gt;" in text
    assert all(c.isprintable() or c in "\n\t" for c in text)
