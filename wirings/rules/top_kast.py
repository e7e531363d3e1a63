"""Top-KAST (Jayakumar, Pascanu, Rae, Osindero, Elsen, NeurIPS 2020): a gradient for a superset of the real edges."""

from collections.abc import Sequence

import torch
from torch import Tensor

from wirings.errors import WiringError
from wirings.rules.optimizers import learning_rates
from wirings.rules.registry import register
from wirings.rules.rule import EdgesLike, LayerLike, Rule, Training
from wirings.selection.kept_edges import KeptEdges
from wirings.utils.checks import check_number
from wirings.utils.text import brief


@register
class TopKAST(Rule):
    """The k edges of largest magnitude are real. The gradient reaches them and the next strongest, and no others.

    It reaches the strongest edges up to the density ``reach``; all others keep their weights, so that it would be
    enough to store this superset in training. An edge enters the superset when one in it has shrunk below it. ResNet50
    with 10 % of the weights, where the gradient reaches 20 %, has 73.0 % on ImageNet in the paper, as quoted in
    SparseML's pull request 1674; the implementation there has 72.5 %.

    The paper shrinks weights by a loss of their squares, which counts 1 / density times as much for edges of the
    superset that are not real. Here that is a separate step after the optimizer's (see `L1Anneal` for the reasons):
    w ← w · (1 − learning rate × exploration), and w · (1 − learning rate × exploration ÷ density) for edges that are
    not real. It replaces weight decay: set the optimizer's to 0 for edges. A term of the gradient passes through
    momentum m, which multiplies it by 1 / (1 − m); a separate step does not. So ``exploration`` is the paper's
    coefficient, or the weight decay that it replaces, divided by 1 − m. The separate step and the default of ``reach``
    are our choices. What weight decay and momentum do to edges outside the superset is up to the optimizer.

    Args:
        reach: the density of the superset, above 0 and at most 1; in a layer with a larger budget it is the real edges.
        exploration: the strength of the shrinking: 1e-3 for a weight decay of 1e-4 with momentum 0.9. Needs
            ``wiring.step(optimizer)``; 0 for none.
    """

    name = "top_kast"
    kept: KeptEdges | None = None
    reaches = "some"
    atomic = True

    def __init__(self, reach: float = 0.5, exploration: float = 0.0) -> None:
        self.reach = check_number(self.name, "reach", reach)
        if not self.reach:
            raise WiringError(
                f"{self.name}: reach must be above 0, got {brief(reach)}; for real edges alone use rule 'no_update'."
            )
        self.kept = KeptEdges(reach=self.reach)
        self.exploration = check_number(self.name, "exploration", exploration, most=float("inf"))

    def real(self, weight: Tensor, edges: EdgesLike) -> Tensor:
        return edges.choose(weight)

    @torch.no_grad()
    def update(self, layers: Sequence[LayerLike], training: Training, optimizer: torch.optim.Optimizer | None) -> None:
        if not self.exploration:
            return
        trained = learning_rates(self.name, layers, optimizer, "exploration=0")
        if not trained:
            return
        # All choices before any weight changes: layers that share a budget are ranked together.
        selection, chosen = layers[0].edges.selection, [layer for layer, _ in trained]
        real, reached = selection.kept_weights(chosen), selection.kept_weights(chosen, self.reach)
        for (layer, rate), kept, others in zip(trained, real, reached, strict=True):
            shrink = rate * self.exploration
            more = (shrink / layer.edges.density()).clamp(max=1.0)
            shrink = shrink.clamp(max=1.0) if isinstance(shrink, Tensor) else min(shrink, 1.0)
            layer.weight.sub_(torch.where(kept != 0, kept * shrink, others * more))
