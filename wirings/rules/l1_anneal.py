"""L1 + Anneal, a baseline of the paper's section "Related Methods": start with all edges, remove the weakest."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wirings.rules.base import Layer, register
from wirings.rules.gmp import GMP
from wirings.rules.optimizers import learning_rates
from wirings.utils.checks import number


@register
class L1Anneal(GMP):
    """All allowed edges at first; edges are removed by magnitude, for good, until k remain. An L1 term shrinks weights.

    It is `GMP` with an L1 term.

    The paper gives neither a coefficient nor a schedule; the defaults are our choice. What the L1 term takes off a
    weight in all is coefficient × the sum of all steps' learning rates: 0.3 by default in the paper's CIFAR-10 setting,
    whose sum is about 3,100. A shorter training wants a larger coefficient.

    Args:
        coefficient: of the L1 term. After every optimizer step the magnitude of every edge that is still there is
            reduced by learning rate × coefficient, at most to zero. Needs ``wiring.step(optimizer)``; 0 for no term.
        begin: the fraction of training at which the first edges are removed.
        end: the fraction of training from which on k edges are left.
        kind: how the number falls: ``"cubic"``, fast first, or ``"linear"``.
        every: optimizer steps from one removal to the next.
        steps: optimizer steps of the whole training; else `Wiring.plan` says it.

    The L1 term is a step of its own after the optimizer's (a proximal step, as decoupled weight decay is one), not a
    part of the gradient. One that is added while gradients are computed would have to be multiplied by the loss scale
    of fp16, which a rule does not know; it would count once for every backward pass when gradients are accumulated; and
    momentum would carry weights past zero. A step of its own is the same under all of these, on every replica of DDP,
    and between the replays of a captured CUDA graph. With momentum m, a term of the gradient with this coefficient
    would act 1 / (1 − m) times as strongly. A step that fp16's scaler skips shrinks weights all the same.
    """

    name = "l1_anneal"

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
        self.coefficient = number(self.name, "coefficient", coefficient, most=float("inf"))

    @torch.no_grad()
    def step(self, layers: Sequence[Layer], step: int, optimizer: torch.optim.Optimizer | None) -> None:
        super().step(layers, step, optimizer)
        if self.coefficient:
            self._shrink(layers, optimizer)

    def _shrink(self, layers: Sequence[Layer], optimizer: torch.optim.Optimizer | None) -> None:
        for layer, rate in learning_rates(self.name, layers, optimizer, "coefficient=0"):
            elsewhere = isinstance(rate, Tensor) and rate.device != layer.weight.device
            most: Any = (float(rate) if elsewhere else rate) * self.coefficient
            less = torch.clamp(layer.weight, -most, most)  # what a weight loses: all, if it is no more than that
            layer.weight.sub_(less.masked_fill_(~layer.edges.left, 0.0))  # type: ignore[operator]
