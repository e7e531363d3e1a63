"""Sparse momentum (Dettmers and Zettlemoyer, "Sparse Networks from Scratch", 2019)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from wirings.errors import WiringError
from wirings.rules.base import Edges, Layer, register
from wirings.rules.optimizers import bring_to_rest, group_of
from wirings.rules.planned import Planned
from wirings.rules.random import Random, scores_of
from wirings.rules.set import forget, others_of, wiring_of
from wirings.selection import functional as primitive
from wirings.utils.checks import number, seed_or_none, whole_number, yes_or_no


@register
class SparseMomentum(Planned):
    """A random wiring at first. Now and then the weakest edges are removed, and others grow where momentum is large.

    Each time, in this order:

    1. Every layer loses the fraction ``prune_rate`` (rounded down) of its real edges, those of smallest magnitude.
    2. As many edges as were lost in all are shared out over the layers in proportion to the mean magnitude of the
       momentum of their real edges (those before step 1), by largest remainders. No layer gets more than it allows;
       what is over goes to all others in equal parts.
    3. In each layer the hallucinated edges with the largest momentum become real, from a weight of zero. Those that
       were lost a moment ago may come back so: they keep their weight, as in the authors' code.

    New edges begin at rest, which is ours: what the optimizer remembers of their gradient is set to zero. The gradient
    of an edge to a node that has none is large when a batch norm follows, since nothing varies there; the momentum that
    it left would carry the weight far beyond all others in a few steps, and those would be removed as the weakest.

    So the number of edges is the budget's over all layers together, and not in each, unless ``redistribute`` is false.
    The gradient reaches all allowed edges, which feeds the momentum of hallucinated ones. Their weights are zero from
    the beginning and set to zero after every step, so that weight decay has nothing to add to it.

    Args:
        prune_rate: the fraction that is removed, at the beginning of training; it falls to 0 at the end as half a
            cosine does. 0.5 is the default of the authors' code.
        redistribute: whether lost edges are shared out over the layers, as in the paper; else every layer grows as many
            as it lost. Momentum is largest where maps are, so that shared out, the same edges may cost several times
            the multiply-adds.
        every: optimizer steps from one change to the next; by default a hundredth of training. The paper changes once
            an epoch, and trains ImageNet for 100 of them; a rule knows no epochs.
        seed: of the wiring at first, as for `Random`.
        steps: optimizer steps of the whole training; else `Wiring.plan` says it.

    Needs ``wiring.step(optimizer)`` with SGD with momentum, whose buffer is the momentum, or Adam or AdamW, where it is
    the running mean of the gradient over the root of that of its square.
    """

    name = "sparse_momentum"
    reaches = "all"

    def __init__(
        self,
        prune_rate: float = 0.5,
        every: int | None = None,
        seed: int | None = None,
        steps: int | None = None,
        redistribute: bool = True,
    ) -> None:
        super().__init__(steps)
        self.moves_budget = yes_or_no(self.name, "redistribute", redistribute)
        self.prune_rate, self.seed = number(self.name, "prune_rate", prune_rate), seed_or_none(self.name, seed)
        self.every = None if every is None else whole_number(self.name, "every", every)

    def setup(self, layers: Sequence[Layer]) -> None:
        Random(self.seed).setup(layers)
        _forget_others(layers)

    def rebudget(self, layers: Sequence[Layer]) -> None:
        """Layers lose their weakest edges or grow random ones. Where edges move between them, each one's share of the
        new total is what it has now.
        """
        pooled, now = layers[0].edges.pool is not None, _counts(layers)
        new = [int(layer.edges.k) for layer in layers]
        if pooled or self.moves_budget:
            total = new[0] if pooled else sum(new)
            least = int(total >= len(layers))
            room = [layer.edges.possible - least for layer in layers]
            more = share_out(total - least * len(layers), [max(n - least, 0) for n in now], room)
            new = [least + m for m in more]
        for layer, before, k in zip(layers, now, new, strict=True):
            wiring = wiring_of(layer)
            if k < before:
                wiring = primitive.choose(layer.weight, k, wiring)
            else:
                scores = scores_of(layer).to(wiring.device)
                wiring = wiring | primitive.choose(scores, k - before, others_of(layer, wiring))
            _set(layer, wiring, k)

    def real(self, weight: Tensor, edges: Edges) -> Tensor:
        return edges.wiring  # type: ignore[return-value]

    def forward(self, weight: Tensor, edges: Edges) -> Tensor:
        return primitive.straight_through(weight, edges.wiring, edges.allowed)  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, layers: Sequence[Layer], step: int, optimizer: torch.optim.Optimizer | None) -> None:
        steps = self.length(layers)
        every = max(steps // 100, 1) if self.every is None else self.every
        layers = [layer for layer in layers if layer.weight.requires_grad]
        _forget_others(layers)
        due = step % every == 0 and step < steps
        if due or step == 1:  # what is wrong with the optimizer is told at once
            found = [self._momentum(layer, optimizer) for layer in layers]
            momenta = [momentum for momentum in found if momentum is not None]
            if due and len(momenta) == len(layers):
                self._rewire(layers, momenta, self.prune_rate * (1 + math.cos(math.pi * step / steps)) / 2, optimizer)

    def _momentum(self, layer: Layer, optimizer: torch.optim.Optimizer | None) -> Tensor | None:
        if optimizer is None:
            raise WiringError(f"rule {self.name!r} reads the optimizer's momentum: call wiring.step(optimizer).")
        group, state = group_of(self.name, "momentum", layer, optimizer), optimizer.state.get(layer.weight, {})
        if isinstance(state.get("momentum_buffer"), Tensor):
            return state["momentum_buffer"]
        if "exp_avg" in state and "exp_avg_sq" in state:
            mean, square = state["exp_avg"], state["exp_avg_sq"]
            precise = torch.promote_types(mean.dtype, torch.float32)  # in float16 1e-8 would be 0
            return mean.to(precise) / (square.to(precise).sqrt() + 1e-8)
        if not state and (group.get("momentum") or "betas" in group):
            return None  # it has made no step yet: fp16's scaler skipped them
        raise WiringError(
            f"rule {self.name!r} needs an optimizer with momentum, but {type(optimizer).__name__} keeps none for "
            f"{layer.name}: take SGD with momentum, Adam or AdamW."
        )

    def _rewire(
        self, layers: Sequence[Layer], momenta: Sequence[Tensor], rate: float, optimizer: torch.optim.Optimizer | None
    ) -> None:
        before = _counts(layers)
        lost = [int(rate * count + 1e-6) for count in before]
        grown = lost
        if self.moves_budget:
            real = [torch.where(wiring_of(layer), m, 0.0).float() for layer, m in zip(layers, momenta, strict=True)]
            means = [float(m.abs().sum()) / max(count, 1) for m, count in zip(real, before, strict=True)]
            for layer, mean in zip(layers, means, strict=True):
                if not math.isfinite(mean):
                    raise WiringError(
                        f"the momentum of {layer.name} is not finite ({mean}), and edges are shared out by it: "
                        "training has diverged. Go on from an earlier checkpoint with a smaller learning rate."
                    )
            room = [one.edges.possible - b + n for one, b, n in zip(layers, before, lost, strict=True)]
            grown = _grown(sum(lost), means if any(means) else lost, room)
        for layer, momentum, b, n, g in zip(layers, momenta, before, lost, grown, strict=True):
            old = wiring_of(layer)
            kept = primitive.choose(layer.weight, b - n, old)
            wiring = kept | primitive.choose(momentum, g, others_of(layer, kept))
            layer.weight.masked_fill_(~wiring, 0.0)
            bring_to_rest(layer.weight, wiring & ~old, optimizer)
            _set(layer, wiring, b - n + g)


def _grown(total: int, shares: Sequence[float], room: Sequence[int]) -> list[int]:
    """``total`` in proportion to ``shares``; what one has no room for goes to all others in equal parts."""
    wanted = share_out(total, shares, [total] * len(shares))
    grown = [min(w, most) for w, most in zip(wanted, room, strict=True)]
    left = [most - g for most, g in zip(room, grown, strict=True)]
    more = share_out(total - sum(grown), [1.0] * len(grown), left)
    return [g + m for g, m in zip(grown, more, strict=True)]


def share_out(total: int, shares: Sequence[float], most: Sequence[int]) -> list[int]:
    """``total`` in proportion to ``shares``: whole numbers, by largest remainders, none above ``most``.

    What is too much for one goes to the others in the same proportion; where the shares of all others are zero, in
    proportion to the room that they have.

    >>> share_out(10, [3.0, 1.0, 1.0], [4, 9, 9])
    [4, 3, 3]
    """
    full: set[int] = set()
    while True:
        open_ = [i for i in range(len(shares)) if i not in full]
        parts = shares if any(shares[i] > 0 for i in open_) else most
        whole, left = sum(parts[i] for i in open_), total - sum(most[i] for i in full)
        wanted = {i: left * parts[i] / whole if whole else 0.0 for i in open_}
        over = {i for i in open_ if wanted[i] > most[i]}
        if not over:
            break
        full |= over
    counts = [most[i] if i in full else math.floor(wanted[i] + 1e-9) for i in range(len(shares))]
    missing = total - sum(counts)
    for i in sorted((i for i in open_ if counts[i] < most[i]), key=lambda i: counts[i] - wanted[i])[:missing]:
        counts[i] += 1
    return counts


def _counts(layers: Sequence[Layer]) -> list[int]:
    return [int(torch.count_nonzero(wiring_of(layer))) for layer in layers]


def _set(layer: Layer, wiring: Tensor, k: int) -> None:
    layer.edges.remember("wiring", wiring)
    if layer.edges.pool is None:  # a pool's k is that of all its layers
        layer.edges.k.fill_(k)


def _forget_others(layers: Sequence[Layer]) -> None:
    for layer in layers:
        forget(layer, wiring_of(layer), None)  # their momentum stays: they grow by it
