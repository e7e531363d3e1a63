"""Sharing out whole numbers in proportion to shares."""

import pytest

from wirings.budgets.apportion import round_to_total, share_out, spend


def test_share_out() -> None:
    assert share_out(7, [1.0, 1.0, 2.0], [9, 9, 9]) == [2, 2, 3]  # 1.75, 1.75, 3.5
    assert share_out(6, [5.0, 0.0, 1.0], [2, 9, 3]) == [2, 1, 3]  # two are full, and the rest has nowhere else to go
    assert share_out(3, [0.0, 0.0], [2, 4]) == [1, 2]
    assert share_out(0, [1.0, 2.0], [3, 3]) == [0, 0]
    assert share_out(4, [1e-30, 1.0], [4, 4]) == [0, 4]


def test_largest_remainders_are_rounded_up() -> None:
    assert round_to_total([1.6, 1.6, 0.8], [4, 4, 4], 4) == [2, 1, 1], "each at least one, ties go to the earlier"
    assert round_to_total([0.2, 0.2, 3.6], [4, 4, 4], 4) == [1, 1, 2], "what the minimum adds is taken from others"
    assert round_to_total([2.5, 2.5], [9, 9], 5, least=0) == [3, 2]


def test_totals_that_do_not_fit_are_rejected() -> None:
    with pytest.raises(ValueError, match="7 cannot be shared out"):
        round_to_total([1.0, 2.0], [2, 3], 7)


@pytest.mark.parametrize(("total", "costs"), [(3, (2, 2)), (1, (1, 1)), (100, (1, 1)), (10**30, (1, 1)), (5, (0, 1))])
def test_totals_out_of_range_raise(total: int, costs: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="is not between that of one edge in every layer and that of all edges"):
        spend(total, (1.0, 1.0), (10, 10), costs)
