"""Node functions: what a node does with what it receives before others get it.

A node's function has two parts, and either may be nothing:

- ``after`` makes a node's state from what its edges bring: the paper's f, Z_v = f(Σ w_uv Z_u);
- ``before`` makes what a node sends from its state, so that the edges carry w_uv · before(Z_u).

The tiny classifiers have both orders: the static one norm, activation and convolution before the edges; the dynamic
ones activation and convolution before, the norm after.

What a graph takes as ``node=`` is a recipe: one of the small objects here (`ConvNode`, `ActivationNode`, …), a
`NodeFunction` class of your own, or any function that is given a number of nodes and returns a module. A module that is
no `NodeFunction` acts after the edges. States come as (batch, nodes, …): nothing more for scalars, one dimension more
for vectors, one to three for maps. ``time`` is the step of a discrete graph, the time of a continuous one, 0 in a
static one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from wirings.errors import WiringError, unknown
from wirings.graph.functions import (
    MAP_DIMS,
    PARTS,
    Activations,
    After,
    Convolutions,
    Grouped,
    NodeFunction,
    Plain,
    Stepwise,
    Timed,
    get_activation,
)
from wirings.graph.topology import whole


class Node(ABC):
    """A recipe for node functions."""

    @abstractmethod
    def build(self, nodes: int, sends: bool = True, receives: bool = True) -> NodeFunction:
        """The functions of ``nodes`` nodes. Parts that are never used (no edge leaves or arrives) are left out."""


Recipe = Node | Callable[[int], nn.Module]


def build(recipe: Recipe | None, nodes: int, where: str, sends: bool = True, receives: bool = True) -> NodeFunction:
    """The node functions of a recipe."""
    if recipe is None:
        return Plain()
    if isinstance(recipe, Node):
        return recipe.build(nodes, sends, receives)
    if isinstance(recipe, type) and issubclass(recipe, Node):
        raise WiringError(f"{where}: node= is a recipe, not its class: write {recipe.__name__}(…).")
    make: Any = recipe
    try:
        made = make(nodes) if callable(recipe) and not isinstance(recipe, nn.Module) else None
    except TypeError as error:
        raise WiringError(
            f"{where}: node= is called with a number of nodes and must make their module, but {recipe!r} could not: "
            f"{error}"
        ) from error
    if not isinstance(made, nn.Module):
        raise WiringError(
            f"{where}: node= is a recipe such as ConvNode(), or is called with a number of nodes to make their "
            f"module, but {recipe!r} is neither. A finished module would be shared by mistake: write node=lambda "
            "nodes: …."
        )
    return made if isinstance(made, NodeFunction) else After(made)


@dataclass(frozen=True)
class PlainNode(Node):
    """No function at all: a node's state is the sum of what it receives."""

    def build(self, nodes: int, sends: bool = True, receives: bool = True) -> NodeFunction:
        return Plain()


@dataclass(frozen=True)
class ActivationNode(Node):
    """An activation after the edges, as in a perceptron.

    Args:
        activation: a name (relu, tanh, sigmoid, gelu, silu), a function, or None for none.
        bias: whether each node adds a learned number first. It starts at zero.
    """

    activation: str | Callable[[Tensor], Tensor] | None = "relu"
    bias: bool = False

    def __post_init__(self) -> None:
        get_activation(self.activation)

    def build(self, nodes: int, sends: bool = True, receives: bool = True) -> NodeFunction:
        return Activations(self, nodes) if receives else Plain()


