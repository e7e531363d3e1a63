"""Gradients flow to hallucinated edges, but not through them."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Graph, as_mask, backprop_by_hand, gradient, graphs, on_graphs

from wirings.selection.functional import real_edges, straight_through


def test_gradients_of_three_nodes_by_hand() -> None:
    """Figure "Gradient flow" on nodes 0, 1, 2 with edges (0,1) and (1,2) real and (0,2) hallucinated.

    By hand: Z_0 = phi x = (1, -1); I_1 = 2 Z_0 = (2, -2), Z_1 = relu(I_1) = (2, 0); I_2 = 3 Z_1 = (6, 0).
    L = 1/2 |I_2 - (5, 1)|^2, so dL/dI_2 = (1, -1) and dL/dI_1 = 3 (1, -1) relu'(I_1) = (3, 0).
    (1,2): <Z_1, dL/dI_2> = 2. (0,1): <Z_0, dL/dI_1> = 3. (0,2): <Z_0, dL/dI_2> = 2.
    dL/dZ_0 = 2 (3, 0) = (6, 0), so dL/dphi = 6; with flow through the hallucinated edge they would be (7, -1) and 8.
    """
    weight = torch.tensor([[0.0, 2.0, 1.0], [0.0, 0.0, 3.0], [0.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    phi = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    x, y = torch.tensor([[1.0, -1.0], [5.0, 1.0]], dtype=torch.float64)
    by_magnitude = real_edges(weight, 2, as_mask(3, [(0, 1), (0, 2), (1, 2)]))
    by_mask = straight_through(weight, as_mask(3, [(0, 1), (1, 2)]), as_mask(3, [(0, 1), (0, 2), (1, 2)]))
    for real in (by_magnitude, by_mask):
        state_0 = phi * x
        state_1 = torch.relu(real[0, 1] * state_0)
        loss = 0.5 * ((real[0, 2] * state_0 + real[1, 2] * state_1 - y) ** 2).sum()
        to_weight, to_phi = torch.autograd.grad(loss, (weight, phi))
        assert loss.item() == 1.0
        assert to_weight.tolist() == [[0.0, 3.0, 2.0], [0.0, 0.0, 2.0], [0.0, 0.0, 0.0]]
        assert to_phi.item() == 6.0


@on_graphs
@given(graphs())
def test_gradient_flows_to_every_pair_and_only_through_real_edges(graph: Graph) -> None:
    """Section 2.2: the gradient flows to every pair as <Z_u, dL/dI_v>, and through the real edges only.

    Compared with three references: a dense network whose hallucinated weights are zero (bit for bit), the formula
    with dL/dI_v taken from autograd, and backpropagation by hand.
    """
    leaves = {name: getattr(graph, name).clone().requires_grad_() for name in ("phi", "theta", "psi")}
    weight = graph.weight.clone().requires_grad_()
    loss = graph.forward(real_edges(weight, graph.k, graph.allowed), **leaves)[0]
    to_weight, *to_params = torch.autograd.grad(loss, (weight, *leaves.values()))

    dense = torch.where(as_mask(graph.nodes, graph.real()), graph.weight, 0.0).requires_grad_()
    shift = torch.zeros(graph.nodes, graph.xs.shape[2], dtype=torch.float64, requires_grad=True)
    plain, states, _ = graph.forward(dense, shift, **leaves)
    to_dense, d_total, *expected = torch.autograd.grad(plain, (dense, shift, *leaves.values()))
    assert torch.equal(loss, plain)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(to_params, expected, strict=True))
    assert torch.equal(to_weight, to_dense * graph.allowed)
    torch.testing.assert_close(to_weight, states @ d_total.T * graph.allowed, rtol=1e-12, atol=1e-14)

    values: dict = {edge: graph.weight[edge].item() for edge in graph.pairs}
    for name, first in (("phi", 0), ("theta", graph.inputs), ("psi", graph.nodes - graph.outputs)):
        values |= {(name, first + n): value for n, value in enumerate(getattr(graph, name).tolist())}
    by_hand = backprop_by_hand(graph, values, graph.real(), step=0)
    for edge in graph.pairs:
        assert to_weight[edge].item() == pytest.approx(by_hand[edge], rel=1e-10, abs=1e-13)


@on_graphs
@given(graphs(), st.floats(-0.99, 0.99))
def test_values_of_hallucinated_weights_change_nothing(graph: Graph, factor: float) -> None:
    """Section 2.2, "we do not allow the gradient to flow through": scaling hallucinated weights has no effect."""
    real = as_mask(graph.nodes, graph.real())
    grads = []
    for weight in (graph.weight, torch.where(real, graph.weight, factor * graph.weight)):
        leaves = [p.clone().requires_grad_() for p in (weight, graph.phi, graph.theta, graph.psi)]
        effective = real_edges(leaves[0], graph.k, graph.allowed)
        loss = graph.forward(effective, phi=leaves[1], theta=leaves[2], psi=leaves[3])[0]
        grads.append([loss, *torch.autograd.grad(loss, leaves)])
    assert all(torch.equal(first, second) for first, second in zip(*grads, strict=True))


@settings(on_graphs, max_examples=30)
@given(graphs(acts=("tanh", "identity")), st.randoms(use_true_random=False))
def test_hallucinated_gradient_is_the_slope_of_adding_that_edge(graph: Graph, random: Random) -> None:
    """Algorithm 1's last line: <Z_u, dL/dI_v> equals the finite difference of adding the edge with weight +-h."""
    real = as_mask(graph.nodes, graph.real())
    edge = random.choice([edge for edge in graph.pairs if not real[edge]])
    losses = []
    for step in (1e-5, -1e-5):
        dense = torch.where(real, graph.weight, 0.0)
        dense[edge] = step
        losses.append(graph.forward(dense)[0].item())
    assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(gradient(graph)[edge].item(), rel=1e-5, abs=1e-8)
