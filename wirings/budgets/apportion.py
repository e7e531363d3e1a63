"""Share out whole numbers: in proportion to shares (`share_out`), or so that their costs add up to a sum (`spend`).

An edge costs one multiply-add for every pixel that it carries, so a budget of multiply-adds (``mult_adds=``) is met by
edges of different prices. Shares say how many edges each layer should have. `spend` stays as close to them as possible:
first it finds real numbers that keep the proportions and cost the sum, then whole numbers around these whose cost is
exactly the sum. Layers with the same price are treated together. The search moves away from the shares, in all layers
by the same fraction, until the sum is met. If no numbers of edges cost exactly the sum, the largest sum below is met.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

REACH = 1 << 22
"""The limit of the search: the largest cost by which edges are moved, in units of the greatest common divisor of all
prices.

If the edges of every price cost less than its part of the limit, every combination is considered.
"""
CLOSEST = 2.0**-16
"""The fraction of its share by which the number of edges of a price is moved at first; it doubles from there."""


@dataclass(frozen=True)
class _Price:
    """All layers whose edges cost the same."""

    cost: int
    layers: tuple[int, ...]
    wanted: float
    """The number of edges in all of them, by their shares."""
    most: int

    @property
    def least(self) -> int:
        return len(self.layers)

    def within(self, fraction: float, reach: int) -> tuple[int, int]:
        """The lowest and highest number that differ from ``wanted`` by at most a fraction of it or ``reach``."""
        window = max(math.ceil(min(fraction * self.wanted, reach // self.cost + 1)), 1)
        middle = math.floor(self.wanted + 1e-9)
        return max(middle - window + 1, self.least), min(middle + window, self.most)


def spend(total: int, shares: Sequence[float], most: Sequence[int], costs: Sequence[int]) -> list[int]:
    """Numbers of edges in proportion to ``shares`` that cost ``total``, or slightly less.

    ``total`` must be between the cost of one edge in every layer and that of all edges. It is met exactly if whole
    numbers near the shares meet it; otherwise the remainder is less than the cost of the cheapest edge that could still
    be added.

    Args:
        total: the cost of all edges.
        shares: the shares of the layers, in any unit.
        most: the largest number of edges of each layer; the smallest is 1.
        costs: the cost of one edge of each layer.

    >>> spend(100, [10, 10, 10], [30, 30, 30], [16, 4, 1])
    [5, 4, 4]
    >>> spend(99, [1, 1], [30, 30], [16, 4])
    [5, 4]
    >>> spend(3838, [6, 21, 28], [6, 21, 28], [225, 225, 1])  # 17 edges at 225, so 13 at 1
    [4, 13, 13]
    """
    return list(_spend(total, tuple(shares), tuple(most), tuple(costs)))


@lru_cache(maxsize=64)  # schedules ask for the same numbers after every step
def _spend(total: int, shares: tuple[float, ...], most: tuple[int, ...], costs: tuple[int, ...]) -> tuple[int, ...]:
    least, all_edges = sum(costs), sum(m * cost for m, cost in zip(most, costs, strict=True))
    if min(costs) < 1 or not least <= total <= all_edges:  # the search below would not end
        raise ValueError(f"a cost of {total:,} is not between that of one edge in every layer and that of all edges")
    unit = math.gcd(*costs)
    total //= unit
    costs = tuple(cost // unit for cost in costs)
    wanted = _in_proportion(total, shares, most, costs)
    prices = []
    for cost in set(costs):
        layers = tuple(i for i, c in enumerate(costs) if c == cost)
        prices.append(_Price(cost, layers, sum(wanted[i] for i in layers), sum(most[i] for i in layers)))
    # The last in the list choose first: small groups, which tolerate the least deviation.
    prices.sort(key=lambda price: (-price.wanted, -price.cost))
    counts = [0] * len(costs)
    for price, edges in zip(prices, _nearest(total, prices), strict=True):
        here = [most[i] for i in price.layers]
        real = _in_proportion(edges, [shares[i] for i in price.layers], here, [1] * len(here))
        for i, count in zip(price.layers, round_to_total(real, here, edges), strict=True):
            counts[i] = count
    return tuple(counts)


def _nearest(total: int, prices: Sequence[_Price]) -> list[int]:
    """A number of edges for every price; together they cost ``total``, or as little less as possible."""
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
    """The numbers within the windows, near what is wanted, that cost the most up to ``total``; and the remainder.

    The reachable sums are the bits of one long integer; adding the edges of a price shifts it.
    """
    counts = [low for low, _ in windows]
    while (spare := total - _cost(counts, prices)) < 0:  # only if rounding went wrong: step back
        counts = [max(count - 1, price.least) for count, price in zip(counts, prices, strict=True)]
    upto = (1 << (spare + 1)) - 1
    reached = [1]
    for low, (_, high), price in zip(counts, windows, prices, strict=True):
        sums, more = reached[-1], 0
        while more < high - low:  # covers any number up to `more`, then up to twice that plus one
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
    """Real numbers from 1 to ``most``, proportional to ``shares``, that cost ``total``; found by bisection."""
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

    What exceeds one's limit goes to the others in the same proportion; if the shares of all others are zero, in
    proportion to the room that they have left.

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
