"""Neural graphs as operations: exactly, block by block; what a node does becomes norms, activations and convolutions.

A static graph that is not made of blocks is put in levels by its real edges, which are far fewer than the allowed ones,
so that it takes as many rounds as its longest path has edges. A discrete graph is written out step by step.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from wirings.compaction.builder import Builder
from wirings.compaction.node_functions import Where, known, part_of
from wirings.compaction.operations import Concat, Conv, Linear, Place, Select
from wirings.graph import Blocks, DiscreteGraph, StaticGraph
from wirings.graph.nodes import Plain


def lower_static(builder: Builder, graph: nn.Module, hint: str, x: str) -> str:
    """Add a static graph, in evaluation, to a program; the name of its outputs."""
    assert isinstance(graph, StaticGraph)
    functions, whole = _functions_of_nodes(graph)
    edges = graph.sparse().cpu()
    targets, sources = edges.indices().numpy()
    weights = edges.values().detach()
    levels = (
        _own_levels(graph) if whole or isinstance(graph.topology, Blocks) else _real_levels(graph, targets, sources)
    )
    level_of = np.empty(graph.nodes, int)
    for number, nodes in enumerate(levels):
        level_of[nodes] = number
    place = np.empty(graph.nodes, int)  # of a node in its level
    for nodes in levels:
        place[nodes] = np.arange(len(nodes))
    outputs = {int(level_of[node]) for node in graph.outputs}
    states: dict[int, str] = {}
    messages: dict[int, str] = {}
    for number, nodes in enumerate(levels):
        if number == 0:
            received = x  # level 0 is the inputs, in the caller's order
        else:
            own = level_of[targets] == number
            senders = np.unique(level_of[sources[own]]).tolist()
            senders = senders or [_nearest(graph, number)]  # no edge at all: it receives zeros of the right size
            starts = dict(zip(senders, np.cumsum([0, *(len(levels[s]) for s in senders)]), strict=False))
            matrix = torch.zeros(len(nodes), sum(len(levels[s]) for s in senders), dtype=weights.dtype)
            columns = np.array([starts[s] for s in level_of[sources[own]]], int) + place[sources[own]]
            matrix[place[targets[own]], columns] = weights[torch.from_numpy(own)]
            joined = [messages[s] for s in senders]
            together = joined[0] if len(joined) == 1 else builder.add(Concat, joined, f"{hint}.sent{number}")
            received = _edges(builder, together, matrix, f"{hint}.edges{number}")
        last = number == len(levels) - 1
        where = [functions[int(node)] for node in nodes]
        tag = f"{hint}.node{number}"
        if whole and number > 0 and number not in outputs:
            if not last:
                messages[number] = part_of(builder, where, ("between", 0, 0), received, tag)
            continue
        state = received if number == 0 else part_of(builder, where, ("after", 0), received, tag)
        states[number] = state
        if not last:
            messages[number] = part_of(builder, where, ("before", 0), state, tag)
    kept = sorted(outputs)
    starts = dict(zip(kept, np.cumsum([0, *(len(levels[j]) for j in kept)]), strict=False))
    index = torch.tensor([int(starts[int(level_of[node])] + place[node]) for node in graph.outputs])
    parts = [states[j] for j in kept]
    name = parts[0] if len(parts) == 1 else builder.add(Concat, parts, f"{hint}.outputs")
    whole_level = torch.equal(index, torch.arange(builder.channels(name)))
    return name if whole_level else builder.add(Select, (name,), f"{hint}.outputs", index=index)


def lower_discrete(builder: Builder, graph: nn.Module, hint: str, x: str) -> str:
    """Add a discrete graph with one input, read at its end, to a program: all of its steps."""
    assert isinstance(graph, DiscreteGraph)
    assert graph.steps is not None
    matrix = graph.matrix().detach().cpu()
    where: Where = [(graph.function, i) for i in range(graph.nodes)]
    index = torch.from_numpy(np.asarray(graph.inputs, np.int64))
    states = builder.add(Place, (x,), f"{hint}.start", index=index, channels=graph.nodes)
    for step in range(graph.steps):
        sent = part_of(builder, where, ("before", step), states, f"{hint}.node{step}")
        received = _edges(builder, sent, matrix, f"{hint}.edges{step}")
        states = part_of(builder, where, ("after", step), received, f"{hint}.node{step}")
    read = torch.from_numpy(np.asarray(graph.outputs, np.int64))
    return builder.add(Select, (states,), f"{hint}.outputs", index=read)


def can_lower(module: nn.Module) -> bool:
    """Whether a module is a graph that this file knows."""
    if isinstance(module, DiscreteGraph):
        return module.inflow == "first" and module.reads == "last"
    return isinstance(module, StaticGraph)


# ---- which nodes are computed together ------------------------------------------------------------------------------


def _functions_of_nodes(graph: StaticGraph) -> tuple[Where, bool]:
    """Every node's function and its number there; and whether some function can only be called on all its nodes."""
    where: Where = [(Plain(), 0)] * graph.nodes
    whole = False
    for level in graph.levels():
        whole = whole or not known(level.function)
        first = 0 if level.part is None else level.part.start
        for number, node in enumerate(level.nodes, first):
            where[int(node)] = (level.function, number)
    return where, whole


def _own_levels(graph: StaticGraph) -> list[np.ndarray]:
    return [level.nodes for level in graph.levels()]


def _real_levels(graph: StaticGraph, targets: np.ndarray, sources: np.ndarray) -> list[np.ndarray]:
    """Inputs first; then every node as early as its real parents allow, those without any among the first."""
    level = np.ones(graph.nodes, int)
    level[graph.inputs] = 0
    while True:
        later = level.copy()
        np.maximum.at(later, targets, level[sources] + 1)
        if np.array_equal(later, level):
            break
        level = later
    rest = [np.flatnonzero(level == number) for number in range(1, int(level.max()) + 1)]
    return [graph.inputs, *rest]


def _nearest(graph: StaticGraph, number: int) -> int:
    """A level whose maps have the size of what this level receives: the one before it in blocks, else the inputs."""
    return number - 1 if isinstance(graph.topology, Blocks) else 0


def _edges(builder: Builder, x: str, matrix: Tensor, hint: str) -> str:
    dims = len(builder.maps(x))
    if dims == 0:
        return builder.add(Linear, (x,), hint, weight=matrix)
    if dims > 3:
        raise NotImplementedError("maps have one to three dimensions")
    one, none = (1,) * dims, (0,) * dims
    weight = matrix.view(*matrix.shape, *one)
    return builder.add(Conv, (x,), hint, weight=weight, stride=one, padding=none, dilation=one)
