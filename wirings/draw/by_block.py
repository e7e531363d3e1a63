"""Pictures of transformers: the density of each kind of layer by block, the heads, and densities over training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from wirings.draw.common import ALIVE, NEGATIVE, SOFT, Drawable, as_label, history_of, state_of
from wirings.errors import WiringError
from wirings.history import History
from wirings.history.blocks import column_name
from wirings.history.heads import HeadCounts, TransformerCounts, count_edges

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_NUMBERS = 16
"""The most heads of a block for which each cell has room for its number of edges."""
MAX_LABELS = 40
"""The most blocks of which each is named."""
BLUES, DEPTHS = colormaps["Blues"], ListedColormap(colormaps["viridis"](np.linspace(0, 0.88, 256)))


def transformer(figure: Figure, what: Drawable, title: str = "") -> None:
    """Draw a transformer: the density of each kind of layer by block, and the real edges of each head.

    Dead heads have an orange outline and say what has no real edge: q, k, v or out.

    Args:
        figure: an empty matplotlib Figure, all of which is used.
        what: the wiring to draw.
        title: shown above the picture.
    """
    state = state_of(what)
    counts = count_edges(state.structure, [state])
    families = list(dict.fromkeys(one.attention.family for one in counts.heads))
    by_family = [[one for one in counts.heads if one.attention.family == family] for family in families]
    widths = [0.8 * len(counts.transformer.columns)] + [
        max(2.0, 0.55 * min(MAX_NUMBERS, max(one.attention.heads for one in heads))) for heads in by_family
    ]
    axes = figure.subplots(1, len(widths), squeeze=False, sharey=True, width_ratios=widths)[0]
    _draw_grid(axes[0], counts)
    for ax, family, heads in zip(axes[1:], families, by_family, strict=True):
        _draw_heads(ax, heads, family)
    names = counts.transformer.blocks
    nth = -(-len(names) // MAX_LABELS)
    axes[0].set_yticks(range(0, len(names), nth), [as_label(name) for name in names[::nth]], fontsize=8)
    axes[0].set_ylim(len(names) - 0.5, -0.5)
    if title:
        figure.suptitle(title, fontsize=11)


transformer.whole_figure = True  # type: ignore[attr-defined]


def picture_size(history: History) -> tuple[float, float]:
    """The width and height in inches that suit `transformer`."""
    found = history.structure.transformer
    assert found is not None
    wide = {one.family: min(MAX_NUMBERS, one.heads) for one in found.attentions if one.heads}
    return (
        2 + 0.8 * len(found.columns) + sum(max(2.0, 0.55 * heads) for heads in wide.values()),
        1.4 + 0.34 * max(3, min(MAX_LABELS, len(found.blocks))),
    )


def _draw_grid(ax: Axes, counts: TransformerCounts) -> None:
    """A row for each block, a column for each kind of layer; the denser, the darker."""
    grid = counts.densities()[-1]
    most = max(float(np.nanmax(grid)), 1e-9)
    ax.imshow(grid, cmap=BLUES, vmin=0, vmax=1.25 * most, aspect="auto", interpolation="none")
    for column in range(1, grid.shape[1]):
        ax.axvline(column - 0.5, color="white", linewidth=2)
    if len(grid) <= MAX_LABELS:
        for (block, column), value in np.ndenumerate(grid):
            if not np.isnan(value):
                colour = "white" if value > 0.8 * most else ALIVE
                ax.text(column, block, f"{value:.3g}", ha="center", va="center", fontsize=8, color=colour)
    columns = [column_name(*column).replace(" ", "\n") for column in counts.transformer.columns]
    ax.set_xticks(range(len(columns)), columns, fontsize=8)
    _finish(ax, "density of each layer, %")


def _draw_heads(ax: Axes, heads: list[HeadCounts], family: str) -> None:
    """A row for each block, a cell for each head: the more real edges, the darker."""
    most = max(int(np.maximum(one.edges[-1], 0).sum(1).max()) for one in heads) or 1
    numbers = max(one.attention.heads for one in heads) <= MAX_NUMBERS
    for one in heads:
        block = one.attention.block
        for head, (edges, missing) in enumerate(
            zip(np.maximum(one.edges[-1], 0).sum(1).tolist(), one.missing[-1], strict=True)
        ):
            shade = "white" if missing else BLUES(0.8 * edges / most)
            frame = Rectangle((head - 0.44, block - 0.42), 0.88, 0.84, facecolor=shade, linewidth=1.2)
            frame.set_edgecolor(NEGATIVE if missing else "none")
            ax.add_patch(frame)
            if numbers:
                text = _compact(edges) if not missing else f"no {missing}" if missing.count(",") < 2 else "dead"
                colour = NEGATIVE if missing else "white" if edges > 0.8 * most else ALIVE
                ax.text(head, block, text, ha="center", va="center", fontsize=6.5, color=colour)
    ax.set_xlim(-0.5, max(one.attention.heads for one in heads) - 0.5)
    ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    ax.set_xlabel("head", fontsize=8)
    ax.tick_params(axis="x", labelsize=8)
    dead, total = sum(int(one.dead[-1].sum()) for one in heads), sum(one.attention.heads for one in heads)
    # Two lines, since few heads make a narrow picture.
    which = "real edges of each head" if family == "attention" else f"those of {family}"
    _finish(ax, f"{which}\n{dead:,} of {total:,} dead")


def _compact(count: int) -> str:
    """A count in at most four characters.

    >>> [_compact(n) for n in (0, 999, 1234, 99_950, 123_456, 4_200_000)]
    ['0', '999', '1.2k', '100k', '123k', '4.2M']
    """
    for size, unit in ((1, ""), (1e3, "k"), (1e6, "M"), (1e9, "G")):
        if count < 999.5 * size:
            value = count / size
            return f"{value:.1f}{unit}" if unit and value < 9.95 else f"{value:.0f}{unit}"
    return f"{count:.1e}"


def _finish(ax: Axes, title: str) -> None:
    ax.set_title(title, fontsize=9, color=SOFT)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def density_over_time(figure: Figure, what: History, title: str = "") -> None:
    """Draw the density of a transformer's layers over training: a chart for each kind of layer, a line for each block.

    Args:
        figure: an empty matplotlib Figure, all of which is used.
        what: the history of a transformer, with at least two records.
        title: shown above the picture.
    """
    history = history_of(what)
    if len(history) < 2:
        raise WiringError("density_over_time needs a history with at least two records, got one.")
    counts = count_edges(history.structure, history.states())
    grid, names = counts.densities(), counts.transformer.columns
    columns = min(len(names), 3 if len(names) in (5, 6) else 4)
    rows = -(-len(names) // columns)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    blocks = grid.shape[1]
    depth = Normalize(0, max(blocks - 1, 1))
    for i, ax in enumerate(axes.flat):
        if i >= len(names):
            ax.set_axis_off()
            continue
        for block in range(blocks):
            ax.plot(counts.steps, grid[:, block, i], color=DEPTHS(depth(block)), linewidth=1.3)
        ax.set_title(column_name(*names[i]), fontsize=9, color=SOFT)
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=8)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        if i % columns == 0:
            ax.set_ylabel("density, %", fontsize=8)
        if i + columns >= len(names):
            ax.set_xlabel("optimizer step", fontsize=8)
            ax.tick_params(labelbottom=True)
    axes[0, 0].set_ylim(0, 1.05 * axes[0, 0].get_ylim()[1])  # a line at the top edge would look like a frame
    if blocks > 1:
        ticks = MaxNLocator(6, integer=True).tick_values(0, blocks - 1)
        shown = [int(tick) for tick in ticks if 0 <= tick < blocks]
        bar = figure.colorbar(ScalarMappable(depth, DEPTHS), ax=axes, ticks=shown, pad=0.02)
        bar.ax.set_yticklabels([as_label(counts.transformer.blocks[tick]) for tick in shown], fontsize=8)
        bar.set_label("block", fontsize=8)
    if title:
        figure.suptitle(title, fontsize=11)


density_over_time.whole_figure = True  # type: ignore[attr-defined]