@dataclass(frozen=True)
class ConvNode(Node):
    """Norm, activation and a convolution with one kernel a node, which sees that node's map alone.

    Args:
        norm: ``"instance"``, ``"batch"`` or None; with a learned scale and shift a node.
        activation: a name (relu, tanh, sigmoid, gelu, silu), a function, or None.
        before: which of norm, activation and conv a node does to its state before it sends it, in order.
        after: which of them it does to what it receives, in order.
        stride: the convolution's stride. In a static graph the map gets smaller.
        pad: whether zeros are put around the smaller map so that it has its size again, as dynamic graphs need it.
        kernel: the width of the kernel, odd.
        dims: of the maps: 1, 2 or 3.
        eps: what the norm adds to the variance. A node without input hands gradients on 1/√eps times as large, so a
            larger one calms a wiring that learns (see docs/theory.md).

    >>> ConvNode(before=["activation", "conv"], after=["norm"])
    ConvNode(norm='instance', activation='relu', before=('activation', 'conv'), after=('norm',),
    stride=1, pad=False, kernel=3, dims=2, eps=1e-05)
    """

    norm: str | None = "instance"
    activation: str | Callable[[Tensor], Tensor] | None = "relu"
    before: Sequence[str] = PARTS
    after: Sequence[str] = ()
    stride: int = 1
    pad: bool = False
    kernel: int = 3
    dims: int = 2
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.norm not in (None, "instance", "batch"):
            raise unknown("norm", str(self.norm), ("instance", "batch"))
        get_activation(self.activation)
        object.__setattr__(self, "before", _checked(self.before))
        object.__setattr__(self, "after", _checked(self.after))
        twice = set(self.before) & set(self.after)
        if twice:
            raise WiringError(f"ConvNode: {twice.pop()!r} stands both before and after the edges; name it once.")
        whole("ConvNode", "stride", self.stride)
        whole("ConvNode", "kernel", self.kernel)
        if self.kernel % 2 == 0:
            raise WiringError(f"ConvNode: kernel must be odd, so that it has a centre, not {self.kernel}.")
        if self.dims not in MAP_DIMS:
            raise WiringError(f"ConvNode: dims must be 1, 2 or 3, not {self.dims!r}; scalars take an ActivationNode.")
        if not isinstance(self.eps, (int, float)) or not 0 < self.eps < math.inf:
            raise WiringError(f"ConvNode: eps must be a number above 0, not {self.eps!r}.")

    def build(self, nodes: int, sends: bool = True, receives: bool = True) -> NodeFunction:
        return Convolutions(self, nodes, self.before if sends else (), self.after if receives else ())


@dataclass(frozen=True)
class Groups(Node):
    """Several kinds of nodes in one graph or block: the first ``counts[0]`` are of kind ``kinds[0]``, and so on."""

    counts: Sequence[int]
    kinds: Sequence[Recipe | None]

    def __post_init__(self) -> None:
        for name in ("counts", "kinds"):
            if not isinstance(getattr(self, name), Sequence):
                raise WiringError(f"Groups: {name} is a list, not {getattr(self, name)!r}.")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for count in self.counts:
            whole("Groups", "a count", count)
        if len(self.counts) != len(self.kinds) or not self.counts:
            raise WiringError(f"Groups: {len(self.counts)} counts came for {len(self.kinds)} kinds of nodes.")

    def build(self, nodes: int, sends: bool = True, receives: bool = True) -> NodeFunction:
        if sum(self.counts) != nodes:
            raise WiringError(f"Groups: {self.counts} are {sum(self.counts)} nodes, but the graph has {nodes} here.")
        parts = zip(self.counts, self.kinds, strict=True)
        return Grouped(self.counts, [build(kind, count, "Groups", sends, receives) for count, kind in parts])


@dataclass(frozen=True)
class PerStep(Node):
    """Time-dependent, f(z, ℓ): functions of their own for each of a discrete graph's ``steps`` steps.

    The part after the edges of step ℓ and the part before the edges of step ℓ are those of function ℓ.
    """

    node: Recipe
    steps: int

    def __post_init__(self) -> None:
        whole("PerStep", "steps", self.steps)

    def build(self, nodes: int, sends: bool = True, receives: bool = True) -> NodeFunction:
        functions = [build(self.node, nodes, "PerStep", sends, receives) for _ in range(self.steps)]
        return Stepwise(functions)


@dataclass(frozen=True)
class TimeNode(Node):
    """Time-dependent, f(z, t): each node adds a learned multiple of the time before the rest of its function.

    Args:
        node: the rest, None for nothing.
    """

    node: Recipe | None = None

    def build(self, nodes: int, sends: bool = True, receives: bool = True) -> NodeFunction:
        return Timed(nodes, build(self.node, nodes, "TimeNode", sends, receives))


def _checked(parts: Sequence[str]) -> tuple[str, ...]:
    if isinstance(parts, str) or not isinstance(parts, Sequence):
        raise WiringError(f"ConvNode: before and after are lists of parts: write [{parts!r}].")
    for part in parts:
        if part not in PARTS:
            raise unknown("part", str(part), PARTS)
    if len(set(parts)) < len(parts):
        raise WiringError(f"ConvNode: each part stands once, but {list(parts)} came.")
    return tuple(parts)
