"""Keep the zeros of a network that is sparse already."""

from collections.abc import Sequence

import torch
from torch import Tensor

from wirings.rules.registry import register
from wirings.rules.rule import EdgesLike, LayerLike, Rule, Training
from wirings.rules.set import forget
from wirings.selection import sharded
from wirings.selection.kept_edges import KeptEdges


@register
class Keep(Rule):
    """The edges whose weights are not zero at the time of wiring stay real, and no others ever become real.

    For a network that was pruned before, by any tool that leaves zeros in plain weights. It takes no budget: the wiring
    is exactly where the weights are not zero. A real edge whose weight becomes zero in training stays real. Zeros get
    no gradient, so that momentum, weight decay and averages of weights leave them zero. If an optimizer remembers
    something about them, because it has trained the network before, the first ``wiring.step(optimizer)`` clears it.
    A state with another wiring, or with nonzero weights outside of this one, is rejected when it is loaded.

        wiring = wirings.wire_(pruned, "keep")
        train(pruned)
        wirings.finalize_(pruned)
    """

    name = "keep"
    kept = KeptEdges(mask="wiring", factor=0.0)
    own_budget = True
    keeps_wiring = True
    keeps_zeros = True
    needs_trained_weights = True
    atomic = True

    def budget(self, allowed: int, shape: tuple[int, ...]) -> int:
        return allowed  # at most: `setup` counts the weights

    def setup(self, layers: Sequence[LayerLike]) -> None:
        for layer in layers:
            edges = layer.edges
            wiring = sharded.whole(layer.weight.detach() != 0) if edges.start is None else edges.start
            edges.remember("wiring", wiring if edges.allowed is None else wiring & edges.allowed)
            edges.k.fill_(torch.count_nonzero(edges.wiring))
            forget(layer, edges.wiring, None)  # weights of edges that are not allowed

    def update(self, layers: Sequence[LayerLike], training: Training, optimizer: torch.optim.Optimizer | None) -> None:
        if training.step == 1:
            for layer in layers:
                forget(layer, layer.edges.wiring, optimizer)

    def real(self, weight: Tensor, edges: EdgesLike) -> Tensor:
        return edges.wiring
