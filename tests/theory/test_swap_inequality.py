"""The inequality behind the paper's claim, `eq:ineq`, in exact arithmetic. `reference` explains the notation."""

from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import POSITIVE, in_fractions, signs, within

from wirings.selection.functional import real_edges


def gap(w_i: Fraction, new_i: Fraction, w_j: Fraction, new_j: Fraction) -> Fraction:
    """Left side minus right side of `eq:ineq`; the claim requires it to be >= 0."""
    return new_i * (new_i - w_i) - new_j * (new_j - w_j)


@in_fractions
@given(st.data(), signs, signs)
def test_ineq_holds_for_every_alpha_when_the_entering_edge_does_not_shrink(
    data: st.DataObject, sign_i: int, sign_j: int
) -> None:
    """Covers the two cases of the proof and more: `eq:ineq` needs no bound on alpha, and includes w_ik = 0."""
    a = data.draw(st.one_of(st.just(Fraction(0)), POSITIVE))
    b = a + data.draw(POSITIVE)
    new_a = a + data.draw(st.one_of(st.just(Fraction(0)), POSITIVE) if a else POSITIVE)
    new_b = data.draw(within(0, new_a))
    assert gap(sign_i * a, sign_i * new_a, sign_j * b, sign_j * new_b) > 0


@in_fractions
@given(st.data(), signs, signs)
def test_ineq_holds_below_alpha_star_in_every_case(data: st.DataObject, sign_i: int, sign_j: int) -> None:
    """The condition that defines alpha*, A <= B + (b - a) B / a, suffices whether the edges grow or shrink."""
    a = data.draw(POSITIVE)
    b = a + data.draw(POSITIVE)
    new_b = data.draw(POSITIVE)
    new_a = data.draw(st.one_of(within(new_b, new_b * b / a), st.just(new_b * b / a)))
    assert new_a <= new_b + (b - a) * new_b / a
    assert gap(sign_i * a, sign_i * new_a, sign_j * b, sign_j * new_b) > 0


@in_fractions
@given(st.data())
def test_alpha_star_lies_beyond_the_crossing(data: st.DataObject) -> None:
    """The end of the proof: some alphas below alpha* swap the edges. This is the case of a growing edge."""
    a = data.draw(POSITIVE)
    b = a + data.draw(POSITIVE)
    p = data.draw(POSITIVE)
    q = p - data.draw(POSITIVE)
    crossing = (b - a) / (p - q)
    assert a + crossing * p == b + crossing * q > 0
    assert a * p <= b * q or (b**2 - a**2) / (a * p - b * q) > crossing


@dataclass(frozen=True)
class BothShrink:
    """Two shrinking edges whose magnitudes a - alpha p and b - alpha q cross before the second one changes sign."""

    a: Fraction
    b: Fraction
    p: Fraction
    q: Fraction

    @property
    def crossing(self) -> Fraction:
        return (self.b - self.a) / (self.q - self.p)

    @property
    def alpha_star(self) -> Fraction:
        """The smallest alpha that violates the paper's condition A a <= B b."""
        return (self.b**2 - self.a**2) / (self.b * self.q - self.a * self.p)

    @property
    def exact_limit(self) -> Fraction:
        """The alpha at which both sides of `eq:ineq` are equal."""
        return (self.b * self.q - self.a * self.p) / (self.q**2 - self.p**2)

    @property
    def sign_change(self) -> Fraction:
        return self.b / self.q

    def gap(self, alpha: Fraction) -> Fraction:
        return gap(self.a, self.a - alpha * self.p, self.b, self.b - alpha * self.q)


@st.composite
def both_shrink(draw: st.DrawFn) -> BothShrink:
    b, q, ratio, slower = draw(POSITIVE), draw(POSITIVE), draw(within(0, 1)), draw(within(0, 1))
    return BothShrink(a=b * ratio, b=b, p=q * ratio * slower, q=q)  # a < b and p/a < q/b


@in_fractions
@given(both_shrink(), st.data())
def test_ineq_when_both_edges_shrink(case: BothShrink, data: st.DataObject) -> None:
    """A case the proof does not treat: `eq:ineq` holds up to an exact limit beyond alpha*, and *fails* above it.

    The range where it fails is never empty: it ends at the alpha for which w_jk changes sign. All premises hold in it.
    """
    assert 0 < case.crossing < case.alpha_star <= case.exact_limit < case.sign_change
    below = data.draw(within(case.crossing, case.exact_limit))
    above = data.draw(within(case.exact_limit, case.sign_change))
    for alpha in (below, above):
        new_a, new_b = case.a - alpha * case.p, case.b - alpha * case.q
        assert new_a > new_b > 0  # the edges swap and keep their signs
    assert case.gap(below) > 0
    assert case.gap(case.exact_limit) == 0
    assert case.gap(above) < 0


