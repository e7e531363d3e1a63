"""Decayed gradient: hallucinated edges hear less and less of the loss."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from wirings.errors import unknown
from wirings.rules.base import Edges, Layer, register
from wirings.rules.planned import Planned
from wirings.rules.scaled import scaled_through
from wirings.utils.checks import number

KINDS = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: (1.0 + math.cos(math.pi * done)) / 2,
}


@register
class DecayedGradient(Planned):
    """`DNW`, but the gradient that reaches hallucinated edges is multiplied by a factor, which falls over training.

    With a factor of 1 it is `DNW`, with 0 it is `NoUpdate`. In between, edges are swapped early on and the wiring
    settles. Gradients to edges that are not used are only guesses of what those would do, and noise at a low density;
    that they had better fade is the finding of Bambhaniya and others ("Progressive Gradient Flow for Robust N:M
    Sparsity Training", 2024), who let them fade in N:M wirings of transformers, and of AutoSparse (Kundu and others,
    2023, "gradient annealing"), beside learned thresholds. Neither gives a figure for ResNet50 with 10 % of its weights
    and this rule alone. That the choice is the budget's, and a factor for all layers alike, are ours.

    Args:
        factor: at the beginning, from 0 to 1.
        end: at the end of training; None: the factor stays.
        kind: how it falls: ``"linear"``, or ``"cosine"``, half a wave, slow at both ends.
        steps: optimizer steps of the whole training; else `Wiring.plan` says it. A factor that stays needs neither.
    """

    name = "decayed_gradient"
    reaches = "all"

    def __init__(
        self, factor: float = 1.0, end: float | None = 0.0, kind: str = "linear", steps: int | None = None
    ) -> None:
        super().__init__(steps)
        self.factor = number(self.name, "factor", factor)
        self.end = None if end is None else number(self.name, "end", end)
        if kind not in KINDS:
            raise unknown("kind of decay", str(kind), KINDS)
        self.kind = kind

    def setup(self, layers: Sequence[Layer]) -> None:
        for layer in layers:
            layer.edges.remember("factor", torch.tensor(self.factor, device=layer.weight.device))

    def real(self, weight: Tensor, edges: Edges) -> Tensor:
        return edges.choose(weight)

    def forward(self, weight: Tensor, edges: Edges) -> Tensor:
        real = self.real(weight, edges)
        return scaled_through(weight, torch.where(real, weight, 0.0), real, edges.factor, edges.allowed)  # type: ignore

    @torch.no_grad()
    def step(self, layers: Sequence[Layer], step: int, optimizer: torch.optim.Optimizer | None) -> None:
        if self.end is None:
            return
        left = KINDS[self.kind](min(step / self.length(layers), 1.0))
        for layer in layers:
            layer.edges.factor.fill_(self.end + (self.factor - self.end) * left)  # type: ignore[operator]
