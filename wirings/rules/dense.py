"""Every allowed edge, always: the dense network that sparse wirings are compared with."""

import torch
from torch import Tensor

from wirings.rules.registry import register
from wirings.rules.rule import EdgesLike, Rule


@register
class Dense(Rule):
    """All allowed edges are real. It takes no budget."""

    name = "dense"
    own_budget = True
    acts_between_steps = False

    def budget(self, allowed: int, shape: tuple[int, ...]) -> int:
        return allowed

    def real(self, weight: Tensor, edges: EdgesLike) -> Tensor:
        return torch.ones_like(weight, dtype=torch.bool) if edges.allowed is None else edges.allowed

    def forward(self, weight: Tensor, edges: EdgesLike) -> Tensor:
        return weight if edges.allowed is None else super().forward(weight, edges)
