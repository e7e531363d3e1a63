"""What neural graphs cost: an edge, one multiply-add for each pixel that it carries; a node, what its function counts.

Which edges are alive depends on the whole network: on which inputs of the graph are fed at all, and on which of its
outputs matter to what comes after. Both are arguments here; `wirings.profiling.live` finds them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from wirings.budgets.mult_adds import Call
from wirings.graph import ContinuousGraph, DiscreteGraph, Graph, Liveness, StaticGraph
from wirings.graph.liveness import path_liveness, step_liveness
from wirings.graph.nodes import NodeFunction


class NodeWork(NamedTuple):
    """What the nodes of a graph do in one pass through the edges. Arrays are (nodes,)."""

    sent: np.ndarray
    """Pixels of the map that the node sends."""
    before: np.ndarray
    """Multiply-adds before the edges."""
    after: np.ndarray
    """Multiply-adds after the edges."""
    params_before: np.ndarray
    """Parameters that multiply before the edges."""
    params_after: np.ndarray
    """Parameters that multiply after the edges."""
    size: tuple[int, ...]
    """The size of the output nodes' maps."""


class GraphEdges:
    """A graph and its real edges."""

    def __init__(self, graph: Graph, real: np.ndarray) -> None:
        self.graph = graph
        targets, sources = graph.edge_list()
        self.targets, self.sources = targets[real], sources[real]
        """The nodes that each real edge leads to, and leaves."""
        self.receives, self.sends = np.zeros((2, graph.nodes), bool)
        """For each node, whether a real edge leads to it, and whether one leaves it."""
        self.receives[self.targets] = self.sends[self.sources] = True

    def dense_pixels(self, sent: np.ndarray) -> int:
        """The pixels that all allowed edges would carry if nodes send ``sent`` pixels."""
        return sum(
            int(len(tile.targets) * sent[np.asarray(tile.sources)].sum())
            if tile.places is None
            else int(sent[tile.edge_list()[1]].sum())
            for tile in self.graph.tiles
        )

    def liveness(self, call: Call, fed: np.ndarray, wanted: np.ndarray) -> Liveness:
        """What is alive in a call if only some inputs are fed and only some outputs matter; boolean vectors."""
        graph = self.graph
        edges = self.sources, self.targets, graph.nodes, graph.inputs[fed], graph.outputs[wanted]
        if not isinstance(graph, DiscreteGraph):
            return path_liveness(*edges)
        steps, input_steps = _steps(graph, call)
        return step_liveness(*edges, steps=steps, input_steps=input_steps, read_every_step=graph.reads == "every")


def channel_dims(graph: Graph) -> tuple[int, int]:
    """The dimension of the nodes in a graph's input and in its output."""
    if not isinstance(graph, DiscreteGraph):
        return 1, 1
    return 2 if graph.inflow == "every" else 1, 2 if graph.reads == "every" else 1


def passes(graph: Graph, call: Call) -> tuple[int, str]:
    """How often a call passes through the edges, and what one pass is called: step, evaluation or call."""
    if isinstance(graph, DiscreteGraph):
        return _steps(graph, call)[0], "step"
    return (call.evaluations, "evaluation") if isinstance(graph, ContinuousGraph) else (1, "call")


def _steps(graph: DiscreteGraph, call: Call) -> tuple[int, int]:
    """The number of steps in a call, and how many of them have an input."""
    parts = call.inputs[0][1] if graph.inflow == "every" else 1
    return parts if graph.steps is None else graph.steps, parts


def node_work(graph: Graph, call: Call) -> NodeWork:
    """What the nodes do in one pass through the edges."""
    size = call.inputs[0][channel_dims(graph)[0] + 1 :]
    sent, before, after, params_before, params_after = np.zeros((5, graph.nodes), np.int64)
    static = isinstance(graph, StaticGraph)
    whole: list[tuple[np.ndarray, NodeFunction, slice | None]]
    whole = list(graph.levels()) if static else [(np.arange(graph.nodes), graph.function, None)]  # type: ignore
    for number, (nodes, function, part) in enumerate(whole):
        own, count = (slice(None), len(nodes)) if part is None else (part, part.stop)
        if number or not static:  # the inputs of a static graph receive nothing
            cost = function.cost("after", count, size)
            after[nodes], params_after[nodes], size = cost.mult_adds[own], cost.params[own], cost.size
        state = size
        cost = function.cost("before", count, size)
        before[nodes], params_before[nodes], size = cost.mult_adds[own], cost.params[own], cost.size
        sent[nodes] = math.prod(size)
    return NodeWork(sent, before, after, params_before, params_after, state)
