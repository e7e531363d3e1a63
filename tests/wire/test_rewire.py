"""A model is wired again as it was when it was saved: the same edges, rule, budget, memory and step."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rule_options import OPTIONS
from safetensors.torch import save_file
from torch import nn

import wirings
from wirings import WiringError, rules
from wirings.rules import Rule

STEPS = 6
X = torch.randn(8, 12)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def train(model: nn.Module, wiring: wirings.Wiring, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
        wiring.step(optimizer)


def saved(model: nn.Module, wiring: wirings.Wiring) -> tuple[Any, dict[str, Any]]:
    """The description as it is read from JSON, and a copy of the state."""
    return json.loads(json.dumps(wiring.describe())), copy.deepcopy(model.state_dict())


BUDGETS: dict[str, dict[str, Any]] = {
    "density": {"density": 0.25},
    "erk": {"density": 0.25, "share": "erk"},
    "global": {"k": 60, "share": "global"},
    "schedule": {"density": wirings.CubicSchedule(1.0, 0.2, steps=4)},
    "relative schedule": {"density": wirings.LinearSchedule.over(0.8, 0.2, end=0.75)},
    "mapping": {"budget": {"0": 0.5, "2": 30, "*": wirings.ConstantSchedule(0.25)}},
    "params": {"params": 150},
    "mult_adds": {"mult_adds": 120, "example_input": (12,)},
    "global mult_adds": {"mult_adds": 120, "example_input": (12,), "share": "global"},
}


def check_restored(rule: str | Rule, **budget: Any) -> None:
    """Train, save, restore in a new model, train both further: everything is the same."""
    model = network()
    wiring = wirings.wire_(model, rule, **budget)
    wiring.plan(STEPS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, wiring, optimizer, 3)
    description, state = saved(model, wiring)

    other = network(seed=1)
    again = wirings.rewire_(other, description, state)
    assert repr(again.rule) == repr(wiring.rule)
    assert again.state_dict() == wiring.state_dict()
    assert again.describe() == wiring.describe()
    assert list(other.state_dict()) == list(state)
    for name, value in state.items():
        assert torch.equal(other.state_dict()[name], value), name
    assert torch.equal(other.eval()(X), model.eval()(X))
    new = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    new.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, handle, steps in ((model, wiring, optimizer), (other, again, new)):
        torch.manual_seed(5)
        train(one.train(), handle, steps, 2)
    assert torch.equal(other.eval()(X), model.eval()(X)), "training continues identically"
    for name, mask in wiring.masks().items():
        assert torch.equal(again.masks()[name], mask)


@pytest.mark.parametrize("rule", rules.names())
def test_every_rule_is_restored(rule: str) -> None:
    made = rules.get(rule, **OPTIONS.get(rule, {}))
    check_restored(made, **({} if made.own_budget else {"density": 0.25}))


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_budget_is_restored(budget: str) -> None:
    check_restored("dnw", **BUDGETS[budget])


def test_the_schedule_of_a_rule_is_restored() -> None:
    check_restored(rules.get("soft_threshold", schedule={"kind": "linear", "end": 1.0}), density=0.2)
    check_restored(rules.get("random", schedule="cubic", seed=3), k=50)


def test_tied_weights_and_masks_are_restored() -> None:
    def tied(seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 12))
        model[2].weight = model[0].weight
        return model

    allowed = {"0": torch.rand(12, 12) < 0.5}
    model = tied(0)
    wiring = wirings.wire_(model, "random", density=0.5, allowed=allowed)
    description, state = saved(model, wiring)
    assert description["layers"][0]["names"] == ["0.weight", "2.weight"]
    other = tied(1)
    with pytest.raises(WiringError, match=r"0\.weight had \d+ allowed edges when it was saved, but has 144 now"):
        wirings.rewire_(other, description, state)
    again = wirings.rewire_(other, description, state, allowed=allowed)
    assert torch.equal(other(X), model(X))
    assert len(again.layers) == 2
    untied = tied(1)
    untied[2] = nn.Linear(12, 12)
    with pytest.raises(WiringError, match=r"is used as 0\.weight, but as 0\.weight, 2\.weight.* tied differently"):
        wirings.rewire_(untied, description, state, allowed=allowed)


def test_a_graph_is_restored() -> None:
    def graph(seed: int) -> wirings.StaticGraph:
        torch.manual_seed(seed)
        return wirings.StaticGraph(wirings.Blocks([12, 8, 4]))

    model = graph(0)
    wiring = wirings.wire_(model, "set", density=0.25)
    description, state = saved(model, wiring)
    other = graph(1)
    again = wirings.rewire_(other, description, state)
    assert torch.equal(other(X), model(X))
    assert torch.equal(again.masks()["weight"], wiring.masks()["weight"])


def test_a_part_is_described_within_the_whole_model() -> None:
    model = nn.ModuleDict({"body": network(), "head": nn.Linear(4, 2)})
    wiring = wirings.wire_(model["body"], "dnw", budget={"0": 0.5, "2": 30})
    description = json.loads(json.dumps(wiring.describe_within(model)))
    other = nn.ModuleDict({"body": network(1), "head": nn.Linear(4, 2)})
    again = wirings.rewire_(other, description, model.state_dict())
    assert [layer.name for layer in again.layers] == ["body.0.weight", "body.2.weight"]
    assert [report.edges for report in again.report()] == [96, 30]
    assert torch.equal(other["body"](X), model["body"](X))


def test_rejects_what_does_not_match() -> None:
    model = network()
    wiring = wirings.wire_(model, "random", density=0.25)
    description, state = saved(model, wiring)
    other = network(1)
    before = copy.deepcopy(other.state_dict())

    def rejects(match: str, given: Any = description, weights: Any = state, model: Any = other) -> None:
        with pytest.raises(WiringError, match=match):
            wirings.rewire_(model, given, weights)
        assert not any(hasattr(module, "parametrizations") for module in other.modules())
        for name, value in other.state_dict().items():
            assert torch.equal(value, before[name])

    rejects(r"expected the description of a wiring \(Wiring\.describe\(\)\), got dict", {"steps": 3})
    rejects(r"in format 4, .* reads formats up to 3: upgrade wirings", {**description, "format": 4})
    rejects(
        "unknown rule 'randon'.*random", {**description, "rule": {"name": "randon", "settings": {}, "schedule": None}}
    )
    rejects(
        r"rule 'random' does not take these settings.*'depth'",
        {**description, "rule": {"name": "random", "settings": {"depth": 1}, "schedule": None}},
    )
    rejects(r"also needs the wired model's state_dict\(\)", weights=None)
    rejects(
        r"the saved state has no 0\.weight\.wiring\.\w+, which rule 'random' remembers", weights=network().state_dict()
    )
    rejects(
        r"does not fit this Sequential: 1 keys are missing and 1 are unexpected \(0\.bias, more\)",
        weights={key.replace("0.bias", "more"): value for key, value in state.items()},
    )
    rejects(
        r"does not fit this Sequential: [\s\S]*size mismatch for 0\.bias", weights={**state, "0.bias": torch.zeros(3)}
    )
    rejects(r"expects a torch\.nn\.Module, got int", model=3)
    smaller = nn.Sequential(nn.Linear(12, 16))
    rejects(r"has no weight 2\.weight, 4\.weight, which the saved wiring names\. Make the model", model=smaller)
    wider = network()
    wider[2] = nn.Linear(16, 20)
    rejects(r"2\.weight has shape \(20, 16\), but \(16, 16\) in the saved wiring", model=wider)
    rejects("0.weight is already wired", model=model)


def test_an_own_rule_is_described_if_it_is_registered() -> None:
    class Mine(rules.DNW):
        name = "dnw"

    with pytest.raises(WiringError, match=r"is not the registered rule 'dnw'\. Register the rule"):
        wirings.wire_(network(), Mine(), density=0.5).describe()

    class Odd(rules.Random):
        name = "odd"

        def __init__(self, number: int) -> None:
            super().__init__(number)

    with pytest.raises(WiringError, match=r"cannot be made again from its settings: .*'number'"):
        wirings.wire_(network(), Odd(3), density=0.5).describe()

    class Slow(wirings.LinearSchedule):
        pass

    with pytest.raises(WiringError, match=r"Slow.* is not one of LinearSchedule, CubicSchedule"):
        wirings.wire_(network(), density=Slow(1.0, 0.5, steps=3)).describe()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", b""),
        ("model.safetensors", b"\xff" * 100),
        ("pytorch_model.bin", b"cos\nsystem\n."),
        ("model.safetensors.index.json", b"[" * 100_000),
        ("model.safetensors.index.json", b'{"weight_map": {"0.weight": 3}}'),
        ("model.safetensors.index.json", b'{"weight_map": {"0.weight": "../elsewhere.safetensors"}}'),
        ("model.safetensors.index.json", b'{"weight_map": {"0.weight": "%s"}}' % (b"x" * 300)),
        ("config.json", b"[" * 100_000),
        ("config.json", b'{"wirings": [{"format": 1, "rule": {}, "layers": 7, "state": {}}]}'),
    ],
)
def test_damaged_folders_are_refused_by_name(name: str, content: bytes, tmp_path: Path) -> None:
    model = network()
    save_file(model.state_dict(), tmp_path / "elsewhere.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"wirings": [wirings.wire_(network(), "dnw", k=40).describe()]}))
    (folder / name).write_bytes(content)
    with pytest.raises(WiringError) as refused:
        wirings.rewire_(model, folder)
    assert str(folder) in str(refused.value)
    assert len(str(refused.value)) < 1000
    assert not wirings.wire.parametrization.wired(model)


@pytest.mark.parametrize("spent", [1, 10**12, 10**30])
@pytest.mark.parametrize("cost", [1, 0, 10**15])
def test_impossible_budgets_in_descriptions_are_refused(spent: int, cost: int) -> None:
    """Sharing them out would not end, or take all memory."""
    model = network()
    description, state = saved(model, wirings.wire_(model, "dnw", density=0.25))
    description["budget"] |= {"density": None, "spent": spent}
    description["layers"][0]["cost"] = cost
    with pytest.raises(WiringError, match="cost"):
        wirings.rewire_(network(), description, state)


def test_messages_do_not_repeat_long_texts_of_a_description() -> None:
    model = network()
    description, state = saved(model, wirings.wire_(model, "rigl", density=0.25))
    description["rule"]["settings"]["x" * 10**6] = 1
    with pytest.raises(WiringError, match="does not take these settings") as refused:
        wirings.rewire_(network(), description, state)
    assert len(str(refused.value)) < 2000
