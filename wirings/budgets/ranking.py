"""How many edges each layer has in one ranking of all edges, where an edge costs more in one layer than in another."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from wirings.budgets.budget import LayerSize
from wirings.budgets.prices import priced_counts
from wirings.selection.functional import rank_scores

_MOST = torch.finfo(torch.float32).max


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
    edges: int | None,
    factors: Sequence[Tensor | None],
    senders: Sequence[Tensor | None] = (),
) -> list[int]:
    """The number of edges of each layer among the strongest of all layers that together cost ``spent`` multiply-adds.

    With a number of ``edges``, they are exactly so many and cost at most ``spent``; see `wirings.budgets.prices`.

    Args:
        weights: the weights of the layers.
        allowed: their masks of allowed edges, None for all.
        sizes: their sizes, with the cost of an edge and of nodes.
        spent: the multiply-adds that all edges together may cost, with the nodes that they leave.
        edges: the number of edges, if it is given too.
        factors: what the magnitudes of each layer are multiplied by, None for 1.
        senders: for layers whose nodes cost something, the node that each edge leaves.
    """
    if edges is not None:
        each = zip(weights, allowed, factors, strict=True)
        found = [_strongest(weight.detach(), mask, factor, edges) for weight, mask, factor in each]
        nodes = [
            None if size.nodes is None else _first_of_nodes(one[positions], size.nodes)  # type: ignore[index]
            for (_, positions), one, size in zip(found, senders or [None] * len(sizes), sizes, strict=True)
        ]
        scores = [scores.cpu().numpy() for scores, _ in found]
        return priced_counts(scores, [size.cost for size in sizes], edges, spent, nodes)
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


def _strongest(weight: Tensor, allowed: Tensor | None, factor: Tensor | None, most: int) -> tuple[Tensor, Tensor]:
    """The scores of a layer's ``most`` strongest edges, in the order in which they are chosen, and their positions."""
    row = weight.reshape(-1).abs()
    row = row.to(torch.promote_types(row.dtype, torch.float32)).nan_to_num(nan=_MOST, posinf=_MOST)
    if allowed is not None:
        row = torch.where(allowed.reshape(-1), row, -1.0)
    if row.is_cuda:
        values, order = row.sort(descending=True, stable=True)
        values, order = values[:most], order[:most]
    else:  # several times faster than sorting all
        order = torch.from_numpy(_order_of_largest(row.numpy(), most))
        values = row[order]
    if allowed is not None:
        values, order = values[values >= 0], order[values >= 0]
    return (values if factor is None else values * factor).float().clamp(max=_MOST), order


def _order_of_largest(row: np.ndarray, most: int) -> np.ndarray:
    """The positions of the ``most`` largest numbers, in descending order; of equal ones the first."""
    places = np.arange(len(row))
    if len(row) > most:
        cut = np.partition(row, len(row) - most)[len(row) - most]
        above = np.flatnonzero(row > cut)
        places = np.sort(np.concatenate([above, np.flatnonzero(row == cut)[: most - len(above)]]))
    return places[np.argsort(-row[places], kind="stable")]


def _first_of_nodes(senders: Tensor, costs: Sequence[int]) -> np.ndarray:
    """What each edge adds for the node that it leaves: the node's cost if it is the first that does, otherwise 0."""
    nodes = senders.cpu().numpy()
    added = np.zeros(len(nodes), np.int64)
    found, first = np.unique(nodes, return_index=True)
    added[first] = np.asarray(costs)[found]
    return added
