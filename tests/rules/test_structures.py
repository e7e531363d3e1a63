"""Every rule with every structure: whole groups, exactly the budget's number of them, and the contract of rules."""

import copy
import shutil
from typing import Any

import pytest
import torch
from rule_options import OPTIONS
from torch import Tensor, nn

import wirings
from wirings import WiringError, rules

pytestmark = pytest.mark.filterwarnings("ignore:.*had not removed the others yet", "ignore:share=.global. leaves no")
STRUCTURES = ["2:4", "2:4, transposable", "4x2", "row", "column", "3x3, padded"]
REFUSED = {  # the rules that take no structure, and why
    "dense": "chooses its wiring without a budget",
    "keep": "chooses its wiring without a budget",
    "expander": "chooses single edges in a way of its own",
    "str": "chooses single edges in a way of its own",
}
TAKING = [name for name in rules.names() if name not in REFUSED]
CASES = [(rule, s) for rule in TAKING for s in STRUCTURES if rule != "sparse_momentum" or ":" not in s]
STEPS = 6
each_case = pytest.mark.parametrize(("rule", "structure"), CASES)


def make(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(32, 8),
    )
    return model.to(dtype), torch.randn(6, 4, 4, 4).to(dtype)


def wire(model: nn.Module, rule: str, structure: str, **more: Any) -> wirings.Wiring:
    budget = {} if ":" in structure else {"density": 0.5}
    settings = dict(more.pop("settings", {}))
    wiring = wirings.wire_(
        model, rules.get(rule, **OPTIONS.get(rule, {}), **settings), structure=structure, **budget, **more
    )
    wiring.plan(STEPS)
    return wiring


def train(model: nn.Module, wiring: wirings.Wiring, x: Tensor, steps: int = 1, kind: Any = torch.optim.SGD) -> None:
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.1, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        wiring.step(optimizer)


