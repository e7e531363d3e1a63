"""Static graphs: known networks are special cases, whatever the topology; exactly what is stored is used."""

import copy
import itertools

import numpy as np
import pytest
import torch
from helpers import block_matrix, both_precisions, close, same
from torch import Tensor, nn
from torch.nn import functional as F

import wirings
from wirings import Blocks, Dag, StaticGraph, WiringError
from wirings.graph import ActivationNode, ConvNode, Groups, NodeFunction, PlainNode


@pytest.mark.parametrize("kind", ["batch", "instance"])
def test_eps_of_node_norms(kind: str) -> None:
    torch.manual_seed(0)
    node = ConvNode(norm=kind, before=["norm"], eps=0.5).build(4)
    maps = torch.randn(3, 4, 5, 5) + 1
    over = (0, 2, 3) if kind == "batch" else (2, 3)
    var, mean = torch.var_mean(maps, over, correction=0, keepdim=True)
    torch.testing.assert_close(node.before(maps, 0.0), (maps - mean) / (var + 0.5).sqrt())


@both_precisions
@pytest.mark.parametrize("reach", [None, 1])
def test_a_perceptron_is_a_static_graph(dtype: torch.dtype, tolerance: float, reach: int | None) -> None:
    torch.manual_seed(0)
    sizes = [5, 7, 6, 3]
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    mlp = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2]).to(dtype)
    hidden, last = ActivationNode("tanh", bias=True), ActivationNode(None, bias=True)
    graph = StaticGraph(Blocks(sizes, reach=reach), node=[None, hidden, hidden, last]).to(dtype)
    graph.set_matrix_(block_matrix(sizes, {(i, i + 1): layer.weight for i, layer in enumerate(layers)}))
    with torch.no_grad():
        for function, layer in zip(graph.functions[1:], layers, strict=True):
            function.bias.copy_(layer.bias)

    def pairs() -> list[tuple[Tensor, Tensor]]:
        grad = graph._as_matrix(graph.weight.grad)
        starts = graph.topology.starts()
        weights = [
            (grad[starts[i + 1] : starts[i + 2], starts[i] : starts[i + 1]], layer.weight.grad)
            for i, layer in enumerate(layers)
        ]
        return weights + [(f.bias.grad, la.bias.grad) for f, la in zip(graph.functions[1:], layers, strict=True)]

    same(graph, mlp, torch.randn(9, 5, dtype=dtype), pairs, tolerance)


@both_precisions
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_depthwise_separable_network_is_a_static_graph(dtype: torch.dtype, tolerance: float, order: str) -> None:
    """Depthwise convolution, pointwise convolution, and a norm and ReLU after each pair, with a stride at the start."""
    torch.manual_seed(0)
    sizes = [4, 8, 8, 6]
    depthwise = [
        nn.Conv2d(c, c, 3, stride=2 if i == 0 else 1, padding=1, groups=c, bias=False) for i, c in enumerate(sizes[:-1])
    ]
    pointwise = [nn.Conv2d(a, b, 1, bias=False) for a, b in itertools.pairwise(sizes)]
    norms = [nn.BatchNorm2d(c) for c in sizes[1:]]
    for norm in norms:
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.uniform_(norm.bias, -0.5, 0.5)
    stack = nn.Sequential()
    for d, p, n in zip(depthwise, pointwise, norms, strict=True):
        stack.extend([d, p, n, nn.ReLU()])
    stack.to(dtype)
    if order == "before":  # conv sends, norm and ReLU receive
        parts = {"before": ["conv"], "after": ["norm", "activation"]}
        node = [ConvNode("batch", stride=2, **parts), *[ConvNode("batch", **parts)] * 3]
        graph = StaticGraph(sizes, node=node)
    else:  # the convolution as the paper's f: Z = conv(relu(norm(sum))), the last nodes without it
        parts = ["norm", "activation", "conv"]
        first, last = ConvNode(None, None, stride=2), ConvNode("batch", before=[], after=parts[:2])
        graph = StaticGraph(sizes, node=[first, *[ConvNode("batch", before=[], after=parts)] * 2, last])
    graph.to(dtype)
    graph.set_matrix_(block_matrix(sizes, {(i, i + 1): p.weight[:, :, 0, 0] for i, p in enumerate(pointwise)}))
    with torch.no_grad():
        for i, (d, n) in enumerate(zip(depthwise, norms, strict=True)):
            graph.functions[i].kernel.copy_(d.weight)
            graph.functions[i + 1].norm_weight.copy_(n.weight)
            graph.functions[i + 1].norm_bias.copy_(n.bias)

    def pairs() -> list[tuple[Tensor, Tensor]]:
        matrix, starts = graph._as_matrix(graph.weight.grad), graph.topology.starts()
        found = [(graph.functions[i].kernel.grad, d.weight.grad) for i, d in enumerate(depthwise)]
        for i, (p, n) in enumerate(zip(pointwise, norms, strict=True)):
            own = matrix[starts[i + 1] : starts[i + 2], starts[i] : starts[i + 1]]
            function = graph.functions[i + 1]
            found += [(own, p.weight.grad[:, :, 0, 0]), (function.norm_weight.grad, n.weight.grad)]
            found += [(function.norm_bias.grad, n.bias.grad)]
        return found

    x = torch.randn(3, 4, 8, 8, dtype=dtype)
    same(graph, stack, x, pairs, tolerance)
    for norm, function in zip(norms, graph.functions[1:], strict=True):  # running statistics, too
        close(function.running_mean, norm.running_mean, tolerance)
        close(function.running_var, norm.running_var, tolerance)
    close(graph.eval()(x), stack.eval()(x), tolerance)


