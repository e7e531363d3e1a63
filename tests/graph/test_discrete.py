"""Discrete-time graphs: perceptrons, static graphs, Elman networks and LSTMs are special cases."""

import itertools

import numpy as np
import pytest
import torch
from helpers import block_matrix, both_precisions, close, same
from torch import Tensor, nn

from wirings import Blocks, Dag, DiscreteGraph, StaticGraph
from wirings.graph import ActivationNode, ConvNode, Groups, NodeFunction, PerStep, PlainNode, TimeNode


@both_precisions
def test_a_perceptron_is_a_discrete_graph(dtype: torch.dtype, tolerance: float) -> None:
    """Figure 1 of the paper: one layer is computed per step; nothing else has arrived at the output by then."""
    torch.manual_seed(0)
    sizes = [4, 6, 5, 3]
    layers = [nn.Linear(a, b, bias=False).to(dtype) for a, b in itertools.pairwise(sizes)]
    mlp = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2], nn.Tanh())
    edges = sum(a * b for a, b in itertools.pairwise(sizes))
    graph = DiscreteGraph(18, inputs=4, outputs=3, steps=3, edges=edges, node=ActivationNode("tanh")).to(dtype)
    graph.set_matrix_(block_matrix(sizes, {(i, i + 1): layer.weight for i, layer in enumerate(layers)}))
    assert int(graph.real().sum()) == edges

    def pairs() -> list[tuple[Tensor, Tensor]]:
        grad, starts = graph._as_matrix(graph.all_weights().grad), np.cumsum([0, *sizes])
        return [
            (grad[starts[i + 1] : starts[i + 2], starts[i] : starts[i + 1]], layer.weight.grad)
            for i, layer in enumerate(layers)
        ]

    same(graph, mlp, torch.randn(7, 4, dtype=dtype), pairs, tolerance)
    assert graph.longest_path() == 3
    assert graph.dead_nodes() == []


@both_precisions
@pytest.mark.parametrize("biases", [False, True])
def test_a_static_graph_unrolled_is_a_discrete_graph(dtype: torch.dtype, tolerance: float, biases: bool) -> None:
    """Edges that skip levels of the static graph go through nodes that only wait, one for each step.

    With biases, nodes must not start before their input is there, which a function that depends on the step can do.
    """
    torch.manual_seed(0)
    sizes = [3, 4, 5, 2]
    static = StaticGraph(sizes, node=ActivationNode("tanh", bias=biases)).to(dtype)
    if biases:
        for function in static.functions[1:]:
            nn.init.normal_(function.bias)
    matrix, starts = static.matrix(), static.topology.starts()
    # Node (v, wait): v's state, so many steps later. A block's level is its number.
    level = np.repeat(np.arange(4), sizes)
    unrolled = [(v, 0) for v in range(14)] + [(v, w) for v in range(12) for w in range(1, 3 - level[v])]
    number = {pair: i for i, pair in enumerate(unrolled)}
    big = torch.zeros(len(unrolled), len(unrolled), dtype=dtype)
    for v in range(14):
        for u in range(14):
            if level[u] < level[v]:
                big[number[v, 0], number[u, level[v] - level[u] - 1]] = matrix[v, u]
    waiting = [(v, w) for v, w in unrolled if w > 0]
    for v, w in waiting:
        big[number[v, w], number[v, w - 1]] = 1

    class Unrolled(NodeFunction):
        def __init__(self, nodes: int) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(14, dtype=dtype))
            if biases:
                with torch.no_grad():
                    for i in range(1, 4):
                        self.bias[starts[i] : starts[i + 1]] = static.functions[i].bias

        def after(self, received: Tensor, time: float) -> Tensor:
            computing, waits = received[:, :14], received[:, 14:]
            computed = torch.tanh(computing + self.bias)
            now = torch.from_numpy(level == time + 1)
            return torch.cat([computed * now, waits], 1) if biases else torch.cat([computed, waits], 1)

    graph = DiscreteGraph(topology=big != 0, inputs=3, outputs=list(range(12, 14)), steps=3, node=Unrolled).to(dtype)
    graph.set_matrix_(big)

    def pairs() -> list[tuple[Tensor, Tensor]]:
        ours, theirs = graph._as_matrix(graph.weight.grad), static._as_matrix(static.weight.grad)
        found = []
        for v in range(14):
            for u in range(14):
                if level[u] < level[v]:
                    found.append((ours[number[v, 0], number[u, level[v] - level[u] - 1]], theirs[v, u]))
        if biases:
            found += [
                (graph.function.bias.grad[starts[i] : starts[i + 1]], static.functions[i].bias.grad) for i in (1, 2, 3)
            ]
        return found

    same(graph, static, torch.randn(6, 3, dtype=dtype), pairs, tolerance)


