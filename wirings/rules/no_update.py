"""The paper's ablation "No Update Rule" (its section 3.3)."""

from torch import Tensor

from wirings.rules.base import Edges, Rule, register


@register
class NoUpdate(Rule):
    """The k edges of largest magnitude are real, and only they get a gradient.

    A hallucinated edge keeps its weight (but for weight decay, which is the optimizer's), and enters only when a
    real one has shrunk below it.
    """

    name = "no_update"

    def real(self, weight: Tensor, edges: Edges) -> Tensor:
        return edges.choose(weight)
