"""SET, sparse evolutionary training (Mocanu and others, Nature Communications 2018)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from wirings import edges as primitive
from wirings.errors import unknown
from wirings.rules.base import Edges, Layer, choose_together, register
from wirings.rules.checks import number, whole_number
from wirings.rules.optimizers import states
from wirings.rules.planned import Planned
from wirings.rules.random import Random, generator_of, scores_of

DECAYS = ("constant", "cosine")


@register
class SET(Planned):
    """A random wiring at first. Now and then every layer loses its weakest edges, and as many others grow at random.

    Hallucinated edges get no gradient and weigh zero: what has been lost is forgotten, and an edge that grows starts
    from zero, with no momentum. Every layer keeps its number of edges. What was lost does not grow again at once.

    In the paper edges are lost among the smallest positive and the largest negative ones, once an epoch, and new ones
    start from a random weight; by magnitude, at any step, and from zero are as in later work. Evci and others
    (RigL, 2020) give for ResNet50 with 10 % of its weights 69.6 % on ImageNet.

    Args:
        fraction: of a layer's real edges that is exchanged each time, at the beginning of training.
        decay: how that fraction goes on: ``"constant"``, or ``"cosine"``, half a wave down to 0 at ``end``.
        every: optimizer steps from one change to the next; None: a hundredth of training.
        end: the fraction of training after which the wiring stays.
        seed: of the wiring at first and of what grows; None draws one from PyTorch's generator.
        steps: optimizer steps of the whole training; else `Wiring.plan` says it.

    With ``wiring.step(optimizer)`` the optimizer's momentum of lost edges is cleared.
    """

    name = "set"

    def __init__(
        self,
        fraction: float = 0.3,
        decay: str = "constant",
        every: int | None = None,
        end: float = 1.0,
        seed: int | None = None,
        steps: int | None = None,
    ) -> None:
        super().__init__(steps)
        self.fraction, self.end = number(self.name, "fraction", fraction), number(self.name, "end", end)
        if decay not in DECAYS:
            raise unknown("decay", str(decay), DECAYS)
        self.decay, self.every = decay, None if every is None else whole_number(self.name, "every", every)
        self.seed, self._rebudgeted = seed, False

    def setup(self, layers: Sequence[Layer]) -> None:
        Random(self.seed).setup(layers)
        for layer in layers:
            forget(layer, wiring_of(layer), None)

    def rebudget(self, layers: Sequence[Layer]) -> None:
        """Fewer edges: the weakest go. More: others grow, in the random order of the beginning."""
        pooled, now = layers[0].edges.pool is not None, [wiring_of(layer) for layer in layers]
        counts = [int(torch.count_nonzero(wiring)) for wiring in now]
        counts = [sum(counts)] * len(layers) if pooled else counts
        budgets = [int(layer.edges.k) for layer in layers]
        fewer = [min(k, n) for k, n in zip(budgets, counts, strict=True)]
        kept = choose_together(layers, [layer.weight for layer in layers], fewer, now)
        if fewer != budgets:
            more = [k - n for k, n in zip(budgets, fewer, strict=True)]
            scores = [scores_of(layer).to(layer.weight.device) for layer in layers]
            others = [others_of(layer, wiring) for layer, wiring in zip(layers, kept, strict=True)]
            grown = choose_together(layers, scores, more, others)
            kept = [a | b for a, b in zip(kept, grown, strict=True)]
        for layer, wiring in zip(layers, kept, strict=True):
            layer.edges.remember("wiring", wiring)
            forget(layer, wiring, None)
        self._rebudgeted = True  # for the step that follows at once, which has the optimizer

    def real(self, weight: Tensor, edges: Edges) -> Tensor:
        return edges.wiring  # type: ignore[return-value]

    @torch.no_grad()
    def step(self, layers: Sequence[Layer], step: int, optimizer: torch.optim.Optimizer | None) -> None:
        if self._rebudgeted:
            self._rebudgeted = False
            for layer in layers:
                forget(layer, wiring_of(layer), optimizer)
        if self.due(layers, step):
            for layer in layers:
                if layer.weight.requires_grad:
                    self._exchange(layer, step, self._rate(step / self.length(layers)), optimizer)

    def due(self, layers: Sequence[Layer], step: int) -> bool:
        """Whether the wiring changes after this step."""
        steps = self.length(layers)
        every = max(steps // 100, 1) if self.every is None else self.every
        return step % every == 0 and step < self.end * steps

    def _rate(self, done: float) -> float:
        if self.decay == "constant":
            return self.fraction
        return self.fraction * (1 + math.cos(math.pi * done / self.end)) / 2

    def _exchange(self, layer: Layer, step: int, rate: float, optimizer: torch.optim.Optimizer | None) -> None:
        wiring = wiring_of(layer)
        before = int(torch.count_nonzero(wiring))
        lost = min(int(rate * before + 1e-6), layer.edges.possible - before)
        scores = self.growth(layer, step, optimizer)
        if scores is not None and lost:
            kept = primitive.choose(layer.weight, before - lost, wiring)
            layer.edges.remember("wiring", kept | primitive.choose(scores, lost, others_of(layer, wiring)))
            forget(layer, kept, optimizer)

    def growth(self, layer: Layer, step: int, optimizer: torch.optim.Optimizer | None) -> Tensor | None:
        """What hallucinated edges are ranked by: the largest magnitudes grow. None: nothing changes this time."""
        generator = generator_of(layer, step)
        return torch.rand(layer.weight.shape, generator=generator).to(layer.weight.device)


def wiring_of(layer: Layer) -> Tensor:
    """The wiring that a layer remembers."""
    return layer.edges.wiring  # type: ignore[return-value]


def others_of(layer: Layer, wiring: Tensor) -> Tensor:
    """The allowed edges that are not in ``wiring``."""
    return ~wiring if layer.edges.allowed is None else layer.edges.allowed & ~wiring


@torch.no_grad()
def forget(layer: Layer, kept: Tensor, optimizer: torch.optim.Optimizer | None) -> None:
    """Let all other edges weigh zero, without any momentum."""
    for values in (layer.weight, *states(layer, optimizer).values()):
        values.masked_fill_(~kept, 0.0)
