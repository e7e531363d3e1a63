"""How many edges each layer has in one ranking of all edges, where an edge costs more in one layer than in another."""

from collections.abc import Sequence

import torch
from torch import Tensor

from wirings.budgets.budget import LayerSize


@torch.no_grad()
def rank_layers(
    weights: Sequence[Tensor], allowed: Sequence[Tensor | None], sizes: Sequence[LayerSize], spent: int
) -> list[int]:
    """The number of edges of each layer among the strongest of all layers that together cost ``spent`` multiply-adds.

    Args:
        weights: the weights of the layers.
        allowed: their masks of allowed edges, None for all.
        sizes: their sizes, with the cost of an edge.
        spent: the multiply-adds that all edges together may cost.
    """
    device = weights[0].device
    rows = [w.detach().reshape(-1).to(device).abs().float() for w in weights]
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
