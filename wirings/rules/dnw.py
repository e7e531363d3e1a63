"""Discovering Neural Wirings (Wortsman, Farhadi and Rastegari, NeurIPS 2019), the paper's Algorithm 1."""

from collections.abc import Sequence

import torch
from torch import Tensor

from wirings.rules.optimizers import learning_rates
from wirings.rules.registry import register
from wirings.rules.rule import EdgesLike, LayerLike, Rule, Training
from wirings.selection.kept_edges import KeptEdges
from wirings.utils.checks import check_number


@register
class DNW(Rule):
    """The k edges of largest magnitude are real; the gradient reaches all others as well.

    The wiring is a pure function of the weights, so nothing extra is saved.

    ``decay`` is that of SR-STE (Zhou et al., ICLR 2021), who found that N:M wirings change too often without it:
    hallucinated weights decay, so that those that no gradient sustains leave the competition. They add it to the
    gradient. Here it is a separate step after the optimizer's (see `L1Anneal` for the reasons): w ← w · (1 − learning
    rate × decay) for edges that are not real. A term of the gradient passes through momentum m, which multiplies it by
    1 / (1 − m), so ``decay`` is the paper's coefficient divided by 1 − m.

    Args:
        decay: how strongly hallucinated weights decay: 2e-3 for the paper's 2e-4 with momentum 0.9. Needs
            ``wiring.step(optimizer)``; 0 for none, as in the paper on DNW.
    """

    name = "dnw"
    reaches = "all"
    kept = KeptEdges()
    atomic = True

    def __init__(self, decay: float = 0.0) -> None:
        self.decay = check_number(self.name, "decay", decay, most=float("inf"))

    @property
    def acts_between_steps(self) -> bool:  # type: ignore[override]
        """Whether there is something to do after a step."""
        return self.decay > 0

    def real(self, weight: Tensor, edges: EdgesLike) -> Tensor:
        return edges.choose(weight)

    @torch.no_grad()
    def update(self, layers: Sequence[LayerLike], training: Training, optimizer: torch.optim.Optimizer | None) -> None:
        if not self.decay:
            return
        trained = learning_rates(self.name, layers, optimizer, "decay=0")
        if not trained:
            return
        kept = layers[0].edges.selection.kept_weights([layer for layer, _ in trained])  # before any weight changes
        for (layer, rate), real in zip(trained, kept, strict=True):
            shrink = rate * self.decay
            shrink = shrink.clamp(max=1.0) if isinstance(shrink, Tensor) else min(shrink, 1.0)
            lost = (layer.weight - real) * shrink
            allowed = layer.edges.allowed
            layer.weight.sub_(lost if allowed is None else torch.where(allowed, lost, 0.0))
