"""The paper's theory as properties of random small graphs; `docs/theory.md` tells the same in words.

Everything runs in float64 or in exact fractions. The reference, `algorithm_1`, is written in NumPy with a loop over
nodes and a loop over pairs, its backpropagation by hand: it shares no code with `wirings` and none with autograd.

This file is longer than most, since the statements share one graph, one reference and one way to build a swap.

Names: edge (i, l) is the hallucinated one that enters, edge (j, k) the real one that leaves; k = l is the shared head.
Before the update |w_il| = a < b = |w_jk|; after it |w~_il| = A > B = |w~_jk|. A rate is d|w|/d(alpha).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from random import Random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from wirings.selection.functional import choose, real_edges, straight_through

Edge = tuple[int, int]
exact = settings(derandomize=True, deadline=None, database=None, max_examples=150)
graphic = settings(derandomize=True, deadline=None, database=None, max_examples=50)

ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable, Callable]] = {  # in torch, in NumPy, its derivative
    "tanh": (torch.tanh, np.tanh, lambda x: 1 - np.tanh(x) ** 2),
    "relu": (torch.relu, lambda x: np.maximum(x, 0), lambda x: (x > 0).astype(float)),
    "identity": (lambda x: x, lambda x: x, np.ones_like),
}


# ---- graphs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Graph:
    """A static neural graph. Nodes are in order: inputs (no parents), hidden nodes, outputs (no children).

    Z_v = phi_v x_v at inputs and act(I_v + theta_v) elsewhere, each a mini-batch; the loss is Lipschitz and smooth:
    the mean of sqrt(1 + (sum_v psi_v Z_v - y)^2) over the batch, v over the outputs.
    """

    inputs: int
    outputs: int
    act: str
    k: int
    weight: Tensor  # (nodes, nodes); weight[u, v] belongs to edge (u, v)
    phi: Tensor  # (inputs,)
    theta: Tensor  # (nodes - inputs,)
    psi: Tensor  # (outputs,)
    xs: Tensor  # (steps, inputs, batch)
    ys: Tensor  # (steps, batch)

    @property
    def nodes(self) -> int:
        return len(self.weight)

    @property
    def pairs(self) -> list[Edge]:
        """All allowed pairs u < v, row-major."""
        last = self.nodes - self.outputs
        return [(u, v) for u in range(last) for v in range(max(u + 1, self.inputs), self.nodes)]

    @property
    def allowed(self) -> Tensor:
        return as_mask(self.nodes, self.pairs)

    def real(self) -> list[Edge]:
        """The k pairs of largest magnitude, without `wirings`."""
        return sorted(self.pairs, key=lambda edge: -abs(self.weight[edge].item()))[: self.k]

    def forward(
        self, real: Tensor, shift: Tensor | None = None, step: int = 0, **params: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, states Z and inputs I, from the real edges' weights; ``shift`` (nodes, batch) is added to every I_v."""
        phi, theta, psi = (params.get(name, getattr(self, name)) for name in ("phi", "theta", "psi"))
        act = ACTIVATIONS[self.act][0]
        states = [phi[v] * self.xs[step, v] for v in range(self.inputs)]
        totals = [torch.zeros_like(state) for state in states]
        for v in range(self.inputs, self.nodes):
            total = real[:v, v] @ torch.stack(states)
            if shift is not None:
                total = total + shift[v]
            totals.append(total)
            states.append(act(total + theta[v - self.inputs]))
        out = psi @ torch.stack(states[-self.outputs :])
        return (1 + (out - self.ys[step]) ** 2).sqrt().mean(), torch.stack(states), torch.stack(totals)


def as_mask(nodes: int, edges: list[Edge]) -> Tensor:
    mask = torch.zeros(nodes, nodes, dtype=torch.bool)
    for edge in edges:
        mask[edge] = True
    return mask


def make_graph(
    seed: int, inputs: int, hidden: int, outputs: int, batch: int, act: str, density: float, steps: int = 1
) -> Graph:
    """Magnitudes lie in a narrow band, 0.5 to 0.8, so that edges swap often; no two are equal."""
    rng = np.random.default_rng(seed)
    nodes = inputs + hidden + outputs

    def draw(*shape: int) -> Tensor:
        return torch.from_numpy(rng.standard_normal(shape))

    weight = torch.from_numpy(rng.uniform(0.5, 0.8, (nodes, nodes)) * rng.choice([-1.0, 1.0], (nodes, nodes)))
    phi, theta, psi = 1 + 0.3 * draw(inputs), 0.3 * draw(nodes - inputs), 1 + 0.3 * draw(outputs)
    xs, ys = draw(steps, inputs, batch), 2 * draw(steps, batch)
    graph = Graph(inputs, outputs, act, 0, weight, phi, theta, psi, xs, ys)
    return replace(graph, k=max(2, min(len(graph.pairs) - 1, round(density * len(graph.pairs)))))


