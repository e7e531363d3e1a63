"""Nodes with an activation after the edges, as in a perceptron."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wirings.errors import unknown
from wirings.graph.nodes.base import ALL, Node, NodeFunction, register
from wirings.graph.nodes.plain import Plain
from wirings.utils.checks import check_bool

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "silu": F.silu,
}
ZERO_AT_ZERO = ("relu", "tanh", "gelu", "silu")
"""The activations that map zero to zero."""


def get_activation(activation: str | Callable[[Tensor], Tensor] | None) -> Callable[[Tensor], Tensor] | None:
    """The activation of that name; a function or None is returned as it is."""
    if activation is None or callable(activation):
        return activation
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise unknown("activation", str(activation), ACTIVATIONS)
    return ACTIVATIONS[activation]


def by_node(values: Tensor, states: Tensor) -> Tensor:
    """One number for each node, shaped so that it broadcasts with states of shape (batch, nodes, …)."""
    return values.view(-1, *[1] * (states.dim() - 2))


class Activations(Plain):
    """The functions that `ActivationNode` builds."""

    def __init__(self, recipe: ActivationNode, nodes: int) -> None:
        super().__init__()
        self.activation = get_activation(recipe.activation)
        self.bias = nn.Parameter(torch.zeros(nodes)) if recipe.bias else None

    def after(self, received: Tensor, time: float, nodes: slice = ALL) -> Tensor:
        if self.bias is not None:
            received = received + by_node(self.bias[nodes], received)
        return received if self.activation is None else self.activation(received)

    def between(self, received: Tensor, time: float, next_time: float, nodes: slice = ALL) -> Tensor:
        return self.after(received, time, nodes)


@register
@dataclass(frozen=True)
class ActivationNode(Node):
    """An activation after the edges, as in a perceptron.

    Args:
        activation: a name (relu, tanh, sigmoid, gelu, silu), a function, or None.
        bias: whether each node first adds a learned number, which starts at zero.
    """

    name: ClassVar[str] = "activation"
    activation: str | Callable[[Tensor], Tensor] | None = "relu"
    bias: bool = False

    def __post_init__(self) -> None:
        get_activation(self.activation)
        check_bool("ActivationNode", "bias", self.bias)

    def build(self, nodes: int, sends: bool = True, receives: bool = True) -> NodeFunction:
        return Activations(self, nodes) if receives else Plain()
