"""SET, sparse evolutionary training (Mocanu et al., Nature Communications 2018)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from wirings.errors import unknown
from wirings.rules.optimizers import states
from wirings.rules.planned import Periodic
from wirings.rules.random import Random, generator_of, others_of, resized, scores_of
from wirings.rules.registry import register
from wirings.rules.rule import EdgesLike, LayerLike, Training
from wirings.selection.kept_edges import KeptEdges
from wirings.utils.checks import check_number, check_seed

DECAYS = ("cosine", "constant")


class RandomStart(Periodic):
    """A rule that starts from a random wiring, or a given one, and remembers it. All other edges weigh zero."""

    seed: int | None
    keeps_wiring = True
    atomic = True
    kept = KeptEdges(mask="wiring", factor=0.0)

    def setup(self, layers: Sequence[LayerLike]) -> None:
        Random(self.seed).setup(layers)
        starts = [layer.edges.start for layer in layers]
        if starts[0] is not None:
            for layer, wiring in zip(layers, _resized(layers, starts), strict=True):
                layer.edges.remember("wiring", wiring)
        for layer in layers:
            forget(layer, layer.edges.wiring, None)

    def real(self, weight: Tensor, edges: EdgesLike) -> Tensor:
        return edges.wiring


@register
class SET(RandomStart):
    """A random wiring at first. Now and then every layer loses its weakest edges, and as many others grow at random.

    Hallucinated edges get no gradient and weigh zero: what is lost is forgotten, and an edge that grows starts from
    zero, with no momentum. Every layer keeps its number of edges. Edges that were just lost do not grow again at once.
    A new edge that no gradient has reached, because its nodes lead nowhere, is real and weighs zero.

    In the paper three tenths of the edges are lost once an epoch until the last one, among the smallest positive and
    the largest negative ones, and new ones start from a random weight. Choosing by magnitude, at any step, and starting
    from zero follow later work, and the schedule is that of RigL's authors (Evci et al., 2020), who ran SET with it
    too: an edge that starts from zero near the end, when the learning rate is small, has no time to grow. For ResNet50
    with 10 % of its weights they give 69.6 % on ImageNet. ``decay="constant", end=1.0`` is the schedule of SET's own
    paper, which shares edges out by the Erdős–Rényi formula that ``share="erk"`` comes from.

    With ``wiring.step(optimizer)`` the optimizer's momentum of lost edges is cleared.

    Args:
        fraction: the fraction of a layer's real edges that is exchanged each time, at the beginning of training.
        decay: how that fraction changes: ``"cosine"``, half a wave down to 0 at ``end``, or ``"constant"``.
        every: optimizer steps from one change to the next; None for a hundredth of training.
        end: the fraction of training after which the wiring no longer changes.
        seed: random seed of the first wiring and of what grows; None draws one from PyTorch's generator.
        steps: the number of optimizer steps of the whole training; by default that of `Wiring.plan`.
    """

    name = "set"
    atomic = True

    def __init__(
        self,
        fraction: float = 0.3,
        decay: str = "cosine",
        every: int | None = None,
        end: float = 0.75,
        seed: int | None = None,
        steps: int | None = None,
    ) -> None:
        super().__init__(every, steps)
        self.fraction, self.end = check_number(self.name, "fraction", fraction), check_number(self.name, "end", end)
        if not isinstance(decay, str) or decay not in DECAYS:
            raise unknown("decay", str(decay), DECAYS)
        self.decay, self.seed = decay, check_seed(self.name, seed)

    @torch.no_grad()
    def update(self, layers: Sequence[LayerLike], training: Training, optimizer: torch.optim.Optimizer | None) -> None:
        steps = self.length(training)
        due = self.due(training.step, steps)
        if not due and not training.budget_changed:
            return
        before = [layer.edges.wiring for layer in layers]
        now = _resized(layers, before) if training.budget_changed else before
        rate = self._rate(training.step / steps) if due else 0.0
        changes = []  # all are computed before the first is made, since any of them may fail
        for layer, old, wiring in zip(layers, before, now, strict=True):
            kept = wiring
            if due and layer.weight.requires_grad:
                kept, wiring = self._exchange(layer, old, wiring, rate, training.step, optimizer)
            changes.append((kept & old, wiring))
        for layer, (kept, wiring) in zip(layers, changes, strict=True):
            layer.edges.remember("wiring", wiring)
            forget(layer, kept, optimizer)

    def _rate(self, done: float) -> float:
        """The fraction of the real edges to exchange after the fraction ``done`` of training."""
        if self.decay == "constant":
            return self.fraction
        return self.fraction * (1 + math.cos(math.pi * done / self.end)) / 2

    def _exchange(
        self,
        layer: LayerLike,
        before: Tensor,
        wiring: Tensor,
        rate: float,
        step: int,
        optimizer: torch.optim.Optimizer | None,
    ) -> tuple[Tensor, Tensor]:
        """The edges that stay, and the new wiring. No edge grows that was real ``before`` the budget changed."""
        others = others_of(layer, wiring | before)
        # Edges that a change of the budget has added weigh zero.
        weight = layer.weight if wiring is before else layer.weight.masked_fill(before ^ wiring, 0.0)
        return layer.edges.exchange(weight, wiring, others, rate, lambda: self.growth(layer, others, step, optimizer))

    def growth(
        self, layer: LayerLike, others: Tensor, step: int, optimizer: torch.optim.Optimizer | None
    ) -> Tensor | None:
        """Scores of the ``others``, of which the largest magnitudes grow; None to leave the layer unchanged."""
        return layer.edges.draw(layer.weight.shape, generator_of(layer, step)).to(layer.weight.device)


def _resized(layers: Sequence[LayerLike], wirings: Sequence[Tensor]) -> list[Tensor]:
    """Wirings of the budget's size: the weakest edges go, or others grow in the random order of the beginning."""
    scores = [scores_of(layer).to(layer.weight.device) for layer in layers]
    return resized(layers, wirings, [layer.weight for layer in layers], scores, magnitudes=True)


@torch.no_grad()
def forget(layer: LayerLike, kept: Tensor, optimizer: torch.optim.Optimizer | None) -> None:
    """Set the weights of all edges that are not ``kept`` to zero, and what the optimizer remembers about them."""
    for values in (layer.weight, *states(layer, optimizer).values()):
        values.masked_fill_(~kept, 0.0)
