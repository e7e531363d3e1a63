"""The first-order change of the loss on graphs, with and without a swap. `reference` explains the notation."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import (
    POSITIVE,
    SEEDS,
    Edge,
    Graph,
    as_mask,
    first_order,
    gradient,
    graphs,
    has_path,
    in_fractions,
    make_graph,
    on_graphs,
    signs,
    sizes,
    within,
)
from torch import Tensor

from wirings.selection.functional import choose, real_edges


@dataclass(frozen=True)
class Swap:
    """A graph in which an update with learning rate alpha swaps the hallucinated edge ``enters`` for ``leaves``."""

    graph: Graph
    enters: Edge
    leaves: Edge
    alpha: float
    gradient: Tensor

    def __post_init__(self) -> None:
        before, after = self.graph.weight.abs(), self.updated.abs()
        real = self.graph.real()
        assert self.leaves in real
        assert self.enters not in real
        assert before[self.enters] < before[self.leaves]
        assert after[self.enters] > after[self.leaves]
        assert all(self.updated[edge] * self.graph.weight[edge] > 0 for edge in (self.enters, self.leaves))

    @property
    def updated(self) -> Tensor:
        return self.graph.weight - self.alpha * self.gradient

    @property
    def ineq(self) -> float:
        """Left side minus right side of `eq:ineq`."""
        change = self.updated * (self.updated - self.graph.weight)
        return (change[self.enters] - change[self.leaves]).item()

    def real_weights(self, heads_only: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return the real weights before the update, after it with the swap, and after it without.

        The other edges are updated too: all of them, or only those into the two heads, as in the paper's proof.
        """
        edges = self.graph.real()
        before = torch.where(as_mask(self.graph.nodes, edges), self.graph.weight, 0.0)
        kept = before.clone()
        for edge in edges:
            if not heads_only or edge[1] in (self.enters[1], self.leaves[1]):
                kept[edge] = self.updated[edge]
        swapped = kept.clone()
        swapped[self.leaves], swapped[self.enters] = 0.0, self.updated[self.enters]
        return before, swapped, kept


def fitting_pairs(graph: Graph, grad: Tensor, same_head: bool, path: bool, shrink: bool) -> list[tuple[Edge, Edge]]:
    """Pairs (enters, leaves) for which some alpha and some weight of ``enters`` give a swap that keeps the signs.

    The hallucinated weight can be chosen freely below the real ones: no gradient depends on it.
    """
    real = graph.real()
    weakest = min(abs(graph.weight[edge].item()) for edge in real)

    def fits(enters: Edge, leaves: Edge) -> bool:
        weight, size = graph.weight[leaves].item(), abs(grad[enters].item())
        rate = -np.sign(weight) * grad[leaves].item()
        if size < 1e-4 or abs(rate) < 1e-4 or (enters[1] == leaves[1]) != same_head:
            return False
        if not same_head and has_path([*real, enters], enters[0], leaves[0]) != path:
            return False
        return -rate * weakest > 1.1 * abs(weight) * size if shrink else size > 1.1 * rate

    return [(e, f) for e in graph.pairs if e not in real for f in real if fits(e, f)]


@st.composite
def swaps(draw: st.DrawFn, same_head: bool, path: bool = False, shrink: tuple[float, float] | None = None) -> Swap:
    """Swaps on random graphs.

    Args:
        draw: Provided by Hypothesis.
        same_head: Whether the two edges share their head.
        path: Whether there is a path from i to j in the wiring with the new edge.
        shrink: If given, both edges shrink, and alpha lies between these two marks: 0 is where the magnitudes cross, 1
            the exact limit of `eq:ineq`, 2 where w_jk changes sign.
    """
    seed, size = draw(SEEDS), draw(sizes(hidden=2))
    for further in range(100):  # take the first seed whose graph has such a pair
        graph = make_graph(seed + further, **size)
        grad = gradient(graph)
        if fitting := fitting_pairs(graph, grad, same_head, path, shrink is not None):
            break
    enters, leaves = draw(st.sampled_from(fitting))
    weakest = min(abs(graph.weight[edge].item()) for edge in graph.real())
    b, q = abs(graph.weight[leaves].item()), -(graph.weight[leaves].sign() * grad[leaves]).item()
    p, share = abs(grad[enters].item()), draw(st.floats(0.1, 0.9))
    sign_change = b / -q if q < 0 else float("inf")
    if shrink:  # the entering edge must shrink more slowly, relative to its size, than the leaving one
        p, low = -p, b * p / -q
        a = low + share * (weakest - low)
        marks = [(b - a) / (p - q), (a * p - b * q) / (q**2 - p**2), sign_change]
        alpha = float(np.interp(draw(st.floats(*shrink)), [0, 1, 2], marks))
    else:
        a = share * weakest
        crossing = (b - a) / (p - q)
        alpha = crossing + draw(st.floats(0.05, 0.95)) * (min(3 * crossing, sign_change) - crossing)
    weight = graph.weight.clone()
    weight[enters] = a * grad[enters].sign() * (1 if shrink else -1)
    return Swap(replace(graph, weight=weight), enters, leaves, alpha, grad)


