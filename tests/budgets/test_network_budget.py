"""Budgets of the whole network: parameters and multiply-adds are met exactly, or the error names the nearest."""

import copy
import itertools
import random
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import wirings
from wirings import WiringError, wire_
from wirings.budgets.apportion import spend
from wirings.profiling import profile


def network(seed: int, depth: int) -> tuple[nn.Sequential, tuple[int, int, int]]:
    """A random network of convolutions (some strided or grouped) and linear layers, and the shape of its input."""
    draw = torch.Generator().manual_seed(seed)

    def pick(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (), generator=draw))]

    channels, size = pick(1, 2, 3, 4), pick(5, 6, 8, 9)
    shape, layers = (channels, size, size), []
    for _ in range(depth):
        groups, out = pick(1, 1, 2), 2 * pick(1, 2, 3, 4)
        groups = groups if channels % groups == 0 else 1
        kernel, stride = pick(1, 3), pick(1, 1, 2)
        layers.append(nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=bool(pick(0, 1))))
        layers += [nn.BatchNorm2d(out)] * pick(0, 1) + [nn.ReLU()]
        channels = out
    maps = nn.Sequential(*layers).eval()(torch.zeros(1, *shape))
    layers += [nn.Flatten(), nn.Linear(maps.numel(), pick(2, 3, 7)), nn.ReLU()] if pick(0, 1) else [nn.Flatten()]
    return nn.Sequential(*layers).train(), shape


def costs(model: nn.Module, wiring: wirings.Wiring, shape: tuple[int, ...]) -> list[int]:
    """Multiply-adds of an edge of each wired layer, counted from the size of its output maps."""
    pixels: dict[nn.Module, int] = {}
    hooks = [
        module.register_forward_hook(lambda m, args, out: pixels.update({m: out[0, 0].numel()}))
        for module in model.modules()
    ]
    model.eval()(torch.zeros(1, *shape))
    for hook in hooks:
        hook.remove()
    return [pixels[layer.module] for layer in wiring.layers]


shares = st.sampled_from(["uniform", "erk", "global"])


@pytest.mark.slow
@settings(max_examples=200)
@given(st.integers(0, 10**6), st.integers(1, 4), st.floats(-0.1, 1.1), shares, st.booleans(), st.booleans())
@pytest.mark.filterwarnings("ignore:share=.global. leaves no edges")
def test_parameters(seed: int, depth: int, fraction: float, share: str, skips: bool, as_share: bool) -> None:
    model, shape = network(seed, depth)
    skip = ["0"] if skips and depth > 1 else []
    total = sum(p.numel() for p in model.parameters())
    target: float = max(round(fraction * total), 1)
    if as_share:
        target = min(max(fraction, 0.01), 1.0)
    plain = copy.deepcopy(model)
    try:
        wiring = wire_(model, params=target, share=share, skip=skip)
    except WiringError as error:
        nearest = int(re.search(r"nearest that can be met is ([\d,]+)", str(error))[1].replace(",", ""))
        assert list(model.state_dict()) == list(plain.state_dict()), "the model is unchanged"
        wire_(plain, params=nearest, share=share, skip=skip)
        assert profile(plain, shape).params == nearest
        farther = nearest - 1 if nearest > (target * total if as_share else target) else nearest + 1
        with pytest.raises(WiringError):
            wire_(copy.deepcopy(model), params=farther, share=share, skip=skip)
        return
    expected = int(target * total + 1e-6) if as_share else target
    assert profile(model, shape).params == expected
    assert sum(report.edges for report in wiring.look()) == int(wiring.layers[0].edges.k) or share != "global"


