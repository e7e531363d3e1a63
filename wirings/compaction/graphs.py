"""Neural graphs as operations: exactly, block by block; what a node does becomes norms, activations and convolutions.

A static graph that is not made of blocks is put in levels by its real edges, which are far fewer than the allowed ones,
so that it takes as many rounds as its longest path has edges. A discrete graph is written out step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wirings.compaction.aten import norm_as_affine
from wirings.compaction.builder import Builder
from wirings.compaction.operations import (
    Activation,
    Affine,
    Concat,
    Conv,
    InstanceNorm,
    Linear,
    Pad,
    Place,
    Select,
)
from wirings.compaction.trace import trace
from wirings.graph import Blocks, DiscreteGraph, StaticGraph
from wirings.graph.functions import (
    ACTIVATIONS,
    Activations,
    Convolutions,
    Grouped,
    NodeFunction,
    Plain,
    Stepwise,
    Timed,
)

EPSILON = 1e-5  # of the node functions' norms

Where = list[tuple[NodeFunction, int]]
"""For each of some nodes the function that it has and its number there."""


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
                messages[number] = _part(builder, where, ("between", 0, 0), received, tag)
            continue
        state = received if number == 0 else _part(builder, where, ("after", 0), received, tag)
        states[number] = state
        if not last:
            messages[number] = _part(builder, where, ("before", 0), state, tag)
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
        sent = _part(builder, where, ("before", step), states, f"{hint}.node{step}")
        received = _edges(builder, sent, matrix, f"{hint}.edges{step}")
        states = _part(builder, where, ("after", step), received, f"{hint}.node{step}")
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
    levels = [level for group in graph.groups for level in group.levels]
    whole = False
    for (start, stop), (number, some) in zip(levels, graph._function_of, strict=True):
        function = graph._function(number)
        whole = whole or not _known(function)
        first = 0 if some is None else some.start
        for position in range(start, stop):
            where[int(graph.order[position])] = (function, first + position - start)
    return where, whole


def _own_levels(graph: StaticGraph) -> list[np.ndarray]:
    levels = [level for group in graph.groups for level in group.levels]
    return [graph.order[start:stop] for start, stop in levels]


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


# ---- what nodes do --------------------------------------------------------------------------------------------------


def _known(function: NodeFunction) -> bool:
    """Whether a function can be taken apart, node by node."""
    if type(function) in (Plain, Activations, Convolutions):
        return True
    if type(function) in (Grouped, Stepwise):
        return all(_known(inner) for inner in function.functions)  # type: ignore[union-attr]
    return type(function) is Timed and _known(function.rest)


def _part(builder: Builder, where: Where, part: tuple[Any, ...], x: str, hint: str) -> str:
    """What nodes do ``("before", time)``, ``("after", time)`` or ``("between", time, next time)`` the edges."""
    if not all(_known(function) for function, _ in where):
        return _traced(builder, where, part, x, hint)
    if part[0] == "between":
        return _part(builder, where, ("before", part[2]), _part(builder, where, ("after", part[1]), x, hint), hint)
    leaves = [_leaf(function, number, part[1]) for function, number in where]
    kinds: dict[Any, list[int]] = {}
    for i, (function, _) in enumerate(leaves):
        kinds.setdefault(_signature(function), []).append(i)
    if len(kinds) == 1:
        return _same_kind(builder, leaves, part, x, hint)
    done, order = [], []
    for numbers in kinds.values():
        own = builder.add(Select, (x,), hint, index=torch.tensor(numbers))
        done.append(_same_kind(builder, [leaves[i] for i in numbers], part, own, hint))
        order += numbers
    joined = builder.add(Concat, done, hint)
    if order == sorted(order):
        return joined
    return builder.add(Select, (joined,), hint, index=torch.tensor(np.argsort(order)))


def _leaf(function: NodeFunction, number: int, time: float) -> tuple[NodeFunction, int]:
    """The function that a node has at a time, without what only gathers functions."""
    if isinstance(function, Stepwise):
        return _leaf(function._at(time), number, time)
    if isinstance(function, Grouped):
        for inner, count in zip(function.functions, function.counts, strict=True):
            if number < count:
                return _leaf(inner, number, time)  # type: ignore[arg-type]
            number -= count
    return function, number


def _signature(function: NodeFunction) -> Any:
    """Functions of one signature differ in their parameters only."""
    if isinstance(function, Convolutions):
        return "conv", function.recipe, function._before, function._after
    if isinstance(function, Activations):
        return "activation", function.activation, function.bias is not None
    if isinstance(function, Timed):  # its nodes are gathered by the rest's own signature when they get there
        return "timed", id(function)
    return "plain"


def _same_kind(builder: Builder, leaves: Where, part: tuple[Any, ...], x: str, hint: str) -> str:
    """What nodes of one signature do."""
    function, time = leaves[0][0], part[1]
    if isinstance(function, Timed):
        if part[0] == "after" and time != 0:
            shift = time * _rows(leaves, "slope")
            x = builder.add(Affine, (x,), hint, scale=torch.ones_like(shift), shift=shift)
        return _part(builder, [(f.rest, i) for f, i in leaves], part, x, hint)  # type: ignore[misc]
    if isinstance(function, Activations) and part[0] == "after":
        if function.bias is not None:
            shift = _rows(leaves, "bias")
            x = builder.add(Affine, (x,), hint, scale=torch.ones_like(shift), shift=shift)
        return _activation(builder, function.activation, x, hint)
    if isinstance(function, Convolutions):
        for step in function._before if part[0] == "before" else function._after:
            if step == "norm":
                x = _norm(builder, leaves, x, hint)
            elif step == "activation":
                x = _activation(builder, function.activation, x, hint)
            else:
                x = _convolution(builder, leaves, x, hint)
    return x


def _rows(leaves: Where, name: str) -> Tensor:
    """A parameter's entries for these nodes."""
    function = leaves[0][0]
    if all(f is function for f, _ in leaves):
        return getattr(function, name).detach().cpu()[[i for _, i in leaves]]
    return torch.stack([getattr(f, name).detach().cpu()[i] for f, i in leaves])


