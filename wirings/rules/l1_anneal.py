"""L1 + Anneal, a baseline of the paper (section "Related Methods"): start with all edges, remove the weakest."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wirings.rules.gmp import GMP
from wirings.rules.optimizers import learning_rates
from wirings.rules.registry import register
from wirings.rules.rule import LayerLike, Training
from wirings.utils.checks import check_number


@register
class L1Anneal(GMP):
    """`GMP` with an L1 term: the weakest edges are removed permanently until k remain, and all weights shrink.

    The paper gives neither a coefficient nor a schedule; the defaults are our choice. In total the L1 term takes
    coefficient × the sum of all steps' learning rates off a weight: 0.3 by default in the paper's CIFAR-10 setting,
    where that sum is about 3,100. A shorter training needs a larger coefficient.

    The L1 term is a step of its own after the optimizer's (a proximal step, like decoupled weight decay), not part of
    the gradient. A term in the gradient would have to be multiplied by the loss scale of fp16, which a rule does not
    know; it would count once for every backward pass when gradients are accumulated; and momentum would carry weights
    past zero. A separate step is unaffected by all of these, is the same on every replica of DDP, and works between the
    replays of a captured CUDA graph. With momentum m, a term of the gradient with this coefficient would act 1 / (1 −
    m) times as strongly. A step that fp16's scaler skips shrinks weights all the same.

    Args:
        coefficient: coefficient of the L1 term. After every optimizer step the magnitude of every edge that is left is
            reduced by learning rate × coefficient, at most to zero. Needs ``wiring.step(optimizer)``; 0 for no term.
        begin: as for `GMP`.
        end: as for `GMP`.
        kind: as for `GMP`.
        every: as for `GMP`.
        steps: as for `GMP`.
    """

    name = "l1_anneal"
    atomic = True

    def __init__(
        self,
        coefficient: float = 1e-4,
        begin: float = 0.0,
        end: float = 0.75,
        kind: str = "cubic",
        every: int = 10,
        steps: int | None = None,
    ) -> None:
        super().__init__(begin, end, kind, every, steps)
        self.coefficient = check_number(self.name, "coefficient", coefficient, most=torch.finfo(torch.float32).max)

    @torch.no_grad()
    def update(self, layers: Sequence[LayerLike], training: Training, optimizer: torch.optim.Optimizer | None) -> None:
        rates = learning_rates(self.name, layers, optimizer, "coefficient=0") if self.coefficient else []
        super().update(layers, training, optimizer)
        for layer, rate in rates:
            elsewhere = isinstance(rate, Tensor) and rate.device != layer.weight.device
            most: Any = (float(rate) if elsewhere else rate) * self.coefficient
            less = torch.clamp(layer.weight, -most, most)  # a weight shrinks by at most its own magnitude
            layer.weight.sub_(less.masked_fill_(~layer.edges.left, 0.0))