def at_fixed_states(swap: Swap, before: Tensor, after: Tensor) -> float:
    """The first-order change as in the proof: the sum over the heads of <A_v - I_v, dL/dI_v>, with A_v at fixed Z."""
    shift = torch.zeros(swap.graph.nodes, swap.graph.xs.shape[2], dtype=torch.float64, requires_grad=True)
    loss, states, totals = swap.graph.forward(before, shift)
    d_total = torch.autograd.grad(loss, shift)[0]
    heads = {swap.enters[1], swap.leaves[1]}
    return sum(((after[:, v] @ states - totals[v]) @ d_total[v]).item() for v in heads)


def assert_first_order(swap: Swap, better: bool = True) -> None:
    """Compare swap and no swap; compute the change along the weights, at fixed states, and from `eq:ineq`."""
    for heads_only in (True, False):
        before, swapped, kept = swap.real_weights(heads_only)
        with_swap, without = first_order(swap.graph, before, swapped), first_order(swap.graph, before, kept)
        # The "iff" of the proof: the changes differ by the difference of the two sides, divided by alpha.
        assert swap.alpha * (without - with_swap) == pytest.approx(swap.ineq, rel=1e-7, abs=1e-12)
        if heads_only:
            for after, change in ((swapped, with_swap), (kept, without)):
                assert at_fixed_states(swap, before, after) == pytest.approx(change, rel=1e-7, abs=1e-12)
        assert (with_swap < without) == better
        assert with_swap < 0  # compared with the loss before the update, a swap is always downhill to first order


@on_graphs
@given(swaps(same_head=True))
def test_first_order_change_for_a_shared_head(swap: Swap) -> None:
    """The claim of section 2.2: the hallucinated edge (i,k) replaces the real edge (j,k)."""
    assert swap.ineq > 0
    assert_first_order(swap)


@on_graphs
@given(swaps(same_head=False))
def test_first_order_change_for_two_heads_without_a_path(swap: Swap) -> None:
    """Appendix "A More General Case": (i,l) replaces (j,k), and even with the new edge no path leads from i to j."""
    assert swap.ineq > 0
    assert_first_order(swap)


@on_graphs
@given(swaps(same_head=False, path=True))
def test_first_order_change_needs_no_condition_on_paths(swap: Swap) -> None:
    """The same with a path from i to j: backpropagation is a total derivative, so it already includes all paths."""
    assert swap.ineq > 0
    assert_first_order(swap)


@on_graphs
@given(st.booleans().flatmap(lambda same: swaps(same_head=same, shrink=(0.05, 0.95))))
def test_first_order_change_when_both_edges_shrink_a_little(swap: Swap) -> None:
    """A case the proof leaves out, below the exact limit: the swap is better than no swap."""
    assert swap.ineq > 0
    assert_first_order(swap)


@on_graphs
@given(st.booleans().flatmap(lambda same: swaps(same_head=same, shrink=(1.05, 1.95))))
def test_first_order_change_when_both_edges_shrink_a_lot(swap: Swap) -> None:
    """A case the proof leaves out, above the exact limit: signs are kept, but the swap is *worse* than no swap."""
    assert swap.ineq < 0
    assert_first_order(swap, better=False)


