"""Discovering Neural Wirings (Wortsman, Farhadi and Rastegari, NeurIPS 2019), the paper's Algorithm 1."""

from torch import Tensor

from wirings.rules.registry import register
from wirings.rules.rule import EdgesLike, Rule
from wirings.selection.kept_edges import KeptEdges


@register
class DNW(Rule):
    """The k edges of largest magnitude are real; the gradient reaches all others as well.

    The wiring is a pure function of the weights, so nothing extra is saved.
    """

    name = "dnw"
    reaches = "all"
    kept = KeptEdges()
    acts_between_steps = False

    def real(self, weight: Tensor, edges: EdgesLike) -> Tensor:
        return edges.choose(weight)