def assert_whole(wiring: wirings.Wiring) -> None:
    """Exactly the budget's number of whole groups are real, and nothing else is used in evaluation."""
    counts = []
    for layer, mask in zip(wiring.layers, wiring.masks().values(), strict=True):
        groups: Any = layer.edges.groups
        assert groups.whole(mask, None)
        counts.append(int(groups.count(mask)))
        training = layer.edges.training
        layer.edges.eval()
        assert not layer.edges(layer.weight)[~mask].any()
        layer.edges.train(training)
    shared, ks = wiring.layers[0].edges.shared, [int(layer.edges.k) for layer in wiring.layers]
    if shared:
        assert sum(counts) == ks[0] == sum(layer.edges.possible for layer in wiring.layers) // 2
    else:
        assert counts == ks
        halves = [max(layer.edges.possible // 2, 1) for layer in wiring.layers]
        assert sum(ks) == sum(halves)
        assert ks == halves or wiring.rule.moves_budget
    assert [report.groups for report in wiring.report()] == counts


@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_whole_groups_after_every_step(rule: str, structure: str, dtype: torch.dtype) -> None:
    model, x = make(dtype)
    wiring = wire(model, rule, structure)
    assert_whole(wiring)
    for _ in range(4):
        train(model, wiring, x)
        assert_whole(wiring)
    with torch.no_grad():
        before = model.eval()(x)
        wirings.finalize_(model)
        assert torch.equal(model(x), before)


@pytest.mark.parametrize(("rule", "structure"), [case for case in CASES if ":" not in case[1]])
def test_groups_of_all_layers_ranked_together(rule: str, structure: str) -> None:
    model, x = make()
    wiring = wire(model, rule, structure, share="global")
    for _ in range(3):
        train(model, wiring, x)
        assert_whole(wiring)
    out = model.eval()(x)
    assert torch.equal(wirings.finalize_(copy.deepcopy(model))(x), out)
    assert torch.equal(wirings.finalize_(model)(x), out)


@each_case
def test_save_load_copy_and_determinism(rule: str, structure: str) -> None:
    model, x = make()
    wiring = wire(model, rule, structure)
    train(model, wiring, x, 3)
    other, _ = make(seed=1)
    again = wire(other, rule, structure)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(wiring.state_dict())
    for name, mask in wiring.masks().items():
        assert torch.equal(again.masks()[name], mask)
    copied = copy.deepcopy(model)
    assert torch.equal(other.eval()(x), model.eval()(x))
    assert torch.equal(copied.eval()(x), model(x))
    for one, handle in ((model.train(), wiring), (other.train(), again)):
        torch.manual_seed(5)
        train(one, handle, x, 2)
    assert torch.equal(other.eval()(x), model.eval()(x)), "training continues identically"


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("rule", [name for name in TAKING if rules.get(name).reaches == "all"])
def test_gradient_reaches_all_edges(rule: str, structure: str) -> None:
    if rule == "sparse_momentum" and ":" in structure:
        pytest.skip("refused")
    model, x = make()
    wiring = wire(model, rule, structure)
    model(x).square().mean().backward()
    for layer, mask in zip(wiring.layers, wiring.masks().values(), strict=True):
        assert layer.weight.grad is not None
        assert layer.weight.grad[~mask].ne(0).any(), layer.name
    last = wiring.layers[-1]
    assert last.weight.grad.ne(0).all()  # type: ignore[union-attr]
    finalized = wirings.finalize_(copy.deepcopy(model).eval())
    finalized.zero_grad()
    model.zero_grad()
    for one in (model.eval(), finalized):
        one(x).square().mean().backward()
    assert torch.equal(model[0].bias.grad, finalized[0].bias.grad), "it flows through real edges alone"


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("rule", ["dnw", "soft_threshold", "top_kast", "gmp", "rigl", "targeted_dropout"])
def test_compiled_training_equals_eager(rule: str, structure: str) -> None:
    torch._dynamo.reset()
    model, x = make()
    wire(model, rule, structure)
    model2 = copy.deepcopy(model)
    for one in (model, torch.compile(model2, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(7)
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            one(x).square().mean().backward()
            optimizer.step()
    for (name, a), (_, b) in zip(model.named_parameters(), model2.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(shutil.which("g++") is None, reason="the full compiler needs a C++ compiler")
@pytest.mark.parametrize("structure", ["2:4", "2:4, transposable", "3x3, padded"])
def test_the_full_compiler(structure: str) -> None:
    torch._dynamo.reset()
    model, x = make()
    wire(model, "dnw", structure)
    model2 = copy.deepcopy(model)
    for one in (model, torch.compile(model2, fullgraph=True)):
        one(x).square().mean().backward()
    for (name, a), (_, b) in zip(model.named_parameters(), model2.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)


@each_case
def test_a_schedule_leads_to_the_budget(rule: str, structure: str) -> None:
    model, x = make()
    wiring = wire(model, rule, structure, settings={"schedule": {"kind": "linear", "end": 0.5}})
    counts = [sum(report.counted for report in wiring.look())]
    assert counts[0] == sum(layer.edges.possible for layer in wiring.layers)
    for _ in range(4):
        train(model, wiring, x)
        counts.append(sum(report.counted for report in wiring.look()))
    assert counts == sorted(counts, reverse=True)
    assert_whole(wiring)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("rule", ["set", "rigl"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_exchanges_groups(rule: str, structure: str, kind: Any) -> None:
    model, x = make()
    made = rules.get(rule, every=2, end=1.0, fraction=0.5, seed=1)
    budget = {} if ":" in structure else {"density": 0.5}
    wiring = wirings.wire_(model, made, structure=structure, **budget)
    wiring.plan(8)
    first = wiring.masks()
    train(model, wiring, x, 6, kind)
    assert_whole(wiring)
    assert any(not torch.equal(first[name], mask) for name, mask in wiring.masks().items())
    for layer, mask in zip(wiring.layers, wiring.masks().values(), strict=True):
        assert not layer.weight[~mask].any(), "hallucinated edges weigh zero"


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("rule", sorted(REFUSED))
def test_rules_without_structures_say_so(rule: str, structure: str) -> None:
    model, _ = make()
    keys = list(model.state_dict())
    with pytest.raises(WiringError, match=f"structure='{structure}' cannot be combined with .* which {REFUSED[rule]}"):
        wire(model, rule, structure)
    assert list(model.state_dict()) == keys


def test_some_settings_take_no_structure() -> None:
    with pytest.raises(WiringError, match="moves edges between layers, where N:M fixes their number"):
        wire(make()[0], "sparse_momentum", "2:4")
    wiring = wire(make()[0], "sparse_momentum", "2:4", settings={"redistribute": False})
    assert [report.density for report in wiring.look()] == [0.5] * 3
    with pytest.raises(WiringError, match="chooses single edges in a way of its own"):
        wire(make()[0], "targeted_dropout", "row", settings={"regular": True})


def test_a_rule_that_ignores_groups_is_noticed() -> None:
    class Single(rules.DNW):
        kept = None

        def real(self, weight: Tensor, edges: Any) -> Tensor:
            return wirings.choose(weight, edges.k, edges.allowed)

    model, _ = make()
    with pytest.raises(WiringError, match=r"has chosen edges that are not whole groups.*let it use edges.choose"):
        wirings.wire_(model, Single(), density=0.5, structure="4x2")


def test_a_soft_threshold_shrinks_whole_blocks() -> None:
    model = nn.Linear(4, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, -4.0, 1.0, 1.0], [0.0, 0.0, 0.5, 0.5]]))
    wirings.wire_(model, rules.SoftThreshold("soft"), density=0.25, structure="1x2")
    ratio = 1 - 1 / 12.5**0.5
    expected = torch.tensor([[3.0 * ratio, -4.0 * ratio, 0.0, 0.0], [0.0] * 4])
    torch.testing.assert_close(model.weight.detach(), expected)
