"""Small histories for the tests of pictures and of the page."""

from typing import Any

import numpy as np
import torch

import wirings
from wirings.graph import ConvNode, Graph
from wirings.history import History, WiringState


def five() -> History:
    """Nodes 0 and 1 feed 2 and 3, and all of these feed 4. Four of the eight edges are real, at three records."""
    graph = wirings.StaticGraph([2, 2, 1], edges=4, rule="dnw")
    assert graph.wiring is not None
    rows = [
        # 2←0  2←1  3←0  3←1   4←0  4←1  4←2  4←3
        [1.0, 0.1, 0.1, -1.0, 0.1, 0.1, 0.9, -0.8],
        [1.0, 0.1, 0.1, -1.0, 0.95, 0.1, 0.9, -0.2],  # 4←0 replaces 4←3
        [-1.0, 0.1, 0.1, -1.0, 0.95, 0.1, 0.9, -0.2],  # 2←0 changes its sign
    ]
    _set_weights(graph, rows[0])
    recorder = wirings.Recorder(graph.wiring, every=10)
    for i, row in enumerate(rows[1:], 1):
        _set_weights(graph, row)
        recorder.step(10 * i, loss=1 / i)
        recorder.note(accuracy=50 + 10 * i)
    return recorder.history()


def _set_weights(graph: Graph, row: list[float]) -> None:
    with torch.no_grad():
        graph.all_weights().copy_(torch.tensor(row))


def drifting(graph: Any, records: int, noise: float = 0.1, every: int = 10) -> History:
    """Record a graph whose weights do a random walk."""
    recorder = wirings.Recorder(graph.wiring, every=every)
    weight = graph.all_weights()
    for i in range(1, records):
        with torch.no_grad():
            weight.add_(torch.randn_like(weight) * weight.abs().mean() * noise)
        recorder.step(i * every, loss=2.3 / i)
        recorder.note(accuracy=100 - 90 / i)
    return recorder.history()


def small() -> History:
    return drifting(wirings.StaticGraph([4, 12, 10, 5], edges=70, node=ConvNode()), 12, noise=0.3)


def edges_of(state: WiringState, node: int) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """The real edges into and out of a node, the strongest first: the other node and the weight."""
    into, out_of = np.flatnonzero(state.targets == node), np.flatnonzero(state.sources == node)
    strength = np.abs(state.codes.astype(int))
    lists = []
    for found, ends in ((into, state.sources), (out_of, state.targets)):
        order = sorted(found.tolist(), key=lambda i: (-strength[i], i))
        lists.append([(int(ends[i]), float(state.weights[i])) for i in order])
    return lists[0], lists[1]