@both_precisions
def test_channel_shuffle_and_split_are_static_graphs(dtype: torch.dtype, tolerance: float) -> None:
    groups, channels = 2, 6
    x = torch.randn(3, channels, 4, 4, dtype=dtype)
    where = F.channel_shuffle(torch.arange(6.0).view(1, 6, 1, 1), groups).flatten().long()
    graph = StaticGraph([6, 6], edges=6, node=PlainNode()).to(dtype)
    graph.set_matrix_(block_matrix([6, 6], {(0, 1): torch.eye(6, dtype=dtype)[where]}))
    same(graph, lambda x: F.channel_shuffle(x, groups), x, lambda: [(graph.matrix(), graph.matrix())], tolerance)
    # A split: one half goes on to a convolution, the other half past it to the output.
    conv = nn.Conv2d(3, 3, 3, padding=1, groups=3, bias=False).to(dtype)
    identity = torch.eye(6, dtype=dtype)
    split = StaticGraph([6, 3, 6], edges=9, node=[None, ConvNode(None, None), None]).to(dtype)
    split.set_matrix_(
        block_matrix(
            [6, 3, 6],
            {
                (0, 1): identity[3:],
                (1, 2): identity[:, 3:],
                (0, 2): torch.diag(identity.new_tensor([1, 1, 1, 0, 0, 0])),
            },
        )
    )
    with torch.no_grad():
        split.functions[1].kernel.copy_(conv.weight)

    past = torch.diag(identity.new_tensor([1, 1, 1, 0, 0, 0])).requires_grad_()

    def plain(x: Tensor) -> Tensor:
        other, through = torch.einsum("vu,buhw->bvhw", past, x), conv(x[:, 3:])
        return other + torch.cat([torch.zeros_like(through), through], 1)

    def pairs() -> list[tuple[Tensor, Tensor]]:
        grad = split._as_matrix(split.all_weights().grad)
        # Edges that pass the block by, hallucinated ones too.
        return [(split.functions[1].kernel.grad, conv.weight.grad), (grad[9:, :6], past.grad)]

    same(split, plain, x, pairs, tolerance)


def by_hand(matrix: Tensor, x: Tensor, inputs: int, outputs: int) -> Tensor:
    """A static graph of tanh nodes, one node after the other, straight from eq. io_stat; nodes are in order."""
    states = [x[:, i] for i in range(inputs)]
    for v in range(inputs, len(matrix)):
        states.append(torch.tanh(sum((matrix[v, u] * states[u] for u in range(v)), torch.zeros_like(x[:, 0]))))
    return torch.stack(states[-outputs:], 1)


