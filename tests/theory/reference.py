"""Small random graphs, and the paper's Algorithm 1 in plain NumPy: what the tests of the theory share.

The tests state the paper's theory as properties of small random graphs; `docs/theory.md` explains the same in words.
Everything runs in float64 or in exact fractions. The reference, `algorithm_1`, loops over nodes and pairs and
backpropagates by hand: it shares no code with `wirings` and none with autograd.

Notation: edge (i, l) is the hallucinated edge that enters, edge (j, k) the real edge that leaves; k = l if they share a
head. Before the update |w_il| = a < b = |w_jk|; after it |w~_il| = A > B = |w~_jk|. A rate is d|w|/d(alpha).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

Edge = tuple[int, int]


in_fractions = settings(derandomize=True, deadline=None, database=None, max_examples=150)


on_graphs = settings(derandomize=True, deadline=None, database=None, max_examples=50)


ACTIVATIONS: dict[
    str, tuple[Callable[[Tensor], Tensor], Callable, Callable]
] = {  # in PyTorch, in NumPy, and its derivative
    "tanh": (torch.tanh, np.tanh, lambda x: 1 - np.tanh(x) ** 2),
    "relu": (torch.relu, lambda x: np.maximum(x, 0), lambda x: (x > 0).astype(float)),
    "identity": (lambda x: x, lambda x: x, np.ones_like),
}


@dataclass(frozen=True)
class Graph:
    """A static neural graph. Its nodes are ordered: inputs (no parents), hidden nodes, outputs (no children).

    Every state is a mini-batch: Z_v = phi_v x_v at inputs and act(I_v + theta_v) elsewhere. The loss is Lipschitz and
    smooth: the mean over the batch of sqrt(1 + (sum_v psi_v Z_v - y)^2), where v runs over the outputs.
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
        """All allowed pairs u < v, in row-major order."""
        last = self.nodes - self.outputs
        return [(u, v) for u in range(last) for v in range(max(u + 1, self.inputs), self.nodes)]

    @property
    def allowed(self) -> Tensor:
        return as_mask(self.nodes, self.pairs)

    def real(self) -> list[Edge]:
        """The k pairs of largest magnitude, computed without `wirings`."""
        return sorted(self.pairs, key=lambda edge: -abs(self.weight[edge].item()))[: self.k]

    def forward(
        self, real: Tensor, shift: Tensor | None = None, step: int = 0, **params: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the loss, the states Z and the inputs I; ``shift`` (nodes, batch) is added to the inputs."""
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
    """Make a random graph. Magnitudes lie between 0.5 and 0.8, so that edges swap often; no two are equal."""
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
    """All arguments of `make_graph` except the seed and the steps."""
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
    """<Z_u, dL/dI_v> for every pair: the gradient of a dense weight matrix that is zero except at real edges."""
    dense = torch.where(as_mask(graph.nodes, graph.real()), graph.weight, 0.0).requires_grad_()
    return torch.autograd.grad(graph.forward(dense)[0], dense)[0] * graph.allowed


def first_order(graph: Graph, at: Tensor, to: Tensor) -> float:
    """The first-order change of the loss between two sets of real weights: its slope along the line from ``at``."""
    time = torch.zeros((), dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(graph.forward(at + time * (to - at))[0], time)[0].item()


def has_path(edges: list[Edge], start: int, end: int) -> bool:
    return start == end or any(has_path(edges, v, end) for u, v in edges if u == start)


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
    """The gradient of every parameter, and <Z_u, dL/dI_v> for *every* pair; only real edges propagate it further."""
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
    """Yield the chosen edges and the updated parameters after every training iteration."""
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


def within(low: int | Fraction, high: int | Fraction) -> st.SearchStrategy[Fraction]:
    """Fractions strictly between ``low`` and ``high``."""
    return st.integers(1, 999).map(lambda n: low + (high - low) * Fraction(n, 1000))


signs = st.sampled_from([1, -1])


POSITIVE = within(0, 5)