@both_precisions
@pytest.mark.parametrize("reads", ["last", "every"])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_an_elman_network_is_a_discrete_graph(
    dtype: torch.dtype, tolerance: float, reads: str, checkpoint: bool
) -> None:
    torch.manual_seed(0)
    rnn = nn.RNN(4, 6, batch_first=True).to(dtype)
    kinds = Groups([4, 6], [PlainNode(), ActivationNode("tanh", bias=True)])
    graph = DiscreteGraph(
        10, inputs=4, outputs=6, edges=6 * 10, node=kinds, inflow="every", reads=reads, checkpoint=checkpoint
    ).to(dtype)
    graph.set_matrix_(block_matrix([4, 6], {(0, 1): rnn.weight_ih_l0, (1, 1): rnn.weight_hh_l0}))
    bias = graph.function.functions[1].bias
    with torch.no_grad():
        bias.copy_(rnn.bias_ih_l0 + rnn.bias_hh_l0)

    def pairs() -> list[tuple[Tensor, Tensor]]:
        grad = graph._as_matrix(graph.all_weights().grad)
        return [
            (grad[4:, :4], rnn.weight_ih_l0.grad),
            (grad[4:, 4:], rnn.weight_hh_l0.grad),
            (bias.grad, rnn.bias_ih_l0.grad),
        ]

    def plain(x: Tensor) -> Tensor:
        every, _ = rnn(x)
        return every if reads == "every" else every[:, -1]

    same(graph, plain, torch.randn(3, 7, 4, dtype=dtype), pairs, tolerance)


class LSTMNodes(NodeFunction):
    """Nodes x (inputs), i, f, g, o (gates), c and h. A unit's gates, cell and output see each other: they multiply."""

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.inputs, self.units = 4, (nodes - 4) // 6
        self.bias = nn.Parameter(torch.zeros(4 * self.units))

    def after(self, received: Tensor, time: float) -> Tensor:
        n = self.units
        x, gates, c, _ = received.split([self.inputs, 4 * n, n, n], 1)
        i, f, g, o = (gates + self.bias).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return torch.cat([x, torch.zeros_like(gates), c, o.sigmoid() * c.tanh()], 1)


