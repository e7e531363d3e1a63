"""AC/DC: when phases begin and end, and what happens to weights and momentum then."""

import copy

import pytest
import torch
from torch import nn

import wirings
from wirings import WiringError, rules
from wirings.rules import ACDC


def wired(rule: ACDC, steps: int, k: int = 2) -> tuple[nn.Linear, wirings.Wiring]:
    model = nn.Linear(10, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.arange(1.0, 11.0))
    wiring = wirings.wire_(model, rule, k=k)
    wiring.plan(steps)
    return model, wiring


def test_phases_are_those_of_the_paper() -> None:
    rule = ACDC()
    sparse = [epoch for epoch in range(100) if rule.is_sparse(epoch, 100)]
    begins = [10, 20, 30, 40, 50, 60, 70]
    assert sparse == [e for begin in begins for e in range(begin, begin + 5)] + list(range(85, 100))
    assert rule.is_sparse(100, 100)
    assert [rule.is_sparse(step, 1000) for step in (0, 99, 100, 149, 150, 749, 750, 849, 850, 5000)] == [
        False, False, True, True, False, True, False, False, True, True,
    ]  # fmt: skip


def test_phases_in_steps() -> None:
    rule = ACDC(warmup=2, sparse=1, dense=2, last_dense=2, last_sparse=3)
    assert [rule.is_sparse(step, 12) for step in range(13)] == [bool(int(c)) for c in "0010010001111"]


def test_edges_used_in_training_and_evaluation() -> None:
    model, wiring = wired(ACDC(warmup=2, sparse=1, dense=2, last_dense=2, last_sparse=3), steps=12)
    used = []
    for _ in range(13):
        used.append(int(wiring.layers[0].edges.left.sum()))
        assert int(model.weight.count_nonzero()) <= used[-1]
        assert wiring.look()[0].edges == 2, "evaluated with k edges"
        with torch.no_grad():
            weight = wiring.layers[0].weight
            weight.add_(torch.where(wiring.layers[0].edges.left, 0.5, 0.0))  # a step that reaches the edges in use
        wiring.step()
    assert used == [10, 10, 2, 10, 10, 2, 10, 10, 10, 2, 2, 2, 2]


def test_a_sparse_phase_sets_others_to_zero_and_clears_their_momentum() -> None:
    model, wiring = wired(ACDC(warmup=1, sparse=2, dense=1, last_dense=1, last_sparse=1), steps=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    weight = wiring.layers[0].weight

    def step() -> None:
        optimizer.zero_grad()
        (model.weight * torch.arange(1.0, 11.0)).sum().backward()
        optimizer.step()
        wiring.step(optimizer)

    step()
    momentum = optimizer.state[weight]["momentum_buffer"]
    assert weight[0].nonzero().flatten().tolist() == [8, 9], "the strongest"
    assert momentum[0].nonzero().flatten().tolist() == [8, 9]
    step()
    assert weight.grad[0].nonzero().flatten().tolist() == [8, 9], "others get no gradient"
    assert weight[0, :8].count_nonzero() == 0
    step()  # the sparse phase ends
    assert not momentum.any(), "momentum is reset when all edges become real again"
    step()
    assert weight.grad.count_nonzero() == 10
    assert not wiring.layers[0].edges.left.all(), "sparse again"


def test_keeps_the_dense_weights_on_request() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    plain = copy.deepcopy(model)
    rule = ACDC(keep_dense=True)
    wiring = wirings.wire_(model, rule, density=0.25, share="global")
    wiring.plan(20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = {}
    for step in range(1, 21):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        if step == 17:  # the last dense phase ends
            expected = {layer.name: layer.weight.detach().clone() for layer in wiring.layers}
        wiring.step(optimizer)
    dense = rule.dense_weights(wiring.layers)
    assert all(torch.equal(dense[name], weight) for name, weight in expected.items())
    missing = plain.load_state_dict(dense, strict=False)
    assert sorted(missing.missing_keys) == ["0.bias", "2.bias"]
    assert not missing.unexpected_keys
    assert sum(int(mask.sum()) for mask in wiring.masks().values()) == 16
    with pytest.raises(WiringError, match="keep_dense=True"):
        ACDC().dense_weights(wiring.layers)


def test_a_resumed_run_continues_in_its_phase() -> None:
    def make() -> tuple[nn.Linear, wirings.Wiring]:
        torch.manual_seed(0)
        model = nn.Linear(20, 20)
        wiring = wirings.wire_(model, ACDC(warmup=2, sparse=3, dense=2, last_dense=2, last_sparse=3), density=0.1)
        wiring.plan(20)
        return model, wiring

    def train(model: nn.Linear, wiring: wirings.Wiring, steps: range) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in steps:
            torch.manual_seed(step)
            optimizer.zero_grad()
            model(torch.randn(4, 20)).square().sum().backward()
            optimizer.step()
            wiring.step(optimizer)

    model, wiring = make()
    train(model, wiring, range(4))
    state, handle = copy.deepcopy(model.state_dict()), wiring.state_dict()
    train(model, wiring, range(4, 20))
    other, resumed = make()
    other.load_state_dict(state)
    resumed.load_state_dict(handle)
    train(other, resumed, range(4, 20))
    assert torch.equal(wiring.layers[0].weight, resumed.layers[0].weight)
    assert torch.equal(*(one.masks()["weight"] for one in (wiring, resumed)))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"sparse": 0}, "sparse must be a fraction of training.*got 0"),
        ({"warmup": 1.5}, "warmup must be.*got 1.5"),
        ({"dense": True}, "dense must be"),
        ({"warmup": 0.5, "last_dense": 0.3, "last_sparse": 0.3}, "must leave time for each other.*1.1 of training"),
        ({"keep_dense": 1}, "keep_dense"),
    ],
)
def test_mistakes(settings: dict[str, object], says: str) -> None:
    with pytest.raises(WiringError, match=says):
        rules.get("acdc", **settings)


def test_warns_if_no_sparse_phase_begins() -> None:
    wiring = wirings.wire_(nn.Linear(4, 4), ACDC(last_sparse=1), density=0.5)
    with pytest.warns(UserWarning, match="no sparse phase begins before its end"):
        wiring.plan(1)