SEEDS = st.integers(0, 2**32 - 1)


def sizes(acts: tuple[str, ...] = tuple(ACTIVATIONS), hidden: int = 1) -> st.SearchStrategy[dict]:
    """All arguments of `make_graph` but its seed and steps."""
    return st.fixed_dictionaries(
        {
            "inputs": st.integers(2, 3),
            "hidden": st.integers(hidden, 4),
            "outputs": st.integers(1, 2),
            "batch": st.integers(1, 4),
            "act": st.sampled_from(acts),
            "density": st.floats(0.4, 0.8),
        }
    )


def graphs(steps: int = 1, acts: tuple[str, ...] = tuple(ACTIVATIONS)) -> st.SearchStrategy[Graph]:
    return st.builds(lambda seed, size: make_graph(seed, **size, steps=steps), SEEDS, sizes(acts))


def gradient(graph: Graph) -> Tensor:
    """<Z_u, dL/dI_v> for every pair: the derivative in a dense weight matrix that is zero off the real edges."""
    dense = torch.where(as_mask(graph.nodes, graph.real()), graph.weight, 0.0).requires_grad_()
    return torch.autograd.grad(graph.forward(dense)[0], dense)[0] * graph.allowed


def first_order(graph: Graph, at: Tensor, to: Tensor) -> float:
    """The first-order change of the loss from one set of real weights to another: its slope on the line between."""
    time = torch.zeros((), dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(graph.forward(at + time * (to - at))[0], time)[0].item()


def has_path(edges: list[Edge], start: int, end: int) -> bool:
    return start == end or any(has_path(edges, v, end) for u, v in edges if u == start)


# ---- the reference: Algorithm 1, line by line -----------------------------------------------------------------------


@dataclass(frozen=True)
class Sgd:
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def update(self, value: float, gradient: float, velocity: float | None) -> tuple[float, float]:
        gradient += self.weight_decay * value
        velocity = gradient if velocity is None else self.momentum * velocity + gradient
        step = gradient + self.momentum * velocity if self.nesterov else velocity
        return value - self.lr * step, velocity


def backprop_by_hand(graph: Graph, values: dict, real: list[Edge], step: int) -> dict:
    """The gradient of every parameter, and <Z_u, dL/dI_v> for *every* pair; only real edges carry it further back."""
    _, act, slope = ACTIVATIONS[graph.act]
    x, y = graph.xs[step].numpy(), graph.ys[step].numpy()
    nodes, first_out = range(graph.nodes), graph.nodes - graph.outputs
    total, state = {}, {}
    for v in nodes:
        if v < graph.inputs:
            state[v] = values["phi", v] * x[v]
        else:
            total[v] = sum((values[u, t] * state[u] for u, t in real if t == v), start=np.zeros_like(y))
            state[v] = act(total[v] + values["theta", v])
    error = sum(values["psi", v] * state[v] for v in nodes[first_out:]) - y
    d_out = error / np.sqrt(1 + error**2) / len(y)
    grads, d_total = {}, {}
    for v in reversed(nodes):
        d_state = sum((values[u, t] * d_total[t] for u, t in real if u == v), start=np.zeros_like(y))
        if v >= first_out:
            d_state = d_state + values["psi", v] * d_out
            grads["psi", v] = state[v] @ d_out
        if v < graph.inputs:
            grads["phi", v] = x[v] @ d_state
        else:
            d_total[v] = d_state * slope(total[v] + values["theta", v])
            grads["theta", v] = d_total[v].sum()
    for u, v in graph.pairs:
        grads[u, v] = state[u] @ d_total[v]
    return grads


def algorithm_1(graph: Graph, sgd: Sgd) -> Iterator[tuple[list[Edge], dict]]:
    """After every training iteration: the edges it chose and the parameters it left."""
    values: dict = {edge: graph.weight[edge].item() for edge in graph.pairs}
    values |= {("phi", v): graph.phi[v].item() for v in range(graph.inputs)}
    values |= {("theta", graph.inputs + n): value.item() for n, value in enumerate(graph.theta)}
    values |= {("psi", graph.nodes - graph.outputs + n): value.item() for n, value in enumerate(graph.psi)}
    velocity: dict = {}
    for step in range(len(graph.xs)):
        real = sorted(graph.pairs, key=lambda edge: -abs(values[edge]))[: graph.k]
        grads = backprop_by_hand(graph, values, real, step)
        for name in values:
            values[name], velocity[name] = sgd.update(values[name], grads[name], velocity.get(name))
        yield real, dict(values)


def train_straight_through(graph: Graph, sgd: Sgd) -> Iterator[tuple[list[Edge], dict]]:
    """The same by `real_edges`, autograd and `torch.optim.SGD`."""
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
    """Compare both after every step; the number of edges that were swapped on the way."""
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


@settings(graphic, max_examples=40)
@given(graphs(steps=6), SGDS)
def test_the_straight_through_estimator_is_algorithm_1(graph: Graph, sgd: Sgd) -> None:
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
def test_the_two_agree_while_edges_really_swap(sgd: Sgd, act: str) -> None:
    """The same statement, on runs that are known to change the wiring: agreement is not that of a fixed graph."""
    graph = make_graph(seed=0, inputs=3, hidden=4, outputs=2, batch=4, act=act, density=0.4, steps=12)
    assert assert_same_training(graph, sgd) >= 5


# ---- to, but not through --------------------------------------------------------------------------------------------


def test_gradients_of_three_nodes_by_hand() -> None:
    """Figure "Gradient flow" on nodes 0, 1, 2 with edges (0,1) and (1,2) real and (0,2) hallucinated.

    By hand: Z_0 = phi x = (1, -1); I_1 = 2 Z_0 = (2, -2), Z_1 = relu(I_1) = (2, 0); I_2 = 3 Z_1 = (6, 0).
    L = 1/2 |I_2 - (5, 1)|^2, so dL/dI_2 = (1, -1) and dL/dI_1 = 3 (1, -1) relu'(I_1) = (3, 0).
    (1,2): <Z_1, dL/dI_2> = 2. (0,1): <Z_0, dL/dI_1> = 3. (0,2): <Z_0, dL/dI_2> = 2.
    dL/dZ_0 = 2 (3, 0) = (6, 0), so dL/dphi = 6; through the hallucinated edge it would be (7, -1) and 8.
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


@graphic
@given(graphs())
def test_every_pair_gets_its_gradient_and_no_parameter_feels_a_hallucinated_edge(graph: Graph) -> None:
    """Section 2.2: the gradient flows to every pair as <Z_u, dL/dI_v>, and through the real edges only.

    Against three references: a dense network whose hallucinated weights are zero (bit for bit), the formula with
    dL/dI_v taken from autograd, and the backpropagation by hand.
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


@graphic
@given(graphs(), st.floats(-0.99, 0.99))
def test_the_values_of_hallucinated_weights_change_nothing(graph: Graph, factor: float) -> None:
    """Section 2.2, "we do not allow the gradient to flow through": scaling hallucinated weights is not felt at all."""
    real = as_mask(graph.nodes, graph.real())
    grads = []
    for weight in (graph.weight, torch.where(real, graph.weight, factor * graph.weight)):
        leaves = [p.clone().requires_grad_() for p in (weight, graph.phi, graph.theta, graph.psi)]
        effective = real_edges(leaves[0], graph.k, graph.allowed)
        loss = graph.forward(effective, phi=leaves[1], theta=leaves[2], psi=leaves[3])[0]
        grads.append([loss, *torch.autograd.grad(loss, leaves)])
    assert all(torch.equal(first, second) for first, second in zip(*grads, strict=True))


@settings(graphic, max_examples=30)
@given(graphs(acts=("tanh", "identity")), st.randoms(use_true_random=False))
def test_a_hallucinated_gradient_is_the_slope_of_adding_that_edge(graph: Graph, random: Random) -> None:
    """Algorithm 1's last line: <Z_u, dL/dI_v> by finite differences, the edge added with a weight of +-h."""
    real = as_mask(graph.nodes, graph.real())
    edge = random.choice([edge for edge in graph.pairs if not real[edge]])
    losses = []
    for step in (1e-5, -1e-5):
        dense = torch.where(real, graph.weight, 0.0)
        dense[edge] = step
        losses.append(graph.forward(dense)[0].item())
    assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(gradient(graph)[edge].item(), rel=1e-5, abs=1e-8)


# ---- the inequality behind the claim, in exact arithmetic -----------------------------------------------------------


def gap(w_i: Fraction, new_i: Fraction, w_j: Fraction, new_j: Fraction) -> Fraction:
    """Left minus right side of `eq:ineq`; the claim wants it >= 0."""
    return new_i * (new_i - w_i) - new_j * (new_j - w_j)


def within(low: int | Fraction, high: int | Fraction) -> st.SearchStrategy[Fraction]:
    """A fraction strictly between two others."""
    return st.integers(1, 999).map(lambda n: low + (high - low) * Fraction(n, 1000))


signs = st.sampled_from([1, -1])
POSITIVE = within(0, 5)


@exact
@given(st.data(), signs, signs)
def test_ineq_holds_for_every_alpha_when_the_entering_edge_does_not_shrink(
    data: st.DataObject, sign_i: int, sign_j: int
) -> None:
    """`eq:ineq`, the two cases of the proof and more: no bound on alpha is needed, and w_ik = 0 is no exception."""
    a = data.draw(st.one_of(st.just(Fraction(0)), POSITIVE))
    b = a + data.draw(POSITIVE)
    new_a = a + data.draw(st.one_of(st.just(Fraction(0)), POSITIVE) if a else POSITIVE)
    new_b = data.draw(within(0, new_a))
    assert gap(sign_i * a, sign_i * new_a, sign_j * b, sign_j * new_b) > 0


@exact
@given(st.data(), signs, signs)
def test_ineq_holds_below_alpha_star_in_every_case(data: st.DataObject, sign_i: int, sign_j: int) -> None:
    """`eq:ineq` under the condition that defines alpha*, A <= B + (b - a) B / a: true whether edges grow or shrink."""
    a = data.draw(POSITIVE)
    b = a + data.draw(POSITIVE)
    new_b = data.draw(POSITIVE)
    new_a = data.draw(st.one_of(within(new_b, new_b * b / a), st.just(new_b * b / a)))
    assert new_a <= new_b + (b - a) * new_b / a
    assert gap(sign_i * a, sign_i * new_a, sign_j * b, sign_j * new_b) > 0


@exact
@given(st.data())
def test_alpha_star_lies_beyond_the_crossing(data: st.DataObject) -> None:
    """The end of the proof: there are alphas that swap the edges and are below alpha*. Here for an edge that grows."""
    a = data.draw(POSITIVE)
    b = a + data.draw(POSITIVE)
    p = data.draw(POSITIVE)
    q = p - data.draw(POSITIVE)
    crossing = (b - a) / (p - q)
    assert a + crossing * p == b + crossing * q > 0
    assert a * p <= b * q or (b**2 - a**2) / (a * p - b * q) > crossing


@dataclass(frozen=True)
class BothShrink:
    """Two shrinking edges whose magnitudes a - alpha P and b - alpha Q cross before the second one changes sign."""

    a: Fraction
    b: Fraction
    p: Fraction
    q: Fraction

    @property
    def crossing(self) -> Fraction:
        return (self.b - self.a) / (self.q - self.p)

    @property
    def alpha_star(self) -> Fraction:
        """The first alpha that breaks the paper's condition A a <= B b."""
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


@exact
@given(both_shrink(), st.data())
def test_ineq_when_both_edges_shrink(case: BothShrink, data: st.DataObject) -> None:
    """`eq:ineq` where the proof is silent: it holds up to an exact limit beyond alpha*, and *fails* from there on.

    The failing range is never empty: it reaches up to the alpha at which w_jk changes sign. Every premise holds in it.
    """
    assert 0 < case.crossing < case.alpha_star <= case.exact_limit < case.sign_change
    below = data.draw(within(case.crossing, case.exact_limit))
    above = data.draw(within(case.exact_limit, case.sign_change))
    for alpha in (below, above):
        new_a, new_b = case.a - alpha * case.p, case.b - alpha * case.q
        assert new_a > new_b > 0  # the swap happens, the signs are kept
    assert case.gap(below) > 0
    assert case.gap(case.exact_limit) == 0
    assert case.gap(above) < 0


def test_ineq_fails_by_hand_when_both_edges_shrink() -> None:
    """The claim without alpha*, broken by numbers: a linear loss, so that first order is all there is.

    L = I_k, Z_i = 1, Z_j = 2, w_ik = 1, w_jk = 1.1, alpha = 0.5: the weights become 0.5 and 0.1.
    The loss was 2.2; it is 0.2 without the swap and 0.5 with it.
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
    """alpha* as the paper writes it: the set under the supremum has a hole once signs may change.

    In the case above the condition holds up to 0.175 and again from 0.69 on without end: its supremum is infinite, so
    alpha = 0.5 lies "below alpha*", the signs are kept, the swap happens, and `eq:ineq` fails.
    """

    def in_the_set(alpha: Fraction) -> bool:
        new_i, new_j = abs(1 - alpha), abs(Fraction(11, 10) - 2 * alpha)
        return new_i <= new_j + Fraction(1, 10) * new_j / 1

    assert in_the_set(Fraction(17, 100))
    assert not in_the_set(Fraction(1, 2))
    assert all(in_the_set(Fraction(n)) for n in (1, 10, 1000, 10**6))


@exact
@given(st.data(), signs, signs)
def test_ineq_holds_when_the_entering_edge_changes_sign(data: st.DataObject, sign_i: int, sign_j: int) -> None:
    """The assumption sign(w~) = sign(w) is not needed of the edge that enters."""
    a = data.draw(POSITIVE)
    b = a + data.draw(POSITIVE)
    new_a = data.draw(POSITIVE)
    new_b = data.draw(within(0, new_a))
    assert gap(sign_i * a, -sign_i * new_a, sign_j * b, sign_j * new_b) > 0


def test_ineq_can_fail_when_the_leaving_edge_changes_sign() -> None:
    """The assumption sign(w~) = sign(w) is needed of the edge that leaves: the gradient wants it, now reversed."""
    assert gap(Fraction(1), Fraction(11, 10), Fraction(3, 2), Fraction(-1)) < 0


@exact
@given(st.data(), signs, signs)
def test_ineq_survives_weight_decay(data: st.DataObject, sign_i: int, sign_j: int) -> None:
    """The claim with weight decay: decay scales both weights by 1 - alpha lambda first, which keeps their order.

    The gradient's share of a step is w~ - (1 - alpha lambda) w, and that is what the first-order change contains.
    """
    a = data.draw(POSITIVE)
    b = a + data.draw(POSITIVE)
    kept = data.draw(within(0, 1))
    new_a = kept * a + data.draw(POSITIVE)  # the gradient does not shrink it, though decay may
    new_b = data.draw(within(0, new_a))
    assert gap(sign_i * kept * a, sign_i * new_a, sign_j * kept * b, sign_j * new_b) > 0


def test_the_claim_does_not_survive_momentum() -> None:
    """Momentum can swap an edge in against the present gradient: even a linear loss rises then.

    L = -I_k. The first mini-batch (Z_i = 2, Z_j = 0) pushes w_ik from 0.7 to 0.9; on the second (Z_i = -1/2,
    Z_j = 1/10) the gradient wants w_ik smaller, but its velocity takes it to 1.03, past w_jk = 1.01.
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


# ---- the first-order change of the loss, swap against no swap, on graphs --------------------------------------------


@dataclass(frozen=True)
class Swap:
    """A graph in which an update with rate alpha lifts the hallucinated edge ``enters`` over the real ``leaves``."""

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
        """Left minus right side of `eq:ineq`."""
        change = self.updated * (self.updated - self.graph.weight)
        return (change[self.enters] - change[self.leaves]).item()

    def real_weights(self, heads_only: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Real weights before the update, after it with the swap, and after it without.

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
    """Pairs (enters, leaves) that can be made to swap, with signs kept, by the choice of alpha and the weight of one.

    A hallucinated weight is free as long as it stays below the real ones: no gradient depends on it.
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
    """``path``: from i to j, in the wiring with the new edge. ``shrink``: both edges do, alpha between these two marks.

    Marks: 0 is where the magnitudes cross, 1 the exact limit of `eq:ineq`, 2 where w_jk changes sign.
    """
    seed, size = draw(SEEDS), draw(sizes(hidden=2))
    for further in range(100):  # the first graph from this seed on that has such a pair
        graph = make_graph(seed + further, **size)
        grad = gradient(graph)
        if fitting := fitting_pairs(graph, grad, same_head, path, shrink is not None):
            break
    enters, leaves = draw(st.sampled_from(fitting))
    weakest = min(abs(graph.weight[edge].item()) for edge in graph.real())
    b, q = abs(graph.weight[leaves].item()), -(graph.weight[leaves].sign() * grad[leaves]).item()
    p, share = abs(grad[enters].item()), draw(st.floats(0.1, 0.9))
    sign_change = b / -q if q < 0 else float("inf")
    if shrink:  # the entering edge has to decay relatively slower than the leaving one
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
    """The first-order change as the proof writes it: the sum of <A_v - I_v, dL/dI_v> over the heads, A_v at fixed Z."""
    shift = torch.zeros(swap.graph.nodes, swap.graph.xs.shape[2], dtype=torch.float64, requires_grad=True)
    loss, states, totals = swap.graph.forward(before, shift)
    d_total = torch.autograd.grad(loss, shift)[0]
    heads = {swap.enters[1], swap.leaves[1]}
    return sum(((after[:, v] @ states - totals[v]) @ d_total[v]).item() for v in heads)


def assert_first_order(swap: Swap, better: bool = True) -> None:
    """Swap against no swap, and the same change from three sides: along the weights, at fixed states, by `eq:ineq`."""
    for heads_only in (True, False):
        before, swapped, kept = swap.real_weights(heads_only)
        with_swap, without = first_order(swap.graph, before, swapped), first_order(swap.graph, before, kept)
        # "iff" in the proof: the difference of the two changes is the difference of the two sides, over alpha
        assert swap.alpha * (without - with_swap) == pytest.approx(swap.ineq, rel=1e-7, abs=1e-12)
        if heads_only:
            for after, change in ((swapped, with_swap), (kept, without)):
                assert at_fixed_states(swap, before, after) == pytest.approx(change, rel=1e-7, abs=1e-12)
        assert (with_swap < without) == better
        assert with_swap < 0  # against the loss before the update the swap is always downhill, to first order


@graphic
@given(swaps(same_head=True))
def test_first_order_change_for_a_shared_head(swap: Swap) -> None:
    """The claim of section 2.2: the hallucinated (i,k) replaces the real (j,k)."""
    assert swap.ineq > 0
    assert_first_order(swap)


@graphic
@given(swaps(same_head=False))
def test_first_order_change_for_two_heads_without_a_path(swap: Swap) -> None:
    """Appendix "A More General Case": (i,l) replaces (j,k), no path from i to j, not even with the new edge."""
    assert swap.ineq > 0
    assert_first_order(swap)


@graphic
@given(swaps(same_head=False, path=True))
def test_first_order_change_needs_no_condition_on_paths(swap: Swap) -> None:
    """The same with a path from i to j: backpropagation is a total derivative, so paths are already counted in it."""
    assert swap.ineq > 0
    assert_first_order(swap)


@graphic
@given(st.booleans().flatmap(lambda same: swaps(same_head=same, shrink=(0.05, 0.95))))
def test_first_order_change_when_both_edges_shrink_a_little(swap: Swap) -> None:
    """The case the proof leaves out, below its exact limit (so below alpha* as well): the swap is the better move."""
    assert swap.ineq > 0
    assert_first_order(swap)


@graphic
@given(st.booleans().flatmap(lambda same: swaps(same_head=same, shrink=(1.05, 1.95))))
def test_first_order_change_when_both_edges_shrink_a_lot(swap: Swap) -> None:
    """The case the proof leaves out, above its exact limit: signs are kept, and yet the swap is the *worse* move."""
    assert swap.ineq < 0
    assert_first_order(swap, better=False)


def test_no_path_from_i_to_j_does_not_fix_the_states() -> None:
    """Appendix "A More General Case": a path from k to i breaks "the states are fixed" just as well.

    Nodes j=0, k=1, i=2, l=3 in a chain, all linear, Z_0 = 1; (0,1), (1,2), (1,3) real with weights 1, 2, 1. Replace
    (0,1) by (2,3). At fixed states I_3 = 1 Z_1 + 0.5 Z_2 = 2. In truth nothing reaches node 1 any more, so I_3 = 0.
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
    """What the appendix needs for its A_k and A_l: then both inputs move, by a finite step, exactly as it writes."""
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


# ---- what holds without any condition -------------------------------------------------------------------------------


@exact
@given(st.data())
def test_a_swap_is_downhill_from_the_old_weights_whatever_alpha(data: st.DataObject) -> None:
    """Not in the paper: |x| < |y| and |X| > |Y| give X (X - x) > y (Y - y), whatever the signs.

    So the first-order change from *before* the update is negative for every swap and every alpha.
    """
    y, new_x = (data.draw(signs) * data.draw(POSITIVE) for _ in range(2))
    x, new_y = y * data.draw(within(-1, 1)), new_x * data.draw(within(-1, 1))
    assert new_x * (new_x - x) > y * (new_y - y)


@graphic
@given(graphs(), st.floats(0.01, 100.0))
def test_a_whole_step_never_points_uphill(graph: Graph, alpha: float) -> None:
    """Not in the paper: a step of Algorithm 1, with all its swaps, is a first-order descent for every alpha.

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


def test_whole_steps_of_that_kind_do_swap() -> None:
    """The property above is not about fixed wirings: large rates swap edges on most graphs."""
    swapped = 0
    for seed in range(20):
        graph = make_graph(seed, inputs=3, hidden=3, outputs=2, batch=3, act="tanh", density=0.5)
        after = choose(graph.weight - 1.0 * gradient(graph), graph.k, graph.allowed)
        swapped += not torch.equal(after, choose(graph.weight, graph.k, graph.allowed))
    assert swapped >= 15


# ---- Lemma 1 --------------------------------------------------------------------------------------------------------


@exact
@given(SEEDS, st.integers(1, 5), within(0, 1))
def test_lemma_1_with_an_explicit_bound_on_alpha(seed: int, batch: int, share: Fraction) -> None:
    """Lemma 1 at an output node, "sufficiently small" made explicit: the loss bends by at most M = psi^2 / batch.

    So any alpha below 2 d / (M (|gamma_1|^2 + |gamma_2|^2)) will do, d being the first-order lead of gamma_1.
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
    assume(bound > 1e-6)  # below, the two losses differ by less than float64 tells
    for halvings in range(4):
        alpha = float(share) * bound / 2**halvings
        assert loss(total + alpha * gamma_1) < loss(total + alpha * gamma_2)


@settings(graphic, max_examples=40)
@given(graphs(acts=("tanh", "identity")), SEEDS, st.sampled_from([1, 2]))
def test_lemma_1_for_all_small_alpha_on_graphs(graph: Graph, seed: int, heads: int) -> None:
    """Lemma 1 for one node and its version for two, (gamma, xi), on smooth graphs, by shrinking alpha.

    The true lead over alpha tends to the first-order lead, and its sign is right from the first alpha on.
    """
    rng = np.random.default_rng(seed)
    real = torch.where(as_mask(graph.nodes, graph.real()), graph.weight, 0.0)
    shape = (graph.nodes, graph.xs.shape[2])
    moved = torch.zeros(shape, dtype=torch.float64)
    moved[rng.choice(np.arange(graph.inputs, graph.nodes - 1), heads - 1, replace=False)] = 1.0
    moved[graph.nodes - 1] = 1.0  # an output, whose gradient cannot vanish on the whole batch

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
    """The claim asks for a Lipschitz loss; Lemma 1's expansion needs more. L = max(I_0, I_1) at a tie is Lipschitz.

    Its reported gradient is (1/2, 1/2). Along (1, -1.2) that promises -0.1 alpha; the truth is +alpha, for every alpha.
    """
    total = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    slope = torch.autograd.grad(total.amax(), total)[0]
    along = torch.tensor([1.0, -1.2], dtype=torch.float64)
    assert (slope @ along).item() == pytest.approx(-0.1)
    for alpha in (1.0, 1e-3, 1e-6):
        assert (alpha * along).amax().item() == alpha


# ---- the worked counterexample of docs/theory.md --------------------------------------------------------------------


@pytest.mark.parametrize(("margin", "after_swap"), [(0.02, 0.3872), (0.002, 0.326432), (0.0002, 0.32064032)])
def test_the_true_loss_rises_although_the_claim_holds(margin: float, after_swap: float) -> None:
    """The claim promises a first-order lead only. Z_j = 1, Z_i = 2, L = 1/2 (I_k - 1.2)^2, w_jk = 1, w_ik = 1 - margin.

    dL/dI_k = -0.2 and the rates are 0.4 and 0.2: the edges cross at alpha = 5 margin, and alpha* is about 10 margin.
    With alpha = 7.5 margin all premises hold. However small alpha, I_k jumps from 1 to about 2, past the target.
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
    assert 0 < a < b  # the premises: it was weaker,
    assert new_a > new_b > 0  # is stronger, signs kept,
    assert alpha < (b * b - a * a) / (0.4 * a - 0.2 * b)  # alpha < alpha*,
    assert new_a * (new_a - a) > new_b * (new_b - b)  # and `eq:ineq` holds

    slope = -0.2
    assert slope * (new_a * 2 - 1) < slope * (new_b - 1) < 0  # first order: down, and more so with the swap
    no_swap, swap = loss(updated[0] * 1.0).item(), loss(real_edges(updated, 1) @ states).item()
    assert no_swap < before.item() == pytest.approx(0.02)
    assert swap == pytest.approx(after_swap)
    assert swap > 15 * before.item()


# ---- batch norm -----------------------------------------------------------------------------------------------------

EDGES = 6  # pairs into the node below; 4 of them real


def batch_norm(channel: Tensor, eps: float = 0.0) -> Tensor:
    """Over all entries of one channel. PyTorch's own refuses an epsilon of zero; with any other, it is used."""
    if eps:
        return F.batch_norm(channel.reshape(-1, 1), None, None, training=True, eps=eps).reshape(channel.shape)
    return (channel - channel.mean()) / channel.std(correction=0)


@dataclass(frozen=True)
class Node:
    """One node on a batch of 3 x 3 channels: relu (or another function), convolution, batch norm, and a loss."""

    weight: Tensor  # (EDGES,)
    states: Tensor  # (EDGES, batch, 3, 3)
    kernel: Tensor  # (1, 1, 3, 3)
    target: Tensor  # (batch, 3, 3)

    def output(self, act: Callable[[Tensor], Tensor] = torch.relu, norm: bool = True, eps: float = 0.0) -> Tensor:
        total = torch.einsum("u,ubxy->bxy", real_edges(self.weight, 4), self.states)
        out = F.conv2d(act(total)[:, None], self.kernel, padding=1)[:, 0]
        return batch_norm(out, eps) if norm else out

    def grads(self, norm: bool = True) -> tuple[Tensor, Tensor]:
        """With respect to the weights of all edges, real or not, and to the kernel."""
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


@graphic
@given(NODES, SCALES)
def test_batch_norm_hides_the_scale_of_the_incoming_weights(node: Node, scale: float) -> None:
    """Appendix "Effect of theta_v on w_uv": the node's output ignores the scale, and gradients go with its inverse."""
    scaled = replace(node, weight=scale * node.weight)
    torch.testing.assert_close(scaled.output(), node.output(), **close)
    torch.testing.assert_close(scaled.grads()[0] * scale, node.grads()[0], **close)
    torch.testing.assert_close(scaled.grads()[1], node.grads()[1], **close)
    assert (node.grads()[0][~node.real].abs() > 0).all()  # hallucinated edges take part


@graphic
@given(NODES, SCALES)
def test_batch_norm_hides_the_scale_of_the_kernel(node: Node, scale: float) -> None:
    """The appendix's worry, a kernel scaled up at will: with batch norm the edges' gradients do not notice it.

    Without batch norm the same gradients, for the same error at the output, are multiplied by the scale.
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


@graphic
@given(NODES, st.floats(0.01, 1.0))
def test_the_energy_of_real_incoming_weights_is_conserved(node: Node, alpha: float) -> None:
    """The appendix's "energy": the gradient is orthogonal to the real incoming weights, and to the kernel.

    So gradient flow keeps their norm, and a finite step makes it grow by alpha^2 |gradient|^2, never shrink.
    """
    to_weight, to_kernel = node.grads()
    real, to_real = node.weight[node.real], to_weight[node.real]
    assert abs(real @ to_real) <= 1e-9 * real.norm() * to_real.norm()
    assert abs((node.kernel * to_kernel).sum()) <= 1e-9 * node.kernel.norm() * to_kernel.norm()
    after = real - alpha * to_real
    torch.testing.assert_close(after @ after, real @ real + alpha**2 * (to_real @ to_real), rtol=1e-9, atol=0)


def test_the_energy_of_hallucinated_weights_is_not_conserved() -> None:
    """The appendix's statement covers what the node computes with; a hallucinated weight is not part of that."""
    for seed in range(10):
        node = some_node(seed)
        hallucinated, to_hallucinated = node.weight[~node.real], node.grads()[0][~node.real]
        assert abs(hallucinated @ to_hallucinated) > 1e-3 * hallucinated.norm() * to_hallucinated.norm()


def test_the_energy_drifts_less_the_closer_steps_come_to_gradient_flow() -> None:
    """Conservation in the limit: the same time in four times as many steps, a fourth of the drift."""

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


@graphic
@given(NODES, SCALES)
def test_scale_invariance_with_epsilon(node: Node, scale: float) -> None:
    """The same with batch norm's epsilon: off by at most half of epsilon over the smaller variance, relatively."""
    eps = 1e-5
    scaled = replace(node, weight=scale * node.weight)
    bound = eps / (2 * node.output(norm=False).var(correction=0) * min(1.0, scale**2))
    difference = (scaled.output(eps=eps) - node.output(eps=eps)).abs()
    assert (difference <= bound * node.output().abs() + 1e-9).all()


def test_scale_invariance_needs_a_homogeneous_function_before_the_norm() -> None:
    """The appendix's statement, with relu and convolution before the norm; a tanh there does feel the scale."""
    node = some_node(0)
    scaled = replace(node, weight=3 * node.weight)
    torch.testing.assert_close(scaled.output(), node.output(), **close)
    assert (scaled.output(torch.tanh) - node.output(torch.tanh)).abs().max() > 0.1
    louder = replace(node, kernel=3 * node.kernel)
    torch.testing.assert_close(louder.output(torch.tanh), node.output(torch.tanh), **close)


def test_the_only_real_edge_of_a_normed_node_does_not_move() -> None:
    """A corollary: orthogonal to a single number means zero. The hallucinated edges into the node do move."""
    node = some_node(0)
    weight = node.weight.clone().requires_grad_()
    total = torch.einsum("u,ubxy->bxy", real_edges(weight, 1), node.states)
    ((batch_norm(torch.relu(total)) - node.target) ** 2).mean().backward()
    real = choose(weight, 1)
    assert weight.grad[real].abs().item() < 1e-12
    assert (weight.grad[~real].abs() > 1e-3).all()


def test_scale_decides_the_ranking_across_nodes_though_batch_norm_hides_it() -> None:
    """What the appendix does not say: conserved is not comparable. Two normed nodes, the second's weights rescaled.

    The network computes the same function; but with k = 3 the next choice of edges takes away one of its edges.
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


def test_a_batch_norm_without_input_hands_on_gradients_times_one_over_the_root_of_epsilon() -> None:
    """Norm, relu and a sum, as in MobileNetV1-DNW: all edges into the node are hallucinated, its shift is positive."""
    eps, rng = 1e-5, np.random.default_rng(0)
    states, error = (torch.from_numpy(rng.standard_normal(shape)) for shape in ((3, 64), (64,)))

    def gradient(real: list[float], shift: float) -> Tensor:
        weight = torch.tensor(real, dtype=torch.float64, requires_grad=True)
        normed = torch.nn.functional.batch_norm((weight @ states)[:, None], None, None, training=True, eps=eps)[:, 0]
        (torch.relu(normed + shift) * error).sum().backward()
        return weight.grad

    centred = states - states.mean(1, keepdim=True)
    torch.testing.assert_close(gradient([0.0, 0.0, 0.0], 0.1), eps**-0.5 * centred @ error)
    assert gradient([0.0, 0.0, 0.0], 0.0).count_nonzero() == 0  # a shift that is not positive lets nothing through
    fed = gradient([1.0, 0.0, 0.0], 0.1)[1:].norm()
    assert gradient([0.0, 0.0, 0.0], 0.1)[1:].norm() > 100 * fed