@both_precisions
def test_an_lstm_is_a_discrete_graph_whose_node_functions_multiply(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(4, 5, batch_first=True).to(dtype)
    graph = DiscreteGraph(34, inputs=4, outputs=5, node=LSTMNodes, inflow="every", reads="every").to(dtype)
    matrix = torch.zeros(34, 34, dtype=dtype)  # 0–3 x, 4–23 gates, 24–28 c, 29–33 h
    matrix[4:24, :4] = lstm.weight_ih_l0.detach()
    matrix[4:24, 29:] = lstm.weight_hh_l0.detach()
    matrix[24:29, 24:29] = torch.eye(5, dtype=dtype)  # a cell remembers itself along an edge of weight 1
    graph.set_matrix_(matrix)
    with torch.no_grad():
        graph.function.bias.copy_(lstm.bias_ih_l0 + lstm.bias_hh_l0)

    def pairs() -> list[tuple[Tensor, Tensor]]:
        grad = graph._as_matrix(graph.weight.grad)
        return [
            (grad[4:24, :4], lstm.weight_ih_l0.grad),
            (grad[4:24, 29:], lstm.weight_hh_l0.grad),
            (graph.function.bias.grad, lstm.bias_hh_l0.grad),
        ]

    same(graph, lambda x: lstm(x)[0], torch.randn(3, 6, 4, dtype=dtype), pairs, tolerance)


def product_of(matrix: Tensor, x: Tensor, steps: int, inputs: int) -> Tensor:
    states = torch.zeros(len(x), len(matrix), dtype=x.dtype)
    states[:, :inputs] = x
    for _ in range(steps):
        states = torch.tanh(states @ matrix.t())
    return states


@both_precisions
@pytest.mark.parametrize("kind", ["complete", "blocks", "dag", "matrix", "sparse"])
def test_every_topology_computes_the_paper_s_equation(dtype: torch.dtype, tolerance: float, kind: str) -> None:
    torch.manual_seed(0)
    allowed = torch.rand(40, 40) < (0.02 if kind == "sparse" else 0.5)
    topology = {"blocks": Blocks([3, 17, 20]), "dag": Dag(40, inputs=3)}.get(kind, allowed)
    which = {"nodes": 40} if kind == "complete" else {"topology": topology}
    graph = DiscreteGraph(**which, inputs=3, outputs=[39, 5, 7], steps=2, node=ActivationNode("tanh")).to(dtype)
    matrix = graph.matrix().requires_grad_()
    allowed_here = graph._as_matrix(torch.ones_like(graph.weight))
    same(
        graph,
        lambda x: product_of(matrix, x, 2, 3)[:, [39, 5, 7]],
        torch.randn(5, 3, dtype=dtype),
        lambda: [(graph._as_matrix(graph.weight.grad), matrix.grad * allowed_here)],
        tolerance,
    )


@both_precisions
@pytest.mark.parametrize("order", [("before", "after"), ("before",), ("after",)])
def test_skipping_unneeded_states_changes_nothing(dtype: torch.dtype, tolerance: float, order: tuple[str, ...]) -> None:
    """From one input to the last states, unneeded nodes are skipped at both ends; step by step they are not."""
    torch.manual_seed(0)
    parts = {
        ("before", "after"): {"before": ["activation", "conv"], "after": ["norm"]},
        ("before",): {"before": ["norm", "activation", "conv"], "after": []},
        ("after",): {"before": [], "after": ["norm", "activation", "conv"]},
    }[order]
    graph = DiscreteGraph(12, inputs=3, outputs=4, steps=3, edges=60, node=ConvNode(**parts)).to(dtype)
    nn.init.uniform_(graph.function.norm_bias)

    def slow(x: Tensor) -> Tensor:
        states = graph.initial(x)
        for time in range(3):
            states = graph.step(states, time)
        return graph.read(states)

    x = torch.randn(2, 3, 5, 5, dtype=dtype)
    y1, y2 = graph(x), slow(x)
    close(y1, y2, tolerance)
    one = torch.autograd.grad(y1.square().sum(), list(graph.parameters()))
    two = torch.autograd.grad(y2.square().sum(), list(graph.parameters()))
    for a, b in zip(one, two, strict=True):
        close(a, b, tolerance)


def test_steps_and_time_matter() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 2)
    graph = DiscreteGraph(10, inputs=2, outputs=2, steps=4, node=TimeNode(ActivationNode("tanh")))
    before = graph(x)
    nn.init.ones_(graph.function.slope)
    assert not torch.allclose(graph(x), before)
    states = torch.zeros(3, 10)
    states[:, :2] = x
    for time in range(4):  # f(z, ℓ) = tanh(z + ℓ)
        states = torch.tanh(states @ graph.matrix().t() + time)
    close(graph(x), states[:, -2:], 1e-6)
    per_step = DiscreteGraph(10, inputs=2, outputs=2, steps=2, node=PerStep(ActivationNode("tanh", bias=True), 2))
    first, second = (f.bias for f in per_step.function.functions)
    nn.init.normal_(first)
    nn.init.normal_(second)
    states = torch.zeros(3, 10)
    states[:, :2] = x
    for bias in (first, second):
        states = torch.tanh(states @ per_step.matrix().t() + bias)
    close(per_step(x), states[:, -2:], 1e-6)


def test_input_nodes_may_have_parents_and_states_may_be_given() -> None:
    torch.manual_seed(0)
    graph = DiscreteGraph(6, inputs=6, outputs=6, steps=1)
    x, states = torch.randn(2, 6), torch.randn(2, 6)
    close(graph(x), x @ graph.matrix().t(), 1e-6)
    close(graph(x, states=states), (x + states) @ graph.matrix().t(), 1e-6)


def test_a_sequence_may_go_on_without_input() -> None:
    torch.manual_seed(0)
    graph = DiscreteGraph(6, inputs=2, outputs=2, steps=5, node=ActivationNode("tanh"), inflow="every", reads="every")
    x = torch.randn(3, 2, 2)
    padded = torch.cat([x, torch.zeros(3, 3, 2)], 1)
    assert graph(x).shape == (3, 5, 2)
    assert torch.equal(graph(x), graph(padded))


def test_checkpointing_saves_memory() -> None:
    torch.manual_seed(0)
    graph = DiscreteGraph(20, inputs=3, outputs=2, steps=6, edges=100, node=ConvNode(), reads="every")
    x = torch.randn(2, 3, 6, 6)

    def kept() -> tuple[int, list[Tensor]]:
        total = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = graph(x)
        return total, list(torch.autograd.grad(y.square().sum(), list(graph.parameters())))

    all_of_it, grads = kept()
    graph.checkpoint = True
    less, again = kept()
    assert less < all_of_it / 3
    for a, b in zip(grads, again, strict=True):
        close(a, b, 1e-6)


