"""STR: thresholds are learned, and how many edges a layer has follows from them; exactly k in all."""

import math

import pytest
import torch
from torch import nn

import wirings
from wirings import WiringError
from wirings.rules import STR

WEIGHTS = [torch.tensor([[8.0, -4.0, 2.0, 1.0]]), torch.tensor([[0.7, -0.6, 0.4, 0.3]])]


def wired(rule: STR | None = None, **budget: object) -> tuple[nn.ModuleList, wirings.Wiring]:
    model = nn.ModuleList([nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)])
    with torch.no_grad():
        for module, weight in zip(model, WEIGHTS, strict=True):
            module.weight.copy_(weight)
    return model, wirings.wire_(model, rule or STR(), **(budget or {"k": 4}))


def set_threshold(wiring: wirings.Wiring, layer: int, value: float) -> None:
    """What many steps would come to: a threshold is exp(value) times what it was at first."""
    edges = wiring.layers[layer].edges
    edges.threshold.detach().fill_(value)
    edges.held.fill_(value)


def edges(wiring: wirings.Wiring) -> list[int]:
    return [report.edges for report in wiring.look()]


def test_real_edges_are_shrunk_by_the_threshold() -> None:
    model, wiring = wired()
    torch.testing.assert_close(model[0].weight.detach(), torch.tensor([[6.0, -2.0, 0, 0]]))
    torch.testing.assert_close(model[1].weight.detach(), torch.tensor([[0.3, -0.2, 0, 0]]))
    assert [layer.edges.scale.item() for layer in wiring.layers] == pytest.approx([2.0, 0.4])
    (model[0].weight * torch.tensor([[0.5, 0.1, 9.0, 9.0]])).sum().backward()
    layer = wiring.layers[0]
    torch.testing.assert_close(layer.weight.grad, torch.tensor([[0.5, 0.1, 0, 0]])), "real edges alone"
    # ∂L/∂v = −t Σ sign(w) g = −2 (0.5 − 0.1)
    assert layer.edges.threshold.grad.item() == pytest.approx(-0.8)


def test_a_threshold_that_has_risen_gives_edges_to_the_other_layer() -> None:
    """In multiples of their thresholds: 4, 2, 1, 0.5 and 1.75, 1.5, 1, 0.75. The first threshold grows by 2.5."""
    model, wiring = wired()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wiring.step(optimizer)
    assert edges(wiring) == [2, 2], "as the share said"
    set_threshold(wiring, 0, math.log(2.5))  # 1.6, 0.8, 0.4, 0.2
    wiring.step(optimizer)
    assert edges(wiring) == [1, 3]
    assert [int(layer.edges.k) for layer in wiring.layers] == [1, 3]
    torch.testing.assert_close(model[0].weight.detach(), torch.tensor([[4.0, 0, 0, 0]]))
    torch.testing.assert_close(model[1].weight.detach(), torch.tensor([[0.4, -0.3, 0.1, 0]]))


def test_no_layer_is_cut_off() -> None:
    model, wiring = wired()
    set_threshold(wiring, 0, 50.0)
    wiring.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert edges(wiring) == [1, 3]


