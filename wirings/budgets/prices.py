"""Two budgets at once: exactly so many edges that together cost at most so many multiply-adds.

An edge is worth its score, such as its magnitude, less a price for every multiply-add that it costs. The edges that are
worth most are taken, and the price is the lowest at which they cost no more than they may. At a price of zero this is a
plain ranking. Layers whose edges cost the same differ only in scores, so the search looks at a few sorted rows.

Nodes may cost something too, once the first of their edges is taken. That counts against the bound, but has no price: a
node belongs to whichever of its edges is the strongest.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wirings.errors import WiringError

_HALVINGS = 64
"""Steps of a bisection: more than a double has digits."""


@dataclass(frozen=True)
class _Row:
    """All edges of one cost, strongest first."""

    cost: int
    negated: np.ndarray
    """Their scores times -1, which ascend; -inf for those that are taken in any case."""
    layer: np.ndarray
    """The layer that each belongs to."""
    first: int
    """How many are taken in any case: one for each layer."""
    nodes: np.ndarray | None = None
    """What the nodes of the first n edges cost, for every n from 0 on; None if nodes cost nothing."""

    def price_of(self, count: int) -> int:
        """What the first ``count`` edges and their nodes cost."""
        return self.cost * count + (0 if self.nodes is None else int(self.nodes[count]))

    def worths(self, price: float) -> list[float]:
        """What the best and the worst of the others are worth at a price; nothing if there are no others."""
        return [-float(v) - price * self.cost for v in self.negated[self.first :][[0, -1]]] if self.others else []

    @property
    def others(self) -> int:
        return len(self.negated) - self.first


def priced_counts(
    scores: Sequence[np.ndarray],
    costs: Sequence[int],
    edges: int,
    spent: int,
    nodes: Sequence[np.ndarray | None] | None = None,
) -> list[int]:
    """The number of edges of each layer: ``edges`` in total, at least one each, that cost at most ``spent``.

    Where edges without a price would cost more, the result costs as much as it may, up to less than one edge and the
    node that it would add.

    Args:
        scores: the scores of the edges of each layer, in any order; the larger, the better. The ``edges`` best are
            enough.
        costs: what one edge of each layer costs.
        edges: the number of edges, from one for each layer to all of them.
        spent: what they may cost together, at least as much as `least_cost` and all nodes.
        nodes: for layers whose scores are in descending order, what each edge adds for its node: the node's cost if no
            better edge shares it, otherwise 0. None for layers whose nodes cost nothing.

    >>> priced_counts([np.array([9.0, 8.0, 7.0]), np.array([3.0, 2.0, 1.0])], [4, 1], 4, 16)
    [3, 1]
    >>> priced_counts([np.array([9.0, 8.0, 7.0]), np.array([3.0, 2.0, 1.0])], [4, 1], 4, 12)
    [2, 2]
    """
    rows, distinct = _rows(scores, costs, edges, nodes or [None] * len(scores)), sorted(set(costs))
    counts = _take(rows, 0.0, edges)
    if _cost(rows, counts) > spent:
        ends = [worth for row in rows for worth in row.worths(0.0)]
        closest = min((b - a for a, b in itertools.pairwise(distinct)), default=1)
        # At the higher price the cheapest edges come first, whatever their scores.
        low, high = 0.0, 2 * (max(ends) - min(ends)) / closest + 1e-12
        more, counts = counts, _take(rows, high, edges)
        for _ in range(_HALVINGS):
            if 0 <= spent - _cost(rows, counts) < closest or more == counts:
                break  # no exchange of edges would come closer
            middle = (low + high) / 2
            found = _take(rows, middle, edges)
            if _cost(rows, found) > spent:
                low, more = middle, found
            else:
                high, counts = middle, found
        _fill(rows, counts, more, spent)
    total = np.zeros(len(scores), np.int64)
    for row, count in zip(rows, counts, strict=True):
        total += np.bincount(row.layer[:count], minlength=len(scores))
    return [int(count) for count in total]


def least_cost(allowed: Sequence[int], costs: Sequence[int], edges: int) -> int:
    """What ``edges`` edges cost at least, with at least one in each layer.

    >>> least_cost([3, 3], [4, 1], 5)
    11
    """
    left, cost = edges - len(allowed), sum(costs)
    for most, price in sorted(zip(allowed, costs, strict=True), key=lambda pair: pair[1]):
        taken = min(most - 1, left)
        cost, left = cost + taken * price, left - taken
    return cost


def check_feasible(names: str, allowed: Sequence[int], costs: Sequence[int], edges: int, spent: int, rest: int) -> None:
    """Raise if no ``edges`` edges cost at most ``spent``; the message names the nearest pairs that can be met.

    Args:
        names: what was asked for, for the message.
        allowed: the number of allowed edges of each layer.
        costs: what one edge of each layer costs.
        edges: the number of edges.
        spent: what they may cost.
        rest: the multiply-adds of the rest of the network, for the message.
    """
    least = least_cost(allowed, costs, edges)
    if least <= spent:
        return
    low, high = len(allowed), edges  # the first can be met, unless nothing can; the second cannot
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if least_cost(allowed, costs, middle) <= spent else (low, middle)
    fewer = (
        f", and with {spent + rest:,} multiply-adds there can be at most {low:,} edges" if sum(costs) <= spent else ""
    )
    raise WiringError(
        f"{names} cannot be met at once: {edges:,} edges cost at least {least:,} multiply-adds, one in each of the "
        f"{len(allowed)} wired layers and the others where they cost least, and the rest of the network has {rest:,}. "
        f"The nearest that can be met with {edges:,} edges is mult_adds = {least + rest:,}{fewer}."
    )


def proportional_scores(share: float, allowed: int) -> np.ndarray:
    """Scores by which layers are ranked in proportion to their shares: the best n of all layers are n divided so.

    A price p per multiply-add then multiplies a layer's number by exp(-p · cost).
    """
    return np.log(share) - np.log(np.arange(allowed) + 0.5)


def _rows(
    scores: Sequence[np.ndarray], costs: Sequence[int], most: int, nodes: Sequence[np.ndarray | None]
) -> list[_Row]:
    """One row for every cost, from the cheapest on, of its ``most`` best edges: no more are ever taken."""
    made = []
    for cost in sorted(set(costs)):
        layers = [i for i, one in enumerate(costs) if one == cost]
        negated = []
        for i in layers:
            row = np.negative(scores[i])
            row[np.argmin(row)] = -np.inf  # every layer keeps its strongest edge
            negated.append(row)
        numbers = np.repeat(layers, [len(row) for row in negated])
        values = np.concatenate(negated)
        added: np.ndarray | None = None
        if any(nodes[i] is not None for i in layers):
            each = [np.zeros(len(scores[i]), np.int64) if nodes[i] is None else nodes[i] for i in layers]
            added = np.concatenate(each)  # type: ignore[arg-type]
        if len(values) > most and added is None:  # several times faster than sorting all
            best = np.sort(np.argpartition(values, most - 1)[:most])
            values, numbers = values[best], numbers[best]
        order = np.argsort(values, kind="stable")[:most]
        total = None if added is None else np.concatenate([[0], np.cumsum(added[order])])
        made.append(_Row(cost, values[order].astype(np.float64), numbers[order], len(layers), total))
    return made


def _cost(rows: Sequence[_Row], counts: Sequence[int]) -> int:
    return sum(row.price_of(count) for row, count in zip(rows, counts, strict=True))


def _take(rows: Sequence[_Row], price: float, edges: int) -> list[int]:
    """How many edges of each row are among the ``edges`` best at a price; of equally good ones the cheapest."""

    def at_least(worth: float) -> list[int]:
        return [int(np.searchsorted(row.negated, -(worth + price * row.cost), side="right")) for row in rows]

    ends = [worth for row in rows for worth in row.worths(price)] or [0.0]
    low, high = (end + side * 1e-9 * (1 + abs(end)) for side, end in ((-1, min(ends)), (1, max(ends))))
    counts, more = at_least(high), at_least(low)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        found = at_least(middle)
        if sum(found) <= edges:
            high, counts = middle, found
        else:
            low, more = middle, found
        if sum(counts) == edges:
            return counts
    for i in range(len(rows)):
        counts[i] += min(more[i] - counts[i], edges - sum(counts))
    return counts


def _fill(rows: Sequence[_Row], counts: list[int], more: Sequence[int], spent: int) -> None:
    """Exchange cheap edges for expensive ones, in place, towards numbers that cost too much, while that fits."""
    left = spent - _cost(rows, counts)
    for dear in reversed(range(len(rows))):
        for cheap in range(dear):
            most = min(more[dear] - counts[dear], counts[cheap] - more[cheap])
            if most <= 0:
                continue

            def difference(moved: int, dear: int = dear, cheap: int = cheap) -> int:
                pairs = ((rows[dear], counts[dear], moved), (rows[cheap], counts[cheap], -moved))
                return sum(row.price_of(count + by) - row.price_of(count) for row, count, by in pairs)

            low, high = 0, most + 1  # the largest number that fits, by bisection
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if difference(middle) <= left else (low, middle)
            left -= difference(low)
            counts[dear] += low
            counts[cheap] -= low