def test_dead_nodes_are_not_on_any_walk_in_time() -> None:
    # 0 → 1 → 2 → 3 (output), 0 → 4 → 3; with 2 steps only 0, 4, 3 matter, with 3 steps only 0, 1, 2, 3
    matrix = torch.zeros(6, 6)
    for u, v in [(0, 1), (1, 2), (2, 3), (0, 4), (4, 3)]:
        matrix[v, u] = 1.0

    def made(**more: object) -> DiscreteGraph:
        graph = DiscreteGraph(6, inputs=1, outputs=[3], edges=5, **more)  # type: ignore[arg-type]
        graph.set_matrix_(matrix)
        return graph

    assert made(steps=2).dead_nodes() == [1, 2, 5]
    assert made(steps=3).dead_nodes() == [4, 5]
    assert made(steps=4).dead_nodes() == [0, 1, 2, 3, 4, 5]
    assert made(steps=4, inflow="every").dead_nodes() == [5]
    assert made(steps=3, reads="every").dead_nodes() == [5]
    assert made(inflow="every").dead_nodes() == [5]
    assert [made(steps=s).longest_path() for s in (2, 3, 4)] == [2, 3, 0]
    assert made(steps=4, inflow="every").longest_path() == 3
    # Outputs are read before the next part is fed: without an edge, an input is not an output.
    for steps in (2, None):
        self_loop = DiscreteGraph(2, inputs=[0], outputs=[0], steps=steps, inflow="every", reads="every", edges=1)
        self_loop.set_matrix_(torch.tensor([[0.0, 0.0], [0.0, 1.0]]))
        assert self_loop.dead_nodes() == [0, 1]
        self_loop.set_matrix_(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
        assert self_loop.dead_nodes() == [1]
    loop = DiscreteGraph(2, inputs=1, outputs=1, inflow="every", edges=4)
    assert loop.longest_path() == float("inf")


def test_strides_by_zero_padding_keep_the_resolution() -> None:
    """Figure 2 of the paper: the smaller map of a strided convolution is padded with zeros to the graph's size."""
    torch.manual_seed(0)
    parts = {"before": ["activation", "conv"], "after": ["norm"]}
    kinds = Groups([5, 5], [ConvNode(**parts), ConvNode(stride=2, pad=True, **parts)])
    graph = DiscreteGraph(10, inputs=3, outputs=2, steps=3, edges=50, node=kinds)
    x = torch.randn(2, 3, 8, 8)
    y = graph(x)
    assert y.shape == (2, 2, 8, 8)
    y.square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in graph.function.parameters())
    sent = graph.function.before(graph.initial(x.abs()) + 1, 0)[:, 5:]
    assert not sent[..., :2, :].any()
    assert not sent[..., 6:].any()
    assert sent[..., 2:6, 2:6].abs().sum() > 0
    strided = nn.functional.conv2d(torch.ones(1, 1, 8, 8), graph.function.functions[1].kernel[:1], stride=2, padding=1)
    padded = graph.function.functions[1].before(torch.ones(1, 5, 8, 8), 0)[:, :1]
    close(padded, nn.functional.pad(strided, (2, 2, 2, 2)), 1e-6)


def test_prints_as_a_constructor_call() -> None:
    graph = DiscreteGraph(9, inputs=2, outputs=2, steps=3, edges=12, node=ActivationNode("tanh"), rule="random")
    text = "DiscreteGraph(nodes=9, inputs=2, outputs=2, steps=3, edges=12, "
    assert repr(graph) == text + "node=ActivationNode(activation='tanh', bias=False), rule='random')"
    sequence = DiscreteGraph(blocks=[2, 3], inflow="every", reads="every", checkpoint=True)
    assert repr(sequence) == "DiscreteGraph(blocks=[2, 3], inflow='every', reads='every', checkpoint=True)"
    for one in (graph, sequence):
        again = eval(repr(one), {"DiscreteGraph": DiscreteGraph, "ActivationNode": ActivationNode})
        assert repr(again) == repr(one)
        assert again.allowed == one.allowed


@pytest.mark.parametrize("inflow", ["first", "every"])
@pytest.mark.parametrize("reads", ["last", "every"])
def test_removing_dead_nodes_changes_nothing(inflow: str, reads: str) -> None:
    """Cutting off dead nodes does not change the output. Plain nodes, positive weights."""
    for seed in range(12):
        torch.manual_seed(seed)
        graph = DiscreteGraph(7, inputs=2, outputs=2, steps=3, edges=8, inflow=inflow, reads=reads).double()
        graph.set_matrix_(torch.rand(7, 7, dtype=torch.float64) + 0.1)
        x = torch.rand(1, 3, 2, dtype=torch.float64) + 0.1 if inflow == "every" else torch.rand(1, 2).double() + 0.1
        y, matrix, dead = graph(x), graph.matrix(), graph.dead_nodes()
        cut = DiscreteGraph(7, inputs=2, outputs=2, steps=3, inflow=inflow, reads=reads).double()
        for v in range(7):
            without = matrix.clone()
            without[v] = without[:, v] = 0
            cut.set_matrix_(without)
            assert torch.equal(cut(x), y) == (v in dead), (seed, v)