def test_no_path_from_i_to_j_does_not_fix_the_states() -> None:
    """Appendix "A More General Case": a path from k to i also violates "the states are fixed".

    Nodes j=0, k=1, i=2, l=3 in a chain, all linear, Z_0 = 1; (0,1), (1,2), (1,3) real with weights 1, 2, 1. Replace
    (0,1) by (2,3). At fixed states I_3 = 1 Z_1 + 0.5 Z_2 = 2. In fact nothing reaches node 1 any more, so I_3 = 0.
    """
    real = [(0, 1), (1, 2), (1, 3)]
    assert not has_path([*real, (2, 3)], 2, 0)
    weights = torch.zeros(4, 4)
    weights[0, 1], weights[1, 2], weights[1, 3] = 1.0, 2.0, 1.0

    def states(weights: Tensor) -> Tensor:
        state = [torch.tensor(1.0)]
        for v in range(1, 4):
            state.append(weights[:v, v] @ torch.stack(state))
        return torch.stack(state)

    swapped = weights.clone()
    swapped[0, 1], swapped[2, 3] = 0.0, 0.5
    assert (swapped[:, 3] @ states(weights)).item() == 2.0
    assert states(swapped)[3].item() == 0.0


def test_states_stay_fixed_if_neither_head_reaches_the_other() -> None:
    """The condition the appendix needs for A_k and A_l: then a finite step moves both inputs exactly as stated."""
    apart = moved_otherwise = 0
    for seed in range(12):
        graph = make_graph(seed, inputs=2, hidden=4, outputs=2, batch=2, act="tanh", density=0.4)
        real = graph.real()
        before = torch.where(as_mask(graph.nodes, real), graph.weight, 0.0)
        states = graph.forward(before)[1]
        for enters in (edge for edge in graph.pairs if edge not in real):
            for leaves in (edge for edge in real if edge[1] != enters[1]):
                after = before.clone()
                after[leaves], after[enters] = 0.0, graph.weight[enters]
                heads = [enters[1], leaves[1]]
                as_written = torch.allclose(
                    graph.forward(after)[2][heads], (after.T @ states)[heads], rtol=0, atol=1e-12
                )
                if not any(has_path([*real, enters], *ends) for ends in (heads, heads[::-1])):
                    assert as_written
                    apart += 1
                moved_otherwise += not as_written
    assert apart > 100
    assert moved_otherwise > 100


@in_fractions
@given(st.data())
def test_every_swap_is_downhill_from_the_old_weights_for_every_alpha(data: st.DataObject) -> None:
    """Not in the paper: |x| < |y| and |X| > |Y| imply X (X - x) > y (Y - y) for all signs.

    So relative to the loss *before* the update, the first-order change is negative for every swap and every alpha.
    """
    y, new_x = (data.draw(signs) * data.draw(POSITIVE) for _ in range(2))
    x, new_y = y * data.draw(within(-1, 1)), new_x * data.draw(within(-1, 1))
    assert new_x * (new_x - x) > y * (new_y - y)


@on_graphs
@given(graphs(), st.floats(0.01, 100.0))
def test_whole_step_never_points_uphill(graph: Graph, alpha: float) -> None:
    """Not in the paper: to first order, a step of Algorithm 1 with all its swaps descends for every alpha.

    The real weights are a subgradient of a convex function of all weights: half the sum of the k largest squares.
    Subgradients are monotone, so <real(w~) - real(w), w~ - w> >= 0, and w~ - w is -alpha times the gradient.
    """
    grad = gradient(graph)
    after = graph.weight - alpha * grad
    old, new = (real_edges(w, graph.k, graph.allowed) for w in (graph.weight, after))
    slope = first_order(graph, old, new)
    assert slope == pytest.approx(((new - old) * grad).sum().item(), rel=1e-9, abs=1e-12)
    assert slope <= 0
    if not torch.equal(choose(after, graph.k, graph.allowed), choose(graph.weight, graph.k, graph.allowed)):
        assert slope < 0


def test_whole_steps_do_swap_edges() -> None:
    """The property above is not limited to fixed wirings: a large learning rate swaps edges on most graphs."""
    swapped = 0
    for seed in range(20):
        graph = make_graph(seed, inputs=3, hidden=3, outputs=2, batch=3, act="tanh", density=0.5)
        after = choose(graph.weight - 1.0 * gradient(graph), graph.k, graph.allowed)
        swapped += not torch.equal(after, choose(graph.weight, graph.k, graph.allowed))
    assert swapped >= 15
