"""What neural graphs cost: an edge a multiply-add for every pixel of what it carries, a node its convolution.

Which edges live is a matter of the whole network: of the input nodes, which are fed at all, and of the output nodes,
which matter to what comes after. Both are given here; `wirings.profiling.live` finds them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from wirings.budgets.mult_adds import Call
from wirings.graph import ContinuousGraph, DiscreteGraph, Graph, StaticGraph
from wirings.graph.base import reached
from wirings.graph.functions import Convolutions, Grouped, NodeFunction, Stepwise, Timed


class Work(NamedTuple):
    """What the nodes of a graph do once: multiply-adds and parameters of their convolutions, by node number."""

    sent: np.ndarray
    """Pixels of the map that a node sends."""
    before: np.ndarray
    """Multiply-adds before a node sends."""
    after: np.ndarray
    """Multiply-adds when it has received."""
    kernels_before: np.ndarray
    kernels_after: np.ndarray
    size: tuple[int, ...]
    """Of the output nodes' maps."""


class Wires:
    """A graph and its real edges."""

    def __init__(self, graph: Graph, real: np.ndarray) -> None:
        self.graph = graph
        targets, sources = graph._edge_list()
        self.targets, self.sources = targets[real], sources[real]
        """The nodes that each real edge leads to, and comes from."""
        self.receives, self.sends = np.zeros((2, graph.nodes), bool)
        """By node: whether a real edge leads to it, and whether one leaves it."""
        self.receives[self.targets] = self.sends[self.sources] = True

    def carried(self, sent: np.ndarray) -> int:
        """The pixels that all allowed edges carry, if nodes send so many."""
        tiles = self.graph.tiles
        return sum(
            int(len(tile.targets) * sent[np.asarray(tile.sources)].sum())
            if tile.places is None
            else int(sent[tile.edge_list()[1]].sum())
            for tile in tiles
        )


class Walk(NamedTuple):
    """What lives in a graph at each of its times: (times, nodes) or (times, real edges), boolean."""

    edges: np.ndarray
    sends: np.ndarray
    """Nodes whose part before the edges matters, and depends on the input."""
    receives: np.ndarray
    """The same for the part after the edges."""
    nodes: np.ndarray
    """(nodes,): those that live at any time."""
    fed: np.ndarray
    """Of the output nodes, those that something reaches from an input that is fed."""
    wanted: np.ndarray
    """Of the input nodes, those that reach an output that matters."""


def channel_dims(graph: Graph) -> tuple[int, int]:
    """The dimension of the nodes in a graph's input and in its output."""
    if not isinstance(graph, DiscreteGraph):
        return 1, 1
    return 2 if graph.inflow == "every" else 1, 2 if graph.reads == "every" else 1


def times(graph: Graph, call: Call) -> tuple[int, str]:
    """How often a graph goes through its edges in a call, and what that is called."""
    if isinstance(graph, DiscreteGraph):
        return _steps(graph, call)[0], "step"
    return (call.evaluations, "evaluation") if isinstance(graph, ContinuousGraph) else (1, "call")


def _steps(graph: DiscreteGraph, call: Call) -> tuple[int, int]:
    """Steps in a call, and how many of them have input of their own."""
    parts = call.inputs[0][1] if graph.inflow == "every" else 1
    return parts if graph.steps is None else graph.steps, parts


def work(graph: Graph, call: Call) -> Work:
    """What the nodes do in one pass through the edges."""
    size = call.inputs[0][channel_dims(graph)[0] + 1 :]
    sent, before, after, kernels_before, kernels_after = np.zeros((5, graph.nodes), np.int64)
    if isinstance(graph, StaticGraph):
        levels = [level for group in graph.groups for level in group.levels]
        places = [(graph.order[slice(*level)], *at) for level, at in zip(levels, graph._function_of, strict=True)]
        functions: list[NodeFunction] = list(graph.functions)  # type: ignore[arg-type]
    else:
        places, functions = [(np.arange(graph.nodes), 0, None)], [graph.function]  # type: ignore[list-item]
    for number, (nodes, function, some) in enumerate(places):
        own, count = (slice(None), len(nodes)) if some is None else (some, some.stop)
        if number or not isinstance(graph, StaticGraph):  # a static graph's inputs receive nothing
            cost, kernel, size = _convolutions(functions[function], "after", count, size)
            after[nodes], kernels_after[nodes] = cost[own], kernel[own]
        state = size
        cost, kernel, size = _convolutions(functions[function], "before", count, size)
        before[nodes], kernels_before[nodes] = cost[own], kernel[own]
        sent[nodes] = math.prod(size)
    return Work(sent, before, after, kernels_before, kernels_after, state)


