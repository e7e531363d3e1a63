"""STR: thresholds are learned and determine how many edges each layer has; exactly k in total."""

import copy
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import wirings
from wirings import WiringError
from wirings.rules import STR
from wirings.rules.str import _rank, _write_ranking

WEIGHTS = [torch.tensor([[8.0, -4.0, 2.0, 1.0]]), torch.tensor([[0.7, -0.6, 0.4, 0.3]])]


def wired(rule: STR | None = None, **budget: object) -> tuple[nn.ModuleList, wirings.Wiring]:
    model = nn.ModuleList([nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)])
    with torch.no_grad():
        for module, weight in zip(model, WEIGHTS, strict=True):
            module.weight.copy_(weight)
    return model, wirings.wire_(model, rule or STR(), **(budget or {"k": 4}))


def set_threshold(wiring: wirings.Wiring, layer: int, value: float) -> None:
    """Set a threshold to exp(value) times its initial value, as after many steps."""
    edges = wiring.layers[layer].edges
    edges.threshold.detach()[layer] = value
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
    torch.testing.assert_close(layer.weight.grad, torch.tensor([[0.5, 0.1, 0, 0]])), "only real edges"
    # ∂L/∂log t = −t Σ sign(w) g = −2 (0.5 − 0.1). One edge lies at each threshold: ∂log t/∂v is ½; for the other, −½.
    assert layer.edges.threshold.grad.tolist() == pytest.approx([-0.4, 0.4])


def test_a_higher_threshold_gives_edges_to_the_other_layer() -> None:
    """Weights over their thresholds: 4, 2, 1, 0.5 and 1.75, 1.5, 1, 0.75. The first threshold grows by 2.5."""
    model, wiring = wired()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wiring.step(optimizer)
    assert edges(wiring) == [2, 2], "by the uniform share"
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
    assert edges(wiring) == [3, 1], "by magnitude, except for the strongest edge of the second layer"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wiring.step(optimizer)
    set_threshold(wiring, 1, -5.0)
    wiring.step(optimizer)
    assert edges(wiring) == [1, 3]
    assert wirings.finalize_(model)[1].weight.count_nonzero() == 3


def test_the_gradient_is_that_of_the_rule_itself() -> None:
    """Compare with finite differences of the loss over the thresholds, with almost all edges real and with few."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(60, 60, bias=False), nn.Linear(300, 400, bias=False)])
    for module in model:
        nn.init.normal_(module.weight)
    wiring = wirings.wire_(model, "str", budget={"0": 0.9, "1": 0.03})

    def loss() -> torch.Tensor:
        return 0.5 * model[0].weight.abs().sum() + 0.055 * model[1].weight.abs().sum()

    loss().backward()
    learned = wiring.layers[0].edges.threshold
    found = []
    for shift in (-0.05, 0.05):
        set_threshold(wiring, 0, shift)
        values = torch.stack([layer.edges.held for layer in wiring.layers])
        _write_ranking(wiring.layers, *_rank(wiring.layers, values))
        found.append(loss().item())
    slope = (found[1] - found[0]) / 0.1
    assert learned.grad[0].item() == pytest.approx(slope, rel=0.1)
    assert learned.grad.sum().item() == pytest.approx(0.0, abs=1e-3 * abs(slope)), "a common scale is the budget's"


def test_large_gradients_move_a_threshold_by_one_percent() -> None:
    """A gradient hundreds of times too large moves a threshold by 1 %, and has no other effect."""
    for make in (torch.optim.SGD, torch.optim.AdamW):
        settings = {"momentum": 0.9} if make is torch.optim.SGD else {}
        _, wiring = wired(STR(every=2))
        learned = wiring.layers[0].edges.threshold
        optimizer = make([learned], lr=0.1, weight_decay=0.0, **settings)
        for gradient in [[-300.0, 300.0], *[[0.0, 0.0]] * 19]:
            learned.grad = torch.tensor(gradient)
            optimizer.step()
            wiring.step(optimizer)
        assert learned.tolist() == pytest.approx([0.02, -0.02], abs=1e-4)


def test_unlimited_thresholds_move_no_edges() -> None:
    """A schedule changes the budget in steps between rankings, too."""
    model = nn.ModuleList([nn.Linear(40, 40, bias=False) for _ in "ab"])
    wiring = wirings.wire_(model, STR(every=10), density=wirings.LinearSchedule(0.5, 0.1, steps=100))
    before = edges(wiring)
    wiring.layers[0].edges.threshold.detach()[0] += 30
    wiring.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert all(abs(b - a) < 20 for a, b in zip(before, edges(wiring), strict=True))


def test_copies_learn_by_themselves() -> None:
    model, _ = wired()
    twin = copy.deepcopy(model)
    own, its = (found.parametrizations.weight[0].threshold for found in (model[0], twin[0]))
    assert its is twin[1].parametrizations.weight[0].threshold
    assert its is not own
    with torch.no_grad():
        its.fill_(1.0)
    assert own.tolist() == [0.0, 0.0]
    model.load_state_dict(twin.state_dict())
    assert own.tolist() == [1.0, 1.0]


def test_learns_where_edges_are_worth_more() -> None:
    """The first layer sees noise, the second all the information: its threshold falls, and edges move there."""
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
    assert wiring.layers[0].edges.threshold[0] > wiring.layers[0].edges.threshold[1] + 0.15


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
    with pytest.raises(WiringError, match=r"learns thresholds, which are not.*create the optimizer.*after wire_"):
        wiring.step(early)
    wiring.step(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(WiringError, match="create the optimizer"):
        wiring.step(early)
    model = nn.Linear(4, 2)
    with pytest.raises(WiringError, match=r"learns thresholds with the optimizer: call wiring.step\(optimizer\)"):
        wirings.wire_(model, "str", k=4).step()
    with pytest.raises(WiringError, match="every must be a whole number"):
        STR(every=0)
    with pytest.raises(WiringError, match=r"moves edges between layers.*use params= or k="):
        wirings.wire_(nn.Linear(4, 2), "str", mult_adds=4, example_input=(4,))


def test_the_thresholds_are_saved_once_and_loaded_from_every_layer(tmp_path: Path) -> None:
    """All layers hold one parameter, but safetensors rejects tensors that share memory."""
    model, wiring = wired()
    set_threshold(wiring, 1, 0.5)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert [name for name in state if name.endswith("threshold")] == ["0.weight.wiring.threshold"]
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other, again = wired()
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert [layer.edges.threshold.tolist() for layer in again.layers] == [[0.0, 0.5]] * 2
    other, again = wired()
    other.load_state_dict({**state, "1.weight.wiring.threshold": state["0.weight.wiring.threshold"]})  # as before
    assert again.layers[0].edges.threshold is again.layers[1].edges.threshold
    assert again.layers[1].edges.threshold.tolist() == [0.0, 0.5]
