"""How many edges each layer has in one ranking of all edges, where an edge costs more in one layer than in another."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from wirings.budgets.budget import LayerSize
from wirings.budgets.prices import bounded_counts
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
            None if size.nodes is None else _running_costs(one[positions], size.nodes)  # type: ignore[index]
            for (_, positions), one, size in zip(found, senders or [None] * len(sizes), sizes, strict=True)
        ]
        free, allowed_edges = _free_counts([one for one, _ in found], edges), [size.allowed for size in sizes]
        return bounded_counts(free, allowed_edges, [size.cost for size in sizes], edges, spent, nodes)
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
    order = _order_of_best(row, most)
    values = row[order]
    if allowed is not None:
        values, order = values[values >= 0], order[values >= 0]
    return (values if factor is None else values * factor).float().clamp(max=_MOST), order


def _order_of_best(row: Tensor, most: int) -> Tensor:
    """The positions of the ``most`` largest numbers, in descending order; of equal ones the first."""
    if row.is_cuda:
        return row.sort(descending=True, stable=True).indices[:most]
    values = row.numpy()
    places = np.arange(len(values))
    if len(values) > most:  # several times faster than sorting all
        cut = np.partition(values, len(values) - most)[len(values) - most]
        above = np.flatnonzero(values > cut)
        places = np.sort(np.concatenate([above, np.flatnonzero(values == cut)[: most - len(above)]]))
    return torch.from_numpy(places[np.argsort(-values[places], kind="stable")])


def _free_counts(scores: Sequence[Tensor], edges: int) -> list[int]:
    """The number of edges of each layer among the ``edges`` best of all layers, but at least one."""
    device = scores[0].device
    layer = torch.cat([torch.full((len(row),), i, device=device) for i, row in enumerate(scores)])
    best = _order_of_best(torch.cat([row.to(device) for row in scores]), edges)
    counts = torch.bincount(layer[best], minlength=len(scores)).tolist()
    for i in (i for i, count in enumerate(counts) if not count):
        counts[i], counts[counts.index(max(counts))] = 1, max(counts) - 1
    return counts


def _running_costs(senders: Tensor, costs: Sequence[int]) -> np.ndarray:
    """What the nodes that the first n edges leave cost, for every n from 0 on."""
    nodes = senders.cpu().numpy()
    added = np.zeros(len(nodes) + 1, np.int64)
    found, first = np.unique(nodes, return_index=True)
    added[first + 1] = np.asarray(costs)[found]
    return np.cumsum(added)
