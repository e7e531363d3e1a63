"""STR, soft threshold reparametrization (Kusupati and others, ICML 2020): thresholds that are learned, a layer each."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from wirings import edges as primitive
from wirings.errors import WiringError
from wirings.rules.base import Edges, Layer, Rule, register
from wirings.rules.checks import whole_number

LIMIT = 0.01
"""The part of itself by which a threshold changes in a step, at most."""


@register
class STR(Rule):
    """Every layer has a threshold, and learns it: how many of the budget's edges are its own. Real edges are shrunk by
    it.

    The paper uses sign(w) · max(|w| − t, 0), with a threshold t a layer that is trained with the weights, and gets
    fewer edges by more weight decay on the thresholds; how many in the end is not known before. Here the number is
    given. So what is learned is how the layers' thresholds relate to one another, and their common scale is the
    budget's:

    - A layer's threshold is t = c · s · exp(v): v is a parameter of the model, which starts from 0, and s is where the
      caller's share of edges puts the threshold at first.
    - After every step the edges of all layers are ranked together by |w| / (s · exp(v)). The k first are the budget's,
      and each layer's number is how many of them are its own, at least one. That is the c for which exactly k edges in
      all are above their thresholds.
    - Where one layer's threshold falls, c rises, and with it those of all others, in proportion to how many edges lie
      at each; a layer's number of edges stands for that. So of the sum of all changes of v each layer gives back its
      share, which is the gradient with c's own in it. Without that, all v fall as weight decay shrinks weights, those
      of layers with many edges fastest, until the others have one edge each.
    - A threshold changes by 1 % a step at most. Norms of nodes that have lost all edges have gradients hundreds of
      times too large, and one of them could take a layer's edges away.
    - In the forward pass the strongest of a layer, as many as it has, are real, shrunk by the magnitude of the next
      one, which is where its threshold lies. The gradient reaches real edges alone, and by them v, as it does in the
      paper: ∂t/∂v = t.

    ResNet50 with 10 % of its weights reaches 74.31 % on ImageNet in the paper. A schedule takes the place of the rising
    thresholds there: ``schedule="cubic"``.

    Args:
        every: optimizer steps from one ranking of all layers to the next.

    Make the optimizer after the model was wired, so that it has the thresholds, and call ``wiring.step(optimizer)``.
    """

    name = "str"
    moves_budget = True

    def __init__(self, every: int = 1) -> None:
        self.every = whole_number(self.name, "every", every)

    def setup(self, layers: Sequence[Layer]) -> None:
        for layer in layers:
            edges, weight = layer.edges, layer.weight.detach()
            scale = torch.ones((), device=weight.device)
            if edges.pool is None:
                cut = _cut(weight, primitive.choose(weight, edges.k, edges.allowed), edges)
                spread = weight.float().square().mean().sqrt()  # where all edges are real, there is no threshold yet
                scale = torch.where(cut > 0, cut.float(), torch.where(spread > 0, spread, 1.0))
            edges.remember("scale", scale)
            edges.remember("held", torch.zeros_like(scale))
            if "threshold" in edges._parameters:  # set up a second time, with other weights
                edges.threshold.detach().zero_()  # type: ignore[operator]
            else:
                # One number, but no scalar: fully_shard would refuse one in its own words, before `fsdp.check` can.
                edges.register_parameter("threshold", nn.Parameter(torch.zeros(1, device=weight.device)))
            if edges.pool is not None:
                edges.remember("own", torch.zeros_like(edges.k))
        if layers[0].edges.pool is not None:
            self.rebudget(layers)

    @torch.no_grad()
    def rebudget(self, layers: Sequence[Layer]) -> None:
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
        real = primitive.choose(torch.cat(rows), total, torch.cat(allowed))
        for layer, part in zip(layers, real.split([len(row) for row in rows]), strict=True):
            _number(layer.edges).copy_(part.sum())

    def real(self, weight: Tensor, edges: Edges) -> Tensor:
        return primitive.choose(weight, _number(edges), edges.allowed)

    def forward(self, weight: Tensor, edges: Edges) -> Tensor:
        real = self.real(weight, edges)
        # The value is where the budget puts the threshold; the gradient is that of exp(v).
        factor = edges.threshold.exp()  # type: ignore[operator]
        threshold = _cut(weight, real, edges) * (factor / factor.detach()).to(weight.dtype)
        return torch.where(real, weight - weight.sign() * threshold, 0.0)

    def step(self, layers: Sequence[Layer], step: int, optimizer: torch.optim.Optimizer | None) -> None:
        if step == 1:
            self._check(layers, optimizer)
        if step % self.every == 0:
            self._hold(layers)
            self.rebudget(layers)

    @torch.no_grad()
    def _hold(self, layers: Sequence[Layer]) -> None:
        """Of the thresholds' changes since the last time keep what leaves the budget as it is, up to the limit."""
        numbers = torch.stack([_number(layer.edges) for layer in layers]).float()
        held: Tensor = torch.stack([layer.edges.held for layer in layers])  # type: ignore[misc]
        change = torch.cat([layer.edges.threshold for layer in layers]) - held  # type: ignore[misc]
        change = change - change.sum() * numbers / numbers.sum()
        held = held + change.clamp(-LIMIT * self.every, LIMIT * self.every)
        for layer, value in zip(layers, held, strict=True):
            layer.edges.threshold.copy_(value)  # type: ignore[operator]
            layer.edges.held.copy_(value)  # type: ignore[operator]

    def _check(self, layers: Sequence[Layer], optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is None:
            raise WiringError(f"rule {self.name!r} learns thresholds with the optimizer: call wiring.step(optimizer).")
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if missing := [layer for layer in layers if id(layer.edges.threshold) not in held]:
            raise WiringError(
                f"rule {self.name!r} learns a threshold for {missing[0].name}, which is not among the optimizer's "
                "parameters: make the optimizer from model.parameters() after wire_."
            )


def _number(edges: Edges) -> Tensor:
    """How many edges of this layer are real; in a pool ``k`` is that of all layers."""
    return edges.k if edges.pool is None else edges.own  # type: ignore[return-value]


def _threshold(edges: Edges) -> Tensor:
    return edges.scale * edges.threshold.exp()  # type: ignore[operator]


def _cut(weight: Tensor, real: Tensor, edges: Edges) -> Tensor:
    """The magnitude of the strongest edge of this layer that is not real, 0 if all are."""
    size = weight.detach().abs().masked_fill(real, 0.0)
    return (size if edges.allowed is None else size.masked_fill(~edges.allowed, 0.0)).amax()
