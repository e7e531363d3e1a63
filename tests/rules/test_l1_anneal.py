"""L1 + Anneal: which edges are removed and when, and how much the L1 term shrinks weights."""

import copy

import pytest
import torch
from torch import Tensor, nn

import wirings
from wirings import WiringError
from wirings.rules import L1Anneal

W = torch.tensor([[8.0, -1.0, 3.0, -6.0], [2.0, 7.0, -5.0, 4.0]])


def layer(rule: L1Anneal, weight: Tensor = W, **budget: object) -> tuple[nn.Module, wirings.Wiring, torch.optim.SGD]:
    model = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    with torch.no_grad():
        model.weight.copy_(weight)
    wiring = wirings.wire_(model, rule, **(budget or {"k": 2}))
    return model, wiring, torch.optim.SGD(model.parameters(), lr=0.1)


def magnitudes(model: nn.Module) -> set[float]:
    return set(model.weight.detach().abs().flatten().tolist()) - {0.0}


def test_removes_the_weakest_on_schedule() -> None:
    """8 edges, 2 to keep; removals at steps 2, 4 and 6 of 10: linearly from 8 to 2 between 0 and 60 %."""
    model, wiring, optimizer = layer(L1Anneal(coefficient=0, end=0.6, kind="linear", every=2, steps=10))
    strongest = list(range(1, 9))
    history = {0: 8, 1: 8, 2: 6, 3: 6, 4: 4, 5: 4, 6: 2, 7: 2, 10: 2}
    for step in range(11):
        if step:
            wiring.step(optimizer)
        there = history.get(step, 2)
        model.train()
        assert magnitudes(model) == set(strongest[-there:]), step
        model.eval()
        assert magnitudes(model) == {7, 8}, "evaluated with k at every step"
        assert wiring.masks()["weight"].tolist() == [[True, False, False, False], [False, True, False, False]]


def test_cubic() -> None:
    """At step 2 of 4, half-way, (1 − ½)³ of the 6 edges are left to remove: 0.75, rounded down to 0."""
    model, wiring, optimizer = layer(L1Anneal(coefficient=0, end=1.0, kind="cubic", every=1, steps=4))
    counts = []
    for _ in range(4):
        wiring.step(optimizer)
        counts.append(len(magnitudes(model)))
    assert counts == [2 + 2, 2, 2, 2]  # (1 − ¼)³ · 6 = 2.53


def test_begin_and_the_end_between_two_removals() -> None:
    """Nothing is removed before 40 %; the last removal is at the end, even if that is not a multiple of ``every``."""
    model, wiring, optimizer = layer(L1Anneal(coefficient=0, begin=0.4, end=0.7, kind="linear", every=5, steps=10))
    counts = []
    for _ in range(9):
        wiring.step(optimizer)
        counts.append(len(magnitudes(model)))
    assert counts == [8, 8, 8, 8, 6, 6, 2, 2, 2]  # step 5: a third of the way from 4 to 7


def test_all_at_once() -> None:
    model, wiring, optimizer = layer(L1Anneal(coefficient=0, begin=0.5, end=0.5, every=1, steps=4))
    counts = []
    for _ in range(3):
        wiring.step(optimizer)
        counts.append(len(magnitudes(model)))
    assert counts == [8, 2, 2]


def test_removed_edges_stay_removed() -> None:
    model, wiring, optimizer = layer(L1Anneal(coefficient=0, end=0.6, kind="linear", every=2, steps=10))
    for _ in range(2):
        wiring.step(optimizer)
    weight = wiring.layers[0].weight
    with torch.no_grad():
        weight[0, 1] = 100.0  # it was removed at step 2
    assert model.weight[0, 1] == 0
    assert not wiring.masks()["weight"][0, 1]
    model(torch.ones(1, 4)).sum().backward()
    assert weight.grad.tolist() == [[1, 0, 1, 1], [0, 1, 1, 1]], "all edges that are left get a gradient, and no others"
    for _ in range(4):
        wiring.step(optimizer)
    assert magnitudes(model) == {7, 8}


