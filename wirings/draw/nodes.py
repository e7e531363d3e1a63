"""Pictures of every node and edge: in columns, in a circle, by a spring layout, or as a matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgba

from wirings.draw.coarsen import NodeBins, coarsen_if_large
from wirings.draw.common import (
    ALIVE,
    DEAD,
    NEGATIVE,
    POSITIVE,
    SOFT,
    Drawable,
    add_title,
    as_label,
    relative_strengths,
    state_of,
)
from wirings.history import WiringState

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FEW_EDGES = 3_000
"""The most edges that an SVG has as lines; more are embedded as an image."""
MAX_CELLS = 1_000
"""The most nodes for which the adjacency matrix has one row each."""


def blocks(ax: Axes, what: Drawable, title: str = "") -> None:
    """Draw a column of nodes for each block of a static graph or each layer of a model, and the real edges.

    Positive edges are blue, negative ones orange; the stronger, the more opaque. Dead nodes (in models with several
    layers: nodes without a real edge) are grey. If there are too many nodes or edges, each dot stands for several
    nodes, and the picture says so.

    Args:
        ax: the Axes to draw on.
        what: the wiring to draw.
        title: shown above the picture.
    """
    state, note = coarsen_if_large(state_of(what))
    structure = state.structure
    positions = np.empty((structure.nodes, 2))
    for i, group in enumerate(structure.groups):
        count = group.stop - group.start
        positions[group.start : group.stop, 0] = i
        positions[group.start : group.stop, 1] = np.linspace(1, 0, count) if count > 1 else 0.5
    _draw_network(ax, state, positions)
    names = _group_labels(state, note, "\n")
    long = max(len(line) for name in names for line in name.split("\n")) * len(names) > 70
    for i, text in enumerate(names):
        turned = {"rotation": 55, "ha": "left"} if long else {"ha": "center"}
        ax.annotate(text, (i, 1), (0, 6), textcoords="offset points", va="bottom", fontsize=8, color=SOFT, **turned)
    ax.set_xlim(-0.3, len(structure.groups) - 0.7)
    ax.set_ylim(-0.03, 1.03)
    add_title(ax, "", note)
    if title:
        ax.set_title(title, fontsize=11, pad=70 if long else 32)


def circle(ax: Axes, what: Drawable, title: str = "") -> None:
    """Draw the nodes of a graph on a circle, clockwise from the left. Arguments and colours are those of `blocks`."""
    state, note = coarsen_if_large(state_of(what))
    angle = np.pi - 2 * np.pi * (np.arange(state.structure.nodes) + 0.5) / state.structure.nodes
    _draw_network(ax, state, np.stack([np.cos(angle), np.sin(angle)], 1))
    _label_circle(ax, state, _group_labels(state, note, ", "))
    ax.set_xlim(-1.5, 1.5)
    ax.set_ylim(-1.12, 1.12)
    ax.set_aspect("equal")
    add_title(ax, title, note)


def _label_circle(ax: Axes, state: WiringState, names: list[str]) -> None:
    """Label the groups around a circle, each side from top to bottom; labels without room are left out."""
    middles = [np.pi - np.pi * (group.start + group.stop) / state.structure.nodes for group in state.structure.groups]
    # The height of a text line in data units: the y axis spans 2.24 units and about 3/5 of the figure's height.
    line = 2.24 * 12 / 72 / (0.6 * ax.figure.bbox.height / ax.figure.dpi)
    last = {-1.0: 2.0, 1.0: 2.0}
    for y, x, name in sorted(zip(1.06 * np.sin(middles), 1.06 * np.cos(middles), names, strict=True), reverse=True):
        side = float(np.copysign(1.0, x))
        low = min(y, last[side] - line)
        if low > -1.12:
            last[side] = low
            at = side * max(abs(x), np.sqrt(max(0.0, 1.06**2 - low**2)))
            ax.annotate(name, (at, low), ha="left" if side > 0 else "right", va="center", fontsize=8, color=SOFT)


def spring(ax: Axes, what: Drawable, title: str = "", rounds: int = 60) -> None:
    """Draw a graph as if its edges were springs, which pull joined nodes together.

    Inputs are squares, outputs triangles. Colours are those of `blocks`.

    Args:
        ax: the Axes to draw on.
        what: the wiring to draw.
        title: shown above the picture.
        rounds: iterations of the layout.
    """
    state, note = coarsen_if_large(state_of(what))
    _draw_network(ax, state, spring_layout(state, rounds), roles=True)
    ax.margins(0.04)
    ax.set_aspect("equal")
    ax.set(xticks=[], yticks=[])
    add_title(ax, title, note)


def spring_layout(state: WiringState, rounds: int = 60) -> np.ndarray:
    """Coordinates of the nodes, shape (nodes, 2).

    All nodes repel each other, and edges attract by their strength. Inputs start on the left, outputs on the right.
    """
    structure = state.structure
    nodes, random = structure.nodes, np.random.default_rng(0)  # seeded, so that the layout is reproducible
    positions = random.uniform(-1, 1, (nodes, 2)).astype(np.float32)
    positions[structure.inputs, 0], positions[structure.outputs, 0] = -1.5, 1.5
    pull = np.zeros((nodes, nodes), np.float32)
    np.add.at(pull, (state.targets, state.sources), relative_strengths(state))
    pull = (pull + pull.T) / max(1.0, len(state) / nodes)
    wanted = np.sqrt(4 / nodes)  # the distance at which the nodes fill the square
    for i in range(rounds):
        apart = positions[:, None] - positions[None]
        square = np.maximum((apart**2).sum(2), 1e-4)
        force = (apart * (wanted**2 / square - pull * np.sqrt(square) / wanted)[..., None]).sum(1)
        force -= 2 * positions  # keeps nodes without edges from drifting away
        length = np.maximum(np.hypot(*force.T), 1e-9)
        most = 0.3 * (1 - i / rounds)
        positions = positions + force / length[:, None] * np.minimum(length, most)[:, None]
    return positions - positions.mean(0)


def adjacency(ax: Axes, what: Drawable, title: str = "") -> None:
    """Draw a graph as a matrix: columns send, rows receive. Positive edges are blue, negative ones orange.

    Beyond 1,000 nodes, each cell stands for several pairs of nodes, and the picture says so.

    Args:
        ax: the Axes to draw on.
        what: the wiring to draw.
        title: shown above the picture.
    """
    state, note = state_of(what), ""
    structure = state.structure
    if structure.nodes > MAX_CELLS:
        bins = NodeBins(structure, MAX_CELLS // 2)
        groups, count = bins.structure.groups, bins.structure.nodes
        codes = bins.codes(state).reshape(count, count)
        shade = np.abs(codes.astype(float)) / max(1, np.abs(codes.astype(int)).max())
        positive, note = codes > 0, f"each cell stands for up to {bins.size} × {bins.size} pairs of nodes"
    else:
        groups, count = structure.groups, structure.nodes
        shade, positive = np.zeros((count, count)), np.zeros((count, count), bool)
        shade[state.targets, state.sources] = 0.5 + 0.5 * relative_strengths(state)
        positive[state.targets, state.sources] = state.codes > 0
    picture = np.where(positive[..., None], to_rgba(POSITIVE), to_rgba(NEGATIVE))
    picture[..., 3] = shade
    if count > 100 and len(state) < 8 * count and not note:  # single cells would be too small to see
        colours = picture[state.targets, state.sources]
        ax.scatter(state.sources + 0.5, state.targets + 0.5, s=5, c=colours, marker="s", linewidths=0)
        ax.set(xlim=(0, count), ylim=(count, 0), aspect="equal")
    else:
        smooth = "none" if count <= 60 else "antialiased"
        ax.imshow(picture, extent=(0, count, count, 0), interpolation=smooth)
    for group in groups[1:]:
        ax.axhline(group.start, color=DEAD, linewidth=0.5)
        ax.axvline(group.start, color=DEAD, linewidth=0.5)
    labelled = [g for i, g in enumerate(groups) if g.stop - g.start > 0.045 * count or i == 0]
    middles, names = [(g.start + g.stop) / 2 for g in labelled], [as_label(g.name) for g in labelled]
    ax.set_yticks(middles, names, fontsize=8)
    ax.set_xticks(middles, names, fontsize=8, rotation=40, ha="right")
    ax.tick_params(length=0)
    ax.set_ylabel("receive", fontsize=9)
    ax.set_xlabel("send" + (f"\n({note})" if note else ""), fontsize=9)
    add_title(ax, title)


def _group_labels(state: WiringState, note: str, between: str) -> list[str]:
    """Names of the groups and, unless dots stand for several nodes, their numbers of nodes."""
    groups = [(as_label(group.name), group.stop - group.start) for group in state.structure.groups]
    return [name if note else f"{name}{between}{count:,}" for name, count in groups]


def _draw_network(ax: Axes, state: WiringState, positions: np.ndarray, roles: bool = False) -> None:
    """Draw edges as lines and nodes as dots.

    Args:
        ax: the Axes to draw on.
        state: the wiring.
        positions: coordinates of the nodes, shape (nodes, 2).
        roles: whether inputs and outputs get markers of their own.
    """
    _draw_edges(ax, state, positions)
    _draw_nodes(ax, state, positions, roles)
    ax.set_axis_off()


def _draw_edges(ax: Axes, state: WiringState, positions: np.ndarray) -> None:
    """Draw edges as lines, the strongest on top."""
    strength, count = relative_strengths(state), len(state)
    order = np.argsort(strength, kind="stable")
    colours = np.where(state.codes[:, None] > 0, to_rgba(POSITIVE), to_rgba(NEGATIVE))
    # The more edges, the more transparent: few are opaque; thousands are a haze in which the strongest stand out.
    full, least = min(1.0, 24 / np.sqrt(max(count, 1))), 0.45 if count < 100 else 0.12
    colours[:, 3] = full * (least + (1 - least) * strength ** (3 if count < FEW_EDGES else 6))
    width = float(np.clip(26 / np.sqrt(max(count, 1)), 0.35, 2.5))
    lines = list(np.stack([positions[state.sources], positions[state.targets]], 1)[order])
    drawn = LineCollection(
        lines, colors=colours[order].tolist(), linewidths=width, zorder=1, rasterized=count > FEW_EDGES
    )
    ax.add_collection(drawn)


def _draw_nodes(ax: Axes, state: WiringState, positions: np.ndarray, roles: bool) -> None:
    """Draw nodes as dots, dead ones in grey; with ``roles``, inputs as squares and outputs as triangles."""
    nodes = state.structure.nodes
    size = float(np.clip(2_500 / nodes, 2.0, 60))
    marks = np.zeros(nodes, int)
    if roles:
        marks[state.structure.inputs], marks[state.structure.outputs] = 1, 2
    for mark, shape in enumerate("os^"):
        here = marks == mark
        if here.any():
            shade = np.where(state.alive[here], ALIVE, DEAD)
            x, y = positions[here].T
            ax.scatter(x, y, s=size * (1.6 if mark else 1), c=shade, marker=shape, linewidths=0, zorder=2)
