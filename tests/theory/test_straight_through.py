"""The straight-through estimator trains exactly as Algorithm 1 does."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ACTIVATIONS, Edge, Graph, Sgd, algorithm_1, graphs, make_graph, on_graphs

from wirings.selection.functional import real_edges


def train_straight_through(graph: Graph, sgd: Sgd) -> Iterator[tuple[list[Edge], dict]]:
    """Train like `algorithm_1`, but with `real_edges`, autograd and `torch.optim.SGD`."""
    weight, phi, theta, psi = params = [
        p.clone().requires_grad_() for p in (graph.weight, graph.phi, graph.theta, graph.psi)
    ]
    optimizer = torch.optim.SGD(
        params, lr=sgd.lr, momentum=sgd.momentum, weight_decay=sgd.weight_decay, nesterov=sgd.nesterov
    )
    first_out = graph.nodes - graph.outputs
    for step in range(len(graph.xs)):
        real = real_edges(weight, graph.k, graph.allowed)
        optimizer.zero_grad()
        graph.forward(real, step=step, phi=phi, theta=theta, psi=psi)[0].backward()
        optimizer.step()
        values: dict = {edge: weight[edge].item() for edge in graph.pairs}
        values |= {("phi", v): phi[v].item() for v in range(graph.inputs)}
        values |= {("theta", v): theta[v - graph.inputs].item() for v in range(graph.inputs, graph.nodes)}
        values |= {("psi", v): psi[v - first_out].item() for v in range(first_out, graph.nodes)}
        yield [(u, v) for u, v in real.detach().nonzero().tolist()], values


def assert_same_training(graph: Graph, sgd: Sgd) -> int:
    """Compare both after every step, and return the number of edges that were swapped in."""
    swaps, before = 0, None
    for (real, ours), (wiring, theirs) in zip(train_straight_through(graph, sgd), algorithm_1(graph, sgd), strict=True):
        assert set(real) == set(wiring)
        assert len(real) == graph.k
        assert ours.keys() == theirs.keys()
        np.testing.assert_allclose([ours[n] for n in theirs], list(theirs.values()), rtol=1e-9, atol=1e-11)
        swaps += 0 if before is None else len(set(real) - before)
        before = set(real)
    return swaps


SGDS = st.builds(
    Sgd,
    lr=st.floats(0.02, 0.3),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    weight_decay=st.sampled_from([0.0, 0.01, 0.2]),
).flatmap(lambda sgd: st.sampled_from([sgd, replace(sgd, nesterov=True)] if sgd.momentum else [sgd]))


@settings(on_graphs, max_examples=40)
@given(graphs(steps=6), SGDS)
def test_straight_through_estimator_equals_algorithm_1(graph: Graph, sgd: Sgd) -> None:
    """Appendix "Reformulation as a Straight-Through Estimator", with the momentum and weight decay of section 2.2."""
    assert_same_training(graph, sgd)


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize(
    "sgd",
    [
        Sgd(0.2),
        Sgd(0.2, weight_decay=0.1),
        Sgd(0.1, momentum=0.9),
        Sgd(0.1, momentum=0.9, weight_decay=0.05),
        Sgd(0.1, momentum=0.9, weight_decay=0.05, nesterov=True),
    ],
    ids=str,
)
def test_both_agree_while_edges_really_swap(sgd: Sgd, act: str) -> None:
    """The same on runs that are known to change the wiring, so that agreement is not trivial."""
    graph = make_graph(seed=0, inputs=3, hidden=4, outputs=2, batch=4, act=act, density=0.4, steps=12)
    assert assert_same_training(graph, sgd) >= 5
