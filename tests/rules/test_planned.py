"""Rules with a schedule need to know the length of training."""

from contextlib import nullcontext

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


def test_which_rules_are_planned() -> None:
    assert PLANNED == ["acdc", "decayed_gradient", "gmp", "l1_anneal", "rigl", "set", "sparse_momentum"]


@pytest.mark.parametrize("rule", PLANNED)
def test_rejects_a_missing_plan(rule: str) -> None:
    wiring, optimizer = wired(rule)
    with pytest.raises(WiringError, match=rf"'{rule}' follows a schedule.*call wiring.plan\(steps\).*or give.*steps="):
        wiring.step(optimizer)
    wiring.plan(10)
    wiring.step(optimizer)


@pytest.mark.parametrize("rule", PLANNED)
def test_steps_of_the_constructor_take_precedence(rule: str) -> None:
    wiring, optimizer = wired(rules.get(rule, steps=7))
    wiring.step(optimizer)
    wiring.plan(100)
    assert wiring.rule.length(rules.Training(step=1, steps=wiring.planned)) == 7
    with pytest.raises(WiringError, match=f"{rule}: steps must be a whole number, at least 1, got 0"):
        rules.get(rule, steps=0)


def test_one_rule_for_two_models() -> None:
    rule = rules.L1Anneal()
    both = wired(rule), wired(rule)
    lengths: list[int] = []
    rule.length = lambda training: lengths.append(training.steps) or training.steps  # type: ignore
    for (wiring, optimizer), steps in zip(both, (10, 20), strict=True):
        wiring.plan(steps)
        wiring.step(optimizer)
    assert lengths == [10, 20]


@pytest.mark.parametrize("steps", [0, -1, 2.5, "10", True, None])
def test_plan_rejects_invalid_steps(steps: object) -> None:
    wiring, _ = wired("dnw")
    wiring.plan(3)  # this rule does not need it, but it is not an error
    with pytest.raises(WiringError, match=r"Wiring.plan: steps must be a whole number, at least 1, got"):
        wiring.plan(steps)


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (rules.RigL(every=100), "'rigl' .* it changes the wiring every 100 steps, up to step 37; use a smaller every="),
        (rules.SET(every=50, end=1.0), "'set' .* it changes the wiring every 50 steps, up to step 49"),
        (rules.SparseMomentum(every=60), "'sparse_momentum' .* every 60 steps"),
        (rules.SET(every=40, steps=30), "'set' .* every 40 steps, up to step 22"),
        (rules.STR(every=51), "'str' .* it ranks the layers every 51 steps"),
    ],
    ids=str,
)
def test_warns_if_training_ends_before_the_first_change(rule: rules.Rule, says: str) -> None:
    wiring, _ = wired(rule)
    with pytest.warns(UserWarning, match=f"rule {says}"):
        wiring.plan(50)


@pytest.mark.parametrize(("every", "often"), [(None, "step"), (1, "step"), (5, "5 steps")])
def test_advises_to_train_longer_if_no_period_is_short_enough(every: int | None, often: str) -> None:
    wiring, _ = wired(rules.SET(every=every))
    with pytest.warns(UserWarning, match=f"it changes the wiring every {often}, up to step 0; train longer"):
        wiring.plan(1)


@pytest.mark.parametrize("rule", [*(rules.get(name) for name in PLANNED), rules.SET(every=37), rules.SET(end=0.0)])
def test_plans_that_suit_the_rule_do_not_warn(rule: rules.Rule) -> None:
    wiring, _ = wired(rule)
    wiring.plan(50)


