"""Gradual magnitude pruning (Zhu and Gupta, "To prune, or not to prune", 2017)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from wirings.errors import WiringError, unknown
from wirings.rules.base import Edges, Layer, choose_together, register
from wirings.rules.planned import Planned
from wirings.utils.checks import number, whole_number

KINDS = {"cubic": 3, "linear": 1}


@register
class GMP(Planned):
    """All allowed edges at first; every now and then the weakest are removed, for good, until k remain.

    In training the forward pass uses every edge that is still there, and those alone get a gradient. The wiring, which
    evaluation and `finalize_` use, is the k strongest of them at any time.

    Zhu and Gupta remove edges every 100 to 1,000 steps while the number that is left falls as (1 − t)³ does, and then
    train on with the wiring that they have. Gale, Elsen and Hooker ("The State of Sparsity", 2019) tuned it for
    ResNet50: 73.91 % on ImageNet with 10 % of the weights. Where edges begin and end to be removed is our choice, and
    so is that they are gone for good.

    Args:
        begin: the fraction of training at which the first edges are removed.
        end: the fraction of training from which on k edges are left.
        kind: how the number falls: ``"cubic"``, fast first, or ``"linear"``.
        every: optimizer steps from one removal to the next.
        steps: optimizer steps of the whole training; else `Wiring.plan` says it.
    """

    name = "gmp"
    reaches = "some"
    for_good = True

    def __init__(
        self,
        begin: float = 0.0,
        end: float = 0.75,
        kind: str = "cubic",
        every: int = 100,
        steps: int | None = None,
    ) -> None:
        super().__init__(steps)
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
        # A plan that was made shorter half-way may have put the end behind this step.
        ends = (self.replanned(layers) and step > last) or step == last
        if ends or (step < last and step % self.every == 0) or self._rebudgeted:
            self._rebudgeted = False
            self._remove(layers, 0.0 if step >= last else self._still_to_go(step / steps))

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


def _counts(layers: Sequence[Layer]) -> tuple[list[int], list[int]]:
    """For every layer, or for all of a pool together: its budget, and how many edges are still there."""
    budgets = [int(layer.edges.k) for layer in layers]
    there = [int(torch.count_nonzero(layer.edges.left)) for layer in layers]  # type: ignore[arg-type]
    return budgets, there if layers[0].edges.pool is None else [sum(there)] * len(layers)