@pytest.mark.slow
@settings(max_examples=200)
@given(st.integers(0, 10**6), st.integers(1, 4), st.floats(-0.1, 1.1), shares, st.booleans(), st.booleans())
@pytest.mark.filterwarnings("ignore:share=.* leaves a single edge")
def test_multiply_adds(seed: int, depth: int, fraction: float, share: str, skips: bool, as_share: bool) -> None:
    model, shape = network(seed, depth)
    skip = ["0"] if skips and depth > 1 else []
    total = profile(model, shape).mult_adds
    target: float = max(round(fraction * total), 1)
    if as_share:
        target = min(max(fraction, 0.01), 1.0)
    plain = copy.deepcopy(model)
    settings: dict[str, Any] = {"share": share, "skip": skip, "example_input": shape}
    try:
        wiring = wire_(model, mult_adds=target, **settings)
    except WiringError as error:
        nearest = int(re.search(r"nearest that can be met is ([\d,]+)", str(error))[1].replace(",", ""))
        wire_(plain, mult_adds=nearest, **settings)
        assert profile(plain, shape).mult_adds == nearest
        return
    number = int(target * total + 1e-6) if as_share else target
    left = number - profile(model, shape).mult_adds
    reports = wiring.look()
    price = costs(model, wiring, shape)
    room = [cost for cost, report in zip(price, reports, strict=True) if report.edges < report.possible]
    assert 0 <= left < min(room, default=1), "exactly, or up to less than one edge of the cheapest layer with room"
    assert min(report.edges for report in reports) >= 1
    assert left == 0 or 1 not in price or reports[price.index(1)].density == 1


def test_by_hand() -> None:
    """The convolution's 36 edges cost 4 × 4 multiply-adds each, the linear layer's 32 edges one each; 3 biases."""
    model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Flatten(), nn.Linear(32, 1))
    assert sum(p.numel() for p in model.parameters()) == 36 + 2 + 32 + 1
    plain = copy.deepcopy(model)
    wiring = wire_(model, params=37)
    assert [r.edges for r in wiring.look()] == [18, 16], "half of the 68 edges, and 3 biases"
    model = copy.deepcopy(plain)
    wiring = wire_(model, params=0.5)  # of 71: 35
    assert sum(r.edges for r in wiring.look()) == 32
    model = copy.deepcopy(plain)
    wiring = wire_(model, mult_adds=304, example_input=(2, 4, 4))  # half of 36 · 16 + 32
    assert [r.edges for r in wiring.look()] == [18, 16]
    assert profile(model, (2, 4, 4)).mult_adds == 304
    model = copy.deepcopy(plain)
    wiring = wire_(model, mult_adds=0.5, example_input=torch.zeros(1, 2, 4, 4))
    assert [r.edges for r in wiring.look()] == [18, 16]
    model = copy.deepcopy(plain)
    wiring = wire_(model, mult_adds=5e2, example_input=torch.zeros(2, 2, 4, 4))
    assert profile(model, torch.zeros(2, 2, 4, 4)).mult_adds == 500, "counts both examples"


def test_accepts_numpy_scalars() -> None:
    budgets: list[tuple[dict[str, Any], int]] = [({"params": np.int64(37)}, 34), ({"params": np.float32(0.5)}, 32)]
    for budget, edges in [*budgets, ({"k": np.int64(20)}, 20)]:
        model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Flatten(), nn.Linear(32, 1))
        assert sum(r.edges for r in wire_(model, **budget).look()) == edges


@pytest.mark.parametrize(("rule", "share"), [("dnw", "uniform"), ("dnw", "erk"), ("str", "uniform")])
def test_a_layer_without_edges_would_cut_the_network(rule: str, share: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    with pytest.raises(WiringError, match="nearest that can be met is 3"):
        wire_(model, rule, k=2, share=share)
    assert next(iter(model.state_dict())) == "0.weight", "the model is unchanged"
    assert [report.edges for report in wire_(model, rule, k=3, share=share).look()] == [1, 1, 1]


def test_by_erk() -> None:
    """Densities (2 + 2 + 3 + 3) / 36 and 33 / 32 give 10 : 33 edges, but the second layer has only 32."""
    model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Flatten(), nn.Linear(32, 1))
    wiring = wire_(model, mult_adds=16 * 5 + 16, example_input=(2, 4, 4), share="erk")
    assert [r.edges for r in wiring.look()] == [5, 16], "5 : 16.5, and 96 in total"


def test_unwired_layers_count() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Flatten(), nn.Linear(32, 1))
    wiring = wire_(model, mult_adds=36 * 16 + 9, example_input=(2, 4, 4), skip=["0"])
    assert [r.edges for r in wiring.look()] == [9]
    model = wirings.unwire_(model)
    wiring = wire_(model, params=36 + 3 + 7, skip=["0"])
    assert [r.edges for r in wiring.look()] == [7]


