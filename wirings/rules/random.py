"""The randomly wired graph, the paper's baseline RG (section 3)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from wirings.rules.registry import register
from wirings.rules.rule import EdgesLike, LayerLike, Rule, Training, choose_by
from wirings.selection.kept_edges import KeptEdges
from wirings.utils.checks import check_seed


@register
class Random(Rule):
    """A fixed random graph: the k largest of uniform random scores, for the whole training.

    Each layer remembers its wiring and the seed of its scores, so that a schedule of the density removes or adds edges
    in one random order.

    Args:
        seed: random seed of the graph; None draws one from PyTorch's generator.
    """

    name = "random"
    kept = KeptEdges(mask="wiring", factor=0.0)
    acts_between_steps = False
    keeps_wiring = True
    atomic = True

    def __init__(self, seed: int | None = None) -> None:
        self.seed = check_seed(self.name, seed)

    def setup(self, layers: Sequence[LayerLike]) -> None:
        generator = None if self.seed is None else torch.Generator().manual_seed(self.seed)
        for layer in layers:
            seed = torch.randint(2**62, (), generator=generator)
            layer.edges.remember("seed", seed.to(layer.weight.device))
        self._draw(layers)

    def update(self, layers: Sequence[LayerLike], training: Training, optimizer: torch.optim.Optimizer | None) -> None:
        if training.budget_changed:
            self._draw(layers)

    def _draw(self, layers: Sequence[LayerLike]) -> None:
        # Scores come from the CPU's generator, in float32: the same graph on every device and in every precision.
        scores = [scores_of(layer).to(layer.weight.device) for layer in layers]
        for layer, real in zip(layers, choose_by(layers, scores), strict=True):
            layer.edges.remember("wiring", real)

    def real(self, weight: Tensor, edges: EdgesLike) -> Tensor:
        return edges.wiring


def generator_of(layer: LayerLike, step: int = 0) -> torch.Generator:
    """The layer's own random number generator, at its start; a different one for every step."""
    return torch.Generator().manual_seed((int(layer.edges.seed) + step) % 2**62)


def scores_of(layer: LayerLike) -> Tensor:
    """The random order of a layer's edges that its seed gives: one number for each edge."""
    return torch.rand(layer.weight.shape, generator=generator_of(layer))
