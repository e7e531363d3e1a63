"""L1 + Anneal, a baseline of the paper's section "Related Methods": start with all edges, remove the weakest."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from wirings.errors import WiringError, unknown
from wirings.rules.base import Edges, Layer, choose_together, register
from wirings.rules.checks import number, whole_number
from wirings.rules.planned import Planned

KINDS = {"cubic": 3, "linear": 1}


@register
class L1Anneal(Planned):
    """All allowed edges at first; edges are removed by magnitude, for good, until k remain. An L1 term shrinks weights.

    In training the forward pass uses every edge that is still there, and those alone get a gradient. The wiring, which
    evaluation and `finalize_` use, is the k strongest of them at any time.

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
        super().__init__(steps)
        self.coefficient = number(self.name, "coefficient", coefficient, most=float("inf"))
        self.begin, self.end = number(self.name, "begin", begin), number(self.name, "end", end)
        if begin > end:
            raise WiringError(f"{self.name}: begin = {begin} must not be after end = {end}.")
        if kind not in KINDS:
            raise unknown("kind of annealing", str(kind), KINDS)
        self.kind, self.every = kind, whole_number(self.name, "every", every)
        self._rebudgeted = False

    def setup(self, layers: Sequence[Layer]) -> None:
        for layer in layers:
            allowed = layer.edges.allowed
            everything = torch.ones_like(layer.weight, dtype=torch.bool) if allowed is None else allowed.clone()
            layer.edges.remember("left", everything)

    def rebudget(self, layers: Sequence[Layer]) -> None:
        for layer, k, there in zip(layers, *_counts(layers), strict=True):
            if k > there:
                raise WiringError(
                    f"{layer.name}: rule {self.name!r} removes edges for good and has {there} left, but the budget's "
                    f"schedule asks for {k} now; give it a density that does not rise."
                )
        self._rebudgeted = True  # for the step that follows at once

    def real(self, weight: Tensor, edges: Edges) -> Tensor:
        return edges.choose(weight)

    def forward(self, weight: Tensor, edges: Edges) -> Tensor:
        if not edges.training:
            return super().forward(weight, edges)
        return torch.where(edges.left, weight, 0.0)  # type: ignore[arg-type]

    def used(self, weight: Tensor, edges: Edges) -> Tensor | None:
        return edges.left

    @torch.no_grad()
    def step(self, layers: Sequence[Layer], step: int, optimizer: torch.optim.Optimizer | None) -> None:
        steps = self.length(layers)
        last = max(math.ceil(self.end * steps - 1e-6), 1)  # with k edges from here on
        if step == last or (step < last and step % self.every == 0) or self._rebudgeted:
            self._rebudgeted = False
            self._remove(layers, 0.0 if step >= last else self._still_to_go(step / steps))
        if self.coefficient:
            self._shrink(layers, optimizer)

    def _still_to_go(self, done: float) -> float:
        """Of the edges that are to be removed, the fraction that is still there after ``done`` of the training."""
        if done <= self.begin:
            return 1.0
        return (1.0 - (done - self.begin) / (self.end - self.begin)) ** KINDS[self.kind]

    def _remove(self, layers: Sequence[Layer], still_to_go: float) -> None:
        counts = []
        for layer, k, there in zip(layers, *_counts(layers), strict=True):
            pool = layer.edges.pool
            possible = sum(one.edges.possible for one in ([layer] if pool is None else pool.layers))
            # Never more than are there: a plan that was made longer half-way does not bring any back.
            counts.append(min(k + int((possible - k) * still_to_go + 1e-6), there))
        weights = [layer.weight for layer in layers]
        for layer, left in zip(layers, choose_together(layers, weights, counts), strict=True):
            layer.edges.remember("left", left)

    def _shrink(self, layers: Sequence[Layer], optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is None:
            raise WiringError(
                f"rule {self.name!r} shrinks weights by the optimizer's learning rate: call wiring.step(optimizer), or "
                "give the rule coefficient=0."
            )
        rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        for layer in layers:
            weight = layer.weight
            if not weight.requires_grad:
                continue
            if id(weight) not in rates:
                raise WiringError(
                    f"rule {self.name!r} shrinks weights by their learning rate, but {layer.name} is not among the "
                    "parameters of the optimizer that wiring.step was given; pass the one that trains it."
                )
            # The rate may be a tensor on the device, which nothing here waits for.
            less = (weight.abs() - rates[id(weight)] * self.coefficient).clamp_(min=0)
            weight.copy_(torch.where(layer.edges.left, less.copysign_(weight), weight))  # type: ignore[arg-type]


def _counts(layers: Sequence[Layer]) -> tuple[list[int], list[int]]:
    """For every layer, or for all of a pool together: its budget, and how many edges are still there."""
    budgets = [int(layer.edges.k) for layer in layers]
    there = [int(torch.count_nonzero(layer.edges.left)) for layer in layers]  # type: ignore[arg-type]
    return budgets, there if layers[0].edges.pool is None else [sum(there)] * len(layers)
