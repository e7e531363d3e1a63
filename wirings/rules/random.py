"""The randomly wired graph, the paper's baseline RG (its section 3)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from wirings.rules.base import Edges, Layer, Rule, choose_together, register
from wirings.utils.checks import seed_or_none


@register
class Random(Rule):
    """A fixed random graph: uniform random scores, the k largest of them, for the whole training.

    Args:
        seed: makes the graph the same every time; None draws one from PyTorch's generator.

    Each layer remembers its wiring and the seed of its scores, so that a schedule of the density removes or adds
    edges of one and the same random order.
    """

    name = "random"

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed_or_none(self.name, seed)

    def setup(self, layers: Sequence[Layer]) -> None:
        generator = None if self.seed is None else torch.Generator().manual_seed(self.seed)
        for layer in layers:
            seed = torch.randint(2**62, (), generator=generator)
            layer.edges.remember("seed", seed.to(layer.weight.device))
        self.rebudget(layers)

    def rebudget(self, layers: Sequence[Layer]) -> None:
        # Scores come from the CPU's generator, in float32: the same graph on every device and in every precision.
        scores = [scores_of(layer).to(layer.weight.device) for layer in layers]
        for layer, real in zip(layers, choose_together(layers, scores), strict=True):
            layer.edges.remember("wiring", real)

    def real(self, weight: Tensor, edges: Edges) -> Tensor:
        return edges.wiring  # type: ignore[return-value]


def generator_of(layer: Layer, step: int = 0) -> torch.Generator:
    """The layer's own generator of random numbers, at its beginning, or another one for every step."""
    return torch.Generator().manual_seed((int(layer.edges.seed) + step) % 2**62)  # type: ignore[arg-type]


def scores_of(layer: Layer) -> Tensor:
    """The random order of a layer's edges that its seed gives: one number each."""
    return torch.rand(layer.weight.shape, generator=generator_of(layer))
