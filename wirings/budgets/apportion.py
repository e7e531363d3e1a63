"""Whole numbers of edges whose costs add up to a given sum, where an edge costs more in one layer than in another.

An edge of a layer costs a multiply-add for every pixel that it carries, so a sum is met by edges of different price.
Shares say how many edges each layer should have. What is found is as near to them as it can be: first the real numbers
that keep the proportions and spend the sum, then whole numbers around these whose cost is exactly the sum. Layers of
one price are taken together, and looked at ever farther from their shares, all by the same fraction, until the sum
comes out. Where no numbers of edges cost it, it is the largest sum below.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

REACH = 1 << 22
"""Sums that are looked at, in multiples of what divides all prices: so far edges are moved from their shares at most.

Where the edges of no price cost more than its part of that, every combination is looked at.
"""
CLOSEST = 2.0**-16
"""The first fraction of its share that a price's number is moved by; then twice that, and so on."""


@dataclass(frozen=True)
class _Price:
    """All layers whose edges cost the same."""

    cost: int
    layers: tuple[int, ...]
    wanted: float
    """Edges in all of them."""
    most: int

    @property
    def least(self) -> int:
        return len(self.layers)

    def within(self, fraction: float, reach: int) -> tuple[int, int]:
        """The lowest and the highest number that is at most a fraction of what is wanted away from it, or ``reach``."""
        window = max(math.ceil(min(fraction * self.wanted, reach // self.cost + 1)), 1)
        middle = math.floor(self.wanted + 1e-9)
        return max(middle - window + 1, self.least), min(middle + window, self.most)


def spend(total: int, shares: Sequence[float], most: Sequence[int], costs: Sequence[int]) -> list[int]:
    """Numbers of edges, from 1 to ``most`` each, in proportion to ``shares``, that cost ``total`` or little less.

    ``total`` must lie between the cost of one edge in every layer and that of all edges. It is met where whole numbers
    near the shares meet it, else what is left of it is less than the cost of the cheapest edge that could still be
    added.

    >>> spend(100, [10, 10, 10], [30, 30, 30], [16, 4, 1])
    [5, 4, 4]
    >>> spend(99, [1, 1], [30, 30], [16, 4])
    [5, 4]
    >>> spend(3838, [6, 21, 28], [6, 21, 28], [225, 225, 1])  # 17 edges at 225, so 13 at 1
    [4, 13, 13]
    """
    return list(_spend(total, tuple(shares), tuple(most), tuple(costs)))


@lru_cache(maxsize=64)  # schedules ask for the same again after every step
def _spend(total: int, shares: tuple[float, ...], most: tuple[int, ...], costs: tuple[int, ...]) -> tuple[int, ...]:
    unit = math.gcd(*costs)
    total //= unit
    costs = tuple(cost // unit for cost in costs)
    wanted = _in_proportion(total, shares, most, costs)
    prices = []
    for cost in set(costs):
        layers = tuple(i for i, c in enumerate(costs) if c == cost)
        prices.append(_Price(cost, layers, sum(wanted[i] for i in layers), sum(most[i] for i in layers)))
    prices.sort(key=lambda price: (-price.wanted, -price.cost))  # the last has the first choice: few edges mind most
    counts = [0] * len(costs)
    for price, edges in zip(prices, _nearest(total, prices), strict=True):
        here = [most[i] for i in price.layers]
        real = _in_proportion(edges, [shares[i] for i in price.layers], here, [1] * len(here))
        for i, count in zip(price.layers, round_to_total(real, here, edges), strict=True):
            counts[i] = count
    return tuple(counts)


def _nearest(total: int, prices: Sequence[_Price]) -> list[int]:
    """For every price a number of edges; together they cost ``total``, or as little less as can be."""
    reach = max(REACH // len(prices), *(price.cost for price in prices))
    widest = [price.within(math.inf, reach) for price in prices]
    windows, fraction = [price.within(0.0, reach) for price in prices], CLOSEST
    best, left = _within(total, windows, prices)
    while left > 0 and windows != widest:
        before, windows = windows, [price.within(fraction, reach) for price in prices]
        fraction *= 2
        if windows != before:
            found, rest = _within(total, windows, prices)
            best, left = (found, rest) if rest < left else (best, left)
    return best


def _within(total: int, windows: Sequence[tuple[int, int]], prices: Sequence[_Price]) -> tuple[list[int], int]:
    """The costliest numbers up to ``total`` within windows, near to what is wanted; and what is left of ``total``.

    Which sums can be reached is one long integer, a bit for every sum: a price's edges shift it.
    """
    counts = [low for low, _ in windows]
    while (spare := total - _cost(counts, prices)) < 0:  # only where rounding has gone wrong: take a way back
        counts = [max(count - 1, price.least) for count, price in zip(counts, prices, strict=True)]
    upto = (1 << (spare + 1)) - 1
    reached = [1]
    for low, (_, high), price in zip(counts, windows, prices, strict=True):
        sums, more = reached[-1], 0
        while more < high - low:  # any number up to this, then up to twice that and one
            step = min(more + 1, high - low - more)
            sums |= (sums << (step * price.cost)) & upto
            more += step
        reached.append(sums)
    place = reached[-1].bit_length() - 1
    left = spare - place
    for i in reversed(range(len(prices))):
        low, high, price = counts[i], windows[i][1], prices[i]
        before = np.frombuffer(reached[i].to_bytes(spare // 8 + 1, "little"), np.uint8)
        added = np.arange(min(max(high - low, 0), place // price.cost) + 1)
        bits = place - added * price.cost
        fits = added[(before[bits >> 3] >> (bits & 7)) & 1 == 1]
        taken = int(fits[np.argmin(np.abs(low + fits - price.wanted))])
        counts[i] += taken
        place -= taken * price.cost
    return counts, left


def _cost(counts: Sequence[int], prices: Sequence[_Price]) -> int:
    return sum(count * price.cost for count, price in zip(counts, prices, strict=True))


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


def share_out(total: int, shares: Sequence[float], most: Sequence[int]) -> list[int]:
    """``total`` in proportion to ``shares``: whole numbers, by largest remainders, none above ``most``.

    What is too much for one goes to the others in the same proportion; if the shares of all others are zero, in
    proportion to the room that they have.

    >>> share_out(10, [3.0, 1.0, 1.0], [4, 9, 9])
    [4, 3, 3]
    """
    full: set[int] = set()
    while True:
        open_ = [i for i in range(len(shares)) if i not in full]
        parts = shares if any(shares[i] > 0 for i in open_) else most
        whole, left = sum(parts[i] for i in open_), total - sum(most[i] for i in full)
        wanted = {i: left * parts[i] / whole if whole else 0.0 for i in open_}
        over = {i for i in open_ if wanted[i] > most[i]}
        if not over:
            return round_to_total([wanted.get(i, most[i]) for i in range(len(shares))], most, total, least=0)
        full |= over


def round_to_total(wanted: Sequence[float], most: Sequence[int], total: int, least: int = 1) -> list[int]:
    """Whole numbers near ``wanted`` that add up to ``total``, from ``least`` to ``most`` each, by largest remainders.

    Ties go to the earlier number.

    >>> round_to_total([1.6, 1.6, 0.8], [4, 4, 4], 4)
    [2, 1, 1]
    """
    counts = [min(max(math.floor(w + 1e-9), least), m) for w, m in zip(wanted, most, strict=True)]
    while (missing := total - sum(counts)) != 0:
        sign = 1 if missing > 0 else -1
        free = [i for i in range(len(counts)) if (counts[i] < most[i] if sign > 0 else counts[i] > least)]
        if not free:
            raise ValueError(f"{total} cannot be shared out over numbers from {least} to at most {sum(most)} in total")
        free.sort(key=lambda i: (sign * (counts[i] - wanted[i]), i))
        for i in free[: abs(missing)]:
            counts[i] += sign
    return counts