def _norm(builder: Builder, leaves: Where, x: str, hint: str) -> str:
    function: Any = leaves[0][0]
    weight, bias = _rows(leaves, "norm_weight"), _rows(leaves, "norm_bias")
    if function.recipe.norm == "instance":
        return builder.add(InstanceNorm, (x,), f"{hint}.norm", scale=weight, shift=bias, epsilon=EPSILON)
    statistics = _rows(leaves, "running_mean"), _rows(leaves, "running_var")
    scale, shift = norm_as_affine(*statistics, weight, bias, EPSILON)
    return builder.add(Affine, (x,), f"{hint}.norm", scale=scale, shift=shift)


def _activation(builder: Builder, activation: Any, x: str, hint: str) -> str:
    if activation is None:
        return x
    for name, known in ACTIVATIONS.items():
        if activation is known:
            return builder.add(Activation, (x,), f"{hint}.{name}", kind=name)
    return trace(_Call(activation), builder, [x], {})[0]


def _convolution(builder: Builder, leaves: Where, x: str, hint: str) -> str:
    function: Any = leaves[0][0]
    recipe = function.recipe
    kernel, dims = _rows(leaves, "kernel"), recipe.dims
    size = builder.maps(x)
    settings = {"stride": (recipe.stride,) * dims, "padding": (recipe.kernel // 2,) * dims, "dilation": (1,) * dims}
    out = builder.add(Conv, (x,), f"{hint}.conv", weight=kernel, groups=len(leaves), **settings)
    missing = [big - small for big, small in zip(size, builder.maps(out), strict=True)]
    if not recipe.pad or not any(missing):
        return out
    before, after = tuple(m // 2 for m in missing), tuple(m - m // 2 for m in missing)
    return builder.add(Pad, (out,), f"{hint}.pad", before=before, after=after)


def _traced(builder: Builder, where: Where, part: tuple[Any, ...], x: str, hint: str) -> str:
    """What nodes with a function of the caller's own do, by a trace of it."""
    function = where[0][0]
    numbers = [i for _, i in where]
    assert all(f is function for f, _ in where)
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    some = {"nodes": slice(numbers[0], numbers[-1] + 1)} if function.some_nodes else {}
    return trace(_Part(function, part, some), builder, [x], {})[0]


class _Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class _Part(nn.Module):
    """One part of a node function as a module."""

    def __init__(self, function: NodeFunction, part: Sequence[Any], some: dict[str, Any]) -> None:
        super().__init__()
        self.function, self.part, self.some = function, part, some

    def forward(self, x: Tensor) -> Tensor:
        name, *times = self.part
        return getattr(self.function, name)(x, *times, **self.some)
