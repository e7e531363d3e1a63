"""Nodes followed by batch norm: what their weights' scale changes, and what it does not."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from reference import SEEDS, on_graphs
from torch import Tensor

from wirings.selection.functional import choose, real_edges

EDGES = 6  # edges into the node, of which 4 are real


def batch_norm(channel: Tensor, eps: float = 0.0) -> Tensor:
    """Normalize all entries of one channel. PyTorch's function, which rejects eps = 0, is used for all other values."""
    if eps:
        return F.batch_norm(channel.reshape(-1, 1), None, None, training=True, eps=eps).reshape(channel.shape)
    return (channel - channel.mean()) / channel.std(correction=0)


@dataclass(frozen=True)
class Node:
    """One node on a batch of 3 x 3 maps: ReLU (or another function), convolution, batch norm, and a loss."""

    weight: Tensor  # (EDGES,)
    states: Tensor  # (EDGES, batch, 3, 3)
    kernel: Tensor  # (1, 1, 3, 3)
    target: Tensor  # (batch, 3, 3)

    def output(self, act: Callable[[Tensor], Tensor] = torch.relu, norm: bool = True, eps: float = 0.0) -> Tensor:
        total = torch.einsum("u,ubxy->bxy", real_edges(self.weight, 4), self.states)
        out = F.conv2d(act(total)[:, None], self.kernel, padding=1)[:, 0]
        return batch_norm(out, eps) if norm else out

    def grads(self, norm: bool = True) -> tuple[Tensor, Tensor]:
        """Gradients of the weights of all edges, real or hallucinated, and of the kernel."""
        leaves = self.weight.clone().requires_grad_(), self.kernel.clone().requires_grad_()
        node = replace(self, weight=leaves[0], kernel=leaves[1])
        loss = (1 + (node.output(norm=norm) - self.target) ** 2).sqrt().mean()
        return torch.autograd.grad(loss, leaves)

    @property
    def real(self) -> Tensor:
        return choose(self.weight, 4)


def some_node(seed: int, batch: int = 3) -> Node:
    rng = np.random.default_rng(seed)
    shapes = (EDGES,), (EDGES, batch, 3, 3), (1, 1, 3, 3), (batch, 3, 3)
    return Node(*(torch.from_numpy(rng.standard_normal(shape)) for shape in shapes))


NODES = st.builds(some_node, SEEDS, st.integers(2, 4))


SCALES = st.floats(0.05, 20.0)


close = {"rtol": 1e-6, "atol": 1e-8}


@on_graphs
@given(NODES, SCALES)
def test_batch_norm_hides_the_scale_of_the_incoming_weights(node: Node, scale: float) -> None:
    """Appendix "Effect of theta_v on w_uv": the output does not depend on the scale; gradients scale inversely."""
    scaled = replace(node, weight=scale * node.weight)
    torch.testing.assert_close(scaled.output(), node.output(), **close)
    torch.testing.assert_close(scaled.grads()[0] * scale, node.grads()[0], **close)
    torch.testing.assert_close(scaled.grads()[1], node.grads()[1], **close)
    assert (node.grads()[0][~node.real].abs() > 0).all()  # this includes the hallucinated edges


@on_graphs
@given(NODES, SCALES)
def test_batch_norm_hides_the_scale_of_the_kernel(node: Node, scale: float) -> None:
    """The appendix's concern, a kernel of arbitrary scale: with batch norm it does not change the edges' gradients.

    Without batch norm, the same error at the output gives gradients multiplied by the scale.
    """
    scaled = replace(node, kernel=scale * node.kernel)
    torch.testing.assert_close(scaled.output(), node.output(), **close)
    torch.testing.assert_close(scaled.grads()[0], node.grads()[0], **close)
    torch.testing.assert_close(scaled.grads()[1] * scale, node.grads()[1], **close)

    def to_weight(node: Node) -> Tensor:
        weight = node.weight.clone().requires_grad_()
        out = replace(node, weight=weight).output(norm=False)
        return torch.autograd.grad(out, weight, grad_outputs=node.target)[0]

    torch.testing.assert_close(to_weight(scaled), scale * to_weight(node), **close)


@on_graphs
@given(NODES, st.floats(0.01, 1.0))
def test_energy_of_real_incoming_weights_is_conserved(node: Node, alpha: float) -> None:
    """The appendix's "energy": the gradient is orthogonal to the real incoming weights, and to the kernel.

    So gradient flow keeps their norm, and a finite step increases its square by alpha^2 |gradient|^2.
    """
    to_weight, to_kernel = node.grads()
    real, to_real = node.weight[node.real], to_weight[node.real]
    assert abs(real @ to_real) <= 1e-9 * real.norm() * to_real.norm()
    assert abs((node.kernel * to_kernel).sum()) <= 1e-9 * node.kernel.norm() * to_kernel.norm()
    after = real - alpha * to_real
    torch.testing.assert_close(after @ after, real @ real + alpha**2 * (to_real @ to_real), rtol=1e-9, atol=0)


