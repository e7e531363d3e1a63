"""Whole numbers of edges whose costs add up to a given sum, where an edge costs more in one layer than in another.

An edge of a layer costs a multiply-add for every pixel that it carries, so a sum is met by edges of different price.
Shares say how many edges each layer should have; what is found is as near to them as it can be: first the real numbers
that keep the proportions and spend the sum, then the whole numbers around these whose cost is exactly the sum or, where
there is no such combination, the largest below it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

WINDOWS = (1, 4)
"""How far from its share a layer's number may be moved so that the sum comes out."""


def spend(total: int, shares: Sequence[float], most: Sequence[int], costs: Sequence[int]) -> list[int]:
    """Numbers of edges, from 1 to ``most`` each, in proportion to ``shares``, that cost ``total`` or little less.

    ``total`` must lie between the cost of one edge in every layer and that of all edges. What is left of it is less
    than the cost of the cheapest edge that could still be added.

    >>> spend(100, [10, 10, 10], [30, 30, 30], [16, 4, 1])
    [5, 4, 4]
    >>> spend(99, [1, 1], [30, 30], [16, 4])
    [5, 4]
    """
    wanted = _in_proportion(total, shares, most, costs)
    unit = math.gcd(*costs)
    best: list[int] = []
    for window in WINDOWS:
        found = _around(total, wanted, most, costs, unit, window)
        if not best or _cost(found, costs) > _cost(best, costs):
            best = found
        if total - _cost(best, costs) < unit:
            break
    return _filled(total, best, most, costs)


def _cost(counts: Sequence[int], costs: Sequence[int]) -> int:
    return sum(count * cost for count, cost in zip(counts, costs, strict=True))


def _in_proportion(total: int, shares: Sequence[float], most: Sequence[int], costs: Sequence[int]) -> list[float]:
    """Real numbers between 1 and ``most`` that go with ``shares`` and cost ``total``: found by halving an interval."""
    least = [max(share, 1e-12) for share in shares]

    def numbers(scale: float) -> list[float]:
        return [min(max(scale * share, 1.0), m) for share, m in zip(least, most, strict=True)]

    low, high = 0.0, max(m / share for share, m in zip(least, most, strict=True))
    for _ in range(200):
        middle = (low + high) / 2
        spent = sum(number * cost for number, cost in zip(numbers(middle), costs, strict=True))
        low, high = (middle, high) if spent <= total else (low, middle)
    return numbers(low)


def _around(
    total: int, wanted: Sequence[float], most: Sequence[int], costs: Sequence[int], unit: int, window: int
) -> list[int]:
    """The costliest whole numbers up to ``total`` within ``window`` of ``wanted``, and nearest to it as may be.

    Which sums can be reached is one long integer, a bit for every multiple of ``unit``: a layer's edges shift it.
    """
    low = [max(math.floor(w + 1e-9) - window + 1, 1) for w in wanted]
    while _cost(low, costs) > total:  # only where rounding has gone wrong: take the cheapest way back
        low = [max(n - 1, 1) for n in low]
    high = [min(math.floor(w + 1e-9) + window, m) for w, m in zip(wanted, most, strict=True)]
    left = (total - _cost(low, costs)) // unit
    upto = (1 << (left + 1)) - 1
    reached = [1]
    for a, b, cost in zip(low, high, costs, strict=True):
        sums, before = 0, reached[-1]
        for more in range(max(b - a, 0) + 1):
            sums |= before << (more * cost // unit)
        reached.append(sums & upto)
    place = reached[-1].bit_length() - 1
    counts = list(low)
    for i in range(len(costs) - 1, -1, -1):
        step = costs[i] // unit
        fits = [
            n for n in range(max(high[i] - low[i], 0) + 1) if place >= n * step and reached[i] >> place - n * step & 1
        ]
        taken = min(fits, key=lambda n: abs(low[i] + n - wanted[i]))
        counts[i] += taken
        place -= taken * step
    return counts


def _filled(total: int, counts: list[int], most: Sequence[int], costs: Sequence[int]) -> list[int]:
    """Edges added, the costliest that fit first, until none fits."""
    left = total - _cost(counts, costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        more = min(left // costs[i], most[i] - counts[i])
        counts[i] += more
        left -= more * costs[i]
    return counts
