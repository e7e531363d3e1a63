"""A picture of a feed-forward network given by its weight matrices: columns of nodes with real edges between them."""

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
    """Draw a feed-forward network. Dead nodes and their edges are grey.

    Args:
        ax: the Axes to draw on.
        weights: the weight matrices from the input on, each of shape (receiving nodes, sending nodes), zero where there
            is no edge. Positive edges are blue, negative ones orange; the stronger within their layer, the more opaque.
        title: shown above the picture.
        outputs: labels of the output nodes.
    """
    matrices = [weight.detach().float().cpu().numpy() for weight in weights]
    alive = live_nodes([matrix != 0 for matrix in matrices])
    positions = [_column_positions(i, len(nodes), square=i == 0) for i, nodes in enumerate(alive)]
    for i, matrix in enumerate(matrices):
        targets, sources = np.nonzero(matrix)
        values = matrix[targets, sources]
        used = alive[i][sources] & alive[i + 1][targets]
        order = np.argsort(used * np.abs(values))  # the strongest on top
        strength = np.abs(values) / max(np.abs(values).max(initial=0.0), 1e-12)
        colours = np.where(used, np.where(values > 0, POSITIVE, NEGATIVE), DEAD)
        segments = np.stack([positions[i][sources], positions[i + 1][targets]], axis=1)
        ax.add_collection(
            LineCollection(
                list(segments[order]),
                colors=list(colours[order]),
                alpha=list((0.15 + 0.75 * strength * used)[order]),
                linewidths=0.7,
                zorder=1,
            )
        )
    for i, (nodes, position) in enumerate(zip(alive, positions, strict=True)):
        size = 22 if i in (0, len(alive) - 1) else 9
        ax.scatter(
            position[:, 0],
            position[:, 1],
            s=size,
            c=np.where(nodes, ALIVE, DEAD),
            marker="s" if i == 0 else "o",
            zorder=2,
            linewidths=0,
        )
    for label, (x, y) in zip(outputs, positions[-1], strict=False):
        ax.annotate(label, (x, y), xytext=(7, 0), textcoords="offset points", va="center", fontsize=9)
    ax.set_title(title, fontsize=10)
    ax.set_axis_off()
    ax.set_xlim(-0.5, len(alive) - 0.6)
    ax.set_ylim(-0.05, 1.05)


def live_nodes(masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """For each column of nodes, which of them lie on a path from the first column to the last.

    Args:
        masks: boolean matrices of the real edges, each of shape (receiving nodes, sending nodes), from the input on.
    """
    forward: list[np.ndarray] = [np.ones(masks[0].shape[1], dtype=bool)]
    for matrix in masks:
        forward.append(np.any(matrix & forward[-1], axis=1))
    backward: list[np.ndarray] = [np.ones(masks[-1].shape[0], dtype=bool)]
    for matrix in reversed(masks):
        backward.append(np.any(matrix & backward[-1][:, None], axis=0))
    return [a & b for a, b in zip(forward, reversed(backward), strict=True)]


def _column_positions(i: int, count: int, square: bool) -> np.ndarray:
    """Coordinates of the nodes of column ``i``: pixels as a square image, other nodes one above the other."""
    side = round(count**0.5)
    if square and side * side == count and side > 1:
        rows, columns = np.divmod(np.arange(count), side)
        return np.stack([i - 0.42 + 0.5 * columns / (side - 1), 0.9 - 0.8 * rows / (side - 1)], axis=1)
    return np.stack([np.full(count, float(i)), np.linspace(1, 0, count) if count > 1 else np.array([0.5])], axis=1)
