"""Fine-tuning: the wiring of a network that was trained with all its edges (section 3.3 of the paper, "FT")."""

from collections.abc import Sequence

import torch
from torch import Tensor

from wirings.rules.registry import register
from wirings.rules.rule import EdgesLike, LayerLike, Rule, Training, choose_by
from wirings.selection.kept_edges import KeptEdges


@register
class FineTune(Rule):
    """The k edges of largest magnitude at the time of wiring stay real; training continues from the current weights.

    Wire a model that is already trained: its weights decide the wiring. Each layer remembers its wiring and the
    magnitudes that decided it, so that a schedule of the density removes edges in the order of that moment, whatever
    the weights have become since.

        train(model)
        wiring = wirings.wire_(model, "fine_tune", density=0.1)
        train(model)
    """

    name = "fine_tune"
    kept = KeptEdges(mask="wiring", factor=0.0)
    acts_between_steps = False
    keeps_wiring = True
    needs_trained_weights = True
    atomic = True

    def setup(self, layers: Sequence[LayerLike]) -> None:
        for layer in layers:
            layer.edges.remember("score", layer.weight.detach().abs())
        self._choose(layers)

    def update(self, layers: Sequence[LayerLike], training: Training, optimizer: torch.optim.Optimizer | None) -> None:
        if training.budget_changed:
            self._choose(layers)

    def _choose(self, layers: Sequence[LayerLike]) -> None:
        scores = [layer.edges.score for layer in layers]
        for layer, real in zip(layers, choose_by(layers, scores, magnitudes=True), strict=True):
            layer.edges.remember("wiring", real)

    def real(self, weight: Tensor, edges: EdgesLike) -> Tensor:
        return edges.wiring
