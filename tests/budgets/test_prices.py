"""Two budgets at once: exactly so many edges, and at most so many multiply-adds."""

import copy
import itertools
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_network_budget import costs as costs_of
from test_network_budget import network
from torch import nn

import wirings
from wirings import WiringError, models, rules, wire_
from wirings.budgets.prices import bounded_counts, check_feasible, least_cost
from wirings.graph import Blocks
from wirings.graph.nodes import ConvNode
from wirings.profiling import profile

layers = st.lists(st.tuples(st.integers(1, 12), st.sampled_from([1, 4, 9, 16, 64])), min_size=1, max_size=5)


@settings(max_examples=200)
@given(layers, st.floats(0, 1), st.floats(0, 1), st.integers(0, 10**6), st.booleans())
def test_numbers_of_edges(shape: list[tuple[int, int]], share: float, bound: float, seed: int, paid: bool) -> None:
    random = np.random.default_rng(seed)
    shares = random.random(len(shape)).tolist()
    allowed, costs = [n for n, _ in shape], [cost for _, cost in shape]
    edges = len(shape) + round(share * (sum(allowed) - len(shape)))
    nodes = [np.cumsum([0, *random.integers(0, 2, n) * 5 * cost]) for n, cost in shape] if paid else None
    every = 0 if nodes is None else sum(int(one[-1]) for one in nodes)
    least, most = least_cost(allowed, costs, edges) + every, sum(n * c for n, c in shape) + every
    spent = least + round(bound * (most - least))

    def total(counts: list[int]) -> int:
        of_nodes = 0 if nodes is None else sum(int(one[n]) for one, n in zip(nodes, counts, strict=True))
        return sum(n * c for n, c in zip(counts, costs, strict=True)) + of_nodes

    counts = bounded_counts(shares, allowed, costs, edges, spent, nodes)
    assert sum(counts) == edges
    assert all(1 <= n <= most for n, most in zip(counts, allowed, strict=True))
    assert total(counts) <= spent
    free = bounded_counts(shares, allowed, costs, edges, most, nodes)
    if total(free) <= spent:
        assert counts == free, "the bound does not matter"
    else:
        assert spent - total(counts) < max(costs) * (6 if paid else 1), "within one edge of the bound, and a node"


def test_every_expensive_layer_gives_some_edges_up() -> None:
    """Halving what a uniform density costs: numbers are divided by a power of the cost, and no layer is cut off."""
    counts = bounded_counts([1, 1, 1, 1], [10**6] * 4, [64, 16, 4, 1], 4000, 42_500)
    assert sum(counts) == 4000
    ratios = [np.log(a / b) for a, b in itertools.pairwise(counts)]
    assert ratios == pytest.approx([ratios[0]] * 3, rel=0.02)
    assert sum(n * c for n, c in zip(counts, [64, 16, 4, 1], strict=True)) > 42_500 - 64


def test_by_hand() -> None:
    """The convolution's 36 edges cost 16 multiply-adds each, the linear layer's 32 one each."""
    model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.Flatten(), nn.Linear(32, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.linspace(1.0, 2.0, 36).view(2, 2, 3, 3))
        model[2].weight.copy_(torch.linspace(0.5, 1.5, 32).view(1, 32))
    settings: dict[str, Any] = {"k": 20, "example_input": (2, 4, 4), "share": "global"}
    for mult_adds, expected in ((320, [19, 1]), (304, [18, 2]), (170, [10, 10]), (35, [1, 19])):
        twin = copy.deepcopy(model)
        wiring = wire_(twin, mult_adds=mult_adds, **settings)
        assert [report.edges for report in wiring.report()] == expected
        assert profile(twin, (2, 4, 4)).mult_adds == expected[0] * 16 + expected[1] <= mult_adds
    with pytest.raises(WiringError, match="nearest that can be met with 20 edges is mult_adds = 35, and with 34"):
        wire_(model, mult_adds=34, **settings)
    assert next(iter(model.state_dict())) == "0.weight", "the model is unchanged"


