"""Top-KAST (Jayakumar, Pascanu, Rae, Osindero, Elsen, NeurIPS 2020): a gradient for a superset of the real edges."""

from collections.abc import Sequence

import torch
from torch import Tensor

from wirings.errors import WiringError
from wirings.rules.base import Edges, Layer, Rule, register
from wirings.rules.optimizers import learning_rates
from wirings.selection import functional as primitive
from wirings.selection.sharded import is_sharded
from wirings.utils.checks import number


@register
class TopKAST(Rule):
    """The k edges of largest magnitude are real. The gradient reaches them and the next strongest, and no others.

    Those that it reaches are the strongest up to the density ``reach``; all the rest keep their weights, so that a
    training that stores only this superset would do. An edge enters the superset when one in it has shrunk below it.
    Its ResNet50 with 10 % of the weights, where the gradient reaches 20 %, has 73.0 % on ImageNet in the paper, as
    SparseML's pull request 1674 quotes it; the implementation there has 72.5 %.

    The paper shrinks weights by a loss of their squares, which counts 1 / density times as much for edges of the
    superset that are not real: they must be worth it. Here that is a step of its own after the optimizer's (see
    `L1Anneal` for why): w ← w · (1 − learning rate × exploration), and of those that are not real w · (1 − learning
    rate × exploration ÷ density). It takes the place of weight decay: set the optimizer's to 0 for edges. What is part
    of the gradient goes through momentum m, which makes 1 / (1 − m) times as much of it; a step of its own does not. So
    ``exploration`` is the paper's coefficient, or the weight decay whose place it takes, divided by 1 − m. That
    it is a step of its own, and the default of ``reach``, are ours. What weight decay and momentum of the optimizer do
    to edges outside of the superset is the optimizer's.

    Args:
        reach: the density of the superset, above 0 and at most 1; a layer whose budget is larger has its real edges
            there.
        exploration: the strength of the shrinking: 1e-3 for a weight decay of 1e-4 with momentum 0.9. Needs
            ``wiring.step(optimizer)``; 0 for none.
    """

    name = "top_kast"
    reaches = "some"

    def __init__(self, reach: float = 0.5, exploration: float = 0.0) -> None:
        self.reach = number(self.name, "reach", reach)
        if not self.reach:
            raise WiringError(
                f"{self.name}: reach must be above 0, not {reach!r}; for real edges alone take rule 'no_update'."
            )
        self.exploration = number(self.name, "exploration", exploration, most=float("inf"))

    def real(self, weight: Tensor, edges: Edges) -> Tensor:
        return edges.choose(weight)

    def forward(self, weight: Tensor, edges: Edges) -> Tensor:
        return primitive.straight_through(weight, edges.choose(weight), edges.choose_more(weight, self.reach))

    @torch.no_grad()
    def step(self, layers: Sequence[Layer], step: int, optimizer: torch.optim.Optimizer | None) -> None:
        if not self.exploration:
            return
        trained = learning_rates(self.name, layers, optimizer, "exploration=0")
        # All choices before any weight is changed: layers that share a budget are ranked together.
        chosen = self._strongest([layer for layer, _ in trained])
        for (layer, rate), (real, reached) in zip(trained, chosen, strict=True):
            shrink = rate * self.exploration
            more = (shrink / layer.edges.density()).clamp(max=1.0)
            shrink = shrink.clamp(max=1.0) if isinstance(shrink, Tensor) else min(shrink, 1.0)
            layer.weight.sub_(torch.where(real != 0, real * shrink, reached * more))

    def _strongest(self, layers: Sequence[Layer]) -> list[tuple[Tensor, Tensor]]:
        """For each layer its weights that are real, and those that the gradient reaches; zeros elsewhere."""
        weights, all_edges = [layer.weight.detach() for layer in layers], [layer.edges for layer in layers]
        alike = len({(w.device, w.dtype) for w in weights}) == 1
        if not alike or any(e.pool is not None or is_sharded(w) for e, w in zip(all_edges, weights, strict=True)):
            return [
                (torch.where(e.choose(w), w, 0.0), torch.where(e.choose_more(w, self.reach), w, 0.0))
                for e, w in zip(all_edges, weights, strict=True)
            ]
        within = [e.within() for e in all_edges]  # all at once, which on a GPU takes as long as one
        real = primitive.real_edges_of(weights, [e.k for e in all_edges], within)
        more = [e.more(self.reach) for e in all_edges]
        return list(zip(real, primitive.real_edges_of(weights, more, within), strict=True))