def _convolutions(
    function: NodeFunction, part: str, count: int, size: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """For each node of a function: multiply-adds and parameters of its convolution in this part; and the maps' size."""
    if isinstance(function, Timed):
        return _convolutions(function.rest, part, count, size)
    if isinstance(function, Stepwise):  # alike but for their parameters: every step has kernels of its own
        steps = [_convolutions(f, part, count, size) for f in function.functions]  # type: ignore[arg-type]
        return steps[0][0], np.sum([kernel for _, kernel, _ in steps], 0), steps[0][2]
    if isinstance(function, Grouped):
        pieces = zip(function.functions, function.counts, strict=True)
        done = [_convolutions(f, part, n, size) for f, n in pieces]  # type: ignore[arg-type]
        return np.concatenate([d[0] for d in done]), np.concatenate([d[1] for d in done]), done[0][2]
    if isinstance(function, Convolutions) and "conv" in function._parts[part]:
        recipe, number = function.recipe, len(function.kernel)  # type: ignore[arg-type]
        weights = recipe.kernel**recipe.dims
        out = tuple(-(-side // recipe.stride) for side in size)
        cost = np.full(number, weights * math.prod(out))
        return cost, np.full(number, weights), size if recipe.pad else out
    return np.zeros(count, np.int64), np.zeros(count, np.int64), size


def walk(wires: Wires, call: Call, fed: np.ndarray, wanted: np.ndarray) -> Walk:
    """What lives if, of the inputs and the outputs, those are fed and these wanted; boolean vectors."""
    graph, targets, sources = wires.graph, wires.targets, wires.sources
    if isinstance(graph, DiscreteGraph):
        return _walk_steps(wires, graph, call, fed, wanted)
    comes = reached(graph.inputs[fed], sources, targets, graph.nodes)
    leads = reached(graph.outputs[wanted], targets, sources, graph.nodes)
    onward = np.zeros(graph.nodes, bool)
    onward[sources[leads[targets]]] = True
    edges, live = comes[sources] & leads[targets], comes & leads
    return Walk(edges[None], (comes & onward)[None], live[None], live, comes[graph.outputs], leads[graph.inputs])


def _walk_steps(wires: Wires, graph: DiscreteGraph, call: Call, fed: np.ndarray, wanted: np.ndarray) -> Walk:
    """The same along the steps: an edge lives in the steps in which it carries something on to where it matters."""
    targets, sources = wires.targets, wires.sources
    steps, parts = _steps(graph, call)
    sent, arrived, onward, counts = (np.zeros((steps + 1, graph.nodes), bool) for _ in range(4))
    for time in range(steps):
        sent[time] = arrived[time]
        if time < parts:
            sent[time, graph.inputs[fed]] = True
        arrived[time + 1, targets[sent[time, sources]]] = True
    for time in range(steps - 1, -1, -1):
        counts[time + 1] = onward[time + 1]
        if time == steps - 1 or graph.reads == "every":
            counts[time + 1, graph.outputs[wanted]] = True
        onward[time, sources[counts[time + 1, targets]]] = True
    edges = sent[:-1][:, sources] & counts[1:][:, targets]
    sends, receives = sent[:-1] & onward[:-1], arrived[1:] & counts[1:]
    read = arrived[1:] if graph.reads == "every" else arrived[-1:]
    ever, made = np.asarray((sends | receives).any(0)), np.asarray(read[:, graph.outputs].any(0))
    return Walk(edges, sends, receives, ever, made, np.asarray(onward[:parts, graph.inputs].any(0)))