def test_ranked_only_every_few_steps() -> None:
    model, wiring = wired(STR(every=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    set_threshold(wiring, 0, math.log(2.5))
    wiring.step(optimizer)
    assert edges(wiring) == [2, 2]
    wiring.step(optimizer)
    assert edges(wiring) == [1, 3]


def test_one_ranking_from_the_beginning() -> None:
    model, wiring = wired(k=4, share="global")
    assert edges(wiring) == [3, 1], "by magnitude, but for the strongest of the second layer"
    wiring.step(torch.optim.SGD(model.parameters(), lr=0.1))
    set_threshold(wiring, 1, -5.0)
    wiring.step(None)
    assert edges(wiring) == [1, 3]
    assert wirings.finalize_(model)[1].weight.count_nonzero() == 3


def changed(rule: STR, steps: int, *moves: float, **budget: object) -> tuple[list[float], list[int]]:
    """Thresholds and numbers of edges after steps in which an optimizer has moved every threshold by so much."""
    wiring = wired(rule, **budget)[1]
    optimizer = torch.optim.SGD([layer.edges.threshold for layer in wiring.layers], lr=1.0)
    for _ in range(steps):
        for layer, move in zip(wiring.layers, moves, strict=True):
            layer.edges.threshold.grad = torch.tensor([-move])
        optimizer.step()
        wiring.step(optimizer)
    return [layer.edges.threshold.item() for layer in wiring.layers], edges(wiring)


def test_what_would_change_the_budget_is_given_back() -> None:
    """Two edges each: half of the sum of changes, −0.006. Three and one: three quarters and a quarter of −0.008."""
    assert changed(STR(), 1, -0.004, -0.002)[0] == pytest.approx([-0.001, 0.001])
    assert changed(STR(), 1, -0.004, -0.004, k=4, share="global")[0] == pytest.approx([0.002, -0.002])
    assert changed(STR(every=4), 4, -0.004, -0.002)[0] == pytest.approx([-0.004, 0.004]), "those of four steps at once"


def test_thresholds_that_all_fall_move_no_edges() -> None:
    """Each by as much as it has edges, as weight decay does it: nothing is left of it, however long it goes on."""
    thresholds, numbers = changed(STR(), 2000, -0.15, -0.05, budget={"0": 3, "1": 1})
    assert numbers == [3, 1]
    assert thresholds == pytest.approx([0.0, 0.0], abs=1e-3)


def test_no_jump() -> None:
    """A gradient hundreds of times too large moves no more than 1 % a step."""
    assert changed(STR(), 1, -300.0, 0.0)[0] == pytest.approx([-0.01, 0.01])
    assert changed(STR(every=5), 5, -300.0, 0.0)[0] == pytest.approx([-0.05, 0.05])


def test_learns_where_edges_are_worth_more() -> None:
    """The first layer sees noise, the second all there is to know: its threshold falls, and edges move there."""
    torch.manual_seed(0)
    noise, signal, truth = torch.randn(256, 20), torch.randn(256, 20), torch.randn(20, 1)
    model = nn.ModuleList([nn.Linear(20, 1, bias=False), nn.Linear(20, 1, bias=False)])
    wiring = wirings.wire_(model, "str", k=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    assert edges(wiring) == [10, 10]
    for _ in range(300):
        optimizer.zero_grad()
        (model[0](noise) + model[1](signal) - signal @ truth).square().mean().backward()
        optimizer.step()
        wiring.step(optimizer)
    first, second = edges(wiring)
    assert first + second == 20
    assert second >= 13
    assert wiring.layers[0].edges.threshold.item() > wiring.layers[1].edges.threshold.item() + 0.15


def test_all_edges_at_first() -> None:
    """With a schedule from all edges there is no threshold yet: layers are compared by the size of their weights."""
    model, wiring = wired(density=wirings.LinearSchedule(1.0, 0.5, steps=2))
    assert torch.equal(model[0].weight, WEIGHTS[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        wiring.step(optimizer)
    assert sum(edges(wiring)) == 4


def test_the_optimizer_must_have_the_thresholds() -> None:
    model = nn.Linear(4, 2)
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    wiring = wirings.wire_(model, "str", k=4)
    with pytest.raises(WiringError, match=r"a threshold for weight.*make the optimizer.*after wire_"):
        wiring.step(early)
    model = nn.Linear(4, 2)
    with pytest.raises(WiringError, match=r"learns thresholds with the optimizer: call wiring.step\(optimizer\)"):
        wirings.wire_(model, "str", k=4).step()
    with pytest.raises(WiringError, match="every must be a whole number"):
        STR(every=0)
    with pytest.raises(WiringError, match=r"moves edges between layers.*give params= or k="):
        wirings.wire_(nn.Linear(4, 2), "str", mult_adds=4, example_input=(4,))
