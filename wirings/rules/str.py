"""STR, soft threshold reparametrization (Kusupati and others, ICML 2020): thresholds that are learned, a layer each."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from wirings.errors import WiringError
from wirings.rules.base import Edges, Layer, Rule, next_out, register
from wirings.rules.optimizers import bring_to_rest
from wirings.selection import functional as primitive
from wirings.selection.sharded import is_sharded
from wirings.utils.checks import whole_number

LIMIT = 0.01
"""The part of itself by which a threshold changes in a step, at most."""
NEAR = 0.1
"""Edges whose magnitude differs from a threshold by this part of it at most lie at the threshold."""


@register
class STR(Rule):
    """Every layer has a threshold, and learns it: how many of the budget's edges are its own. Real edges are shrunk by
    it.

    The paper uses sign(w) · max(|w| − t, 0), with a threshold t a layer that is trained with the weights, and gets
    fewer edges by more weight decay on the thresholds; how many in the end is not known before. Here the number is
    given. So what is learned is how the layers' thresholds relate to one another, and their common scale is the
    budget's:

    - A layer's threshold is t = c · s · exp(v): v is trained, and starts from 0, and s is where the caller's share of
      edges puts the threshold when the model is wired.
    - After every step the edges of all layers are ranked together by |w| / (s · exp(v)). The k first are the budget's,
      and each layer's number is how many of them are its own, at least one. That is the c for which exactly k edges in
      all are above their thresholds.
    - In the forward pass the strongest of a layer, as many as it has, are real, shrunk by the magnitude of the next
      one, which is where its threshold lies. The gradient reaches real edges alone, and by them v: ∂t/∂v = t. (The
      paper has t = sigmoid(v), and so t · (1 − t).)
    - Where one layer's v falls, c rises, and with it the thresholds of all: ∂ log c/∂v is minus the layer's part of all
      edges that lie at a threshold. That is in the gradient. Without it all v would fall as weight decay shrinks
      weights, those of layers with many edges fastest, until the others have one edge each.
    - A threshold changes by 1 % a step at most, against the gradients of nodes that have lost all their edges: their
      norms make them hundreds of times too large, and one could take a layer's edges away. What the optimizer has
      gathered for a v that would have gone further is forgotten.

    A real edge that is exactly as strong as the next one weighs zero, as in `SoftThreshold`.

    ResNet50 with 10 % of its weights reaches 74.31 % on ImageNet in the paper. A schedule takes the place of the rising
    thresholds there: ``schedule="cubic"``.

    Args:
        every: optimizer steps from one ranking of all layers to the next.

    Make the optimizer after the model was wired, so that it has the thresholds, and call ``wiring.step(optimizer)``.
    Load weights to start from before wiring; s would be that of others.
    """

    name = "str"
    moves_budget = True

    def __init__(self, every: int = 1) -> None:
        self.every = whole_number(self.name, "every", every)
        self._checked = 0

    def setup(self, layers: Sequence[Layer]) -> None:
        # One parameter for all layers, which every one of them has: the gradient of one is that of all. A vector, since
        # fully_shard would refuse a scalar in its own words, before `fsdp.check` can.
        learned = layers[0].edges._parameters.get("threshold")
        if learned is None:
            learned = nn.Parameter(torch.zeros(len(layers), device=layers[0].weight.device))
        learned.detach().zero_()  # set up a second time, with other weights
        for place, layer in enumerate(layers):
            edges, weight = layer.edges, layer.weight.detach()
            scale = torch.ones((), device=weight.device)
            if edges.pool is None:
                cut = next_out(weight, primitive.choose(weight, edges.k, edges.allowed), edges.allowed)
                spread = weight.float().square().mean().sqrt()  # where all edges are real, there is no threshold yet
                scale = torch.where(cut > 0, cut.float(), torch.where(spread > 0, spread, 1.0))
            edges.remember("scale", scale)
            edges.remember("held", torch.zeros_like(scale))
            edges.remember("pull", torch.eye(len(layers), device=weight.device)[place])
            edges.register_parameter("threshold", learned)
            if edges.pool is not None:
                edges.remember("own", torch.zeros_like(edges.k))
        if not any(is_sharded(layer.weight) for layer in layers):  # `fsdp.check` refuses them, in a moment
            self._rank(layers, move=layers[0].edges.pool is not None)

    def rebudget(self, layers: Sequence[Layer]) -> None:
        self._rank(layers)

    @torch.no_grad()
    def _rank(self, layers: Sequence[Layer], move: bool = True) -> None:
        """Rank all edges together, for every layer's number of them, and for what its threshold does to the others."""
        ks = torch.stack([layer.edges.k for layer in layers])
        total = ks[0] if layers[0].edges.pool is not None else ks.sum()
        rows, allowed = [], []
        for layer in layers:
            row = (layer.weight.abs().float() / _threshold(layer.edges)).reshape(-1)
            mask = layer.edges.allowed
            allowed.append(torch.ones_like(row, dtype=torch.bool) if mask is None else mask.reshape(-1))
            # A layer's strongest edge comes before all others: none is cut off.
            strongest = torch.where(allowed[-1], row, -1.0).argmax(keepdim=True)
            rows.append(row.scatter(0, strongest, float("inf")))
        lengths, row, among = [len(row) for row in rows], torch.cat(rows), torch.cat(allowed)
        real = primitive.choose(row, total, among)
        numbers = torch.stack([part.sum() for part in real.split(lengths)])
        common = row.masked_fill(real | ~among, 0.0).amax()  # the c of all layers; 0 if all edges are real
        at = ((row - common).abs() <= NEAR * common) & among & (row > 0)
        lying = torch.stack([part.sum() for part in at.split(lengths)])
        lying = torch.where(lying.sum() > 0, lying, numbers).float()
        pulls = torch.eye(len(layers), device=lying.device) - lying / lying.sum()
        for layer, number, pull in zip(layers, numbers, pulls, strict=True):
            layer.edges.pull.copy_(pull)  # type: ignore[operator]
            if move:
                _number(layer.edges).copy_(number)

    def real(self, weight: Tensor, edges: Edges) -> Tensor:
        return primitive.choose(weight, _number(edges), edges.allowed)

    def forward(self, weight: Tensor, edges: Edges) -> Tensor:
        real = self.real(weight, edges)
        # The value is where the budget puts the threshold; the gradient is that of log t = v + log c.
        change = (edges.pull * edges.threshold).sum()  # type: ignore[operator]
        threshold = next_out(weight, real, edges.allowed) * (change - change.detach()).exp().to(weight.dtype)
        return torch.where(real, weight - weight.sign() * threshold, 0.0)

    def step(self, layers: Sequence[Layer], step: int, optimizer: torch.optim.Optimizer | None) -> None:
        learned: nn.Parameter = layers[0].edges.threshold  # type: ignore[assignment]
        if optimizer is None or id(optimizer) != self._checked:
            self._check(learned, optimizer)
        if step % self.every == 0:
            self._limit(learned, layers, optimizer)
            self._rank(layers)

    @torch.no_grad()
    def _limit(self, learned: nn.Parameter, layers: Sequence[Layer], optimizer: torch.optim.Optimizer | None) -> None:
        """Let every v go only so far from where it was the last time."""
        before: Tensor = torch.stack([layer.edges.held for layer in layers])  # type: ignore[misc]
        change, most = learned - before, LIMIT * self.every
        learned.copy_(before + change.clamp(-most, most))
        for layer, value in zip(layers, learned, strict=True):
            layer.edges.held.copy_(value)  # type: ignore[operator]
        bring_to_rest(learned, change.abs() > most, optimizer)

    def _check(self, learned: nn.Parameter, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is None:
            raise WiringError(f"rule {self.name!r} learns thresholds with the optimizer: call wiring.step(optimizer).")
        if not any(p is learned for group in optimizer.param_groups for p in group["params"]):
            raise WiringError(
                f"rule {self.name!r} learns thresholds, which are not among the optimizer's parameters: make the "
                "optimizer from model.parameters() after wire_."
            )
        self._checked = id(optimizer)


def _number(edges: Edges) -> Tensor:
    """How many edges of this layer are real; in a pool ``k`` is that of all layers."""
    return edges.k if edges.pool is None else edges.own  # type: ignore[return-value]


def _threshold(edges: Edges) -> Tensor:
    """Over c."""
    return edges.scale * edges.held.exp()  # type: ignore[operator]
