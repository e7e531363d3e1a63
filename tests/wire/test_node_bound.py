"""A bound on multiply-adds counts the nodes of graphs that edges leave, at every step, and what dead nodes free."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import wirings
from wirings import models, rules, wire_
from wirings.graph import Blocks
from wirings.graph.nodes import ConvNode, PlainNode
from wirings.profiling import profile

SHAPE = (2, 8, 8)


class Network(nn.Module):
    """Two graphs of random sizes at two resolutions, between a dense convolution and a classifier."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        first, second, third = (int(n) for n in torch.randint(2, 7, (3,)))
        self.stem = nn.Conv2d(2, first, 3, padding=1, bias=False)
        kinds = [[ConvNode(norm="batch", stride=s), ConvNode(norm="batch"), PlainNode()] for s in (1, 2)]
        self.stages = nn.Sequential(
            wirings.StaticGraph(Blocks([first, second, second]), node=kinds[0]),
            wirings.StaticGraph(Blocks([second, third, third]), node=kinds[1]),
        )
        self.head = nn.Linear(third, 3)
        self.sole_readers = {"stem": "stages.0"}

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, wiring: wirings.Wiring) -> None:
    optimizer.zero_grad()
    model.train()(torch.randn(4, *SHAPE)).square().sum().backward()
    optimizer.step()
    wiring.step(optimizer)


