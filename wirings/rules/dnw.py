"""Discovering Neural Wirings (Wortsman, Farhadi, Rastegari, NeurIPS 2019), the paper's Algorithm 1."""

from torch import Tensor

from wirings.rules.base import Edges, Rule, register


@register
class DNW(Rule):
    """The k edges of largest magnitude are real; the gradient reaches all others too.

    The wiring is a pure function of the weights, so nothing extra is saved.
    """

    name = "dnw"
    reaches = "all"

    def real(self, weight: Tensor, edges: Edges) -> Tensor:
        return edges.choose(weight)

    def forward(self, weight: Tensor, edges: Edges) -> Tensor:
        return edges.keep(weight)
