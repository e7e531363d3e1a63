"""STR, soft threshold reparametrization (Kusupati et al., ICML 2020): one learned threshold per layer."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from wirings.errors import WiringError
from wirings.rules.optimizers import bring_to_rest
from wirings.rules.registry import register
from wirings.rules.rule import EdgesLike, LayerLike, Rule, Training
from wirings.selection import functional
from wirings.selection.kept_edges import KeptEdges
from wirings.selection.sharded import is_sharded
from wirings.utils.checks import check_int

LIMIT = 0.01
"""The largest relative change of a threshold in one step."""
NEAR = 0.1
"""The largest relative difference from a threshold of edges that count as lying at it."""


@register
class STR(Rule):
    """Every layer learns a threshold, which decides how many of the budget's edges it gets and shrinks its real edges.

    The paper uses sign(w) · max(|w| − t, 0), with one threshold t per layer that is trained with the weights, and gets
    fewer edges by more weight decay on the thresholds; the final number is not known in advance. Here the number is
    given. So what is learned is how the layers' thresholds relate to one another; their common scale follows from the
    budget:

    - A layer's threshold is t = c · s · exp(v): v is trained and starts from 0, and s is the threshold that gives the
      layer its share of the budget when the model is wired.
    - After every step the edges of all layers are ranked together by |w| / (s · exp(v)). The first k are the budget's,
      and each layer's number is how many of them it has, at least one. That is the c for which exactly k edges in total
      are above their thresholds.
    - In the forward pass a layer's strongest edges, as many as its number, are real, shrunk by the magnitude of the
      next one, which is where its threshold lies. The gradient reaches real edges only, and through them v: ∂t/∂v = t.
      (The paper has t = sigmoid(v), and so t · (1 − t).)
    - When one layer's v falls, c rises, and with it the thresholds of all: ∂ log c/∂v is minus the layer's part of all
      edges that lie at a threshold. The gradient includes this term. Without it, every v would fall as weight decay
      shrinks weights, fastest in layers with many edges, until the others have one edge each.
    - A threshold changes by at most 1 % a step. This limits the gradients of nodes that have lost all their edges,
      which norms make hundreds of times too large, so that one of them could take a layer's edges away. The momentum of
      a v that would have gone further is reset.

    A real edge that is exactly as strong as the next one weighs zero, as in `SoftThreshold`.

    ResNet50 with 10 % of its weights reaches 74.31 % on ImageNet in the paper. A schedule (``schedule="cubic"``)
    replaces the rising thresholds there.

    Create the optimizer after wiring the model, so that it has the thresholds, and call ``wiring.step(optimizer)``.
    Load initial weights before wiring, since s depends on them.

    Args:
        every: optimizer steps from one ranking of all layers to the next.
    """

    name = "str"
    # The value of a threshold is where the budget puts it; the gradient is that of log t = v + log c.
    kept = KeptEdges(power=1.0, factor=0.0, own="own", learned="threshold", pull="pull")
    moves_budget = True
    free_only = True
    keeps_wiring = True
    atomic = True

    def __init__(self, every: int = 1) -> None:
        self.every = check_int(self.name, "every", every)

    def setup(self, layers: Sequence[LayerLike]) -> None:
        # One parameter that all layers hold, since the gradient of each threshold involves them all. A vector, since
        # fully_shard would reject a scalar with a message of its own before `fsdp.check` can.
        learned = layers[0].edges._parameters.get("threshold")
        if learned is None:
            learned = nn.Parameter(torch.zeros(len(layers), device=layers[0].weight.device))
        learned.detach().zero_()  # set up a second time, with other weights
        for place, layer in enumerate(layers):
            edges, weight = layer.edges, layer.weight.detach()
            scale = torch.ones((), device=weight.device)
            if edges.shared and edges.rank_factor is not None:
                scale = 1 / edges.rank_factor
            elif not edges.shared:
                cut = functional.next_magnitude(
                    weight, functional.choose(weight, edges.k, edges.allowed), edges.allowed
                )
                spread = weight.float().square().mean().sqrt()  # if all edges are real, there is no threshold yet
                scale = torch.where(cut > 0, cut.float(), torch.where(spread > 0, spread, 1.0))
            edges.remember("scale", scale)
            edges.remember("held", torch.zeros_like(scale))
            edges.remember("pull", torch.eye(len(layers), device=weight.device)[place])
            edges.register_parameter("threshold", learned)
            if edges.shared:
                edges.remember("own", torch.zeros_like(edges.k))
        if not any(is_sharded(layer.weight) for layer in layers):  # `fsdp.check` rejects them afterwards
            _write_ranking(layers, *_rank(layers, learned.detach()), move=layers[0].edges.shared)

    def real(self, weight: Tensor, edges: EdgesLike) -> Tensor:
        return functional.choose(weight, _number(edges), edges.allowed)

    @torch.no_grad()
    def update(self, layers: Sequence[LayerLike], training: Training, optimizer: torch.optim.Optimizer | None) -> None:
        learned: nn.Parameter = layers[0].edges.threshold
        self._check(learned, optimizer)
        due = training.step % self.every == 0
        if not due and not training.budget_changed:
            return
        values = before = torch.stack([layer.edges.held for layer in layers])
        change, most = learned - before, LIMIT * self.every
        if due:
            values = before + change.clamp(-most, most)
        ranking = _rank(layers, values)  # before anything is changed
        if due:
            learned.copy_(values)
            for layer, value in zip(layers, values, strict=True):
                layer.edges.held.copy_(value)
            bring_to_rest(learned, change.abs() > most, optimizer)
        _write_ranking(layers, *ranking)

    def idle(self, steps: int | None) -> str | None:
        if steps is None or self.every <= steps:
            return None
        return f"it ranks the layers every {self.every} steps; use a smaller every="

    def _check(self, learned: nn.Parameter, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is None:
            raise WiringError(f"rule {self.name!r} learns thresholds with the optimizer: call wiring.step(optimizer).")
        if not any(p is learned for group in optimizer.param_groups for p in group["params"]):
            raise WiringError(
                f"rule {self.name!r} learns thresholds, which are not among the optimizer's parameters: create the "
                "optimizer from model.parameters() after wire_()."
            )


@torch.no_grad()
def _rank(layers: Sequence[LayerLike], values: Tensor) -> tuple[Tensor, Tensor]:
    """Rank the edges of all layers together.

    Args:
        layers: all wired layers.
        values: the v of each layer.

    Returns:
        The number of edges of each layer, and how the threshold of each depends on every v, a row for each.
    """
    ks = torch.stack([layer.edges.k for layer in layers])
    total = ks[0] if layers[0].edges.shared else ks.sum()
    rows, allowed = [], []
    for layer, value in zip(layers, values, strict=True):
        row = (layer.weight.abs().float() / (layer.edges.scale * value.exp())).reshape(-1)
        mask = layer.edges.allowed
        allowed.append(torch.ones_like(row, dtype=torch.bool) if mask is None else mask.reshape(-1))
        # A layer's strongest edge comes before all others, so that every layer keeps at least one.
        strongest = torch.where(allowed[-1], row, -1.0).argmax(keepdim=True)
        rows.append(row.scatter(0, strongest, float("inf")))
    lengths, row, among = [len(row) for row in rows], torch.cat(rows), torch.cat(allowed)
    real = functional.choose(row, total, among)
    numbers = torch.stack([part.sum() for part in real.split(lengths)])
    common = row.masked_fill(real | ~among, 0.0).amax()  # the common scale c; 0 if all edges are real
    at = ((row - common).abs() <= NEAR * common) & among & (row > 0)
    lying = torch.stack([part.sum() for part in at.split(lengths)])
    lying = torch.where(lying.sum() > 0, lying, numbers).float()
    return numbers, torch.eye(len(layers), device=lying.device) - lying / lying.sum()


@torch.no_grad()
def _write_ranking(layers: Sequence[LayerLike], numbers: Tensor, pulls: Tensor, move: bool = True) -> None:
    """Set what `_rank` has found; the numbers of edges only if they may ``move`` between layers."""
    for layer, number, pull in zip(layers, numbers, pulls, strict=True):
        layer.edges.pull.copy_(pull)
        if move:
            _number(layer.edges).copy_(number)


def _number(edges: EdgesLike) -> Tensor:
    """The number of real edges of this layer; with a shared budget ``k`` is that of all layers."""
    return edges.k if not edges.shared else edges.own