@settings(max_examples=15)
@given(
    st.integers(0, 10**6),
    st.floats(0.1, 0.9),
    st.floats(0, 1.1),
    st.sampled_from(["global", "scaled"]),
    st.sampled_from(["dnw", "soft_threshold", "decayed_gradient", "top_kast"]),
)
def test_the_bound_holds_at_every_step(seed: int, share: float, bound: float, how: str, rule: str) -> None:
    model = Network(seed)
    dense = profile(model, SHAPE).mult_adds
    k = max(round(share * sum(m.allowed for m in model.stages)), 2)
    least = dense - sum(m.allowed * px for m, px in zip(model.stages, (64, 16), strict=True))
    cheap = min(k - 1, model.stages[1].allowed)
    least += (k - cheap) * 64 + cheap * 16
    limit = least + round(bound * (dense - least))
    plain = copy.deepcopy(model)
    wiring = wire_(model, rule, k=k, mult_adds=limit, example_input=SHAPE, share=how, include=["stages"])
    wiring.plan(300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(4):
        if step % 2:
            wiring.steps = 100 * step - 1  # the next one ranks the layers again
        counted = profile(model, SHAPE)
        assert counted.live_mult_adds <= counted.mult_adds <= limit
        assert sum(report.edges for report in wiring.report()) == k
        train(model, optimizer, wiring)
    free = wire_(plain, rule, k=k, mult_adds=dense, example_input=SHAPE, share=how, include=["stages"])
    numbers = [r.edges for r in free.report()]
    without = wire_(wirings.unwire_(plain), rule, k=k, share=how, include=["stages"])
    # How much is left of a bound depends on nodes, whose costs come in steps; see test_two_budgets for other layers.
    assert numbers == [r.edges for r in without.report()], "the bound does not matter"


def test_edges_spend_what_unused_nodes_free() -> None:
    model = models.get("mobilenetv1_dnw", rule="dnw", share="scaled", mult_adds=3_232_842)
    edges = [report.edges for report in model.wiring.report()]
    counted = profile(model)
    assert sum(edges) == 158_939
    assert 3_232_842 - 1024 - 9 * 1024 - 27 * 1024 < counted.mult_adds <= 3_232_842
    spent = sum(n * pixels for n, pixels in zip(edges, (1024, 256, 64, 16, 4), strict=True))
    assert spent > 3_232_842 - 2_314_240, "if all nodes counted, edges could not spend as much"


def test_weak_nodes_give_way_before_edges_do() -> None:
    """Two nodes send; the second one's edges are weaker, and without it the ranking fits."""
    graph = wirings.StaticGraph(Blocks([2, 4]), node=[ConvNode(), PlainNode()])
    model = nn.Sequential(graph, nn.Flatten(), nn.Linear(4 * 16, 2, bias=False))
    with torch.no_grad():
        graph.weight.copy_(torch.tensor([[9.0, 3.0], [9.0, 1.0], [9.0, 1.0], [9.0, 1.0]]).flatten())
        model[2].weight.copy_(torch.linspace(0.1, 2.9, 128).view(2, 64))
    nodes, settings = 2 * 9 * 16, {"example_input": (2, 4, 4), "share": "global"}
    free = wire_(copy.deepcopy(model), k=15, mult_adds=5000, **settings)
    assert [report.edges for report in free.report()] == [5, 10]
    wiring = wire_(model, k=15, mult_adds=5 * 16 + nodes + 10 - 1, **settings)
    assert [report.edges for report in wiring.report()] == [4, 11], "only the first node's edges"
    assert wiring.layers[0].edges.left.tolist() == [True, False] * 4


def test_nodes_are_closed_until_the_next_ranking() -> None:
    model = Network(3)
    settings: dict[str, Any] = {"k": 12, "example_input": SHAPE, "share": "global", "include": ["stages"]}
    costs = (m.allowed * pixels for m, pixels in zip(model.stages, (64, 16), strict=True))
    least = profile(model, SHAPE).mult_adds - sum(costs) + 64 + 11 * 16  # all nodes, and the cheapest edges
    wiring = wire_(model, mult_adds=least + 200, **settings)
    layer = wiring.layers[0]
    open_, sent = layer.edges.left, layer.senders()
    assert open_ is not None
    assert not open_.all()
    closed = int(sent[~open_][0])
    assert bool((open_ == ~torch.isin(sent, sent[~open_])).all()), "all edges of a node, or none"
    with torch.no_grad():
        layer.weight[sent == closed] = 50.0
    assert not (wiring.masks()[layer.name] & (sent == closed)).any()
    model(torch.randn(4, *SHAPE)).square().sum().backward()
    assert layer.weight.grad is not None
    wiring.steps = 99
    wiring.step()
    assert (wiring.masks()[layer.name] & (sent == closed)).any(), "ranked again"


def test_open_nodes_are_not_edges_that_training_still_used() -> None:
    model = Network(3)
    k, bound = sum(m.allowed for m in model.stages) // 4, profile(model, SHAPE).mult_adds
    wire_(model, k=k, mult_adds=bound, example_input=SHAPE, share="global", include=["stages"])
    wirings.finalize_(model)  # without a warning, which would fail the test
    assert sum(int(m.weight.count_nonzero()) for m in model.stages) == k


@pytest.mark.parametrize("rule", ["dnw", "soft_threshold"])
def test_a_schedule_closes_nodes_when_it_ends(rule: str) -> None:
    model = Network(5)
    limit = profile(model, SHAPE).mult_adds - 3500
    wiring = wire_(
        model, rules.get(rule, schedule={"end": 0.5}), k=12, mult_adds=limit, example_input=SHAPE, share="scaled",
        include=["stages"],
    )  # fmt: skip
    wiring.plan(20)
    assert all(layer.edges.left is not None and layer.edges.left.all() for layer in wiring.layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(1, 21):
        train(model, optimizer, wiring)
        if step >= 10:
            assert sum(report.edges for report in wiring.report()) == 12
            assert profile(model, SHAPE).mult_adds <= limit


def test_acdc_meets_the_bound_in_sparse_phases() -> None:
    model = Network(5)
    limit = profile(model, SHAPE).mult_adds - 3500
    rule = rules.get("acdc", warmup=2, sparse=3, dense=2, last_dense=2, last_sparse=4)
    wiring = wire_(model, rule, k=12, mult_adds=limit, example_input=SHAPE, share="global", include=["stages"])
    wiring.plan(20)
    optimizer, numbers = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), set()
    for step in range(1, 21):
        train(model, optimizer, wiring)
        if rule.is_sparse(step, 20):
            numbers.add(tuple(report.edges for report in wiring.report()))
            assert sum(report.edges for report in wiring.report()) == 12
            assert profile(model, SHAPE).mult_adds <= limit
    assert len(numbers) > 1, "ranked again"


def test_saved_and_restored() -> None:
    settings: dict[str, Any] = {"k": 12, "example_input": SHAPE, "share": "global", "include": ["stages"]}
    model = Network(3)
    limit = profile(model, SHAPE).mult_adds - 3000
    wiring = wire_(model, mult_adds=limit, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    wiring.steps = 98
    for _ in range(3):
        train(model, optimizer, wiring)
    again = Network(3)
    restored = wirings.rewire_(again, wiring.describe(), model.state_dict())
    other = Network(3)
    resumed = wire_(other, mult_adds=limit, **settings)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(wiring.state_dict())
    for one in (restored, resumed):
        assert one.steps == 101
        for layer, same in zip(wiring.layers, one.layers, strict=True):
            assert torch.equal(layer.edges.left, same.edges.left)
        for mask, same in zip(wiring.masks().values(), one.masks().values(), strict=True):
            assert torch.equal(mask, same)
    for one, handle in ((model, wiring), (again, restored)):
        handle.steps = 199
        torch.manual_seed(7)
        train(one, torch.optim.SGD(one.parameters(), lr=0.5), handle)
    assert all(torch.equal(a, b) for a, b in zip(wiring.masks().values(), restored.masks().values(), strict=True))


def test_rules_that_keep_a_wiring_count_all_nodes() -> None:
    model = Network(3)
    dense = profile(model, SHAPE).mult_adds
    wiring = wire_(model, "rigl", k=12, mult_adds=dense - 3000, example_input=SHAPE, share="global", include=["stages"])
    assert all(layer.edges.left is None for layer in wiring.layers)
    spent = sum(report.edges * px for report, px in zip(wiring.report(), (64, 16), strict=True))
    edges = sum(m.allowed * px for m, px in zip(model.stages, (64, 16), strict=True))
    assert dense - edges + spent <= dense - 3000


@pytest.mark.parametrize("nodes", [[-1], [10**15], [1.5], "costs", [], {}, [0]])
def test_damaged_costs_of_nodes_are_refused(nodes: Any) -> None:
    model = Network(3)
    k, bound = sum(m.allowed for m in model.stages) // 2, profile(model, SHAPE).mult_adds
    wiring = wire_(model, "dnw", k=k, mult_adds=bound, share="global", include=["stages*"], example_input=SHAPE)
    description, state = copy.deepcopy(wiring.describe()), model.state_dict()
    assert description["layers"][0]["nodes"], "the bound counts nodes"
    description["layers"][0]["nodes"] = nodes
    with pytest.raises(wirings.WiringError, match="nodes"):
        wirings.rewire_(Network(3), description, state)


def test_a_bound_with_room_for_all_nodes_closes_none() -> None:
    model = Network(3)
    dense = profile(model, SHAPE).mult_adds
    k = sum(m.allowed for m in model.stages) // 4
    bounded = wire_(model, "dnw", k=k, mult_adds=dense, share="global", include=["stages*"], example_input=SHAPE)
    assert all(bool(layer.edges.left.all()) for layer in bounded.layers)


@pytest.mark.parametrize("share", ["uniform", "erk", "global", "scaled"])
def test_a_fraction_is_of_the_same_total_for_every_share(share: str) -> None:
    model = Network(3)
    dense = profile(model, SHAPE).mult_adds
    wiring = wire_(model, "dnw", density=1.0, mult_adds=1.0, share=share, include=["stages*"], example_input=SHAPE)
    assert profile(model, SHAPE).mult_adds == dense
    assert wiring.budget is not None
    with pytest.raises(wirings.WiringError, match=r"cannot be (met|guaranteed) at once: .* nearest that can be"):
        wire_(Network(3), "dnw", density=1.0, mult_adds=0.9, share=share, include=["stages*"], example_input=SHAPE)


def test_a_refusal_counts_nodes_apart_from_the_rest() -> None:
    with pytest.raises(
        wirings.WiringError, match=r"nodes of graphs cost [\d,]+ if all of them are in use, and the rest"
    ):
        wire_(Network(3), "dnw", k=4, mult_adds=2_000, share="global", include=["stages*"], example_input=SHAPE)
