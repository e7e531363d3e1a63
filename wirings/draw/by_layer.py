"""Pictures of a wired model layer by layer: a small matrix for each layer, and the density of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from wirings.draw.common import POSITIVE, SOFT, Drawable, add_title, as_label, state_of
from wirings.history import WiringState

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_CELLS = 48
"""The most rows and columns that a layer's matrix is drawn with."""
MAX_BARS = 60
"""The most layers that get a bar of their own."""


def layers(figure: Figure, what: Drawable, title: str = "") -> None:
    """Draw a matrix for each layer: rows receive, columns send, and darker cells are denser.

    A cell is a pair of nodes, or of groups of neighbouring nodes in wide layers.

    Args:
        figure: an empty matplotlib Figure, all of which is used.
        what: the wiring to draw.
        title: shown above the picture.
    """
    state = state_of(what)
    tables = [_density_table(state, i) for i in range(len(state.structure.layers))]
    columns = min(len(tables), max(4, int(np.ceil(np.sqrt(1.6 * len(tables))))))
    rows = -(-len(tables) // columns)
    axes = figure.subplots(rows, columns, squeeze=False)
    most = max(float(table.max()) for table in tables) or 1.0
    for ax in axes.flat[len(tables) :]:
        ax.set_axis_off()
    for ax, table, layer, count in zip(axes.flat, tables, state.structure.layers, state.counts(), strict=False):
        ax.imshow(np.sqrt(table / most), cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="none")
        ax.set_xticks([])
        ax.set_yticks([])
        name = "\n".join(map(as_label, _in_lines(layer.name.removesuffix(".weight"))))
        ax.set_title(f"{name}\n{100 * count / (layer.stop - layer.start):.3g} %", fontsize=7, color=SOFT, pad=3)
    if title:
        figure.suptitle(title, fontsize=11)
    figure.supxlabel("sending nodes", fontsize=8)
    figure.supylabel("receiving nodes", fontsize=8)


layers.whole_figure = True  # type: ignore[attr-defined]


def _in_lines(name: str, most: int = 20) -> list[str]:
    """A long name in two lines, broken at a dot if there is one, without the beginning of what is still too long.

    >>> _in_lines("decoder.0.feed_forward.down"), _in_lines("transformer_in_the_middle")
    (['decoder.', '0.feed_forward.down'], ['…ormer_in_the_middle'])
    >>> _in_lines("model.language_model.layers.0.self_attn.q_proj")
    ['…guage_model.layers.', '0.self_attn.q_proj']
    """
    dot = name.find(".", len(name) - most - 1) + 1 if len(name) > most else 0
    lines = [name[:dot], name[dot:]] if dot else [name]
    return [line if len(line) <= most else f"…{line[1 - most :]}" for line in lines]


def _density_table(state: WiringState, i: int) -> np.ndarray:
    """The density of each cell of layer ``i``: real edges divided by possible edges."""
    structure = state.structure
    layer = structure.layers[i]
    first, last = np.searchsorted(state.indices, (layer.start, layer.stop))
    tiles = [tile for tile in structure.tiles if layer.start <= tile.start < layer.stop]
    bounds = []
    for tile in tiles:
        ends = np.stack(tile.endpoints(np.array([tile.start, tile.start + tile.count - 1])))
        if tile.pairs is not None:
            ends = np.stack([[side.min(), side.max()] for side in tile.pairs])
        bounds.append(ends)
    low, high = np.min(bounds, axis=(0, 2)), np.max(bounds, axis=(0, 2)) + 1
    sizes = np.minimum(high - low, MAX_CELLS)
    if structure.block is not None and all(tile.pairs is None for tile in tiles):
        sizes = np.array([_cells(n, side) for n, side in zip(high - low, structure.block, strict=True)])
    rows, cols = (
        (ends[first:last] - low[k]) * sizes[k] // (high[k] - low[k])
        for k, ends in enumerate((state.targets, state.sources))
    )
    counts = np.zeros(sizes)
    np.add.at(counts, (rows, cols), 1)
    # If the number of cells does not divide the number of nodes, some cells stand for one node more than others.
    each = [np.bincount(np.arange(n) * size // n) for n, size in zip(high - low, sizes, strict=True)]
    return np.minimum(counts / (np.outer(*each) * max(tile.inner for tile in tiles)), 1.0)


def _cells(nodes: int, side: int) -> int:
    """The number of rows or columns of cells, each of whole blocks if there are not too many of them.

    >>> _cells(512, 32), _cells(4096, 32), _cells(70, 32)
    (16, 32, 48)
    """
    blocks, rest = divmod(int(nodes), side)
    if rest or not blocks:
        return min(int(nodes), MAX_CELLS)
    return max(count for count in range(1, min(blocks, MAX_CELLS) + 1) if blocks % count == 0)


def density(ax: Axes, what: Drawable, title: str = "") -> None:
    """Draw a bar for the density of each layer in percent; for a single graph, of the edges into each block.

    Beyond 60 layers, each bar stands for several neighbouring layers, and the picture says so.

    Args:
        ax: the Axes to draw on.
        what: the wiring to draw.
        title: shown above the picture.
    """
    state = state_of(what)
    names, real, possible = _edges_by_part(state)
    note = ""
    if len(names) > MAX_BARS:
        size = -(-len(names) // MAX_BARS)
        starts = np.arange(0, len(names), size)
        real, possible = np.add.reduceat(real, starts), np.add.reduceat(possible, starts)
        names = [f"{names[a]} … {names[min(a + size, len(names)) - 1]}" for a in starts.tolist()]
        note = f"each bar stands for {size} consecutive layers"
    percent = 100 * real / possible
    bars = np.arange(len(names))
    ax.barh(bars, percent, color=POSITIVE, height=0.7)
    ax.set_yticks(bars, [as_label(name) for name in names], fontsize=min(9.0, 260 / len(names) + 2))
    ax.invert_yaxis()
    if len(names) <= 25:
        for bar, value, count in zip(bars, percent, real, strict=True):
            ax.annotate(
                f"{value:.3g} %, {count:,.0f} edge{'' if count == 1 else 's'}",
                (value, bar),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
    ax.set_xlim(0, 1.4 * percent.max() if len(names) <= 25 else 1.05 * percent.max())
    ax.set_xlabel("density, %" + (f" ({note})" if note else ""))
    ax.spines[["top", "right"]].set_visible(False)
    add_title(ax, title)


def _edges_by_part(state: WiringState) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Names, real and possible edges of each layer; for a single graph, of the edges into each group of nodes."""
    structure = state.structure
    if len(structure.layers) > 1:
        sizes = np.array([layer.stop - layer.start for layer in structure.layers])
        return [layer.name.removesuffix(".weight") for layer in structure.layers], state.counts(), sizes
    group, count = structure.group_of(), len(structure.groups)
    possible = np.zeros(count, np.int64)
    for tile in structure.tiles:
        if tile.pairs is not None:
            np.add.at(possible, group[tile.pairs[0]], 1)
        else:  # in a graph, rows receive
            np.add.at(possible, group[tile.targets : tile.targets + tile.rows], tile.cols * tile.inner)
    real = np.bincount(group[state.targets], minlength=count)
    used = np.flatnonzero(possible)
    return [f"to {structure.groups[i].name}" for i in used], real[used], possible[used]
