"""Convert the functions of a graph's nodes to operations. Functions that users define are traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.operations import Activation, Affine, Concat, Conv, InstanceNorm, Pad, SelectChannels
from wirings.compaction.operations.affine import norm_as_affine
from wirings.compaction.trace import trace
from wirings.graph.nodes import (
    ACTIVATIONS,
    Activations,
    Convolutions,
    Grouped,
    NodeFunction,
    Plain,
    Stepwise,
    Timed,
)

NodeFunctions = list[tuple[NodeFunction, int]]
"""For each of some nodes, its function and its number among the nodes of that function."""


def can_split(function: NodeFunction) -> bool:
    """Whether a function can be converted for some of its nodes only."""
    if type(function) in (Plain, Activations, Convolutions):
        return True
    if type(function) in (Grouped, Stepwise):
        return all(can_split(inner) for inner in function.functions)  # type: ignore[union-attr]
    return type(function) is Timed and can_split(function.rest)


def lower_node_functions(
    builder: ProgramBuilder, where: NodeFunctions, part: tuple[Any, ...], x: str, hint: str
) -> str:
    """Add a part of the functions of some nodes to a program; returns the name of the result.

    Args:
        builder: the program.
        where: the nodes, one for each channel of the input.
        part: ``("before", time)``, ``("after", time)`` or ``("between", time, next time)`` the edges.
        x: the name of the input.
        hint: a hint for the names of the operations.
    """
    if not all(can_split(function) for function, _ in where):
        return _traced(builder, where, part, x, hint)
    if part[0] == "between":
        state = lower_node_functions(builder, where, ("after", part[1]), x, hint)
        return lower_node_functions(builder, where, ("before", part[2]), state, hint)
    leaves = [_leaf(function, number, part[1]) for function, number in where]
    kinds: dict[Any, list[int]] = {}
    for i, (function, _) in enumerate(leaves):
        kinds.setdefault(_signature(function), []).append(i)
    if len(kinds) == 1:
        return _same_kind(builder, leaves, part, x, hint)
    done, order = [], []
    for numbers in kinds.values():
        own = builder.add(SelectChannels, (x,), hint, index=torch.tensor(numbers))
        done.append(_same_kind(builder, [leaves[i] for i in numbers], part, own, hint))
        order += numbers
    joined = builder.add(Concat, done, hint)
    if order == sorted(order):
        return joined
    return builder.add(SelectChannels, (joined,), hint, index=torch.tensor(np.argsort(order)))


def _leaf(function: NodeFunction, number: int, time: float) -> tuple[NodeFunction, int]:
    """The function that a node has at a time, inside functions that only combine others."""
    if isinstance(function, Stepwise):
        return _leaf(function.at(time), number, time)
    if isinstance(function, Grouped):
        for inner, count in zip(function.functions, function.counts, strict=True):
            if number < count:
                return _leaf(inner, number, time)  # type: ignore[arg-type]
            number -= count
    return function, number


def _signature(function: NodeFunction) -> Any:
    """A key that is equal for functions that differ in their parameters only."""
    if isinstance(function, Convolutions):
        return "conv", function.recipe, function.parts["before"], function.parts["after"]
    if isinstance(function, Activations):
        return "activation", function.activation, function.bias is not None
    if isinstance(function, Timed):  # its inner function is grouped by signature later
        return "timed", id(function)
    return "plain"


def _same_kind(builder: ProgramBuilder, leaves: NodeFunctions, part: tuple[Any, ...], x: str, hint: str) -> str:
    """Convert the functions of nodes with the same signature."""
    function, time = leaves[0][0], part[1]
    if isinstance(function, Timed):
        if part[0] == "after" and time != 0:
            shift = time * _rows(leaves, "slope")
            x = builder.add(Affine, (x,), hint, scale=torch.ones_like(shift), shift=shift)
        return lower_node_functions(builder, [(f.rest, i) for f, i in leaves], part, x, hint)  # type: ignore[misc]
    if isinstance(function, Activations) and part[0] == "after":
        if function.bias is not None:
            shift = _rows(leaves, "bias")
            x = builder.add(Affine, (x,), hint, scale=torch.ones_like(shift), shift=shift)
        return _activation(builder, function.activation, x, hint)
    if isinstance(function, Convolutions):
        for step in function.parts[part[0]]:
            if step == "norm":
                x = _norm(builder, leaves, x, hint)
            elif step == "activation":
                x = _activation(builder, function.activation, x, hint)
            else:
                x = _convolution(builder, leaves, x, hint)
    return x


def _rows(leaves: NodeFunctions, name: str) -> Tensor:
    """The entries of a parameter for these nodes."""
    function = leaves[0][0]
    if all(f is function for f, _ in leaves):
        return getattr(function, name).detach().cpu()[[i for _, i in leaves]]
    return torch.stack([getattr(f, name).detach().cpu()[i] for f, i in leaves])


def _norm(builder: ProgramBuilder, leaves: NodeFunctions, x: str, hint: str) -> str:
    function: Any = leaves[0][0]
    weight, bias = _rows(leaves, "norm_weight"), _rows(leaves, "norm_bias")
    if function.recipe.norm == "instance":
        return builder.add(InstanceNorm, (x,), f"{hint}.norm", scale=weight, shift=bias, epsilon=function.recipe.eps)
    statistics = _rows(leaves, "running_mean"), _rows(leaves, "running_var")
    scale, shift = norm_as_affine(*statistics, weight, bias, function.recipe.eps)
    return builder.add(Affine, (x,), f"{hint}.norm", scale=scale, shift=shift)


def _activation(builder: ProgramBuilder, activation: Any, x: str, hint: str) -> str:
    if activation is None:
        return x
    for name, known in ACTIVATIONS.items():
        if activation is known:
            return builder.add(Activation, (x,), f"{hint}.{name}", kind=name)
    return trace(_Call(activation), builder, [x], {})[0]


def _convolution(builder: ProgramBuilder, leaves: NodeFunctions, x: str, hint: str) -> str:
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


def _traced(builder: ProgramBuilder, where: NodeFunctions, part: tuple[Any, ...], x: str, hint: str) -> str:
    """Trace a function that a user defined."""
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