@pytest.mark.parametrize(
    ("density", "begins"),
    [
        (wirings.LinearSchedule(1.0, 0.5, steps=10, begin=50), 50),
        (wirings.CubicSchedule.over(1.0, 0.5, begin=1.0), 50),
        (wirings.LinearSchedule(1.0, 0.5, steps=10, begin=49), None),
        (wirings.CubicSchedule.over(1.0, 0.5, begin=0.25, end=0.75), None),
    ],
)
def test_warns_if_training_ends_before_a_schedule_begins(density: wirings.CubicSchedule, begins: int | None) -> None:
    expected = pytest.warns(
        UserWarning, match="density will not change .* of 50 steps: its schedule begins after step 50"
    )
    for budget in ({"density": density}, {"budget": {"*": density}}):
        wiring = wirings.wire_(nn.Linear(4, 2), **budget)
        with expected if begins else nullcontext():
            wiring.plan(50)


def test_warns_if_the_schedule_of_a_rule_begins_too_late() -> None:
    rule = rules.get("dnw", schedule={"begin": 1.0, "end": 1.0})
    wiring = wirings.wire_(nn.Linear(4, 2), rule, k=4)
    with pytest.warns(UserWarning, match="the density will not change in a training of 50 steps: its schedule begins"):
        wiring.plan(50)


def scheduled() -> tuple[nn.Linear, wirings.Wiring]:
    model = nn.Linear(16, 32)
    return model, wirings.wire_(model, density=wirings.CubicSchedule.over(1.0, 0.1, end=0.5))


def number(wiring: wirings.Wiring) -> int:
    return wiring.look()[0].edges


def test_a_second_plan_moves_schedules_of_the_density() -> None:
    _, wiring = scheduled()
    wiring.plan(100)
    wiring.plan(1000)
    for _ in range(50):
        wiring.step()
    assert number(wiring) > 350, "a tenth of the way down, not at its end"


@pytest.mark.parametrize("first", ["plan", "load"])
def test_resuming_with_a_longer_plan(first: str) -> None:
    model, wiring = scheduled()
    wiring.plan(100)
    for _ in range(30):
        wiring.step()
    other, again = scheduled()
    other.load_state_dict(model.state_dict())
    if first == "plan":
        again.plan(200)
        again.load_state_dict(wiring.state_dict())
    else:
        again.load_state_dict(wiring.state_dict())
        again.plan(200)
    assert (again.steps, number(again)) == (30, number(wiring))
    again.step()
    _, meant = scheduled()
    meant.plan(200)
    for _ in range(31):
        meant.step()
    assert number(again) == number(meant)


def test_rejected_state_changes_nothing() -> None:
    model, wiring = scheduled()
    wiring.plan(100)
    state = {**wiring.state_dict(), "steps": 30, "edges": [7]}
    with pytest.raises(WiringError, match="saved with 7 edges, but at step 30"):
        wiring.load_state_dict(state)
    with pytest.raises(WiringError, match="not the state of a wiring: it has no 'steps'"):
        wiring.load_state_dict({"rule": "dnw"})
    assert (wiring.steps, number(wiring)) == (0, 512)
    assert torch.equal(model.weight, model.parametrizations.weight.original)


def test_a_step_that_raises_does_not_count() -> None:
    model = nn.Linear(16, 32)
    wiring = wirings.wire_(model, "gmp", density=wirings.LinearSchedule(0.5, 0.1, steps=10))
    before = number(wiring)
    with pytest.raises(WiringError, match="how long the training is"):
        wiring.step()
    assert wiring.steps == 0
    wiring.plan(20)
    wiring.step()
    assert wiring.steps == 1
    assert number(wiring) < before


def test_rejects_a_rising_schedule_for_permanent_removal() -> None:
    model = nn.Linear(16, 32)
    before = model.weight.detach().clone()
    with pytest.raises(WiringError, match=r"permanently, but the budget's schedule rises from 51 to 256"):
        wirings.wire_(model, "gmp", density=wirings.LinearSchedule(0.1, 0.5, steps=50))
    assert torch.equal(model.weight, before)
    assert list(model.state_dict()) == ["weight", "bias"]


def test_rejects_settings_beside_a_rule_object() -> None:
    rule = rules.GMP()
    assert rules.get(rule) is rule
    with pytest.raises(WiringError, match=r"settings \(schedule, every\) go with a rule's name, but got the rule GMP"):
        rules.get(rule, schedule="cubic", every=3)
