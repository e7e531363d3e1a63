"""What the nodes and edges of a graph compute in a call, in multiply-adds.

An edge costs one multiply-add for each pixel that it carries; a node, what its function counts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from wirings.budgets.mult_adds import Call
from wirings.graph.base import Graph
from wirings.graph.continuous import ContinuousGraph
from wirings.graph.discrete import DiscreteGraph
from wirings.graph.nodes import NodeFunction
from wirings.graph.static import StaticGraph


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


def channel_dims(graph: Graph) -> tuple[int, int]:
    """The dimension of the nodes in a graph's input and in its output."""
    if not isinstance(graph, DiscreteGraph):
        return 1, 1
    return 2 if graph.inflow == "every" else 1, 2 if graph.reads == "every" else 1


def passes(graph: Graph, call: Call) -> tuple[int, str]:
    """How often a call passes through the edges, and what one pass is called: step, evaluation or call."""
    if isinstance(graph, DiscreteGraph):
        return steps_of(graph, call)[0], "step"
    return (call.evaluations, "evaluation") if isinstance(graph, ContinuousGraph) else (1, "call")


def steps_of(graph: DiscreteGraph, call: Call) -> tuple[int, int]:
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


def edge_cost(graph: Graph, call: Call) -> tuple[int | None, int, np.ndarray, int]:
    """What the edges of a graph cost in a call.

    Returns:
        One edge, None if they differ; all allowed edges; each node that an edge leaves, (nodes,); and nodes in any
        case.
    """
    work, (often, _) = node_work(graph, call), passes(graph, call)
    carried = work.sent[graph.edge_list()[1]]
    each = often * int(carried[0]) if len(carried) and (carried == carried[0]).all() else None
    return each, often * int(carried.sum()), often * work.before, often * int(work.after.sum())
