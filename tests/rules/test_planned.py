"""Rules with a schedule are told how long the training is."""

import pytest
import torch
from torch import nn

import wirings
from wirings import WiringError, rules

PLANNED = [name for name in rules.names() if issubclass(type(rules.get(name)), rules.Planned)]


def wired(rule: str | rules.Rule) -> tuple[wirings.Wiring, torch.optim.Optimizer]:
    model = nn.Linear(4, 2)
    wiring = wirings.wire_(model, rule, k=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return wiring, optimizer


def test_which() -> None:
    assert PLANNED == ["decayed_gradient", "gmp", "l1_anneal", "rigl", "set", "sparse_momentum"]


@pytest.mark.parametrize("rule", PLANNED)
def test_neither_plan_nor_steps(rule: str) -> None:
    wiring, optimizer = wired(rule)
    with pytest.raises(WiringError, match=rf"'{rule}' follows a schedule.*call wiring.plan\(steps\).*or give.*steps="):
        wiring.step(optimizer)
    wiring.plan(10)
    wiring.step(optimizer)


@pytest.mark.parametrize("rule", PLANNED)
def test_steps_of_the_constructor_stay(rule: str) -> None:
    wiring, optimizer = wired(rules.get(rule, steps=7))
    wiring.step(optimizer)
    wiring.plan(100)
    assert wiring.rule.length(wiring.layers) == 7
    with pytest.raises(WiringError, match=f"{rule}: steps must be a whole number, at least 1, not 0"):
        rules.get(rule, steps=0)


def test_one_rule_for_two_models() -> None:
    rule = rules.L1Anneal()
    (one, _), (other, _) = wired(rule), wired(rule)
    one.plan(10)
    other.plan(20)
    assert [rule.length(wiring.layers) for wiring in (one, other)] == [10, 20]


@pytest.mark.parametrize("steps", [0, -1, 2.5, "10", True, None])
def test_what_plan_takes(steps: object) -> None:
    wiring, _ = wired("dnw")
    wiring.plan(3)  # of no use to this rule, and no mistake
    with pytest.raises(WiringError, match=r"Wiring.plan: steps must be a whole number, at least 1, not"):
        wiring.plan(steps)
