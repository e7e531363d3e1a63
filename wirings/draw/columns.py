"""A wired feed-forward network as a picture: columns of nodes, real edges between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.collections import LineCollection
from torch import Tensor

from wirings.draw.common import ALIVE, DEAD, NEGATIVE, POSITIVE

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def layered(ax: Axes, weights: Sequence[Tensor], title: str = "", outputs: Sequence[str] = ()) -> None:
    """Draw the network that ``weights`` make, one after the other, on a matplotlib ``ax``.

    Args:
        ax: where to draw.
        weights: matrices (nodes that receive, nodes that send), zero where there is no edge. An edge is drawn blue if
            its weight is positive and orange if it is negative, the stronger in its layer the more opaque.
        title: above the picture.
        outputs: labels for the last nodes.

    Nodes that cannot reach the output, or that nothing reaches, are grey, and so are their edges.
    """
    matrices = [weight.detach().float().cpu().numpy() for weight in weights]
    alive = live_nodes([matrix != 0 for matrix in matrices])
    places = [_column(i, len(nodes), square=i == 0) for i, nodes in enumerate(alive)]
    for i, matrix in enumerate(matrices):
        heads, tails = np.nonzero(matrix)
        values = matrix[heads, tails]
        used = alive[i][tails] & alive[i + 1][heads]
        order = np.argsort(used * np.abs(values))  # the strongest on top
        strength = np.abs(values) / max(np.abs(values).max(initial=0.0), 1e-12)
        colours = np.where(used, np.where(values > 0, POSITIVE, NEGATIVE), DEAD)
        segments = np.stack([places[i][tails], places[i + 1][heads]], axis=1)
        ax.add_collection(
            LineCollection(
                list(segments[order]),
                colors=list(colours[order]),
                alpha=list((0.15 + 0.75 * strength * used)[order]),
                linewidths=0.7,
                zorder=1,
            )
        )
    for i, (nodes, place) in enumerate(zip(alive, places, strict=True)):
        size = 22 if i in (0, len(alive) - 1) else 9
        ax.scatter(
            place[:, 0],
            place[:, 1],
            s=size,
            c=np.where(nodes, ALIVE, DEAD),
            marker="s" if i == 0 else "o",
            zorder=2,
            linewidths=0,
        )
    for label, (x, y) in zip(outputs, places[-1], strict=False):
        ax.annotate(label, (x, y), xytext=(7, 0), textcoords="offset points", va="center", fontsize=9)
    ax.set_title(title, fontsize=10)
    ax.set_axis_off()
    ax.set_xlim(-0.5, len(alive) - 0.6)
    ax.set_ylim(-0.05, 1.05)


def live_nodes(joined: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Which nodes of each column lie on a path from the first column to the last.

    Args:
        joined: boolean matrices (nodes that receive, nodes that send), from the input on.
    """
    forth: list[np.ndarray] = [np.ones(joined[0].shape[1], dtype=bool)]
    for matrix in joined:
        forth.append(np.any(matrix & forth[-1], axis=1))
    back: list[np.ndarray] = [np.ones(joined[-1].shape[0], dtype=bool)]
    for matrix in reversed(joined):
        back.append(np.any(matrix & back[-1][:, None], axis=0))
    return [a & b for a, b in zip(forth, reversed(back), strict=True)]


def _column(i: int, count: int, square: bool) -> np.ndarray:
    """Positions of a column's nodes: pixels as a square image, other nodes one above the other."""
    side = round(count**0.5)
    if square and side * side == count and side > 1:
        rows, columns = np.divmod(np.arange(count), side)
        return np.stack([i - 0.42 + 0.5 * columns / (side - 1), 0.9 - 0.8 * rows / (side - 1)], axis=1)
    return np.stack([np.full(count, float(i)), np.linspace(1, 0, count) if count > 1 else np.array([0.5])], axis=1)
