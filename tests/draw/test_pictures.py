"""Pictures: each can be drawn with 5 to 5,000 nodes, shows the right values, and has no overlapping labels."""

import copy
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("matplotlib")
from histories import drifting, five, small
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

import wirings
from wirings import WiringError, draw
from wirings.draw.common import NEGATIVE, POSITIVE, relative_strengths
from wirings.draw.nodes import spring_layout
from wirings.history import History, snapshot_of


def network() -> nn.Module:
    """Layers of several kinds, as in a residual network."""
    layers = [nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 32, 3, groups=2), nn.Conv2d(16, 32, 1)]
    model = nn.Sequential(*layers, nn.ConvTranspose2d(32, 64, 2), nn.Flatten(), nn.Linear(64, 10))
    wirings.wire_(model, density=0.2)
    return model


def deep() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(61)))
    wirings.wire_(model, density=0.5)
    return model


SUBJECTS: dict[str, Any] = {
    "5 nodes": five,
    "5 nodes, cycles": lambda: wirings.DiscreteGraph(5, inputs=1, outputs=1, steps=3, edges=8),
    "31 nodes": small,
    "a network": network,
    "61 layers": deep,
    "5,000 nodes": lambda: wirings.StaticGraph([100, 1600, 1600, 1600, 100], edges=4000),
    "5,000 nodes, cycles": lambda: wirings.DiscreteGraph(
        topology=torch.rand(5000, 5000) < 0.0004, inputs=40, outputs=50, steps=3, edges=4000
    ),
}
PICTURES = {
    "blocks": draw.blocks,
    "circle": draw.circle,
    "spring": draw.spring,
    "adjacency": draw.adjacency,
    "degrees": draw.degrees,
    "density": draw.density,
    "layers": draw.layers,
}


def drawn(function: Any, *what: Any, size: tuple[float, float] = (8, 5), **how: Any) -> Figure:
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    function(figure if getattr(function, "whole_figure", False) else figure.add_subplot(), *what, **how)
    figure.canvas.draw()
    return figure


