"""Graphs under autocast: a wired weight is made in the lower precision at once, with the same results."""

from typing import Any

import pytest
import torch
from torch import nn

import wirings
from wirings import ContinuousGraph, Dag, DiscreteGraph, StaticGraph
from wirings.graph import product
from wirings.selection import passes

HALF = torch.bfloat16
GRAPHS: dict[str, Any] = {
    "blocks": lambda: StaticGraph([4, 6, 6, 3]),
    "dag": lambda: StaticGraph(topology=Dag(9, inputs=4), outputs=3),
    "discrete": lambda: DiscreteGraph(9, inputs=4, outputs=3, steps=2),
    "continuous": lambda: ContinuousGraph(9, inputs=4, outputs=3),
}


def wired(graph: nn.Module) -> nn.Module:
    """A wired model of two layers: the weight of a single one is made when it is read."""
    model = nn.Sequential(graph, nn.Linear(3, 2))
    wirings.wire_(model, "dnw", density=0.5)
    return model


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtype in which each graph has got its weights, in the order of the calls."""
    found: list[torch.dtype] = []
    split = product.split

    def watched(weight: torch.Tensor, products: Any) -> Any:
        found.append(weight.dtype)
        return split(weight, products)

    for module in (product, wirings.graph.static):
        monkeypatch.setattr(module, "split", watched)
    return found


def step(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    with torch.autocast("cpu", HALF):
        y = model(torch.randn(5, 4))
    y.float().square().sum().backward()
    return [y.detach(), *[p.grad for p in model.parameters() if p.grad is not None]]


@pytest.mark.parametrize("kind", GRAPHS)
def test_weights_are_made_in_the_precision_of_autocast(
    kind: str, seen: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for devices in (("cpu",), ()):
        monkeypatch.setattr(passes, "DEVICES", devices)
        torch.manual_seed(0)
        results.append(step(wired(GRAPHS[kind]())))
    assert seen == [HALF, torch.float32]
    for ours, converted in zip(*results, strict=True):
        assert ours.dtype == converted.dtype
        assert torch.equal(ours, converted)


def test_a_weight_that_is_read_by_others_keeps_its_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "DEVICES", ("cpu",))
    graph = GRAPHS["blocks"]()
    read: list[torch.dtype] = []
    model = wired(graph)
    model[1].register_forward_pre_hook(lambda *_: read.append(graph.weight.dtype))
    with torch.autocast("cpu", HALF):
        model(torch.randn(5, 4))
        read.append(graph.weight.dtype)
    assert read == [torch.float32, torch.float32]


def test_sparse_tiles_keep_the_precision_of_the_weights(
    seen: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "DEVICES", ("cpu",))
    allowed = torch.zeros(400, 400, dtype=torch.bool)
    allowed[4:, :4] = torch.rand(396, 4) < 0.05
    allowed[399, 0] = True
    graph = StaticGraph(topology=allowed, inputs=4, outputs=3)
    assert any(product.sparse for product in graph.far.values())
    step(wired(graph))
    assert seen == [torch.float32]


def test_a_graph_without_a_rule(seen: list[torch.dtype]) -> None:
    step(StaticGraph([4, 6, 3]))
    assert seen == [torch.float32]
