"""Fine-tuning: the wiring of a network that was trained with all its edges (the paper's section 3.3, "FT")."""

from collections.abc import Sequence

from torch import Tensor

from wirings.rules.base import Edges, Layer, Rule, choose_together, register


@register
class FineTune(Rule):
    """The k edges of largest magnitude when the model is wired, for good; training goes on from the weights it has.

    Wire a model that is trained already: its weights then decide the wiring. Each layer remembers its wiring and the
    magnitudes that decided it, so that a schedule of the density removes edges in the order of that moment, whatever
    has become of the weights since.

        train(model)
        wiring = wirings.wire_(model, "fine_tune", density=0.1)
        train(model)
    """

    name = "fine_tune"

    def setup(self, layers: Sequence[Layer]) -> None:
        for layer in layers:
            layer.edges.remember("score", layer.weight.detach().abs())
        self.rebudget(layers)

    def rebudget(self, layers: Sequence[Layer]) -> None:
        scores: list[Tensor] = [layer.edges.score for layer in layers]  # type: ignore[misc]
        for layer, real in zip(layers, choose_together(layers, scores), strict=True):
            layer.edges.remember("wiring", real)

    def real(self, weight: Tensor, edges: Edges) -> Tensor:
        return edges.wiring  # type: ignore[return-value]
