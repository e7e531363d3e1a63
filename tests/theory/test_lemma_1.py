"""Lemma 1, and the worked counterexample of docs/theory.md: the claim is about first order only."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference import SEEDS, Graph, as_mask, graphs, in_fractions, on_graphs, within
from torch import Tensor

from wirings.selection.functional import real_edges


@in_fractions
@given(SEEDS, st.integers(1, 5), within(0, 1))
def test_lemma_1_with_an_explicit_bound_on_alpha(seed: int, batch: int, share: Fraction) -> None:
    """Lemma 1 at an output node, with "sufficiently small" made explicit: the curvature is at most M = psi^2 / batch.

    So any alpha below 2 d / (M (|gamma_1|^2 + |gamma_2|^2)) suffices, where d is the first-order lead of gamma_1.
    """
    rng = np.random.default_rng(seed)
    psi, y, total, gamma_1, gamma_2 = rng.standard_normal(1)[0], *rng.standard_normal((4, batch))

    def loss(total: np.ndarray) -> float:
        return float(np.sqrt(1 + (psi * total - y) ** 2).mean())

    error = psi * total - y
    slope = psi * error / np.sqrt(1 + error**2) / batch
    if gamma_1 @ slope > gamma_2 @ slope:
        gamma_1, gamma_2 = gamma_2, gamma_1
    lead = (gamma_2 - gamma_1) @ slope
    bound = 2 * lead / (psi**2 / batch * (gamma_1 @ gamma_1 + gamma_2 @ gamma_2))
    assume(bound > 1e-6)  # smaller differences are lost in float64
    for halvings in range(4):
        alpha = float(share) * bound / 2**halvings
        assert loss(total + alpha * gamma_1) < loss(total + alpha * gamma_2)


@settings(on_graphs, max_examples=40)
@given(graphs(acts=("tanh", "identity")), SEEDS, st.sampled_from([1, 2]))
def test_lemma_1_for_small_alpha_on_graphs(graph: Graph, seed: int, heads: int) -> None:
    """Lemma 1 for one node, and its version for two nodes (gamma, xi), on smooth graphs with decreasing alpha.

    The true lead divided by alpha tends to the first-order lead, and has the right sign for every alpha tried.
    """
    rng = np.random.default_rng(seed)
    real = torch.where(as_mask(graph.nodes, graph.real()), graph.weight, 0.0)
    shape = (graph.nodes, graph.xs.shape[2])
    moved = torch.zeros(shape, dtype=torch.float64)
    moved[rng.choice(np.arange(graph.inputs, graph.nodes - 1), heads - 1, replace=False)] = 1.0
    moved[graph.nodes - 1] = 1.0  # an output: its gradient cannot vanish on the whole batch

    def loss(shift: Tensor) -> Tensor:
        return graph.forward(real, shift)[0]

    first, second = (moved * torch.from_numpy(rng.standard_normal(shape)) for _ in range(2))
    slope = torch.func.grad(loss)(torch.zeros(shape, dtype=torch.float64))
    if (first * slope).sum() > (second * slope).sum():
        first, second = second, first
    lead = ((second - first) * slope).sum().item()
    assume(lead > 1e-3)

    def bend(along: Tensor) -> float:
        def line(alpha: Tensor) -> Tensor:
            return loss(alpha * along)

        return torch.func.grad(torch.func.grad(line))(torch.zeros((), dtype=torch.float64)).abs().item()

    largest = 0.1 * lead / (1 + bend(first) + bend(second))
    errors = []
    for halvings in range(8):
        alpha = largest / 2**halvings
        true_lead = (loss(alpha * second) - loss(alpha * first)).item()
        assert true_lead > 0
        errors.append(abs(true_lead / alpha - lead) / lead)
    assert errors[-1] < 0.01
    assert errors[-1] <= errors[0] / 8 + 1e-6


def test_lemma_1_needs_a_derivative_and_not_only_a_lipschitz_loss() -> None:
    """The claim assumes a Lipschitz loss, but Lemma 1 needs a derivative. L = max(I_0, I_1) has none at a tie.

    The reported gradient is (1/2, 1/2). Along (1, -1.2) it predicts -0.1 alpha; the loss rises by alpha, for any alpha.
    """
    total = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    slope = torch.autograd.grad(total.amax(), total)[0]
    along = torch.tensor([1.0, -1.2], dtype=torch.float64)
    assert (slope @ along).item() == pytest.approx(-0.1)
    for alpha in (1.0, 1e-3, 1e-6):
        assert (alpha * along).amax().item() == alpha


@pytest.mark.parametrize(("margin", "after_swap"), [(0.02, 0.3872), (0.002, 0.326432), (0.0002, 0.32064032)])
def test_true_loss_rises_although_the_claim_holds(margin: float, after_swap: float) -> None:
    """The claim only promises a first-order lead. Z_j = 1, Z_i = 2, L = 1/2 (I_k - 1.2)^2, w_jk = 1, w_ik = 1 - margin.

    dL/dI_k = -0.2 and the rates are 0.4 and 0.2: the edges cross at alpha = 5 margin, and alpha* is about 10 margin.
    With alpha = 7.5 margin all premises hold. For every alpha, I_k jumps from 1 to about 2, past the target.
    """
    alpha = 7.5 * margin
    states = torch.tensor([1.0, 2.0], dtype=torch.float64)
    weight = torch.tensor([1.0, 1 - margin], dtype=torch.float64, requires_grad=True)

    def loss(total: Tensor) -> Tensor:
        return 0.5 * (total - 1.2) ** 2

    before = loss(real_edges(weight, 1) @ states)
    before.backward()
    updated = (weight - alpha * weight.grad).detach()
    (b, a), (new_b, new_a) = weight.tolist(), updated.tolist()
    assert weight.grad.tolist() == pytest.approx([-0.2, -0.4])
    assert 0 < a < b  # premises: the entering edge was weaker,
    assert new_a > new_b > 0  # is now stronger, both keep their signs,
    assert alpha < (b * b - a * a) / (0.4 * a - 0.2 * b)  # alpha < alpha*,
    assert new_a * (new_a - a) > new_b * (new_b - b)  # and `eq:ineq` holds

    slope = -0.2
    assert slope * (new_a * 2 - 1) < slope * (new_b - 1) < 0  # to first order the loss falls, and more with the swap
    no_swap, swap = loss(updated[0] * 1.0).item(), loss(real_edges(updated, 1) @ states).item()
    assert no_swap < before.item() == pytest.approx(0.02)
    assert swap == pytest.approx(after_swap)
    assert swap > 15 * before.item()