def test_the_l1_term() -> None:
    """With a learning rate of 0.1 and a coefficient of 1, every magnitude shrinks by 0.1, at most to zero."""
    weight = torch.tensor([[0.5, -0.3, 0.05, 0.0], [-0.1, 2.0, -0.05, 1.0]])
    _, wiring, optimizer = layer(L1Anneal(coefficient=1.0, steps=10), weight)
    wiring.step(optimizer)
    expected = torch.tensor([[0.4, -0.2, 0.0, 0.0], [0.0, 1.9, 0.0, 0.9]])
    torch.testing.assert_close(wiring.layers[0].weight.detach(), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("lr", [0.2, torch.tensor(0.2)], ids=["float", "tensor"])
def test_l1_term_uses_the_groups_learning_rate_and_skips_removed_edges(lr: object) -> None:
    model, wiring, _ = layer(L1Anneal(coefficient=0.5, end=0.0, steps=10))  # k edges from the first step on
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))]}, {"params": model.parameters(), "lr": lr}])
    wiring.step(optimizer)
    expected = W.clone()
    expected[0, 0], expected[1, 1] = 8 - 0.1, 7 - 0.1
    torch.testing.assert_close(wiring.layers[0].weight.detach(), expected)


@pytest.mark.parametrize("how", ["plain", "scaled", "accumulated"])
def test_l1_term_does_not_depend_on_how_gradients_are_computed(how: str) -> None:
    model, wiring, optimizer = layer(L1Anneal(coefficient=0.3, steps=10))
    x = torch.tensor([[1.0, 2.0, 0.0, -1.0]])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=how == "scaled")
    parts = 2 if how == "accumulated" else 1
    for _ in range(parts):
        scaler.scale(model(x).sum() / parts).backward()
    scaler.step(optimizer)
    wiring.step(optimizer)
    after = W - 0.1 * x
    torch.testing.assert_close(wiring.layers[0].weight.detach(), after - 0.03 * after.sign())


def test_gradients_are_clipped_by_the_norm_over_the_edges_left() -> None:
    model, wiring, optimizer = layer(L1Anneal(coefficient=0, end=0.6, kind="linear", every=2, steps=10))
    model(torch.ones(1, 4)).sum().backward()
    assert wiring.clip_grad_norm_(1.0) == pytest.approx(8**0.5)
    wiring.step(optimizer)
    wiring.step(optimizer)
    wiring.layers[0].weight.grad = None
    model(torch.ones(1, 4)).sum().backward()
    assert wiring.clip_grad_norm_(1.0) == pytest.approx(6**0.5)


def test_a_global_budget_is_annealed_over_all_layers() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[8.0, 7.0], [6.0, 1.0]]))
        model[1].weight.copy_(torch.tensor([[2.0, 3.0], [4.0, 5.0]]))
    rule = L1Anneal(coefficient=0, end=1.0, kind="linear", every=1, steps=4)
    wiring = wirings.wire_(model, rule, k=4, share="global")
    for there in (7, 6, 5, 4):
        wiring.step()
        assert magnitudes(model[0]) | magnitudes(model[1]) == set(range(9 - there, 9))
    assert [report.edges for report in wiring.look()] == [3, 1]