def labels(figure: Figure) -> list[tuple[str, Any]]:
    """Visible horizontal texts and their boxes, without ticks that are out of range or switched off."""
    renderer, found = figure.canvas.get_renderer(), []
    hidden = set()
    for ax in figure.axes:
        for side, (low, high) in ((ax.xaxis, sorted(ax.get_xlim())), (ax.yaxis, sorted(ax.get_ylim()))):
            if not ax.axison:
                hidden.update(side.findobj(Text))
            hidden.update(tick.label1 for tick in side.get_major_ticks() if not low <= tick.get_loc() <= high)
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text().strip() and not text.get_rotation() % 90 and text not in hidden:
            found.append((text.get_text(), text.get_window_extent(renderer)))
    return found


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of labels that overlap by more than two pixels."""
    found = []
    for (a, x), (b, y) in itertools.combinations(labels(figure), 2):
        wide = min(x.x1, y.x1) - max(x.x0, y.x0)
        high = min(x.y1, y.y1) - max(x.y0, y.y0)
        if wide > 2 and high > 2:
            found.append((a, b))
    return found


def cut_off(figure: Figure) -> list[str]:
    """Labels that extend beyond the picture."""
    wide, high = figure.canvas.get_width_height()
    return [text for text, box in labels(figure) if min(box.x0, box.y0) < -1 or box.x1 > wide + 1 or box.y1 > high + 1]


@pytest.mark.parametrize("size", [(5, 4), (8, 5)], ids=["small", "usual"])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_picture_is_readable(subject: str, size: tuple[float, float]) -> None:
    history = SUBJECTS[subject]()
    history = history if isinstance(history, History) else snapshot_of(history)
    for name, function in PICTURES.items():
        size = (12, 9) if subject == "61 layers" else size
        figure = drawn(function, history, title=f"{name} of {subject}", size=size)
        assert overlaps(figure) == [], name
        assert cut_off(figure) == [], name
        pixels = np.asarray(figure.canvas.buffer_rgba())
        assert (pixels[..., :3].min(2) < 250).mean() > 0.004, f"{name} is empty"
        said = " ".join(" ".join(text.get_text() for text in figure.findobj(Text)).split())
        if subject.startswith("5,000") and name in ("blocks", "circle", "spring"):
            assert "Too large to draw node by node: each dot stands for up to 16 neighbouring nodes" in said
        if subject.startswith("5,000") and name == "adjacency":
            assert "each cell stands for up to 10 × 10 pairs of nodes" in said
        if subject == "61 layers" and name == "density":
            assert "each bar stands for 2 consecutive layers" in said


def near(pixel: np.ndarray, colour: str) -> bool:
    return bool(np.abs(pixel[:3] - 255 * np.array(to_rgb(colour))).sum() < 90)


def test_edges_have_the_colours_of_their_signs() -> None:
    figure = drawn(draw.blocks, five().state(0))
    pixels, ax = np.asarray(figure.canvas.buffer_rgba()).astype(int), figure.axes[0]

    def along(a: tuple[float, float], b: tuple[float, float]) -> np.ndarray:
        x, y = ax.transData.transform([a[0] + (b[0] - a[0]) / 3, a[1] + (b[1] - a[1]) / 3])
        return pixels[pixels.shape[0] - 1 - round(y), round(x)]

    assert near(along((0, 1), (1, 1)), POSITIVE)  # from node 0 to node 2
    assert near(along((0, 0), (1, 0)), NEGATIVE)
    assert near(along((0, 1), (1, 0)), "white")  # hallucinated


def test_the_matrix_has_one_cell_per_edge() -> None:
    state = five().state(0)
    image = drawn(draw.adjacency, state).axes[0].images[0].get_array()
    assert (image[..., 3] > 0).sum() == 4
    assert image[2, 0, :3].tolist() == pytest.approx(to_rgb(POSITIVE))
    assert image[3, 1, :3].tolist() == pytest.approx(to_rgb(NEGATIVE))


def test_the_matrix_of_a_layer_shows_its_density() -> None:
    model = nn.Linear(64, 100)
    wirings.wire_(model, density=0.25)
    draw.layers(labelled := Figure(), model)
    assert (labelled.get_supxlabel(), labelled.get_supylabel()) == ("sending nodes", "receiving nodes")
    table = draw.layers(figure := Figure(), model) or np.square(np.asarray(figure.axes[0].images[0].get_array()))
    assert table.shape == (48, 48)
    assert table.max() == pytest.approx(1)


def test_layers_of_like_names_are_told_apart() -> None:
    block = nn.ModuleDict({"feed_forward": nn.ModuleDict({"down": nn.Linear(4, 4)})})
    model = nn.ModuleDict({"encoder": nn.ModuleList([block]), "decoder": nn.ModuleList([copy.deepcopy(block)])})
    wirings.wire_(model, density=0.25)
    draw.layers(figure := Figure(), model)
    titles = [ax.get_title() for ax in figure.axes[:2]]
    assert titles == [f"{side}.\n0.feed_forward.down\n25 %" for side in ("encoder", "decoder")]


def test_degrees_and_densities() -> None:
    state = five().state(0)
    figure = drawn(draw.degrees, state)
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["in: mean 1.3, zero for 0 of 3 nodes", "out: mean 1.0, zero for 0 of 4 nodes"]
    bars = drawn(draw.density, state).axes[0].patches
    assert [bar.get_width() for bar in bars] == [50.0, 50.0]


def test_births_and_deaths_of_edges_and_nodes() -> None:
    figure = drawn(draw.births_and_deaths, five())
    heights = [patch.get_height() for patch in figure.axes[0].patches]
    assert heights == [1, 0, -1, 0]
    assert overlaps(figure) == []
    figure = drawn(draw.births_and_deaths, five(), of="nodes")  # nodes 1 and 3 die with the edge from 3 to 4
    assert [patch.get_height() for patch in figure.axes[0].patches] == [0, 0, -2, 0]
    for of in ("accuracy", "loss"):
        line = drawn(draw.progress, five(), of=of).axes[0].lines[0]
        assert line.get_xdata().tolist() == [10, 20]
    assert drawn(draw.progress, five()).axes[0].lines[0].get_ydata().tolist() == [60, 70]


def test_accuracy_against_multiply_adds() -> None:
    points = [draw.Point(41e6, 63.3, "a"), draw.Point(149e6, 68.4, "a"), draw.Point(42e6, 66.0, "b", 0.3)]
    figure = drawn(draw.accuracy_against_mult_adds, points, title="a table")
    assert overlaps(figure) == []
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["a", "b"]
    assert figure.axes[0].get_xlabel() == "multiply-adds per image"
    few = drawn(draw.accuracy_against_mult_adds, [*points, draw.Point(50e6, 67.0, "a", few=True)])
    hollow = [line for line in few.axes[0].lines if line.get_markerfacecolor() == "white"]
    assert [line.get_xydata().tolist() for line in hollow] == [[[50e6, 67.0]]]
    assert few.axes[0].get_xlabel() == "multiply-adds per image (hollow: fewer than three seeds)"
    with pytest.raises(WiringError, match="at least one point"):
        drawn(draw.accuracy_against_mult_adds, [])
    with pytest.raises(WiringError, match="the result of table9/x has no multiply-adds"):
        drawn(draw.accuracy_against_mult_adds, [type("Result", (), {"recipe": "table9/x", "mult_adds": None})()])


def test_the_spring_layout_pulls_joined_nodes_together() -> None:
    graph = wirings.DiscreteGraph(40, inputs=2, outputs=2, steps=2, edges=60)
    state = snapshot_of(graph).state()
    places = spring_layout(state)
    apart = np.hypot(*(places[:, None] - places[None]).transpose(2, 0, 1))
    other = state.sources != state.targets
    assert apart[state.targets[other], state.sources[other]].mean() < 0.8 * apart[np.triu_indices(40, 1)].mean()
    assert np.array_equal(places, spring_layout(state))


def test_equally_strong_edges_look_the_same() -> None:
    assert relative_strengths(five().state(0)).tolist() == [1.0, 1.0, 0.5, 0.25]


def test_names_are_not_interpreted_as_formulas(tmp_path: Path) -> None:
    model = nn.Module()
    model.add_module("$x_{", nn.Linear(4, 3))
    model.add_module("cost: 5$\x07", nn.Linear(3, 2))
    wirings.wire_(model, k=9)
    files = draw.save_pictures(snapshot_of(model), tmp_path, title="$1 and $2_{")
    assert len(files) == 5
    texts = [text.get_text() for text in drawn(draw.density, model).findobj(Text)]
    assert r"cost: 5\$\x07" in texts


def test_saves_files(tmp_path: Path) -> None:
    history = drifting(wirings.StaticGraph([4, 30, 30, 5], edges=70), 2)
    png = draw.save(tmp_path / "a.png", draw.blocks, history, title="x", size=(4, 3))
    assert png.read_bytes()[:4] == b"\x89PNG"
    for name in ("a.svg", "b.svg"):
        draw.save(tmp_path / name, draw.blocks, history)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()  # files are reproducible
    assert draw.save(tmp_path / "c.png", draw.layers, history).exists()
    with pytest.raises(WiringError, match=r"ends in \.png or \.svg, got a\.gif"):
        draw.save(tmp_path / "a.gif", draw.blocks, history)
    with pytest.raises(WiringError, match=r"cannot write .*b\.png"):
        draw.save(tmp_path / "a.png" / "b.png", draw.blocks, history)


def test_rejects_what_cannot_be_drawn() -> None:
    ax = Figure().add_subplot()
    with pytest.raises(WiringError, match="expects a WiringState, a History or a model, got str"):
        draw.blocks(ax, "a graph")  # type: ignore[arg-type]
    with pytest.raises(WiringError, match="expects a History, got Sequential"):
        draw.births_and_deaths(ax, network())  # type: ignore[arg-type]
    with pytest.raises(WiringError, match="a history with at least two records, got one"):
        draw.births_and_deaths(ax, snapshot_of(network()))
    with pytest.raises(WiringError, match="of must be 'edges' or 'nodes', got 'layers'"):
        draw.births_and_deaths(ax, five(), of="layers")
    with pytest.raises(WiringError, match="no values of 'top5'; it has accuracy, loss"):
        draw.progress(ax, five(), of="top5")
    with pytest.raises(AttributeError, match="no attribute 'movie'"):
        _ = draw.movie
