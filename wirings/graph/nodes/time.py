"""Nodes whose function depends on the time: a learned slope, or functions of their own for each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from wirings.errors import WiringError
from wirings.graph.nodes.activation import ActivationNode, by_node
from wirings.graph.nodes.base import Node, NodeCost, NodeFunction, NodeRecipe, register
from wirings.graph.nodes.build import build
from wirings.utils.checks import check_int


class Stepwise(NodeFunction):
    """The functions that `PerStep` builds."""

    def __init__(self, functions: Sequence[NodeFunction]) -> None:
        super().__init__()
        self.functions = nn.ModuleList(functions)
        self.quiet = all(f.quiet for f in functions)

    def before(self, state: Tensor, time: float) -> Tensor:
        return self.at(time).before(state, time)

    def after(self, received: Tensor, time: float) -> Tensor:
        return self.at(time).after(received, time)

    def at(self, time: float) -> NodeFunction:
        """The function of a step."""
        if time != int(time) or not 0 <= time < len(self.functions):
            raise WiringError(
                f"PerStep has functions for steps 0 to {len(self.functions) - 1}, but the graph is at time {time}. "
                "Give it as many steps as the DiscreteGraph; for a ContinuousGraph use a TimeNode."
            )
        return self.functions[int(time)]  # type: ignore[return-value]

    def cost(self, part: str, nodes: int, size: tuple[int, ...]) -> NodeCost:
        costs = [function.cost(part, nodes, size) for function in self.functions]  # type: ignore[operator]
        params = np.sum([cost.params for cost in costs], 0)  # every step has parameters of its own
        return NodeCost(costs[0].mult_adds, params, costs[0].size)


class Timed(NodeFunction):
    """The functions that `TimeNode` builds."""

    def __init__(self, nodes: int, rest: NodeFunction) -> None:
        super().__init__()
        self.slope, self.rest = nn.Parameter(torch.zeros(nodes)), rest

    def before(self, state: Tensor, time: float) -> Tensor:
        return self.rest.before(state, time)

    def after(self, received: Tensor, time: float) -> Tensor:
        return self.rest.after(received + time * by_node(self.slope, received), time)

    def cost(self, part: str, nodes: int, size: tuple[int, ...]) -> NodeCost:
        return self.rest.cost(part, nodes, size)


@register
@dataclass(frozen=True)
class PerStep(Node):
    """Time-dependent, f(z, ℓ): separate functions for each step of a discrete graph.

    Step ℓ uses function ℓ both before and after the edges.

    Args:
        node: the recipe of each step's functions.
        steps: the number of steps of the graph.
    """

    name: ClassVar[str] = "per_step"
    node: NodeRecipe
    steps: int

    @classmethod
    def example(cls, nodes: int) -> PerStep:
        return cls(ActivationNode("tanh", bias=True), steps=3)

    def __post_init__(self) -> None:
        check_int("PerStep", "steps", self.steps)

    def build(self, nodes: int, sends: bool = True, receives: bool = True) -> NodeFunction:
        functions = [build(self.node, nodes, "PerStep", sends, receives) for _ in range(self.steps)]
        return Stepwise(functions)


@register
@dataclass(frozen=True)
class TimeNode(Node):
    """Time-dependent, f(z, t): each node adds a learned multiple of the time to what it receives.

    Args:
        node: the recipe of the rest; None for nothing.
    """

    name: ClassVar[str] = "time"
    node: NodeRecipe | None = None

    def build(self, nodes: int, sends: bool = True, receives: bool = True) -> NodeFunction:
        return Timed(nodes, build(self.node, nodes, "TimeNode", sends, receives))