def test_equal_shares_are_kept_as_far_as_the_bound_allows() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Flatten(), nn.Linear(32, 1))
    for mult_adds, expected in ((1000, [18, 16]), (304, [18, 16]), (303, [17, 17]), (170, [9, 25])):
        wiring = wire_(copy.deepcopy(model), k=34, mult_adds=mult_adds, example_input=(2, 4, 4))
        assert [report.edges for report in wiring.report()] == expected


@pytest.mark.slow
@settings(max_examples=100)
@given(
    st.integers(0, 10**6),
    st.integers(1, 4),
    st.floats(0, 1),
    st.floats(-0.1, 1.1),
    st.sampled_from(["uniform", "erk", "global", "scaled"]),
    st.sampled_from(["k", "density", "params"]),
)
def test_random_networks(seed: int, depth: int, share: float, bound: float, how: str, kind: str) -> None:
    model, shape = network(seed, depth)
    plain = copy.deepcopy(model)
    dense, possible = profile(model, shape).mult_adds, sum(p.numel() for p in model.parameters())
    amount: float = max(share, 0.05)
    if kind != "density":
        wired = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear))
        amount = max(round(amount * wired), depth + 1) + (possible - wired if kind == "params" else 0)
    budget: dict[str, Any] = {kind: amount, "mult_adds": max(round(bound * dense), 1)}
    settings: dict[str, Any] = {"example_input": shape, "share": how}
    try:
        wiring = wire_(model, **budget, **settings)
    except WiringError as error:
        found = re.search(r"with ([\d,]+) edges is mult_adds = ([\d,]+)", str(error))
        edges, nearest = (int(number.replace(",", "")) for number in found.groups())
        wiring = wire_(plain, k=edges, mult_adds=nearest, **settings)
        assert profile(plain, shape).mult_adds == nearest
        with pytest.raises(WiringError):
            wire_(copy.deepcopy(model), k=edges, mult_adds=nearest - 1, **settings)
        return
    prices = costs_of(model, wiring, shape)
    edges = sum(report.edges for report in wiring.report())
    if kind == "k":
        assert edges == amount
    if kind == "params":
        assert profile(model, shape).params == amount
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        wiring.steps = 100 * step + 99  # the next one ranks the layers again
        optimizer.zero_grad()
        model.train()(torch.randn(2, *shape)).square().sum().backward()
        optimizer.step()
        wiring.step()
        counted = profile(model, shape)
        assert sum(report.edges for report in wiring.report()) == edges
        assert counted.live_mult_adds <= counted.mult_adds <= budget["mult_adds"]
    if how == "global":
        free = sum(
            report.edges * price
            for report, price in zip(wire_(plain, k=edges, mult_adds=dense, **settings).report(), prices, strict=True)
        )
        if free > budget["mult_adds"]:
            first = wire_(wirings.unwire_(plain), k=edges, mult_adds=budget["mult_adds"], **settings)
            spent = sum(report.edges * price for report, price in zip(first.report(), prices, strict=True))
            assert 0 <= budget["mult_adds"] - spent < max(prices), "within one edge of the bound"


def test_layers_are_ranked_again_and_saved() -> None:
    def make() -> tuple[nn.Sequential, wirings.Wiring]:
        model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.Flatten(), nn.Linear(64, 8, bias=False))
        return model, wire_(model, k=100, mult_adds=600, example_input=(2, 4, 4), share="global")

    model, wiring = make()
    before = [report.edges for report in wiring.report()]
    with torch.no_grad():
        wiring.layers[0].weight.mul_(0.01)
    for _ in range(100):
        wiring.step()
    after = [report.edges for report in wiring.report()]
    assert sum(before) == sum(after) == 100
    assert after[0] < before[0]
    other, resumed = make()
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(wiring.state_dict())
    assert [report.edges for report in resumed.report()] == after
    plain = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.Flatten(), nn.Linear(64, 8, bias=False))
    rewired = wirings.rewire_(plain, wiring.describe(), model.state_dict())
    assert [report.edges for report in rewired.report()] == after


