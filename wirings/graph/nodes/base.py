"""The contract of node functions, their recipes, and the registry of recipes.

A node's function has two parts, and either may do nothing:

- ``after`` computes a node's state from what its edges bring: the paper's f, Z_v = f(Σ w_uv Z_u);
- ``before`` computes what a node sends from its state, so that an edge carries w_uv · before(Z_u).

The paper's tiny classifiers use both: the static one applies norm, activation and convolution before the edges; the
dynamic ones apply activation and convolution before them, and the norm after.

States have shape (batch, nodes, …): nothing more for numbers, one more dimension for vectors, one to three for maps.
``time`` is the step of a discrete graph, the time of a continuous one, and 0 in a static one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from torch import Tensor, nn

from wirings.errors import WiringError, unknown
from wirings.utils.registry import Registry

ALL = slice(None)


class NodeCost(NamedTuple):
    """What one part of a node function costs when it is called once, for `wirings.profile`."""

    mult_adds: np.ndarray
    """(nodes,): multiply-adds for one example."""
    params: np.ndarray
    """(nodes,): the parameters that multiply."""
    size: tuple[int, ...]
    """The size of the output maps."""


class NodeFunction(nn.Module):
    """The functions of a number of nodes. Override `before`, `after` or both. Tensors are (batch, nodes, …)."""

    some_nodes: bool = False
    """Whether `before`, `after` and `between` take ``nodes=``, a slice, and then compute only these nodes."""
    quiet: bool = False
    """Whether a node whose state is zero always sends zero, so that a graph may leave it out."""
    counted_parameters: tuple[str, ...] = ()
    """The names of the parameters that `cost` counts."""
    norm_parameters: tuple[str, ...] = ()
    """The names of the parameters of norms, which a profile reports separately."""

    def before(self, state: Tensor, time: float) -> Tensor:
        """Compute what the nodes send from their states."""
        return state

    def after(self, received: Tensor, time: float) -> Tensor:
        """Compute the nodes' states from what they receive."""
        return received

    def between(self, received: Tensor, time: float, next_time: float) -> Tensor:
        """Compute what the nodes send next from what they receive, where their states are not read."""
        return self.before(self.after(received, time), next_time)

    def on_rows(self, part: str, rows: Tensor, *times: float, **nodes: slice) -> Tensor:
        """Call `before`, `after` or `between` on states as graphs keep them in memory, (nodes, batch, …)."""
        result: Tensor = getattr(self, part)(rows.transpose(0, 1), *times, **nodes)
        return result.transpose(0, 1)

    def cost(self, part: str, nodes: int, size: tuple[int, ...]) -> NodeCost:
        """Count what ``part``, ``"before"`` or ``"after"``, costs for ``nodes`` nodes with maps of this size."""
        return NodeCost(np.zeros(nodes, np.int64), np.zeros(nodes, np.int64), size)


class After(NodeFunction):
    """Any module, as the part after the edges."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def after(self, received: Tensor, time: float) -> Tensor:
        return self.module(received)


class Node(ABC):
    """A recipe for node functions. Subclasses are small frozen dataclasses of settings."""

    name: ClassVar[str] = ""
    """The name under which `register` makes it available."""
    example_state: ClassVar[tuple[int, ...]] = ()
    """The shape of one node's state in the contract tests: () for numbers, such as (6, 6) for maps."""

    @abstractmethod
    def build(self, nodes: int, sends: bool = True, receives: bool = True) -> NodeFunction:
        """Make the functions of ``nodes`` nodes.

        Args:
            nodes: the number of nodes.
            sends: whether any edge leaves them; otherwise the part before the edges can be left out.
            receives: whether any edge leads to them; otherwise the part after the edges can be left out.
        """

    @classmethod
    def example(cls, nodes: int) -> Node:
        """A recipe for ``nodes`` nodes, for the contract tests. Override it where there are no default settings."""
        return cls()


NodeRecipe = Node | str | Callable[[int], nn.Module]
"""What a graph takes as ``node=``; None stands for nodes without a function."""

_registry: Registry[Node] = Registry("node")
N = TypeVar("N", bound=type[Node])


def register(cls: N) -> N:
    """Make a recipe available by its ``name``, and run the contract tests on it. A decorator."""
    return _registry.register(cls)


def names() -> list[str]:
    """The names of the registered recipes, sorted."""
    return _registry.names()


def get(name: str, **settings: Any) -> Node:
    """The registered recipe of that name, with these settings.

    >>> get("activation", activation="tanh")
    ActivationNode(activation='tanh', bias=False)
    """
    if name not in _registry:
        raise unknown("node", name, _registry)
    try:
        return _registry[name](**settings)
    except TypeError as error:
        made = f"{_registry[name].__name__}(…)"
        raise WiringError(f"node {name!r} does not take these settings: {error}. Use {made} instead.") from error