def test_ineq_fails_by_hand_when_both_edges_shrink() -> None:
    """A counterexample to the claim without alpha*. The loss is linear, so its first-order change is exact.

    L = I_k, Z_i = 1, Z_j = 2, w_ik = 1, w_jk = 1.1, alpha = 0.5: the weights become 0.5 and 0.1.
    The loss falls from 2.2 to 0.2 without the swap, but only to 0.5 with it.
    """
    w_i, w_j, z_i, z_j, alpha = Fraction(1), Fraction(11, 10), 1, 2, Fraction(1, 2)
    new_i, new_j = w_i - alpha * z_i, w_j - alpha * z_j
    assert abs(w_i) < abs(w_j)
    assert new_i > new_j > 0
    assert (w_j * z_j, new_j * z_j, new_i * z_i) == (Fraction(22, 10), Fraction(2, 10), Fraction(5, 10))
    assert gap(w_i, new_i, w_j, new_j) < 0
    case = BothShrink(w_i, w_j, Fraction(1), Fraction(2))
    limits = (case.crossing, case.alpha_star, case.exact_limit, case.sign_change)
    assert limits == (Fraction(1, 10), Fraction(7, 40), Fraction(2, 5), Fraction(11, 20))


def test_alpha_star_must_be_the_first_failure_and_not_a_supremum() -> None:
    """The paper defines alpha* as a supremum, but the set is not an interval once signs may change.

    In the example above the condition holds up to 0.175, and again for every alpha from 0.69 on. Its supremum is
    infinite, so alpha = 0.5 is "below alpha*", the signs are kept, the edges swap, and `eq:ineq` fails.
    """

    def in_the_set(alpha: Fraction) -> bool:
        new_i, new_j = abs(1 - alpha), abs(Fraction(11, 10) - 2 * alpha)
        return new_i <= new_j + Fraction(1, 10) * new_j / 1

    assert in_the_set(Fraction(17, 100))
    assert not in_the_set(Fraction(1, 2))
    assert all(in_the_set(Fraction(n)) for n in (1, 10, 1000, 10**6))


@in_fractions
@given(st.data(), signs, signs)
def test_ineq_holds_when_the_entering_edge_changes_sign(data: st.DataObject, sign_i: int, sign_j: int) -> None:
    """The entering edge does not need the assumption sign(w~) = sign(w)."""
    a = data.draw(POSITIVE)
    b = a + data.draw(POSITIVE)
    new_a = data.draw(POSITIVE)
    new_b = data.draw(within(0, new_a))
    assert gap(sign_i * a, -sign_i * new_a, sign_j * b, sign_j * new_b) > 0


def test_ineq_can_fail_when_the_leaving_edge_changes_sign() -> None:
    """The leaving edge needs the assumption sign(w~) = sign(w): with its new sign, the gradient would keep it."""
    assert gap(Fraction(1), Fraction(11, 10), Fraction(3, 2), Fraction(-1)) < 0


@in_fractions
@given(st.data(), signs, signs)
def test_ineq_survives_weight_decay(data: st.DataObject, sign_i: int, sign_j: int) -> None:
    """Weight decay first scales both weights by 1 - alpha lambda, which keeps their order.

    The gradient's part of a step is w~ - (1 - alpha lambda) w, and only this enters the first-order change.
    """
    a = data.draw(POSITIVE)
    b = a + data.draw(POSITIVE)
    kept = data.draw(within(0, 1))
    new_a = kept * a + data.draw(POSITIVE)  # the gradient makes it grow, though decay may shrink it
    new_b = data.draw(within(0, new_a))
    assert gap(sign_i * kept * a, sign_i * new_a, sign_j * kept * b, sign_j * new_b) > 0


def test_claim_fails_with_momentum() -> None:
    """Momentum can swap in an edge against the current gradient: then even a linear loss rises.

    L = -I_k. The first mini-batch (Z_i = 2, Z_j = 0) pushes w_ik from 0.7 to 0.9; on the second (Z_i = -1/2,
    Z_j = 1/10) the gradient decreases w_ik, but its velocity carries it to 1.03, past w_jk = 1.01.
    """
    weight = torch.tensor([0.7, 1.0], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    states = torch.tensor([[2.0, 0.0], [-0.5, 0.1]], dtype=torch.float64)
    for state in states:
        optimizer.zero_grad()
        loss = -real_edges(weight, 1) @ state
        loss.backward()
        optimizer.step()
    assert weight.tolist() == pytest.approx([1.03, 1.01])
    swapped, kept = (-real_edges(weight, 1) @ states[1]).item(), -weight[1].item() * 0.1
    assert (loss.item(), kept, swapped) == pytest.approx((-0.1, -0.101, 0.515))