class Steps(nn.Module):
    """An LSTM whose outputs attend to a shorter sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.heads = nn.LSTM(6, 8, batch_first=True), nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 3)
        self.out2 = nn.Linear(8, 3)
        self.out2.weight = self.out.weight

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(x)
        mixed, _ = self.heads(states, states, states)
        return self.out(mixed) + self.out2(states)


class FreeAttention(nn.Module):
    """Attention as usually written today: separate projections and a function, with more query than key heads."""

    def __init__(self, width: int, heads: int, answering: int) -> None:
        super().__init__()
        self.heads, self.answering, self.each = heads, answering, width // heads
        self.ask, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.answer = nn.Linear(width, 2 * answering * self.each)

    def forward(self, x: Tensor) -> Tensor:
        query = self.ask(x).unflatten(-1, (self.heads, self.each)).transpose(1, 2)
        pairs = self.answer(x).unflatten(-1, (2 * self.answering, self.each)).transpose(1, 2)
        key, value = pairs.chunk(2, 1)
        shared = self.answering < self.heads
        mixed = F.scaled_dot_product_attention(query, key, value=value, is_causal=True, enable_gqa=shared)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Attends(nn.Module):
    def __init__(self, width: int, heads: int, weights: bool) -> None:
        super().__init__()
        self.layer, self.weights = nn.MultiheadAttention(width, heads, batch_first=True), weights

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.layer(x, x, x, need_weights=self.weights)[0]
        return mixed


@pytest.mark.parametrize(
    ("model", "edges"),
    [
        (FreeAttention(16, 2, 2), 4 * 16 * 16),
        (Attends(16, 2, weights=False), 4 * 16 * 16),
        (Attends(16, 2, weights=True), 4 * 16 * 16),
        (FreeAttention(16, 4, 2), 3 * 16 * 16),
    ],
    ids=["by a function", "a layer", "a layer that gives its weights", "shared keys"],
)
def test_products_of_attention_cost_the_same_however_they_are_written(model: nn.Module, edges: int) -> None:
    x = torch.randn(3, 7, 16)
    whole = 3 * 7 * edges + 2 * 3 * 7 * 7 * 16  # every edge once per token; queries × keys, and scores × values
    assert profile(model, x).mult_adds == whole
    wire_(model, mult_adds=0.5, example_input=x)
    assert profile(model, x).mult_adds == whole // 2
    with pytest.raises(WiringError, match="mult_adds"):
        wire_(copy.deepcopy(wirings.unwire_(model)), mult_adds=2 * 3 * 7 * 7 * 16 - 1, example_input=x)


def test_recurrent_layers_attention_and_tied_weights() -> None:
    x = torch.randn(2, 5, 6)
    for target, met in ((5000, 5000), (7777, 7770), (0.6, 4990)):  # every edge is used at ten places, or twenty
        model = Steps()
        assert profile(model, x).mult_adds == 8320
        wire_(model, mult_adds=target, example_input=x)
        assert profile(model, x).mult_adds == met
    model = Steps()
    wiring = wire_(model, params=400)
    assert sum(r.edges for r in wiring.look()) == 400 - sum(
        p.numel() for name, p in Steps().named_parameters() if "bias" in name
    )


def test_layers_are_ranked_again_only_if_the_rule_follows_the_weights() -> None:
    """All edges of both layers are ranked when wired, then every 100 steps; the multiply-adds stay the same."""
    for rule, moves in (("dnw", True), ("random", False)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.Flatten(), nn.Linear(64, 8, bias=False))
        wiring = wire_(model, rule, mult_adds=1000, example_input=(2, 4, 4), share="global")
        before = [r.edges for r in wiring.look()]
        with torch.no_grad():
            wiring.layers[0].weight.mul_(100)
        for _ in range(99):
            wiring.step()
        assert [r.edges for r in wiring.look()] == before
        wiring.step()
        after = [r.edges for r in wiring.look()]
        assert (after != before) == moves
        assert profile(model, (2, 4, 4)).mult_adds == 1000
        again = copy.deepcopy(model)
        other = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.Flatten(), nn.Linear(64, 8, bias=False))
        resumed = wire_(other, rule, mult_adds=1000, example_input=(2, 4, 4), share="global")
        other.load_state_dict(again.state_dict())
        resumed.load_state_dict(wiring.state_dict())
        assert [r.edges for r in resumed.look()] == after


def test_with_a_schedule() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Flatten(), nn.Linear(64, 8))
    wiring = wire_(model, wirings.rules.get("dnw", schedule="linear"), mult_adds=0.25, example_input=(2, 4, 4))
    wiring.plan(4)
    total = profile(nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Flatten(), nn.Linear(64, 8)), (2, 4, 4)).mult_adds
    counts = []
    for _ in range(3):
        counts.append(profile(model, (2, 4, 4)).mult_adds)
        wiring.step()
    assert counts[0] == total
    assert counts[2] == total // 4
    assert counts[2] < counts[1] < counts[0]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"params": 0}, "params must be a whole number of parameters of the whole network, or a fraction.*got 0"),
        ({"params": 1.5}, r"params must be a whole number.*got 1\.5"),
        ({"params": -3}, "got -3"),
        ({"params": True}, "got True"),
        ({"params": "10"}, "got '10'"),
        ({"params": 10, "density": 0.5}, "got density and params"),
        ({"mult_adds": 10, "params": 10, "k": 5}, "got k and params and mult_adds"),
        ({"params": 4}, r"params = 4 cannot be met: with one edge in each of the 2 wired layers .* has 5 parameters, "
         r"with all edges 71 \(3 of them outside wired layers\)\. The nearest that can be met is 5"),
        ({"params": 100}, r"The nearest that can be met is 71"),
        ({"params": 0.01}, r"params = 0\.01 of 71, 0 parameters, cannot be met"),
        ({"mult_adds": 10, "example_input": (2, 4, 4)}, r"has 17 multiply-adds.*nearest that can be met is 17"),
        ({"mult_adds": 100}, "mult_adds= needs example_input for Sequential: a tensor"),
        ({"mult_adds": 100, "example_input": (3, 4, 4)}, r"Sequential failed on example_input of shape \(1, 3, 4, 4\)"),
        ({"density": 0.1, "example_input": (2, 4, 4)}, "pass mult_adds= too, or drop it"),
        ({"rule": "sparse_momentum", "mult_adds": 100, "example_input": (2, 4, 4)}, "moves edges between layers"),
        ({"rule": "dense", "params": 10}, "fixes the number of edges itself; drop params=10"),
    ],
)  # fmt: skip
def test_mistakes(settings: dict[str, Any], says: str) -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Flatten(), nn.Linear(32, 1))
    with pytest.raises(WiringError, match=says):
        wire_(model, **settings)
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_rejects_layers_without_a_single_edge_cost() -> None:
    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.heads(x, x[:, :2], x[:, :2])[0]

    with pytest.raises(WiringError, match=r"the rows of heads\.in_proj_weight are not all multiplied equally often"):
        wire_(Crossed(), mult_adds=100, example_input=torch.zeros(1, 5, 8))
    graph = nn.Sequential(wirings.StaticGraph([4, 8, 4]))
    with pytest.raises(WiringError, match=r"belongs to a neural graph.*k= or params="):
        wire_(graph, mult_adds=100, example_input=torch.zeros(1, 4, 3, 3))
    unused = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    unused.forward = lambda x: unused["a"](x)  # type: ignore[method-assign]
    with pytest.raises(WiringError, match=r"b\.weight was not used when the model was called"):
        wire_(unused, mult_adds=20, example_input=torch.zeros(1, 4))


def test_counting_leaves_the_model_unchanged() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, 1))
    model[1].eval()
    model.input_shape = (2, 4, 4)  # type: ignore[assignment]
    before = copy.deepcopy(model.state_dict())
    wire_(model, mult_adds=300)
    assert [m.training for m in (model, *model)] == [True, True, False, True, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model[0]._forward_hooks


layers_of_prices = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from([1, 1, 2, 3, 4, 9, 16, 25, 49, 225]), st.integers(1, 30)),
    min_size=1,
    max_size=5,
)


def costs_of(counts: list[int], price: list[int]) -> int:
    return sum(n * p for n, p in zip(counts, price, strict=True))


def reachable(most: list[int], price: list[int]) -> set[int]:
    """All reachable sums, found one by one."""
    sums = {0}
    for m, p in zip(most, price, strict=True):
        sums = {before + n * p for before in sums for n in range(1, m + 1)}
    return sums


@settings(max_examples=300)
@given(layers_of_prices, st.data())
def test_spending_is_as_close_as_possible(layers: list[tuple[int, int, int]], data: st.DataObject) -> None:
    most, price, share = (list(column) for column in zip(*layers, strict=True))
    total = data.draw(st.integers(sum(price), costs_of(most, price)))
    counts = spend(total, share, most, price)
    assert all(1 <= n <= m for n, m in zip(counts, most, strict=True))
    assert costs_of(counts, price) == max(found for found in reachable(most, price) if found <= total)
    assert counts == spend(total, share, most, price)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=3), st.data())
def test_spending_stays_near_the_shares(layers: list[tuple[int, int]], data: st.DataObject) -> None:
    """No price is more than twice as far from its share, plus two edges, as in the best of all combinations."""
    most, price = (list(column) for column in zip(*layers, strict=True))
    every = list(itertools.product(*(range(1, m + 1) for m in most)))
    total = costs_of(list(data.draw(st.sampled_from(every))), price)
    wanted = in_proportion(total, most, price)

    def by_price(numbers: Sequence[float]) -> dict[int, float]:
        return {p: sum(n for n, q in zip(numbers, price, strict=True) if p == q) for p in price}

    def away(numbers: Sequence[float]) -> dict[int, float]:
        return {p: abs(n - by_price(wanted)[p]) for p, n in by_price(numbers).items()}

    nearest = min(
        max(far / by_price(wanted)[p] for p, far in away(counts).items())
        for counts in every
        if costs_of(list(counts), price) == total
    )
    found = away(spend(total, most, most, price))
    assert all(far <= 2 * nearest * by_price(wanted)[p] + 2 for p, far in found.items())


def in_proportion(total: int, most: list[int], price: list[int]) -> list[float]:
    """The same density in every layer, but at least one edge."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        cost = sum(max(middle * m, 1) * p for m, p in zip(most, price, strict=True))
        low, high = (middle, high) if cost <= total else (low, middle)
    return [max(low * m, 1) for m in most]


