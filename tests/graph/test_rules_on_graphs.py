"""Every registered rule fulfils the contract, on every kind of graph."""

import copy

import pytest
import torch
from torch import Tensor

import wirings
from wirings import Blocks, ContinuousGraph, Dag, DiscreteGraph, Graph, StaticGraph, rules
from wirings.graph import ActivationNode, ConvNode

DYNAMIC = {"node": ConvNode(before=["activation", "conv"], after=["norm"]), "inputs": 3, "outputs": 2}
SPARSE = torch.rand(30, 30, generator=torch.Generator().manual_seed(0)) < 0.05
KINDS = {
    "static": (lambda **b: StaticGraph([3, 5, 5, 2], node=ConvNode(), **b), (4, 3, 5, 5)),
    "layers": (lambda **b: StaticGraph(Blocks([3, 5, 5, 2], reach=1), node=ConvNode("batch"), **b), (4, 3, 5, 5)),
    "dag": (lambda **b: StaticGraph(topology=Dag(12, inputs=3), outputs=2, node=ActivationNode("tanh"), **b), (4, 3)),
    "discrete": (lambda **b: DiscreteGraph(10, steps=3, **DYNAMIC, **b), (4, 3, 5, 5)),
    "sequence": (
        lambda **b: DiscreteGraph(10, inputs=3, outputs=2, inflow="every", node=ActivationNode("tanh"), **b),
        (4, 5, 3),
    ),
    "sparse": (
        lambda **b: DiscreteGraph(
            topology=SPARSE, inputs=3, outputs=9, steps=3, node=ActivationNode("tanh", bias=True), **b
        ),
        (4, 3),
    ),
    "continuous": (lambda **b: ContinuousGraph(10, solver="rk4", steps=2, **DYNAMIC, **b), (4, 3, 5, 5)),
    "adaptive": (lambda **b: ContinuousGraph(10, **DYNAMIC, **b), (4, 3, 5, 5)),
    "adjoint": (lambda **b: ContinuousGraph(10, solver="rk4", steps=2, adjoint=True, **DYNAMIC, **b), (4, 3, 5, 5)),
}
# So that rules with a schedule act within the few steps of a test.
OPTIONS = {
    "gmp": {"every": 1},
    "l1_anneal": {"every": 1},
    "rigl": {"every": 2},
    "set": {"every": 2},
    "sparse_momentum": {"every": 2},
}
# New edges start from a weight of zero, and stay there if no gradient reaches them, as in nodes that are cut off.
FROM_ZERO = {"rigl", "set", "sparse_momentum"}
# Models are finalized in the middle of training here.
pytestmark = pytest.mark.filterwarnings("ignore:.*had not removed the others yet")
RULES = rules.names()
every_rule_and_kind = pytest.mark.parametrize(("rule", "kind"), [(rule, kind) for rule in RULES for kind in KINDS])


def make(rule: str, kind: str, seed: int = 0) -> tuple[Graph, Tensor]:
    torch.manual_seed(seed)
    build, shape = KINDS[kind]
    made = rules.get(rule, **OPTIONS.get(rule, {}))
    graph = build(rule=made, **({} if made.own_budget else {"edges": 0.4}))
    graph.wiring.plan(8)
    return graph, torch.randn(shape)


def expected(rule: str, graph: Graph) -> int:
    one = rules.get(rule)
    return one.budget(graph.allowed, graph.edge_shape) if one.own_budget else int(0.4 * graph.allowed)


def train(graph: Graph, x: Tensor, steps: int) -> None:
    optimizer = torch.optim.SGD(graph.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        (graph(x) - 1).square().mean().backward()
        optimizer.step()
        assert graph.wiring is not None
        graph.wiring.step(optimizer)


@every_rule_and_kind
def test_the_contract(rule: str, kind: str) -> None:
    graph, x = make(rule, kind)
    before = graph.all_weights().detach().clone()
    k = expected(rule, graph)
    for _ in range(3):
        train(graph, x, 1)
        assert int(graph.real().sum()) == k
    assert (graph.all_weights() != before).any()
    assert all(p.isfinite().all() for p in graph.parameters())
    # Saved and loaded into another graph, it continues identically.
    other, _ = make(rule, kind, seed=1)
    other.load_state_dict(graph.state_dict())
    assert graph.wiring is not None
    assert other.wiring is not None
    other.wiring.load_state_dict(graph.wiring.state_dict())
    assert torch.equal(other.real(), graph.real())
    for one in (graph, other):
        torch.manual_seed(3)
        train(one, x, 2)
    assert torch.equal(graph.all_weights(), other.all_weights())
    # Finalized, it is plain, has k weights, and returns the same outputs.
    replica = copy.deepcopy(graph).eval()
    with torch.no_grad():
        y = graph.eval()(x)
        wirings.finalize_(replica)
        assert torch.equal(replica(x), y)
    nonzero = int((replica.weight != 0).sum())
    assert nonzero == k or (nonzero < k and rule in FROM_ZERO)
    assert isinstance(replica.weight, torch.nn.Parameter)
    assert len(replica.networkx().edges) == replica.sparse()._nnz() == nonzero
    if nonzero < k:
        return
    assert replica.dead_nodes() == graph.dead_nodes()
    assert replica.longest_path() == graph.longest_path()
    assert torch.equal(replica.matrix(), graph.matrix())


@every_rule_and_kind
def test_no_gradient_through_edges_that_are_not_real(rule: str, kind: str) -> None:
    graph, x = make(rule, kind)
    graph.eval()
    plain = wirings.finalize_(copy.deepcopy(graph))
    one, two = (x.clone().requires_grad_() for _ in range(2))
    graph(one).square().sum().backward()
    plain(two).square().sum().backward()
    assert torch.allclose(one.grad, two.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("adaptive", "adjoint", "sparse")])
def test_compiles(kind: str) -> None:
    graph, x = make("dnw", kind)
    y = graph(x)
    compiled = torch.compile(graph, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), y, atol=1e-5)
    compiled(x).square().sum().backward()
    assert graph.all_weights().grad is not None