def test_resumed_training_continues_identically() -> None:
    def run(model: nn.Module, wiring: wirings.Wiring, optimizer: torch.optim.SGD, start: int, stop: int) -> None:
        for step in range(start, stop):
            optimizer.zero_grad()
            torch.manual_seed(step)
            model(torch.randn(5, 4)).square().sum().backward()
            optimizer.step()
            wiring.step(optimizer)

    rule = L1Anneal(coefficient=0.1, every=2)
    model, wiring, optimizer = layer(rule)
    wiring.plan(10)
    run(model, wiring, optimizer, 0, 4)
    saved, about = copy.deepcopy(model.state_dict()), wiring.state_dict()
    assert saved["weight.wiring.left"].sum() == 2  # cubic, after 53 %: 0.6 of 6 are left to remove
    other, again, its = layer(L1Anneal(coefficient=0.1, every=2), torch.zeros(2, 4))
    again.plan(10)
    other.load_state_dict(saved)
    again.load_state_dict(about)
    run(model, wiring, optimizer, 4, 10)
    run(other, again, its, 4, 10)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_a_longer_plan_brings_nothing_back() -> None:
    model, wiring, optimizer = layer(L1Anneal(coefficient=0, kind="linear", end=1.0, every=1))
    wiring.plan(4)
    wiring.step(optimizer)
    wiring.step(optimizer)
    assert len(magnitudes(model)) == 5
    wiring.plan(100)
    wiring.step(optimizer)
    assert len(magnitudes(model)) == 5


def test_with_a_schedule_of_the_budget() -> None:
    """The budget's schedule falls from 8 to 2 edges after annealing has ended, and no more than that are used."""
    falling = wirings.LinearSchedule(1.0, 0.25, steps=3)
    model, wiring, optimizer = layer(L1Anneal(coefficient=0, end=0.0, steps=10), density=falling)
    for there in (6, 4, 2, 2):
        wiring.step(optimizer)
        assert len(magnitudes(model)) == there == int(wiring.masks()["weight"].sum())
    rising = wirings.LinearSchedule(0.25, 1.0, steps=3)
    with pytest.raises(WiringError, match=r"weight: .*removes edges permanently, .*rises from 2 to 8"):
        layer(L1Anneal(coefficient=0, end=0.0, steps=10), density=rising)


def test_rejects_a_longer_plan_that_would_bring_edges_back() -> None:
    falling = wirings.LinearSchedule.over(1.0, 0.25)
    _, wiring, optimizer = layer(L1Anneal(coefficient=0, end=0.0, steps=10, every=1), density=falling)
    wiring.plan(3)
    wiring.step(optimizer)
    wiring.step(optimizer)
    wiring.plan(6)
    with pytest.raises(WiringError, match=r"weight: .*removes edges permanently and has 4 left.* asks for 5 now"):
        wiring.step(optimizer)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"coefficient": -1}, "l1_anneal: coefficient must be a number from 0 to .*, got -1"),
        ({"coefficient": float("nan")}, "coefficient must be a number from 0 to .*, got nan"),
        ({"coefficient": float("inf")}, "coefficient must be a number from 0 to .*, got inf"),
        ({"begin": -0.1}, "begin must be a number from 0 to 1, got -0.1"),
        ({"end": 75}, "end must be a number from 0 to 1, got 75"),
        ({"begin": 0.8, "end": 0.5}, "begin = 0.8 must not be after end = 0.5"),
        ({"kind": "cubc"}, "unknown kind of annealing 'cubc'. Did you mean 'cubic'"),
        ({"every": 0}, "every must be a whole number, at least 1, got 0"),
    ],
    ids=str,
)
def test_bad_settings(settings: dict[str, object], match: str) -> None:
    with pytest.raises(WiringError, match=match):
        L1Anneal(**settings)


def test_optimizer_is_needed_only_for_the_l1_term() -> None:
    _, wiring, _ = layer(L1Anneal(steps=10))
    with pytest.raises(WiringError, match=r"call wiring.step\(optimizer\), or make the rule with coefficient=0"):
        wiring.step()
    with pytest.raises(WiringError, match="weight is not among the parameters of the optimizer"):
        wiring.step(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    _, wiring, _ = layer(L1Anneal(steps=10, coefficient=0))
    wiring.step()
    _, wiring, _ = layer(L1Anneal(steps=10))
    wiring.layers[0].weight.requires_grad_(False)  # a frozen layer does not change
    wiring.step(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    assert torch.equal(wiring.layers[0].weight, W)
