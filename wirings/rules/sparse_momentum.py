"""Sparse momentum (Dettmers and Zettlemoyer, "Sparse Networks from Scratch", 2019)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from wirings.budgets.apportion import share_out
from wirings.errors import WiringError
from wirings.rules.optimizers import bring_to_rest, group_of
from wirings.rules.random import others_of, scores_of
from wirings.rules.registry import register
from wirings.rules.rule import LayerLike, Training
from wirings.rules.set import RandomStart, forget
from wirings.selection import sharded
from wirings.selection.kept_edges import KeptEdges
from wirings.utils.checks import check_bool, check_number, check_seed


@register
class SparseMomentum(RandomStart):
    """A random wiring at first. Now and then the weakest edges are removed, and others grow where momentum is large.

    Each time, in this order:

    1. Every layer loses the fraction ``prune_rate`` (rounded down) of its real edges, those of smallest magnitude.
    2. As many edges as were lost in total are shared out over the layers in proportion to the mean magnitude of the
       momentum of their real edges (those before step 1), by largest remainders. No layer gets more than it allows; the
       surplus goes to all others in equal parts.
    3. In each layer the hallucinated edges with the largest momentum become real, with a weight of zero. Those that
       were just lost may come back in this way, and keep their weight, as in the authors' code.

    New edges start at rest, which is our choice: what the optimizer remembers about their gradient is set to zero. The
    gradient of an edge to a node that has none is large when a batch norm follows, since nothing varies there; the
    momentum it left would carry the weight far beyond all others in a few steps, and those would be removed as the
    weakest.

    So the number of edges is the budget's over all layers together, not in each, unless ``redistribute`` is false. The
    gradient reaches all allowed edges, which feeds the momentum of hallucinated ones. Their weights are zero from the
    beginning and set to zero after every step, so that weight decay adds nothing to it.

    Needs ``wiring.step(optimizer)`` with SGD with momentum, whose buffer is the momentum, or Adam or AdamW, where it is
    the running mean of the gradient divided by the root of that of its square.

    Args:
        prune_rate: the fraction that is removed at the beginning of training; it falls to 0 at the end along half a
            cosine. 0.5 is the default of the authors' code.
        every: optimizer steps from one change to the next; None for a hundredth of training. The paper changes once an
            epoch, and trains for 100 of them on ImageNet; a rule does not know about epochs.
        seed: random seed of the first wiring, as for `Random`.
        steps: the number of optimizer steps of the whole training; by default that of `Wiring.plan`.
        redistribute: whether lost edges are shared out over the layers, as in the paper; otherwise every layer grows as
            many as it lost. Momentum is largest where feature maps are, so the same number of edges may cost several
            times the multiply-adds when redistributed.
    """

    name = "sparse_momentum"
    atomic = True
    kept = KeptEdges(mask="wiring")
    reaches = "all"

    def __init__(
        self,
        prune_rate: float = 0.5,
        every: int | None = None,
        seed: int | None = None,
        steps: int | None = None,
        redistribute: bool = True,
    ) -> None:
        super().__init__(every, steps)
        self.moves_budget = check_bool(self.name, "redistribute", redistribute)
        self.prune_rate, self.seed = check_number(self.name, "prune_rate", prune_rate), check_seed(self.name, seed)

    @property
    def redistribute(self) -> bool:
        """The setting of that name."""
        return self.moves_budget

    @torch.no_grad()
    def update(self, layers: Sequence[LayerLike], training: Training, optimizer: torch.optim.Optimizer | None) -> None:
        step, steps = training.step, self.length(training)
        trained = [layer for layer in layers if layer.weight.requires_grad]
        due, rewired = self.due(step, steps), []
        resized = self._resized(layers) if training.budget_changed else {}
        if due or step == 1:  # at the first step an unsuitable optimizer is reported at once
            momenta = [self._momentum(layer, optimizer) for layer in trained]
            if due and all(momentum is not None for momentum in momenta):
                rate = self.prune_rate * (1 + math.cos(math.pi * step / steps)) / 2
                wirings = [resized.get(layer.name, layer.edges.wiring) for layer in trained]
                rewired = self._rewired(trained, wirings, momenta, rate)  # type: ignore[arg-type]
        # From here on nothing can fail.
        for layer in layers:
            if layer.name in resized:
                _set(layer, resized[layer.name])
        for layer in trained:
            forget(layer, layer.edges.wiring, None)  # the momentum of other edges stays: they grow by it
        for layer, wiring in zip(trained, rewired, strict=bool(rewired)):
            layer.weight.masked_fill_(~wiring, 0.0)
            bring_to_rest(layer.weight, wiring & ~layer.edges.wiring, optimizer)
            _set(layer, wiring)

    def _resized(self, layers: Sequence[LayerLike]) -> dict[str, Tensor]:
        """Wirings of the budget's size, by layer: layers lose their weakest edges or grow random ones.

        Where edges move between layers, each one's share of the new total is that of its current number.
        """
        shared, now = layers[0].edges.shared, [int(layer.edges.count(layer.edges.wiring)) for layer in layers]
        new = [int(layer.edges.k) for layer in layers]
        if shared or self.moves_budget:
            total = new[0] if shared else sum(new)
            least = int(total >= len(layers))
            room = [layer.edges.possible - least for layer in layers]
            more = share_out(total - least * len(layers), [max(n - least, 0) for n in now], room)
            new = [least + m for m in more]
        found = {}
        for layer, before, k in zip(layers, now, new, strict=True):
            wiring = layer.edges.wiring
            if k < before:
                wiring = layer.edges.choose_among(layer.weight, k, wiring)
            else:
                scores = scores_of(layer).to(wiring.device)
                wiring = wiring | layer.edges.choose_among(scores, k - before, others_of(layer, wiring))
            found[layer.name] = sharded.whole(wiring)
        return found

    def _momentum(self, layer: LayerLike, optimizer: torch.optim.Optimizer | None) -> Tensor | None:
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
            f"{layer.name}: use SGD with momentum, Adam or AdamW."
        )

    def _rewired(
        self, layers: Sequence[LayerLike], wirings: Sequence[Tensor], momenta: Sequence[Tensor], rate: float
    ) -> list[Tensor]:
        """The new wirings of these layers."""
        before = [int(layer.edges.count(wiring)) for layer, wiring in zip(layers, wirings, strict=True)]
        lost = [int(rate * count + 1e-6) for count in before]
        grown = lost
        if self.moves_budget:
            real = [torch.where(wiring, m, 0.0).float() for wiring, m in zip(wirings, momenta, strict=True)]
            numbers = [int(torch.count_nonzero(wiring)) for wiring in wirings]  # of edges, whatever their groups
            means = [float(m.abs().sum()) / max(number, 1) for m, number in zip(real, numbers, strict=True)]
            for layer, mean in zip(layers, means, strict=True):
                if not math.isfinite(mean):
                    raise WiringError(
                        f"the momentum of {layer.name}, by which edges are shared out, is not finite ({mean}): "
                        "training has diverged. Resume from an earlier checkpoint with a smaller learning rate."
                    )
            room = [one.edges.possible - b + n for one, b, n in zip(layers, before, lost, strict=True)]
            grown = _grown(sum(lost), means if any(means) else lost, room)
        found = []
        for layer, old, momentum, b, n, g in zip(layers, wirings, momenta, before, lost, grown, strict=True):
            kept = layer.edges.choose_among(layer.weight, b - n, old)
            grow = layer.edges.choose_among(momentum, g, others_of(layer, kept))
            found.append(sharded.whole(kept | grow))
        return found


def _grown(total: int, shares: Sequence[float], room: Sequence[int]) -> list[int]:
    """``total`` in proportion to ``shares``; what one has no room for goes to all others in equal parts."""
    wanted = share_out(total, shares, [total] * len(shares))
    grown = [min(w, most) for w, most in zip(wanted, room, strict=True)]
    left = [most - g for most, g in zip(room, grown, strict=True)]
    more = share_out(total - sum(grown), [1.0] * len(grown), left)
    return [g + m for g, m in zip(grown, more, strict=True)]


def _set(layer: LayerLike, wiring: Tensor) -> None:
    layer.edges.remember("wiring", wiring)
    if not layer.edges.shared:  # the k of a shared budget is that of all layers
        layer.edges.k.fill_(layer.edges.count(wiring))
