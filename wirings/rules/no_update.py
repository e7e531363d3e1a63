"""The paper's ablation "No Update Rule" (section 3.3)."""

from torch import Tensor

from wirings.rules.registry import register
from wirings.rules.rule import EdgesLike, Rule
from wirings.selection.kept_edges import KeptEdges


@register
class NoUpdate(Rule):
    """The k edges of largest magnitude are real, and only they get a gradient.

    A hallucinated edge keeps its weight (apart from the optimizer's weight decay) and becomes real only when a real
    edge has shrunk below it.
    """

    name = "no_update"
    kept = KeptEdges(factor=0.0)
    acts_between_steps = False

    def real(self, weight: Tensor, edges: EdgesLike) -> Tensor:
        return edges.choose(weight)
