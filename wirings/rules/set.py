"""SET, sparse evolutionary training (Mocanu and others, Nature Communications 2018)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from wirings.errors import unknown
from wirings.rules.base import Edges, Layer, choose_together, register
from wirings.rules.optimizers import states
from wirings.rules.planned import Planned
from wirings.rules.random import Random, generator_of, scores_of
from wirings.selection import functional as primitive
from wirings.utils.checks import number, seed_or_none, whole_number

DECAYS = ("cosine", "constant")


@register
class SET(Planned):
    """A random wiring at first. Now and then every layer loses its weakest edges, and as many others grow at random.

    Hallucinated edges get no gradient and weigh zero: what has been lost is forgotten, and an edge that grows starts
    from zero, with no momentum. Every layer keeps its number of edges. What was lost does not grow again at once. A
    new edge that no gradient has reached, since its nodes lead nowhere, is real and weighs zero.

    In the paper three tenths of the edges are lost once an epoch, to the last one, among the smallest positive and the
    largest negative ones, and new ones start from a random weight. By magnitude, at any step, and from zero are as in
    later work, and the schedule is that of RigL's authors (Evci and others, 2020), who ran SET with it too: an edge
    that starts from zero near the end, when the learning rate is small, has no time to grow. They give for ResNet50
    with 10 % of its weights 69.6 % on ImageNet. ``decay="constant", end=1.0`` is the schedule of SET's own paper,
    which shares edges out by the Erdős–Rényi formula that ``share="erk"`` comes from.

    Args:
        fraction: of a layer's real edges that is exchanged each time, at the beginning of training.
        decay: how that fraction goes on: ``"cosine"``, half a wave down to 0 at ``end``, or ``"constant"``.
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
        decay: str = "cosine",
        every: int | None = None,
        end: float = 0.75,
        seed: int | None = None,
        steps: int | None = None,
    ) -> None:
        super().__init__(steps)
        self.fraction, self.end = number(self.name, "fraction", fraction), number(self.name, "end", end)
        if decay not in DECAYS:
            raise unknown("decay", str(decay), DECAYS)
        self.decay, self.every = decay, None if every is None else whole_number(self.name, "every", every)
        self.seed = seed_or_none(self.name, seed)
        self._before: list[Tensor] | None = None  # the wirings of before a change of budgets

    def setup(self, layers: Sequence[Layer]) -> None:
        Random(self.seed).setup(layers)
        for layer in layers:
            forget(layer, wiring_of(layer), None)

    @torch.no_grad()
    def rebudget(self, layers: Sequence[Layer]) -> None:
        """Fewer edges: the weakest go. More: others grow, in the random order of the beginning."""
        pooled, now = layers[0].edges.pool is not None, [wiring_of(layer).clone() for layer in layers]
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
        for layer, before, wiring in zip(layers, now, kept, strict=True):
            layer.edges.remember("wiring", wiring)
            layer.weight.masked_fill_(before ^ wiring, 0.0)
        self._before = now  # for the step that follows at once, which has the optimizer

    def real(self, weight: Tensor, edges: Edges) -> Tensor:
        return edges.wiring  # type: ignore[return-value]

    @torch.no_grad()
    def step(self, layers: Sequence[Layer], step: int, optimizer: torch.optim.Optimizer | None) -> None:
        due, befores = self.due(layers, step), self._before
        if due or befores is not None:
            rate, self._before = self._rate(step / self.length(layers)) if due else 0.0, None
            for layer, before in zip(layers, befores or [wiring_of(layer).clone() for layer in layers], strict=True):
                kept = wiring_of(layer)
                if due and layer.weight.requires_grad:
                    kept = self._exchange(layer, before, step, rate, optimizer)
                forget(layer, kept & before, optimizer)

    def due(self, layers: Sequence[Layer], step: int) -> bool:
        """Whether the wiring changes after this step."""
        steps = self.length(layers)
        every = max(steps // 100, 1) if self.every is None else self.every
        return step % every == 0 and step < self.end * steps

    def _rate(self, done: float) -> float:
        if self.decay == "constant":
            return self.fraction
        return self.fraction * (1 + math.cos(math.pi * done / self.end)) / 2

    def _exchange(
        self, layer: Layer, before: Tensor, step: int, rate: float, optimizer: torch.optim.Optimizer | None
    ) -> Tensor:
        """Change a layer's wiring; the edges that stay. None grows that was real ``before`` the budget changed."""
        wiring = wiring_of(layer)
        others = others_of(layer, wiring | before)
        count = int(torch.count_nonzero(wiring))
        lost = min(int(rate * count + 1e-6), int(torch.count_nonzero(others)))
        scores = self.growth(layer, others, step, optimizer) if lost else None
        if scores is None:
            return wiring
        kept = primitive.choose(layer.weight, count - lost, wiring)
        layer.edges.remember("wiring", kept | primitive.choose(scores, lost, others))
        return kept

    def growth(self, layer: Layer, others: Tensor, step: int, optimizer: torch.optim.Optimizer | None) -> Tensor | None:
        """What the ``others`` are ranked by: the largest magnitudes grow. None: nothing changes this time."""
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