def test_a_sum_that_takes_more_than_a_few_edges() -> None:
    """With 27 edges at 225 and 28 at 1, 17 · 225 + 13 is the only solution. A regression test: it was once missed."""
    for share, edges in (("uniform", [4, 13, 13]), ("erk", [6, 11, 13])):
        layers = [nn.Conv2d(2, 3, 1, bias=False), nn.Conv2d(3, 7, 1, bias=False)]
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(7, 4, bias=False))
        wiring = wire_(model, mult_adds=3838, example_input=(2, 15, 15), share=share)
        assert profile(model, (2, 15, 15)).mult_adds == 3838
        assert [report.edges for report in wiring.look()] == edges


def test_a_hundred_layers_with_millions_of_edges() -> None:
    """Met exactly with the same density everywhere, and fast if it cannot be met."""
    draw = random.Random(0)
    price = [draw.choice([12544, 3136, 784, 196, 49]) for _ in range(99)] + [1]
    most = [draw.randint(100_000, 3_000_000) for _ in price]
    total = costs_of(most, price) // 10 + 12_345
    began = time.process_time()
    counts = spend(total, most, most, price)
    assert costs_of(counts, price) == total
    assert all(0.0999 < n / m < 0.1001 for n, m in zip(counts, most, strict=True))
    most[-1] = 20  # at least one of them, so the remainder modulo 49 is 1 to 20
    total = costs_of(most, price) // 490 * 49 + 30
    counts = spend(total, most, most, price)
    assert costs_of(counts, price) == total - 10
    assert counts[-1] == 20
    assert all(0.0999 < n / m < 0.1001 for n, m in zip(counts[:-1], most[:-1], strict=True))
    assert time.process_time() - began < 5


def test_handle_shows_unspent_multiply_adds() -> None:
    def table(mult_adds: int) -> str:
        model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.Conv2d(4, 4, 3, padding=1, bias=False))
        return str(wirings.wire_(model, mult_adds=mult_adds, example_input=(1, 5, 5)))

    assert table(25 * 60).splitlines()[-1].startswith("2 layers")
    assert table(25 * 60 + 24).splitlines()[-1].startswith("24 multiply-adds below the budget")
