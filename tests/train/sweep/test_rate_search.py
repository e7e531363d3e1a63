"""Which learning rates a search tries."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wirings.train.sweep.rate_search import FURTHEST, RateSearch, best_rate
from wirings.train.tables.tuned import worse_sides


def follow(search: RateSearch, loss: dict[float, float]) -> list[list[float]]:
    """The rates that a search asks for, time after time, where ``loss`` has what was measured."""
    asked, known = [], {}
    while missing := search.missing(known):
        asked.append(missing)
        known |= {rate: loss[rate] for rate in missing}
    return asked


def test_goes_up_until_it_gets_worse_and_then_between() -> None:
    loss = {1e-3: 5.0, 2e-3: 4.0, 4e-3: 3.0, 8e-3: 2.0, 1.6e-2: 9.0, 5.66e-3: 2.5, 1.13e-2: 1.5}
    assert follow(RateSearch(2e-3), loss) == [[1e-3, 2e-3, 4e-3], [8e-3], [1.6e-2], [5.66e-3, 1.13e-2]]
    assert best_rate(loss) == 1.13e-2


def test_goes_down_where_all_diverge() -> None:
    loss = {0.5: math.inf, 1.0: math.inf, 2.0: math.inf, 0.25: 1.0, 0.125: 3.0, 0.177: 1.0, 0.354: 2.0}
    assert follow(RateSearch(1.0), loss) == [[0.5, 1.0, 2.0], [0.25], [0.125], [0.177, 0.354]]
    assert best_rate(loss) == 0.177  # the lower of two equal ones
    assert best_rate({0.5: math.inf}) is None


def test_goes_up_from_rates_that_are_too_low_to_learn() -> None:
    guessing = dict.fromkeys([0.05, 0.1, 0.2], 90.0)
    assert RateSearch(0.1).missing(guessing) == [0.4]
    loss = {**guessing, 0.4: 50.0, 0.8: 50.0, 1.6: 90.0}
    assert RateSearch(0.1).missing(loss) == [0.566, 1.13]
    assert worse_sides(guessing, 0.1) == (False, False)
    assert RateSearch(0.012345).missing({}) == [0.00617, 0.012345, 0.0247]


def test_asks_again_only_for_what_is_missing() -> None:
    assert RateSearch(1.0).missing({0.5: 1.0, 2.0: 1.0}) == [1.0]
    assert RateSearch(1.0).missing({0.5: 2.0, 1.0: 1.0, 2.0: 2.0, 1.41: 3.0}) == [0.707]


def test_ends_where_nobody_would_look() -> None:
    asked = follow(RateSearch(1.0), {RateSearch(1.0).rate(step): -step for step in range(-30, 30)})
    assert asked[-1] == pytest.approx([2 ** (FURTHEST - 0.5), 2 ** (FURTHEST + 0.5)], rel=1e-2)


@given(st.floats(-6.0, 6.0), st.floats(0.1, 3.0), st.floats(0.1, 3.0), st.integers(-6, -1))
def test_finds_the_best_rate_of_a_valley(place: float, left: float, right: float, start: int) -> None:
    """The best rate is the best of all on its grid, at least five were tried, and worse ones on both sides."""
    search = RateSearch(10.0**start)

    def loss(step: int) -> float:
        distance = step / 2 - place
        return distance * right if distance > 0 else -distance * left

    grid = {search.rate(step): loss(step) for step in range(-20, 21)}
    tried = [rate for part in follow(search, grid) for rate in part]
    best = best_rate({rate: grid[rate] for rate in tried})
    assert best is not None
    assert grid[best] == min(grid.values())
    assert len(tried) == len(set(tried)) >= 5
    assert min(tried) < best < max(tried)