def test_energy_of_hallucinated_weights_is_not_conserved() -> None:
    """The appendix's statement covers only the weights that the node computes with."""
    for seed in range(10):
        node = some_node(seed)
        hallucinated, to_hallucinated = node.weight[~node.real], node.grads()[0][~node.real]
        assert abs(hallucinated @ to_hallucinated) > 1e-3 * hallucinated.norm() * to_hallucinated.norm()


def test_energy_drift_vanishes_with_the_step_size() -> None:
    """Four times as many steps over the same time give a quarter of the drift: gradient flow conserves the energy."""

    def drift(steps: int) -> float:
        node = some_node(0)
        node = replace(node, weight=node.weight[node.real], states=node.states[node.real])  # a fixed wiring
        start = node.weight @ node.weight
        for _ in range(steps):
            node = replace(node, weight=node.weight - 0.5 / steps * node.grads()[0])
        return (node.weight @ node.weight - start).item()

    coarse, fine = drift(50), drift(200)
    assert 0 < fine < coarse
    assert fine / coarse == pytest.approx(0.25, abs=0.03)


@on_graphs
@given(NODES, SCALES)
def test_scale_invariance_with_epsilon(node: Node, scale: float) -> None:
    """With batch norm's epsilon, the relative error is at most half of epsilon over the smaller variance."""
    eps = 1e-5
    scaled = replace(node, weight=scale * node.weight)
    bound = eps / (2 * node.output(norm=False).var(correction=0) * min(1.0, scale**2))
    difference = (scaled.output(eps=eps) - node.output(eps=eps)).abs()
    assert (difference <= bound * node.output().abs() + 1e-9).all()


def test_scale_invariance_needs_a_homogeneous_function_before_the_norm() -> None:
    """The appendix's statement holds for ReLU and convolution before the norm, but not for tanh."""
    node = some_node(0)
    scaled = replace(node, weight=3 * node.weight)
    torch.testing.assert_close(scaled.output(), node.output(), **close)
    assert (scaled.output(torch.tanh) - node.output(torch.tanh)).abs().max() > 0.1
    louder = replace(node, kernel=3 * node.kernel)
    torch.testing.assert_close(louder.output(torch.tanh), node.output(torch.tanh), **close)


def test_only_real_edge_of_a_normed_node_does_not_move() -> None:
    """A corollary: a gradient orthogonal to a single weight is zero. Hallucinated edges into the node do move."""
    node = some_node(0)
    weight = node.weight.clone().requires_grad_()
    total = torch.einsum("u,ubxy->bxy", real_edges(weight, 1), node.states)
    ((batch_norm(torch.relu(total)) - node.target) ** 2).mean().backward()
    real = choose(weight, 1)
    assert weight.grad[real].abs().item() < 1e-12
    assert (weight.grad[~real].abs() > 1e-3).all()


def test_scale_decides_the_ranking_across_nodes_although_batch_norm_hides_it() -> None:
    """Not in the appendix: conserved norms are not comparable between nodes. The first node is rescaled.

    The network still computes the same function, but with k = 3 the next choice of edges removes one of that node's.
    """
    rng = np.random.default_rng(0)
    states = torch.from_numpy(rng.standard_normal((2, 8)))
    weight = torch.tensor([[1.0, 0.9], [0.8, 0.7]], dtype=torch.float64)  # weight[u, v]; (1, 1) is hallucinated

    def normed(real: Tensor) -> Tensor:
        return torch.stack([batch_norm(total) for total in real.T @ states])

    real = choose(weight, 3)
    rescaled = weight * torch.tensor([0.5, 1.0], dtype=torch.float64)
    torch.testing.assert_close(normed(torch.where(real, rescaled, 0.0)), normed(real_edges(weight, 3)))
    assert real.tolist() == [[True, True], [True, False]]
    assert choose(rescaled, 3).tolist() == [[True, True], [False, True]]


def test_batch_norm_without_input_scales_gradients_by_one_over_root_epsilon() -> None:
    """A sum, batch norm and ReLU, as in MobileNetV1-DNW; the node has no real incoming edge and a positive shift."""
    eps, rng = 1e-5, np.random.default_rng(0)
    states, error = (torch.from_numpy(rng.standard_normal(shape)) for shape in ((3, 64), (64,)))

    def gradient(real: list[float], shift: float) -> Tensor:
        weight = torch.tensor(real, dtype=torch.float64, requires_grad=True)
        normed = torch.nn.functional.batch_norm((weight @ states)[:, None], None, None, training=True, eps=eps)[:, 0]
        (torch.relu(normed + shift) * error).sum().backward()
        return weight.grad

    centred = states - states.mean(1, keepdim=True)
    torch.testing.assert_close(gradient([0.0, 0.0, 0.0], 0.1), eps**-0.5 * centred @ error)
    assert gradient([0.0, 0.0, 0.0], 0.0).count_nonzero() == 0  # without a positive shift, ReLU blocks the gradient
    fed = gradient([1.0, 0.0, 0.0], 0.1)[1:].norm()
    assert gradient([0.0, 0.0, 0.0], 0.1)[1:].norm() > 100 * fed
