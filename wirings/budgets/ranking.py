"""How many edges each layer has in one ranking of all edges, where an edge costs more in one layer than in another."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from wirings.budgets.budget import LayerSize
from wirings.selection.functional import rank_scores


@torch.no_grad()
def rank_factor(weight: Tensor, allowed: Tensor | None, possible: int) -> Tensor:
    """One over the root mean square of the ``possible`` weights that are allowed; 1 if they are all zero.

    Computed in double precision, so that the order of summation, as over processes, hardly ever shows.
    """
    values = weight if allowed is None else torch.where(allowed, weight, 0.0)
    squares = float(values.double().square().sum())  # over all processes, if it is sharded
    factor = math.sqrt(possible / squares) if 0 < squares < math.inf else 1.0
    return torch.tensor(factor, dtype=torch.float32, device=weight.device)


@torch.no_grad()
def rank_layers(
    weights: Sequence[Tensor],
    allowed: Sequence[Tensor | None],
    sizes: Sequence[LayerSize],
    spent: int,
    factors: Sequence[Tensor | None],
) -> list[int]:
    """The number of edges of each layer among the strongest of all layers that together cost ``spent`` multiply-adds.

    With a number of edges as well, see `wirings.budgets.bounded_ranking`.

    Args:
        weights: the weights of the layers.
        allowed: their masks of allowed edges, None for all.
        sizes: their sizes, with the cost of an edge.
        spent: the multiply-adds that all edges together may cost.
        factors: what the magnitudes of each layer are multiplied by, None for 1.
    """
    device = weights[0].device
    rows = [
        rank_scores(w.detach(), f).reshape(-1).to(device).abs().float() for w, f in zip(weights, factors, strict=True)
    ]
    rows = [
        row if mask is None else torch.where(mask.reshape(-1).to(device), row, -1.0)
        for row, mask in zip(rows, allowed, strict=True)
    ]
    strongest, order = torch.cat(rows).sort(descending=True, stable=True)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    layer = torch.arange(len(rows), device=device).repeat_interleave(lengths)
    layer = layer[order][strongest >= 0]
    costs = torch.tensor([size.cost for size in sizes], device=device)[layer].cumsum(0)
    return torch.bincount(layer[costs <= spent], minlength=len(rows)).tolist()