@both_precisions
@pytest.mark.parametrize("kind", ["blocks", "dag", "matrix", "shuffled", "sparse"])
def test_every_topology_computes_the_paper_s_equation(dtype: torch.dtype, tolerance: float, kind: str) -> None:
    torch.manual_seed(0)
    nodes, inputs, outputs = 80, 5, 4
    if kind == "blocks":
        topology = Blocks([5, 20, 30, 21, 4])
    elif kind == "dag":
        topology = Dag(nodes, inputs=inputs)
    else:
        allowed = torch.rand(nodes, nodes).tril(-1) > (0.97 if kind == "sparse" else 0.5)
        allowed[:inputs] = False
        topology = allowed
    node = ActivationNode("tanh")
    if kind != "shuffled":
        more = {"outputs": outputs} if kind == "dag" else {"inputs": inputs, "outputs": outputs}
        graph = StaticGraph(topology=topology, node=node, **({} if kind == "blocks" else more)).to(dtype)
        matrix = graph.matrix().requires_grad_()
        same(
            graph,
            lambda x: by_hand(matrix, x, inputs, outputs),
            torch.randn(6, inputs, dtype=dtype),
            lambda: [
                (graph._as_matrix(graph.weight.grad), matrix.grad * (graph._as_matrix(torch.ones_like(graph.weight))))
            ],
            tolerance,
        )
        return
    # The same graph with its nodes numbered otherwise gives the same outputs.
    order = torch.randperm(nodes)  # node i of the ordered graph is node order[i] of the shuffled one
    shuffled = torch.zeros_like(allowed)
    shuffled[order[:, None], order] = allowed
    graph = StaticGraph(
        topology=shuffled, node=node, inputs=order[:inputs].tolist(), outputs=order[-outputs:].tolist()
    ).to(dtype)
    matrix = graph.matrix()[order[:, None], order].requires_grad_()
    same(
        graph,
        lambda x: by_hand(matrix, x, inputs, outputs),
        torch.randn(6, inputs, dtype=dtype),
        lambda: [(graph._as_matrix(graph.weight.grad)[order[:, None], order], matrix.grad * allowed)],
        tolerance,
    )


def test_only_allowed_edges_are_stored_and_ranked() -> None:
    graph = StaticGraph([32, 192, 192, 192, 192, 100], edges=32_000)
    assert graph.allowed == 192 * (32 + 224 + 416 + 608) + 100 * 800 == graph.all_weights().numel()
    assert int(graph.real().sum()) == int((graph.matrix() != 0).sum()) == 32_000
    assert graph.longest_path() == 5
    allowed = torch.tensor([[0, 0, 0], [1, 0, 0], [1, 1, 0]], dtype=torch.bool)
    own = StaticGraph(topology=allowed, inputs=1, outputs=1, edges=2)
    assert own.allowed == 3
    assert not own.matrix()[~allowed].any()


def test_dag_has_every_pair_once() -> None:
    for nodes, inputs in [(3, 1), (40, 3), (100, 32)]:
        graph = StaticGraph(topology=Dag(nodes, inputs=inputs), outputs=1)
        expected = torch.ones(nodes, nodes).tril(-1)
        expected[:inputs] = 0
        graph.set_matrix_(expected)
        assert torch.equal(graph.matrix(), expected)
        assert graph.allowed == int(expected.sum())


@pytest.mark.parametrize("maps", [(), (5,), (6,), (4, 5), (3, 4, 2)], ids=["scalars", "vectors", "1d", "2d", "3d"])
def test_nodes_carry_scalars_vectors_and_maps(maps: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    conv = maps not in ((), (5,))
    node = ConvNode(dims=len(maps)) if conv else ActivationNode("relu")
    graph = StaticGraph([3, 6, 2], edges=12, node=node)
    x = torch.randn(4, 3, *maps)
    y = graph(x)
    assert y.shape == (4, 2, *maps)
    y.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in graph.parameters())
    if conv:
        kernel = graph.functions[0].kernel
        assert kernel.shape == (3, 1, *[3] * len(maps))


def test_the_gradient_reaches_edges_that_are_not_real_but_does_not_pass_through_them() -> None:
    torch.manual_seed(0)
    graph = StaticGraph([3, 8, 8, 2], edges=20, node=ActivationNode("tanh"))
    x = torch.randn(5, 3, requires_grad=True)
    graph(x).sum().backward()
    grad, real = graph.all_weights().grad, graph.real()
    assert (grad[~real] != 0).any()
    plain = copy.deepcopy(graph)
    wirings.finalize_(plain)
    x2 = x.detach().clone().requires_grad_()
    plain(x2).sum().backward()
    assert torch.equal(x.grad, x2.grad)  # to, not through
    assert torch.equal(grad, plain.weight.grad)


def test_custom_node_function() -> None:
    class Leaky(NodeFunction):
        def __init__(self, nodes: int) -> None:
            super().__init__()
            self.slope = nn.Parameter(torch.full((nodes,), 0.1))

        def after(self, received: Tensor, time: float) -> Tensor:
            return torch.where(received > 0, received, self.slope * received)

    for topology in (Blocks([3, 4, 2]), Dag(9, inputs=3)):
        torch.manual_seed(0)
        own = StaticGraph(topology=topology, node=Leaky, outputs=2)
        torch.manual_seed(0)
        module = StaticGraph(topology=topology, node=lambda nodes: nn.LeakyReLU(0.1), outputs=2)
        x = torch.randn(5, 3)
        assert torch.equal(own(x), module(x))
        assert "Leaky" in repr(own)