def test_a_rule_with_a_schedule_ends_at_both_budgets() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Flatten(), nn.Linear(64, 8))
    rule = rules.get("soft_threshold", schedule="cubic")
    wiring = wire_(model, rule, k=100, mult_adds=500, example_input=(2, 4, 4), share="global")
    wiring.plan(10)
    assert sum(report.edges for report in wiring.report()) == 72 + 512
    for _ in range(10):
        wiring.step()
    assert sum(report.edges for report in wiring.report()) == 100
    assert profile(model, (2, 4, 4)).mult_adds <= 500


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"k": 10, "density": 0.1, "mult_adds": 100}, "got density and k and mult_adds"),
        ({"budget": {"0": 3}, "mult_adds": 100}, "got budget and mult_adds"),
        ({"k": 1, "mult_adds": 100}, "nearest that can be met is 2"),
        ({"k": 100, "mult_adds": 1000}, "allow only 68; lower k"),
        ({"k": 30, "mult_adds": 40}, r"with 30 edges is mult_adds = 45, and with 40 .* can be at most 25"),
        ({"k": 5, "mult_adds": 10}, r"with 5 edges is mult_adds = 20\."),
        ({"density": wirings.LinearSchedule(1.0, 0.1, 10), "mult_adds": 100}, "give the density at the end"),
        ({"rule": "sparse_momentum", "k": 30, "mult_adds": 100}, "moves edges between layers"),
    ],
)  # fmt: skip
def test_mistakes(settings: dict[str, Any], says: str) -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Flatten(), nn.Linear(32, 1))
    with pytest.raises(WiringError, match=says):
        wire_(model, **{"example_input": (2, 4, 4), **settings})
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_neural_graphs_of_one_resolution() -> None:
    """Table 2's network: the edges of a stage carry maps of one size. RigL may use any node, so all are counted."""
    model = models.get("mobilenetv1_dnw", rule="rigl", share="scaled", mult_adds=4_200_000)
    edges = [report.edges for report in model.wiring.report()]
    assert sum(edges) == 158_939
    spent = sum(n * pixels for n, pixels in zip(edges, (1024, 256, 64, 16, 4), strict=True))
    assert 0 <= 4_200_000 - 2_314_240 - spent < 1024, "the rest of the network, and less than one edge"
    counted = profile(model)
    assert counted.live_mult_adds <= counted.mult_adds <= 4_200_000
    free = models.get("mobilenetv1_dnw", rule="dnw", share="scaled")
    assert profile(free).mult_adds > 4_200_000
    with pytest.raises(WiringError, match=r"158,939 edges is mult_adds = 2,951,340, and with 2,400,000"):
        models.get("mobilenetv1_dnw", rule="dnw", share="global", mult_adds=2_400_000)
    with pytest.raises(WiringError, match="give share"):
        models.get("mobilenetv1_dnw", rule="dnw", mult_adds=4_200_000)


def test_graphs_without_a_single_cost_are_rejected() -> None:
    strided = wirings.StaticGraph(Blocks([4, 8, 4], reach=1), node=[ConvNode(), ConvNode(stride=2), ConvNode()])
    for graph in (wirings.ContinuousGraph(8, inputs=4, outputs=4), strided):
        with pytest.raises(WiringError, match="belongs to a neural graph"):
            wire_(nn.Sequential(graph), k=10, mult_adds=10**6, example_input=(4, 8, 8))
    skipped = nn.Sequential(wirings.StaticGraph([4, 8, 4]), nn.Flatten(), nn.Linear(36, 5))
    rest = profile(skipped, (4, 3, 3)).mult_adds - 36 * 5
    wiring = wire_(skipped, k=10, mult_adds=rest + 10, example_input=(4, 3, 3), skip=["0"])
    assert [report.edges for report in wiring.report()] == [10]


def test_models_take_a_bound() -> None:
    options: dict[str, Any] = {"width": 0.25, "classes": 10, "image_size": 32, "rule": "dnw", "density": 0.05}
    model = models.get("resnet18", mult_adds=1_500_000, share="global", **options)
    assert profile(model).mult_adds <= 1_500_000 < profile(models.get("resnet18", share="global", **options)).mult_adds


def test_a_pair_that_can_be_met_passes_the_check() -> None:
    check_feasible("both", [36, 32], [16, 1], 20, 35, 0)
    with pytest.raises(WiringError, match="both cannot be met at once"):
        check_feasible("both", [36, 32], [16, 1], 20, 34, 0)
