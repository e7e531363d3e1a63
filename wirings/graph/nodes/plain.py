"""Nodes without a function: a node's state is the sum of what it receives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from wirings.graph.nodes.base import ALL, Node, NodeFunction, register


class Plain(NodeFunction):
    """The functions that `PlainNode` builds."""

    some_nodes = True
    quiet = True

    def before(self, state: Tensor, time: float, nodes: slice = ALL) -> Tensor:
        return state

    def after(self, received: Tensor, time: float, nodes: slice = ALL) -> Tensor:
        return received

    def between(self, received: Tensor, time: float, next_time: float, nodes: slice = ALL) -> Tensor:
        return received


@register
@dataclass(frozen=True)
class PlainNode(Node):
    """No function: a node's state is the sum of what it receives, and it sends its state."""

    name: ClassVar[str] = "plain"

    def build(self, nodes: int, sends: bool = True, receives: bool = True) -> NodeFunction:
        return Plain()
