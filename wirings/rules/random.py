"""The randomly wired graph, the paper's baseline RG (section 3)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from wirings.rules.registry import register
from wirings.rules.rule import EdgesLike, LayerLike, Rule, Training, choose_by
from wirings.selection import sharded
from wirings.selection.kept_edges import KeptEdges
from wirings.utils.checks import check_seed


@register
class Random(Rule):
    """A fixed random graph: the k largest of uniform random scores, for the whole training.

    Each layer remembers its wiring and the seed of its scores, so that a schedule of the density removes or adds edges
    in one random order. With ``start="weights"`` the given edges come first in it.

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
        self._draw(layers, [layer.edges.start for layer in layers])

    def update(self, layers: Sequence[LayerLike], training: Training, optimizer: torch.optim.Optimizer | None) -> None:
        if training.budget_changed:
            self._draw(layers, [layer.edges.wiring for layer in layers])

    def _draw(self, layers: Sequence[LayerLike], before: Sequence[Tensor | None]) -> None:
        """Choose the wirings: at random, or from those ``before``, of which edges are removed or others added."""
        # Scores come from the CPU's generator, in float32: the same graph on every device and in every precision.
        scores = [scores_of(layer).to(layer.weight.device) for layer in layers]
        given = [wiring for wiring in before if wiring is not None]
        chosen = resized(layers, given, scores, scores) if given else choose_by(layers, scores)
        for layer, real in zip(layers, chosen, strict=True):
            layer.edges.remember("wiring", real)

    def real(self, weight: Tensor, edges: EdgesLike) -> Tensor:
        return edges.wiring


def resized(
    layers: Sequence[LayerLike],
    wirings: Sequence[Tensor],
    strengths: Sequence[Tensor],
    scores: Sequence[Tensor],
    magnitudes: bool = False,
) -> list[Tensor]:
    """Wirings of the budget's size: of these ``wirings`` the weakest edges go, or others of the best scores are added.

    Args:
        layers: the layers.
        wirings: their wirings, masks of another number of edges.
        strengths: what the edges to be removed are ranked by, for each layer.
        scores: what the edges to be added are ranked by.
        magnitudes: whether the strengths are weights, as for `choose_by`.
    """
    counts = [int(layer.edges.count(wiring)) for layer, wiring in zip(layers, wirings, strict=True)]
    counts = [sum(counts)] * len(layers) if layers[0].edges.shared else counts
    budgets = [int(layer.edges.k) for layer in layers]
    fewer = [min(k, n) for k, n in zip(budgets, counts, strict=True)]
    kept = choose_by(layers, strengths, fewer, wirings, magnitudes)
    if fewer != budgets:
        more = [k - n for k, n in zip(budgets, fewer, strict=True)]
        others = [others_of(layer, wiring) for layer, wiring in zip(layers, kept, strict=True)]
        grown = choose_by(layers, scores, more, others)
        kept = [a | b for a, b in zip(kept, grown, strict=True)]
    return [sharded.whole(wiring) for wiring in kept]


def others_of(layer: LayerLike, wiring: Tensor) -> Tensor:
    """The allowed edges that are not in ``wiring``."""
    return ~wiring if layer.edges.allowed is None else layer.edges.allowed & ~wiring


def generator_of(layer: LayerLike, step: int = 0) -> torch.Generator:
    """The layer's own random number generator, at its start; a different one for every step."""
    return torch.Generator().manual_seed((int(layer.edges.seed) + step) % 2**62)


def scores_of(layer: LayerLike) -> Tensor:
    """The random order of a layer's edges that its seed gives: one number for each edge."""
    return layer.edges.draw(layer.weight.shape, generator_of(layer))
