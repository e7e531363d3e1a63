"""Gradual magnitude pruning (Zhu and Gupta, "To prune, or not to prune", 2017)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from wirings.errors import WiringError, unknown
from wirings.rules.planned import Planned
from wirings.rules.registry import register
from wirings.rules.rule import EdgesLike, LayerLike, Training, choose_by
from wirings.selection.kept_edges import KeptEdges
from wirings.utils.checks import check_int, check_number

KINDS = {"cubic": 3, "linear": 1}


@register
class GMP(Planned):
    """All allowed edges at first; every now and then the weakest are removed permanently, until k remain.

    In training the forward pass uses every edge that is left, and only these get a gradient. The wiring, which
    evaluation and `finalize_` use, is always the k strongest of them.

    Zhu and Gupta remove edges every 100 to 1,000 steps while the number of edges left falls as (1 − t)³, and then
    continue training with the final wiring. Gale, Elsen and Hooker ("The State of Sparsity", 2019) tuned it for
    ResNet50: 73.91 % on ImageNet with 10 % of the weights. When removal begins and ends, and that it is permanent, are
    our choices.

    Args:
        begin: the fraction of training at which the first edges are removed.
        end: the fraction of training after which only k edges are left.
        kind: how the number falls: ``"cubic"``, fast at first, or ``"linear"``.
        every: optimizer steps from one removal to the next; None for 100, or a hundredth of training if that is less,
            so that a short training does not lose them all at once.
        steps: the number of optimizer steps of the whole training; by default that of `Wiring.plan`.
    """

    name = "gmp"
    kept = KeptEdges(mask="left", factor=0.0, in_training=True)
    reaches = "some"
    removes_permanently = True
    starts_with_all = True
    keeps_wiring = True
    atomic = True

    def __init__(
        self,
        begin: float = 0.0,
        end: float = 0.75,
        kind: str = "cubic",
        every: int | None = None,
        steps: int | None = None,
    ) -> None:
        super().__init__(steps)
        self.begin, self.end = check_number(self.name, "begin", begin), check_number(self.name, "end", end)
        if begin > end:
            raise WiringError(f"{self.name}: begin = {begin} must not be after end = {end}.")
        if not isinstance(kind, str) or kind not in KINDS:
            raise unknown("kind of annealing", str(kind), KINDS)
        self.kind, self.every = kind, None if every is None else check_int(self.name, "every", every)

    def setup(self, layers: Sequence[LayerLike]) -> None:
        for layer in layers:
            first = layer.edges.allowed if layer.edges.start is None else layer.edges.start
            left = torch.ones_like(layer.weight, dtype=torch.bool) if first is None else first.clone()
            layer.edges.remember("left", left)
        self._left(layers)

    def real(self, weight: Tensor, edges: EdgesLike) -> Tensor:
        return edges.choose(weight)

    def forward(self, weight: Tensor, edges: EdgesLike) -> Tensor:
        return torch.where(edges.left if edges.training else self.real(weight, edges), weight, 0.0)  # type: ignore[arg-type]

    def used(self, weight: Tensor, edges: EdgesLike) -> Tensor | None:
        return edges.left

    @torch.no_grad()
    def update(self, layers: Sequence[LayerLike], training: Training, optimizer: torch.optim.Optimizer | None) -> None:
        step, steps, before = training.step, self.length(training), self.length_before(training)
        last = self._last(steps)
        # If the plan was shortened during training, the end may lie before this step.
        ends = step >= last and (before is None or step - 1 < self._last(before))
        every = min(100, max(steps // 100, 1)) if self.every is None else self.every
        if ends or (step < last and step % every == 0) or training.budget_changed:
            self._remove(layers, 0.0 if step >= last else self._still_to_go(step / steps))

    def _last(self, steps: int) -> int:
        """The step after which only k edges are left."""
        return max(math.ceil(self.end * steps - 1e-6), 1)

    def _still_to_go(self, done: float) -> float:
        """The fraction of the edges to be removed that is left after the fraction ``done`` of training."""
        if done <= self.begin:
            return 1.0
        return (1.0 - (done - self.begin) / (self.end - self.begin)) ** KINDS[self.kind]

    def _remove(self, layers: Sequence[LayerLike], still_to_go: float) -> None:
        counts = []
        for layer, left in zip(layers, self._left(layers), strict=True):
            k, possible = int(layer.edges.k), sum(edges.possible for edges in layer.edges.peers())
            # Never more than are left: lengthening the plan during training does not bring any back.
            counts.append(min(k + int((possible - k) * still_to_go + 1e-6), left))
        weights = [layer.weight for layer in layers]
        for layer, left_over in zip(layers, choose_by(layers, weights, counts, magnitudes=True), strict=True):
            layer.edges.remember("left", left_over)

    def _left(self, layers: Sequence[LayerLike]) -> list[int]:
        """How many edges are left in each layer, or in all that share a budget; raises if these are too few."""
        there = [int(layer.edges.count(layer.edges.left)) for layer in layers]
        if layers[0].edges.shared:
            there = [sum(there)] * len(layers)
        for layer, left in zip(layers, there, strict=True):
            if (k := int(layer.edges.k)) > left:
                raise WiringError(
                    f"{layer.name}: rule {self.name!r} removes edges permanently and has {left} left, but the budget "
                    f"asks for {k} now; give it a density that does not rise."
                )
        return there
