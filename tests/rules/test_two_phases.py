"""Lottery tickets and fine-tuning: a trained network determines the wiring, and training starts from its weights."""

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

import wirings
from wirings import WiringError, rules

FIRST = torch.tensor([[0.1, -0.2, 0.3], [-0.4, 0.5, -0.6]])
TRAINED = torch.tensor([[0.9, -0.1, 0.0], [0.2, -0.8, 0.7]])
BEST = torch.tensor([[True, False, False], [False, True, True]])  # of TRAINED, 3 edges


def linear(values: Tensor = FIRST) -> nn.Linear:
    layer = nn.Linear(3, 2)
    with torch.no_grad():
        layer.weight.copy_(values)
        layer.bias.copy_(torch.tensor([1.0, 2.0]))
    return layer


@pytest.mark.parametrize("rule", ["lottery", "fine_tune"])
def test_trained_weights_choose_the_wiring_and_initial_weights_are_restored(rule: str) -> None:
    layer = linear()
    initial = copy.deepcopy(layer.state_dict())
    with torch.no_grad():
        layer.weight.copy_(TRAINED)
        layer.bias.zero_()
    wiring = wirings.wire_(layer, rule, k=3)
    assert torch.equal(wiring.masks()["weight"], BEST)
    assert torch.equal(layer.weight, torch.tensor([[0.9, 0.0, 0.0], [0.0, -0.8, 0.7]]))
    assert wirings.rewind_(layer, initial) is layer
    assert torch.equal(wiring.masks()["weight"], BEST), "the wiring of the trained weights"
    assert torch.equal(layer.weight, torch.tensor([[0.1, 0.0, 0.0], [0.0, 0.5, -0.6]])), "with the initial weights"
    assert torch.equal(layer.bias, torch.tensor([1.0, 2.0]))
    assert torch.equal(wiring.layers[0].weight, FIRST), "hallucinated edges, too"
    wirings.finalize_(layer)
    assert torch.equal(layer.weight != 0, BEST)


@pytest.mark.parametrize("rule", ["lottery", "fine_tune"])
def test_only_real_edges_get_a_gradient_and_the_wiring_is_fixed(rule: str) -> None:
    layer = linear(TRAINED)
    wiring = wirings.wire_(layer, rule, k=3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.tensor([[1.0, 2.0, 3.0]])).sum().backward()
        assert torch.equal(wiring.layers[0].weight.grad, torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 3.0]]))
        optimizer.step()
        wiring.step()
    assert torch.equal(wiring.masks()["weight"], BEST)


@pytest.mark.parametrize("share", ["uniform", "global"])
def test_a_schedule_removes_edges_in_the_order_of_the_trained_weights(share: str) -> None:
    layer = linear(TRAINED)
    wiring = wirings.wire_(layer, "lottery", density=wirings.LinearSchedule(1.0, 1 / 6, steps=5), share=share)
    wirings.rewind_(layer, linear(torch.zeros(2, 3)).state_dict())  # whatever the weights are by then
    kept = [wiring.masks()["weight"].clone()]
    for _ in range(5):
        wiring.step()
        kept.append(wiring.masks()["weight"])
    gone = [(before & ~after).nonzero()[0] for before, after in itertools.pairwise(kept)]
    removed = [int(place @ torch.tensor([3, 1])) for place in gone]
    assert removed == [2, 1, 3, 5, 4]  # 0, 0.1, 0.2, 0.7, 0.8; the last to stay is 0.9
    assert [int(mask.sum()) for mask in kept] == [6, 5, 4, 3, 2, 1]


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


def train(model: nn.Module, steps: int = 5) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(12, 8)).square().mean().backward()
        optimizer.step()


def test_all_parameters_and_buffers_are_rewound() -> None:
    model = normed()
    initial = copy.deepcopy(model.state_dict())
    train(model)
    trained = copy.deepcopy(model.state_dict())
    ticket = wirings.wire_(model, "lottery", density=0.25, skip=["3"])
    scores = trained["0.weight"].abs()
    assert torch.equal(ticket.masks()["0.weight"], wirings.choose(scores, 32))
    wirings.rewind_(model, initial)
    now = {name: value for name, value in model.state_dict().items() if ".wiring." not in name}
    assert now.keys() == initial.keys()
    assert "1.running_mean" in now
    assert "1.num_batches_tracked" in now
    for name, value in initial.items():
        assert torch.equal(now[name], value), name
        assert not torch.equal(trained[name], value), "training has changed it"
    assert torch.equal(ticket.masks()["0.weight"], wirings.choose(scores, 32))
    train(model)
    assert int(wirings.finalize_(model)[0].weight.count_nonzero()) == 32


def test_state_of_a_wired_model_keeps_the_current_wiring() -> None:
    model = normed()
    first = wirings.wire_(model, "random", density=0.25)
    state = copy.deepcopy(model.state_dict())
    assert any(".wiring." in name for name in state)
    del first
    wirings.unwire_(model)
    train(model)
    ticket = wirings.wire_(model, "lottery", density=0.25)
    before = ticket.masks()
    wirings.rewind_(model, state)
    assert all(torch.equal(mask, before[name]) for name, mask in ticket.masks().items())
    assert torch.equal(ticket.layers[0].weight, state["0.weight"])


def test_a_plain_model_is_rewound_too() -> None:
    model = normed()
    initial = copy.deepcopy(model.state_dict())
    train(model)
    wirings.rewind_(model, initial)
    assert all(torch.equal(value, initial[name]) for name, value in model.state_dict().items())


def test_rejects_states_of_other_models() -> None:
    model = normed()
    own = model.state_dict()
    initial = copy.deepcopy(own)
    wirings.wire_(model, "lottery", density=0.5)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(WiringError, match=r"own tensor, which has changed with it\. Copy .*deepcopy"):
        wirings.rewind_(model, own)
    with pytest.raises(WiringError, match=r"0\.weight is missing \(1 missing, 0 unexpected\)"):
        wirings.rewind_(model, {name: value for name, value in initial.items() if name != "0.weight"})
    with pytest.raises(WiringError, match=r"0\.weight is missing, model is unexpected"):
        wirings.rewind_(model, {"model": initial})
    with pytest.raises(WiringError, match=r"3\.bias has shape \(2,\) in the model, but \(5,\) in the state"):
        wirings.rewind_(model, {**initial, "3.bias": torch.zeros(5)})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "nothing was changed"


def test_a_lottery_ticket_is_a_kind_of_fine_tuning() -> None:
    assert isinstance(rules.get("lottery"), rules.FineTune)
    assert {"lottery", "fine_tune"} <= set(rules.names())
