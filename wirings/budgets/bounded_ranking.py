"""How many edges each layer has, and which nodes of graphs may have any, if multiply-adds are bounded as well.

The numbers follow a ranking of all edges (`wirings.budgets.prices`). Nodes of graphs cost something once an edge leaves
them. If the ranking costs too much, the weakest nodes of every graph are closed first, up to half of those in use, and
only then edges move to layers where they cost less. A node is as strong as its edges in the ranking together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from wirings.budgets.budget import LayerSize
from wirings.budgets.prices import bounded_counts

FEWEST = 0.5
"""The smallest fraction of a graph's nodes in use that are left to make room for edges."""
_HALVINGS = 5
"""Steps of the search for that fraction: to a sixtieth of it."""
_MOST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class BoundedRanking:
    """The numbers of edges of layers, and the open nodes of those that are graphs."""

    counts: list[int]
    open: list[np.ndarray | None]
    """For each layer, boolean (nodes,): the nodes that edges may leave; None if its nodes cost nothing."""


@dataclass(frozen=True)
class _Graph:
    """The strongest edges of a layer whose nodes cost something."""

    nodes: np.ndarray
    """The node that each edge leaves, strongest edge first."""
    costs: np.ndarray
    """What each node costs."""
    order: np.ndarray
    """The nodes in use, strongest first."""

    def open(self, fraction: float) -> np.ndarray:
        """The strongest nodes, a fraction of those in use, or all nodes; boolean (nodes,)."""
        mask = np.ones(len(self.costs), bool)
        if fraction < 1:
            mask[:] = False
            mask[self.order[: max(int(np.ceil(fraction * len(self.order))), 1)]] = True
        return mask

    def running_costs(self, open_: np.ndarray) -> np.ndarray:
        """What the nodes of the first n edges cost that leave open nodes, for every n from 0 on."""
        nodes = self.nodes if open_.all() else self.nodes[open_[self.nodes]]
        first = np.full(len(self.costs), -1)
        first[nodes[::-1]] = np.arange(len(nodes))[::-1]  # of equal nodes the last one written, which is the first
        added, used = np.zeros(len(nodes) + 1, np.int64), first >= 0
        added[first[used] + 1] = self.costs[used]
        return np.cumsum(added)


@torch.no_grad()
def rank_bounded(
    weights: Sequence[Tensor],
    allowed: Sequence[Tensor | None],
    sizes: Sequence[LayerSize],
    spent: int,
    edges: int,
    factors: Sequence[Tensor | None],
    senders: Sequence[Tensor | None],
    fewest: float = FEWEST,
) -> BoundedRanking:
    """Share out exactly so many edges, at least one in each layer, that cost at most ``spent`` multiply-adds.

    Args:
        weights: the weights of the layers.
        allowed: their masks of allowed edges, None for all.
        sizes: their sizes, with the cost of an edge and of nodes.
        spent: the multiply-adds that all edges together may cost, with the nodes that they leave.
        edges: the number of edges.
        factors: what the magnitudes of each layer are multiplied by, None for 1.
        senders: for layers whose nodes cost something, the node that each edge leaves.
        fewest: the smallest fraction of a graph's nodes in use that are left to make room for edges.
    """
    each = zip(weights, allowed, factors, strict=True)
    found = [_strongest(weight.detach(), mask, factor, edges) for weight, mask, factor in each]
    free, costs = _free_counts([scores for scores, _ in found], edges), [size.cost for size in sizes]
    graphs = [
        None if sent is None else _graph(scores, sent[positions], size, count)
        for (scores, positions), sent, size, count in zip(found, senders, sizes, free, strict=True)
    ]

    def with_open(fraction: float) -> tuple[list[np.ndarray | None], list[np.ndarray | None], list[int]]:
        """The open nodes, what they cost, and the most edges of each layer, for a fraction of the nodes in use."""
        open_ = [None if graph is None else graph.open(fraction) for graph in graphs]
        pairs = zip(graphs, open_, strict=True)
        running = [None if graph is None or mask is None else graph.running_costs(mask) for graph, mask in pairs]
        each = zip(sizes, running, strict=True)
        return open_, running, [size.allowed if one is None or fraction == 1 else len(one) - 1 for size, one in each]

    def total(counts: Sequence[int], running: Sequence[np.ndarray | None]) -> int:
        nodes = sum(int(one[n]) for one, n in zip(running, counts, strict=True) if one is not None)
        return nodes + sum(n * cost for n, cost in zip(counts, costs, strict=True))

    def fits(fraction: float) -> bool:
        _, running, most = with_open(fraction)
        return all(n <= limit for n, limit in zip(free, most, strict=True)) and total(free, running) <= spent

    fraction = 1.0
    if fewest < 1 and any(graph is not None for graph in graphs) and not fits(1.0):
        low, fraction = fewest, fewest
        if fits(low):  # otherwise edges have to move as well
            fraction = 1.0  # not the largest fraction that fits, but a little more: fewer multiply-adds are left over
            for _ in range(_HALVINGS):
                middle = (low + fraction) / 2
                low, fraction = (middle, fraction) if fits(middle) else (low, middle)
    open_, running, most = with_open(fraction)
    counts = bounded_counts(free, most, costs, edges, spent, running) if sum(most) >= edges and min(most) else []
    if not counts or total(counts, running) > spent:  # too few edges leave these nodes
        open_, running, most = with_open(1.0)
        counts = bounded_counts(free, most, costs, edges, spent, running)
    return BoundedRanking(counts, open_)


def _graph(scores: Tensor, senders: Tensor, size: LayerSize, count: int) -> _Graph:
    nodes, costs = senders.cpu().numpy(), np.asarray(size.nodes)
    strength = np.bincount(nodes[:count], weights=scores[:count].cpu().double().numpy(), minlength=len(costs))
    order = np.argsort(-strength, kind="stable")
    return _Graph(nodes, costs, order[: int((strength > 0).sum())])


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
    if row.device.type != "cpu":
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
