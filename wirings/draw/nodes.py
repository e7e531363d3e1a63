"""Wirings node by node: block by block, in a circle, by springs, or as a matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgba

from wirings.draw.coarse import Bins, drawable
from wirings.draw.common import ALIVE, DEAD, NEGATIVE, POSITIVE, SOFT, Drawn, say, state_of, strengths
from wirings.history import WiringState

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FEW = 3_000
"""Edges that an SVG has as lines; more are a picture in it."""
CELLS = 1_000
"""Rows of an adjacency matrix that has one for every node."""


def blocks(ax: Axes, what: Drawn, title: str = "") -> None:
    """A static graph block by block, or a model layer by layer: a column of nodes each, real edges between them.

    Positive edges are blue, negative ones orange, the stronger the more opaque. Nodes that are dead (in models of
    several layers: without a real edge) are grey. What is too large is drawn in groups of nodes, and says so.
    """
    state, note = drawable(state_of(what))
    structure = state.structure
    places = np.empty((structure.nodes, 2))
    for i, group in enumerate(structure.groups):
        count = group.stop - group.start
        places[group.start : group.stop, 0] = i
        places[group.start : group.stop, 1] = np.linspace(1, 0, count) if count > 1 else 0.5
    _network(ax, state, places)
    names = _names(state, note, "\n")
    long = max(len(line) for name in names for line in name.split("\n")) * len(names) > 70
    for i, text in enumerate(names):
        turned = {"rotation": 55, "ha": "left"} if long else {"ha": "center"}
        ax.annotate(text, (i, 1), (0, 6), textcoords="offset points", va="bottom", fontsize=8, color=SOFT, **turned)
    ax.set_xlim(-0.3, len(structure.groups) - 0.7)
    ax.set_ylim(-0.03, 1.03)
    say(ax, "", note)
    if title:
        ax.set_title(title, fontsize=11, pad=70 if long else 32)


def circle(ax: Axes, what: Drawn, title: str = "") -> None:
    """A graph in a circle: from the left over the top, in the order of the nodes. Colours as in `blocks`."""
    state, note = drawable(state_of(what))
    angle = np.pi - 2 * np.pi * (np.arange(state.structure.nodes) + 0.5) / state.structure.nodes
    _network(ax, state, np.stack([np.cos(angle), np.sin(angle)], 1))
    _around(ax, state, _names(state, note, ", "))
    ax.set_xlim(-1.5, 1.5)
    ax.set_ylim(-1.12, 1.12)
    ax.set_aspect("equal")
    say(ax, title, note)


def _around(ax: Axes, state: WiringState, names: list[str]) -> None:
    """The names of groups around a circle, on each side one below the other; what finds no room is left out."""
    middles = [np.pi - np.pi * (group.start + group.stop) / state.structure.nodes for group in state.structure.groups]
    # A line's height, where the whole, 2.24, has three fifths of the figure's.
    line = 2.24 * 12 / 72 / (0.6 * ax.figure.bbox.height / ax.figure.dpi)
    last = {-1.0: 2.0, 1.0: 2.0}
    for y, x, name in sorted(zip(1.06 * np.sin(middles), 1.06 * np.cos(middles), names, strict=True), reverse=True):
        side = float(np.copysign(1.0, x))
        low = min(y, last[side] - line)
        if low > -1.12:
            last[side] = low
            at = side * max(abs(x), np.sqrt(max(0.0, 1.06**2 - low**2)))
            ax.annotate(name, (at, low), ha="left" if side > 0 else "right", va="center", fontsize=8, color=SOFT)


def spring(ax: Axes, what: Drawn, title: str = "", rounds: int = 60) -> None:
    """A graph as if its edges were springs: joined nodes come together. Inputs are squares, outputs triangles."""
    state, note = drawable(state_of(what))
    places = spring_layout(state, rounds)
    _network(ax, state, places, roles=True)
    ax.margins(0.04)
    ax.set_aspect("equal")
    ax.set(xticks=[], yticks=[])
    say(ax, title, note)


def spring_layout(state: WiringState, rounds: int = 60) -> np.ndarray:
    """Places of the nodes, (nodes, 2): all repel each other, edges pull by their strength; inputs start on the left."""
    structure = state.structure
    nodes, random = structure.nodes, np.random.default_rng(0)  # the same picture every time
    places = random.uniform(-1, 1, (nodes, 2)).astype(np.float32)
    places[structure.inputs, 0], places[structure.outputs, 0] = -1.5, 1.5
    pull = np.zeros((nodes, nodes), np.float32)
    np.add.at(pull, (state.targets, state.sources), strengths(state))
    pull = (pull + pull.T) / max(1.0, len(state) / nodes)
    wanted = np.sqrt(4 / nodes)  # apart, so that all fill the square
    for i in range(rounds):
        apart = places[:, None] - places[None]
        square = np.maximum((apart**2).sum(2), 1e-4)
        force = (apart * (wanted**2 / square - pull * np.sqrt(square) / wanted)[..., None]).sum(1)
        force -= 2 * places  # nobody drifts away, not even who has no edge
        length = np.maximum(np.hypot(*force.T), 1e-9)
        most = 0.3 * (1 - i / rounds)
        places = places + force / length[:, None] * np.minimum(length, most)[:, None]
    return places - places.mean(0)


def adjacency(ax: Axes, what: Drawn, title: str = "") -> None:
    """A graph as a matrix: columns send, rows receive. Positive edges are blue, negative ones orange.

    Beyond 1,000 nodes a cell stands for several, and the picture says so.
    """
    state, note = state_of(what), ""
    structure = state.structure
    if structure.nodes > CELLS:
        bins = Bins(structure, CELLS // 2)
        groups, count = bins.structure.groups, bins.structure.nodes
        codes = bins.codes(state).reshape(count, count)
        shade = np.abs(codes.astype(float)) / max(1, np.abs(codes.astype(int)).max())
        positive, note = codes > 0, f"a cell stands for up to {bins.size} × {bins.size} pairs of nodes"
    else:
        groups, count = structure.groups, structure.nodes
        shade, positive = np.zeros((count, count)), np.zeros((count, count), bool)
        shade[state.targets, state.sources] = 0.5 + 0.5 * strengths(state)
        positive[state.targets, state.sources] = state.codes > 0
    picture = np.where(positive[..., None], to_rgba(POSITIVE), to_rgba(NEGATIVE))
    picture[..., 3] = shade
    if count > 100 and len(state) < 8 * count and not note:  # cells too small to be seen one by one
        colours = picture[state.targets, state.sources]
        ax.scatter(state.sources + 0.5, state.targets + 0.5, s=5, c=colours, marker="s", linewidths=0)
        ax.set(xlim=(0, count), ylim=(count, 0), aspect="equal")
    else:
        smooth = "none" if count <= 60 else "antialiased"
        ax.imshow(picture, extent=(0, count, count, 0), interpolation=smooth)
    for group in groups[1:]:
        ax.axhline(group.start, color=DEAD, linewidth=0.5)
        ax.axvline(group.start, color=DEAD, linewidth=0.5)
    apart = [g for i, g in enumerate(groups) if g.stop - g.start > 0.045 * count or i == 0]
    middles, names = [(g.start + g.stop) / 2 for g in apart], [g.name for g in apart]
    ax.set_yticks(middles, names, fontsize=8)
    ax.set_xticks(middles, names, fontsize=8, rotation=40, ha="right")
    ax.tick_params(length=0)
    ax.set_ylabel("receive", fontsize=9)
    ax.set_xlabel("send" + (f"\n({note})" if note else ""), fontsize=9)
    say(ax, title)


def _names(state: WiringState, note: str, between: str) -> list[str]:
    """Names of groups with their numbers of nodes, which are not those of the dots that stand for them."""
    groups = state.structure.groups
    return [group.name if note else f"{group.name}{between}{group.stop - group.start:,}" for group in groups]


def _network(ax: Axes, state: WiringState, places: np.ndarray, roles: bool = False) -> None:
    """Edges as lines, the strongest on top, and nodes as dots."""
    strength, count = strengths(state), len(state)
    alive = state.alive
    order = np.argsort(strength, kind="stable")
    colours = np.where(state.codes[:, None] > 0, to_rgba(POSITIVE), to_rgba(NEGATIVE))
    # As opaque as leaves room for the lines below: few edges are full, thousands a haze with the strongest in it.
    full, least = min(1.0, 24 / np.sqrt(max(count, 1))), 0.45 if count < 100 else 0.12
    colours[:, 3] = full * (least + (1 - least) * strength ** (3 if count < FEW else 6))
    width = float(np.clip(26 / np.sqrt(max(count, 1)), 0.35, 2.5))
    lines = np.stack([places[state.sources], places[state.targets]], 1)[order]
    ax.add_collection(
        LineCollection(list(lines), colors=colours[order].tolist(), linewidths=width, zorder=1, rasterized=count > FEW)
    )
    nodes = state.structure.nodes
    size = float(np.clip(2_500 / nodes, 2.0, 60))
    marks = np.zeros(nodes, int)
    if roles:
        marks[state.structure.inputs], marks[state.structure.outputs] = 1, 2
    for mark, shape in enumerate("os^"):
        here = marks == mark
        if here.any():
            shade = np.where(alive[here], ALIVE, DEAD)
            x, y = places[here].T
            ax.scatter(x, y, s=size * (1.6 if mark else 1), c=shade, marker=shape, linewidths=0, zorder=2)
    ax.set_axis_off()
