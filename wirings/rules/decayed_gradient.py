"""Decayed gradient: hallucinated edges get less and less of the gradient."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from wirings.errors import unknown
from wirings.rules.planned import Planned
from wirings.rules.registry import register
from wirings.rules.rule import EdgesLike, LayerLike, Training
from wirings.selection.kept_edges import KeptEdges
from wirings.utils.checks import check_number

KINDS = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: (1.0 + math.cos(math.pi * done)) / 2,
}


@register
class DecayedGradient(Planned):
    """`DNW`, but the gradient of hallucinated edges is multiplied by a factor that falls over training.

    A factor of 1 is `DNW`, 0 is `NoUpdate`. In between, edges are swapped early on and the wiring settles. The gradient
    of an unused edge only estimates what the edge would do, and is noisy at low density. Bambhaniya et al.
    ("Progressive Gradient Flow for Robust N:M Sparsity Training", 2024) let it fade in N:M wirings of transformers, and
    AutoSparse (Kundu et al., 2023, "gradient annealing") beside learned thresholds. Neither gives a figure for ResNet50
    with 10 % of its weights and this rule alone. Choosing edges by the budget, and one factor for all layers, are our
    choices.

    Args:
        factor: the factor at the beginning, from 0 to 1.
        end: the factor at the end of training; None keeps it constant.
        kind: how it falls: ``"linear"``, or ``"cosine"``, half a wave, slow at both ends.
        steps: the number of optimizer steps of the whole training; by default that of `Wiring.plan`. A constant factor
            needs neither.
    """

    name = "decayed_gradient"
    reaches = "all"
    kept = KeptEdges(factor="factor")
    atomic = True

    def __init__(
        self, factor: float = 1.0, end: float | None = 0.0, kind: str = "linear", steps: int | None = None
    ) -> None:
        super().__init__(steps)
        self.factor = check_number(self.name, "factor", factor)
        self.end = None if end is None else check_number(self.name, "end", end)
        if not isinstance(kind, str) or kind not in KINDS:
            raise unknown("kind of decay", str(kind), KINDS)
        self.kind = kind

    def setup(self, layers: Sequence[LayerLike]) -> None:
        for layer in layers:
            layer.edges.remember("factor", torch.tensor(self.factor, device=layer.weight.device))

    def real(self, weight: Tensor, edges: EdgesLike) -> Tensor:
        return edges.choose(weight)

    @torch.no_grad()
    def update(self, layers: Sequence[LayerLike], training: Training, optimizer: torch.optim.Optimizer | None) -> None:
        if self.end is None:
            return
        left = KINDS[self.kind](min(training.step / self.length(training), 1.0))
        for layer in layers:
            layer.edges.factor.fill_(self.end + (self.factor - self.end) * left)
