"""Two budgets at once: exactly so many edges that together cost at most so many multiply-adds.

Shares say how many edges each layer should have: those of a density, of ERK, or the numbers in a ranking of all edges.
If these cost too much, a layer's number is divided by a power of what its edges cost, the same power for all layers,
and the numbers are scaled to the same total. The power is the lowest at which the bound is met. So all layers whose
edges are expensive give some up, and none is cut off, as it is if magnitudes compete less a price: the magnitudes of a
layer lie close together, and a little too high a price takes all its edges.

Nodes may cost something too, once the first of their edges is taken. That counts against the bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wirings.budgets.apportion import round_to_total
from wirings.errors import WiringError

_HALVINGS = 48
"""Steps of a bisection: to less than an edge of any number of them that fits into memory."""
_HIGHEST = 2.0**14
"""The highest power. The cheapest edges then come first, whatever the shares."""


def bounded_counts(
    shares: Sequence[float],
    allowed: Sequence[int],
    costs: Sequence[int],
    edges: int,
    spent: int,
    nodes: Sequence[np.ndarray | None] | None = None,
) -> list[int]:
    """The number of edges of each layer: ``edges`` in total, at least one each, that cost at most ``spent``.

    They are in proportion to the shares if that costs no more. Otherwise the result costs as much as it may, up to less
    than one edge and the node that it would add.

    Args:
        shares: the share of each layer, in any unit.
        allowed: the number of allowed edges of each layer.
        costs: what one edge of each layer costs, at least 1.
        edges: the number of edges, from one for each layer to all of them.
        spent: what they may cost together, at least as much as `least_cost` and all nodes.
        nodes: for layers whose nodes cost something, what the nodes of their first n edges cost, for every n from 0 up
            to ``edges`` or all of them. None for other layers.

    >>> bounded_counts([3, 1], [3, 3], [4, 1], 4, 16)
    [3, 1]
    >>> bounded_counts([3, 1], [3, 3], [4, 1], 4, 12)
    [2, 2]
    """
    steps = nodes or [None] * len(costs)

    def cost(counts: Sequence[int]) -> int:
        return sum(_cost(*one) for one in zip(costs, steps, counts, strict=True))

    def at(power: float) -> list[int]:
        return _in_proportion(shares, allowed, costs, edges, power)

    more = at(0.0)
    if cost(more) <= spent:
        return more
    low, high = 0.0, 1.0
    while cost(counts := at(high)) > spent and high < _HIGHEST:
        low, high, more = high, 2 * high, counts
    if cost(counts) > spent:
        counts = _cheapest(allowed, costs, edges)
    for _ in range(_HALVINGS):
        if counts == more or sum(abs(a - b) for a, b in zip(counts, more, strict=True)) <= 2:
            break  # one edge is exchanged
        middle = (low + high) / 2
        found = at(middle)
        if cost(found) > spent:
            low, more = middle, found
        else:
            high, counts = middle, found
    _fill(counts, more, costs, steps, spent - cost(counts))
    return counts


def _cost(cost: int, nodes: np.ndarray | None, count: int) -> int:
    """What the first ``count`` edges of a layer and their nodes cost."""
    return cost * count + (0 if nodes is None else int(nodes[count]))


def _in_proportion(
    shares: Sequence[float], allowed: Sequence[int], costs: Sequence[int], edges: int, power: float
) -> list[int]:
    """Whole numbers from 1 to ``allowed``, ``edges`` in total, in proportion to shares over costs to a power."""
    logs = np.log(np.maximum(shares, 1e-9)) - power * np.log(costs)
    most = np.log(allowed)
    low, high = float((-logs).min()), float((most - logs).max())  # of the logarithm of a factor: one each, or all
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        total = np.exp(np.clip(logs + middle, 0.0, most)).sum()
        low, high = (middle, high) if total <= edges else (low, middle)
    return round_to_total(np.exp(np.clip(logs + low, 0.0, most)).tolist(), allowed, edges)


def _cheapest(allowed: Sequence[int], costs: Sequence[int], edges: int) -> list[int]:
    """The numbers of edges that cost least, with at least one in each layer."""
    counts, left = [1] * len(costs), edges - len(costs)
    for i in sorted(range(len(costs)), key=costs.__getitem__):
        counts[i] += min(allowed[i] - 1, left)
        left -= counts[i] - 1
    return counts


def _fill(
    counts: list[int], more: Sequence[int], costs: Sequence[int], nodes: Sequence[np.ndarray | None], left: int
) -> None:
    """Exchange cheap edges for expensive ones, in place, towards numbers that cost too much, while that fits."""
    order = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)
    for gains in order:
        for loses in reversed(order):
            most = min(more[gains] - counts[gains], counts[loses] - more[loses])
            if most <= 0:
                continue

            def difference(moved: int, gains: int = gains, loses: int = loses) -> int:
                pairs = ((gains, moved), (loses, -moved))
                after = sum(_cost(costs[i], nodes[i], counts[i] + by) for i, by in pairs)
                return after - sum(_cost(costs[i], nodes[i], counts[i]) for i, _ in pairs)

            low, high = 0, most + 1  # the largest number that fits, by bisection
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if difference(middle) <= left else (low, middle)
            left -= difference(low)
            counts[gains] += low
            counts[loses] -= low


def least_cost(allowed: Sequence[int], costs: Sequence[int], edges: int) -> int:
    """What ``edges`` edges cost at least, with at least one in each layer.

    >>> least_cost([3, 3], [4, 1], 5)
    11
    """
    return sum(n * cost for n, cost in zip(_cheapest(allowed, costs, edges), costs, strict=True))


def check_feasible(
    names: str, allowed: Sequence[int], costs: Sequence[int], edges: int, spent: int, rest: int, nodes: int = 0
) -> None:
    """Raise if no ``edges`` edges cost at most ``spent``; the message names the nearest pairs that can be met.

    Args:
        names: what was asked for, for the message.
        allowed: the number of allowed edges of each layer.
        costs: what one edge of each layer costs.
        edges: the number of edges.
        spent: what they may cost, with the nodes that they leave.
        rest: the multiply-adds of the rest of the network, for the message.
        nodes: what the nodes of neural graphs cost if all of them are in use.
    """
    spent -= nodes
    least = least_cost(allowed, costs, edges)
    if least <= spent:
        return
    low, high = len(allowed), edges  # the first can be met, unless nothing can; the second cannot
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if least_cost(allowed, costs, middle) <= spent else (low, middle)
    total = spent + nodes + rest
    fewer = f", and with {total:,} multiply-adds there can be at most {low:,} edges" if sum(costs) <= spent else ""
    verb, graphs = "met", ""
    if nodes:  # fewer may be in use, but which ones changes while training
        verb, graphs = "guaranteed", f", nodes of graphs cost {nodes:,} if all of them are in use"
    raise WiringError(
        f"{names} cannot be {verb} at once: {edges:,} edges cost at least {least:,} multiply-adds, one in each of the "
        f"{len(allowed)} wired layers and the others where they cost least{graphs}, and the rest of the network has "
        f"{rest:,}. The nearest that can be {verb} with {edges:,} edges is mult_adds = {least + nodes + rest:,}{fewer}."
    )