def test_groups_of_node_kinds() -> None:
    torch.manual_seed(0)
    kinds = Groups([2, 3], [ActivationNode("tanh"), ActivationNode("relu")])
    graph = StaticGraph([4, 5], node=[None, kinds])
    x = torch.randn(6, 4)
    sums = x @ graph.matrix()[4:, :4].t()
    close(graph(x), torch.cat([sums[:, :2].tanh(), sums[:, 2:].relu()], 1), 1e-6)
    with pytest.raises(WiringError, match=r"sum to 5, but the graph has 6 nodes"):
        StaticGraph([4, 6], node=[None, kinds])


def test_matrix_networkx_and_paths() -> None:
    # 0, 1 are inputs, 5 is the output: 0 → 2 → 4 → 5 and 0 → 5 live; 1 → nothing; 3 has no input; 2 → 3 is not there
    graph = StaticGraph([2, 2, 1, 1], edges=5, node=PlainNode())
    matrix = torch.zeros(6, 6)
    for u, v, w in [(0, 2, 3.0), (2, 4, -2.0), (4, 5, 1.5), (0, 5, 1.0), (3, 4, 4.0)]:
        matrix[v, u] = w
    graph.set_matrix_(matrix)
    assert graph.dead_nodes() == [1, 3]
    assert graph.longest_path() == 3
    assert torch.equal(graph.matrix(), matrix)
    assert torch.equal(graph.sparse().to_dense(), matrix)
    found = graph.networkx()
    assert {(u, v): data["weight"] for u, v, data in found.edges(data=True)} == {
        (0, 2): 3.0,
        (2, 4): -2.0,
        (4, 5): 1.5,
        (0, 5): 1.0,
        (3, 4): 4.0,
    }
    assert found.nodes[0] == {"role": "input", "block": 0}
    assert found.nodes[5] == {"role": "output", "block": 3}
    assert found.nodes[3] == {"role": "hidden", "block": 1}
    assert repr(graph) == "StaticGraph(blocks=[2, 2, 1, 1], edges=5, node=PlainNode())"
    assert repr(eval(repr(graph), {"StaticGraph": StaticGraph, "PlainNode": PlainNode})) == repr(graph)


def test_longest_path_agrees_with_networkx() -> None:
    import networkx

    for seed in range(5):
        torch.manual_seed(seed)
        graph = StaticGraph(topology=Dag(30, inputs=3), outputs=2, edges=45)
        live = [v for v in range(30) if v not in graph.dead_nodes()]
        found = graph.networkx()
        reached = set.union(*(networkx.descendants(found, int(i)) | {int(i)} for i in graph.inputs))
        leads = set.union(*(networkx.ancestors(found, int(i)) | {int(i)} for i in graph.outputs))
        assert live == sorted(reached & leads)
        assert graph.longest_path() == networkx.dag_longest_path_length(found.subgraph(live), weight=None)


def test_outputs_may_be_any_nodes() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3)
    graph = StaticGraph([3, 5, 5, 2], node=ActivationNode("tanh"), outputs=[14, 4, 0, 9])
    full = StaticGraph([3, 5, 5, 2], node=ActivationNode("tanh"), outputs=15)
    full.set_matrix_(graph.matrix())
    assert torch.equal(graph(x), full(x)[:, [14, 4, 0, 9]])


def test_state_dict_and_copies_and_finalize() -> None:
    torch.manual_seed(0)
    graph = StaticGraph([3, 6, 2], edges=8, node=ConvNode())
    other = StaticGraph([3, 6, 2], edges=8, node=ConvNode())
    other.load_state_dict(graph.state_dict())
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(graph(x), other(x))
    replica = copy.deepcopy(graph)
    wirings.finalize_(replica)
    assert int((replica.weight != 0).sum()) == 8 == int(replica.real().sum())
    assert torch.equal(replica(x), graph(x))
    assert graph.wiring is not None
    assert "weight" in str(graph.wiring)  # the original is wired as before


def test_a_graph_inside_a_model_is_wired_by_wire_() -> None:
    model = nn.Sequential(nn.Linear(4, 3), StaticGraph([3, 6, 2]), nn.Linear(2, 2))
    wiring = wirings.wire_(model, "dnw", budget={"1": 7, "0": 0.5})
    assert {r.name: r.edges for r in wiring.look()} == {"0.weight": 6, "1.weight": 7}
    assert int(model[1].real().sum()) == 7
    model(torch.randn(5, 4)).sum().backward()
    wiring = wirings.wire_(nn.Sequential(nn.Linear(4, 3), StaticGraph([3, 60, 2])), "dnw", density=0.5, share="erk")
    assert [r.shape for r in wiring.look()] == [(3, 4), (62, 63)]
    assert all(0 < r.edges < r.possible for r in wiring.look()[1:])


def test_compiles_without_graph_breaks() -> None:
    torch.manual_seed(0)
    graph = StaticGraph([3, 6, 6, 2], edges=20, node=ConvNode())
    x = torch.randn(2, 3, 4, 4)
    compiled = torch.compile(graph, fullgraph=True, backend="aot_eager")
    close(compiled(x), graph(x), 1e-6)
    compiled(x).square().sum().backward()
    assert np.isfinite(graph.all_weights().grad.numpy()).all()


@pytest.mark.parametrize("kind", ["static", "complete", "dag"])
def test_work_and_memory_are_proportional_to_allowed_edges(kind: str) -> None:
    """Multiplications and stored values per allowed edge and image are the same at every size."""
    from torch.utils.flop_counter import FlopCounterMode

    each = []
    for nodes in (100, 400):
        tenth = nodes // 10
        graph = {
            "static": lambda: StaticGraph([tenth] * 10),  # noqa: B023
            "complete": lambda: wirings.DiscreteGraph(nodes, inputs=tenth, outputs=tenth, steps=3),  # noqa: B023
            "dag": lambda: StaticGraph(topology=Dag(nodes, inputs=tenth), outputs=tenth),  # noqa: B023
        }[kind]()
        buffers = sum(b.numel() for b in graph.buffers())
        assert graph.weight.numel() == graph.allowed
        assert buffers <= graph.allowed  # the triangles of a Dag; nothing else needs an index
        with FlopCounterMode(display=False) as counter:
            graph(torch.randn(8, tenth)).sum().backward()
        each.append(counter.get_total_flops() / graph.allowed / 8)
    assert each[1] <= 1.05 * each[0]
    assert each[1] <= (3 * 6 if kind == "complete" else 6.1 if kind == "static" else 8)


def test_sparse_tiles_store_only_their_edges() -> None:
    nodes = 2000
    allowed = (torch.arange(nodes)[:, None] - torch.arange(nodes)).abs() == 1
    allowed[:10] = False
    graph = StaticGraph(topology=allowed.tril(), inputs=10, outputs=10)
    assert graph.allowed == nodes - 10
    held = sum(b.numel() for b in graph.buffers())
    held += sum(len(t.places[0]) for t in graph.tiles if t.places is not None)
    assert held < 40 * graph.allowed
    assert graph.longest_path() == nodes - 10


def test_groups_without_blocks() -> None:
    torch.manual_seed(0)
    kinds = Groups([2, 3, 5], [None, ActivationNode("tanh"), ActivationNode("relu", bias=True)])
    graph = StaticGraph(topology=Dag(10, inputs=2), outputs=4, node=kinds)
    x, matrix = torch.randn(3, 2), graph.matrix()
    states = [x[:, 0], x[:, 1]]
    for v in range(2, 10):
        total = sum(matrix[v, u] * states[u] for u in range(v))
        states.append(torch.tanh(total) if v < 5 else torch.relu(total))
    close(graph(x), torch.stack(states[-4:], 1), 1e-6)


def test_matrix_has_the_scaled_weights_of_the_rule() -> None:
    class Twice(wirings.rules.Rule):
        name = "twice"

        def real(self, weight: Tensor, edges: wirings.rules.EdgesLike) -> Tensor:
            return edges.choose(weight)

        def forward(self, weight: Tensor, edges: wirings.rules.EdgesLike) -> Tensor:
            return 2 * edges.keep(weight)

    graph = StaticGraph([3, 2], edges=4, rule=Twice())
    x = torch.randn(5, 3)
    close(graph(x), x @ graph.matrix()[3:, :3].t(), 1e-6)
    assert torch.equal(graph.sparse().to_dense(), graph.matrix())


@pytest.mark.parametrize("node", [None, ActivationNode("tanh", bias=True), ConvNode()])
def test_an_empty_batch(node: object) -> None:
    maps = (4, 4) if isinstance(node, ConvNode) else ()
    static = StaticGraph([3, 4, 2], node=node)  # type: ignore[arg-type]
    discrete = wirings.DiscreteGraph(6, inputs=3, outputs=2, steps=2, node=node)  # type: ignore[arg-type]
    for graph in (static, discrete):
        assert graph(torch.zeros(0, 3, *maps)).shape == (0, 2, *maps)
