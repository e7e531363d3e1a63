"""Every registered rule fulfils the contract, on every kind of layer and in every precision."""

import copy
import shutil
from typing import Any

import pytest
import torch
from rule_options import OPTIONS
from soak import SOAK
from torch import Tensor, nn

import wirings
from wirings import rules
from wirings.rules import Rule

# Models are finalized in the middle of training here.
pytestmark = pytest.mark.filterwarnings("ignore:.*had not removed the others yet")
LAYERS = {
    "linear": (lambda: nn.Linear(12, 10), (6, 12)),
    "conv": (lambda: nn.Conv2d(4, 8, 3), (6, 4, 5, 6)),
    "grouped": (lambda: nn.Conv2d(8, 8, 3, groups=4), (6, 8, 5, 6)),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
everywhere = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
each_layer = pytest.mark.parametrize("layer", LAYERS)
each_rule = pytest.mark.parametrize("rule", rules.names())
STEPS = 6
# Compiling takes long, and bf16 compiles the same way for every layer.
COMPILED = {
    f"{name}-{layer}": (layer, dtype)
    for name, dtype in DTYPES.items()
    for layer in LAYERS
    if SOAK or dtype == torch.float32 or layer == "conv"
}
FROM_ZERO = {"rigl", "set", "sparse_momentum"}  # the weight of new edges
TO_ZERO = {"soft_threshold", "str"}  # the weight of a real edge that is as strong as the next hallucinated one


def make(layer: str, dtype: torch.dtype, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """A model whose middle is the layer, and a batch for it."""
    torch.manual_seed(seed)
    build, shape = LAYERS[layer]
    before = nn.Linear(shape[-1], shape[-1])
    model = nn.Sequential(before, nn.Tanh(), build(), nn.Tanh()).to(dtype)
    return model, torch.randn(shape).to(dtype)


def wire(model: nn.Module, rule: str, **budget: object) -> wirings.Wiring:
    made = get(rule)
    wiring = wirings.wire_(model, made, **({} if made.own_budget else budget or {"density": 0.25}))
    wiring.plan(STEPS)
    return wiring


def get(rule: str, **settings: Any) -> Rule:
    return rules.get(rule, **OPTIONS.get(rule, {}), **settings)


def expected_edges(rule: str, weight: Tensor, density: float = 0.25) -> int:
    one = get(rule)
    return one.budget(weight.numel(), tuple(weight.shape)) if one.own_budget else int(density * weight.numel())


def train(model: nn.Module, wiring: wirings.Wiring, x: Tensor, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        wiring.step(optimizer)


def assert_edge_count(rule: str, wiring: wirings.Wiring) -> None:
    training = [layer.edges.training for layer in wiring.layers]
    moves = rules.get(rule).moves_budget
    for layer in wiring.layers:
        layer.edges.eval()
        used, k = layer.edges(layer.weight), int(layer.edges.k)
        real = layer.edges.real(layer.weight)
        assert int(real.sum()) == k
        assert moves or k == expected_edges(rule, layer.weight)
        assert rule in FROM_ZERO | TO_ZERO or int(used.count_nonzero()) == k, "weights are not zero by chance here"
        assert not used[~real].any()
    total = sum(expected_edges(rule, layer.weight) for layer in wiring.layers)
    assert sum(int(layer.edges.k) for layer in wiring.layers) == total
    for layer, mode in zip(wiring.layers, training, strict=True):
        layer.edges.train(mode)


@each_rule
@each_layer
@everywhere
def test_exact_edge_count_after_every_step(rule: str, layer: str, dtype: torch.dtype) -> None:
    model, x = make(layer, dtype)
    wiring = wire(model, rule)
    assert_edge_count(rule, wiring)
    for _ in range(4):
        train(model, wiring, x, 1)
        assert_edge_count(rule, wiring)
    sizes = {one.name: int(one.edges.k) for one in wiring.layers}
    assert {r.name: r.edges for r in wiring.look()} == sizes
    train(model, wiring, x, 1)  # an edge that has just become real may have a weight of zero
    wirings.finalize_(model)
    for name, k in sizes.items():
        assert int(model.get_parameter(name).count_nonzero()) == k or (rule in TO_ZERO and dtype != torch.float32)


@each_rule
@each_layer
@everywhere
def test_finalize_gives_the_same_outputs_and_plain_modules(rule: str, layer: str, dtype: torch.dtype) -> None:
    model, x = make(layer, dtype)
    plain = {name: type(module) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    wiring = wire(model, rule)
    train(model, wiring, x, 3)
    with torch.no_grad():
        before = model.eval()(x)
        assert wirings.finalize_(model) is model
        assert torch.equal(model(x), before)
    assert list(model.state_dict()) == keys
    assert {name: type(module) for name, module in model.named_modules()} == plain


@each_rule
@each_layer
@everywhere
def test_save_and_load(rule: str, layer: str, dtype: torch.dtype, tmp_path: object) -> None:
    model, x = make(layer, dtype)
    wiring = wire(model, rule)
    train(model, wiring, x, 3)
    torch.save({"model": model.state_dict(), "wiring": wiring.state_dict()}, f"{tmp_path}/saved.pt")

    other, _ = make(layer, dtype, seed=1)
    again = wire(other, rule)
    saved = torch.load(f"{tmp_path}/saved.pt", weights_only=True)
    other.load_state_dict(saved["model"])
    again.load_state_dict(saved["wiring"])
    assert again.steps == wiring.steps == 3
    for name, mask in wiring.masks().items():
        assert torch.equal(again.masks()[name], mask)
    assert torch.equal(other.eval()(x), model.eval()(x))
    for one in (model.train(), other.train()):
        torch.manual_seed(5)
        train(one, wiring if one is model else again, x, 2)
    assert torch.equal(other.eval()(x), model.eval()(x)), "training continues identically"


@each_rule
@everywhere
def test_plain_and_wired_checkpoints_are_interchangeable(rule: str, dtype: torch.dtype) -> None:
    plain, _ = make("conv", dtype, seed=1)
    model, _ = make("conv", dtype)
    wiring = wire(model, rule)
    model.load_state_dict(plain.state_dict())
    for layer in wiring.layers:
        assert torch.equal(layer.weight, plain.get_parameter(layer.name))
    saved = model.state_dict()
    memory = {key for key in saved if ".wiring." in key}
    assert set(saved) - memory == set(plain.state_dict())
    fresh, _ = make("conv", dtype, seed=2)
    missing = fresh.load_state_dict(saved, strict=not memory)
    assert set(missing.unexpected_keys) == memory
    assert not missing.missing_keys
    assert torch.equal(fresh[2].weight, plain[2].weight)


@each_rule
@each_layer
@everywhere
def test_determinism(rule: str, layer: str, dtype: torch.dtype) -> None:
    states = []
    for _ in range(2):
        model, x = make(layer, dtype, seed=3)
        wiring = wire(model, rule)
        train(model, wiring, x, 3)
        states.append(model.state_dict())
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key])


@each_rule
@each_layer
@everywhere
def test_backward_flows_through_real_edges_alone(rule: str, layer: str, dtype: torch.dtype) -> None:
    """Whatever the rule does with an edge's gradient, layers before it get a gradient through real edges only."""
    model, x = make(layer, dtype)
    wire(model, rule)
    model.eval()
    finalized = wirings.finalize_(copy.deepcopy(model))
    for one in (model, finalized):
        one(x).square().mean().backward()
    assert torch.equal(model[0].bias.grad, finalized[0].bias.grad)
    assert torch.equal(model[2].bias.grad, finalized[2].bias.grad)
    grad = model[2].parametrizations.weight.original.grad
    real = model[2].parametrizations.weight[0].real(model[2].parametrizations.weight.original)
    assert grad is not None
    assert grad[real].count_nonzero() > 0


@each_rule
def test_gradient_reaches_the_declared_edges(rule: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(12, 10)), torch.randn(6, 12)
    wiring = wire(model, rule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    weight, shares = wiring.layers[0].weight, []
    for _ in range(STEPS):
        hallucinated = ~wiring.masks()["0.weight"]
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        assert weight.grad is not None
        shares.append(float(weight.grad[hallucinated].ne(0).float().mean()) if hallucinated.any() else 0.0)
        optimizer.step()
        wiring.step(optimizer)
    reaches = "real" if max(shares) == 0 else "all" if min(shares) == 1 else "some"
    assert rules.get(rule).reaches == reaches, shares


@each_rule
@pytest.mark.parametrize(("layer", "dtype"), COMPILED.values(), ids=COMPILED)
def test_compiled_training_equals_eager(rule: str, layer: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    model, x = make(layer, dtype)
    wiring = wire(model, rule)
    model2 = copy.deepcopy(model)
    compiled = torch.compile(model2, backend="aot_eager", fullgraph=True)
    for one in (model, compiled):
        torch.manual_seed(7)
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            one(x).square().mean().backward()
            optimizer.step()
    for (name, a), (_, b) in zip(model.named_parameters(), model2.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=name)
    assert len(wiring.layers) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler's own deprecations
@pytest.mark.skipif(shutil.which("g++") is None, reason="the full compiler needs a C++ compiler")
@each_rule
def test_the_full_compiler(rule: str) -> None:
    torch._dynamo.reset()
    model, x = make("conv", torch.float32)
    wire(model, rule)
    model2 = copy.deepcopy(model)
    # Rules that draw at random draw the same numbers then.
    compiled = torch.compile(model2, fullgraph=True, options={"fallback_random": True})
    for one in (model, compiled):
        torch.manual_seed(7)
        one(x).square().mean().backward()
    for (name, a), (_, b) in zip(model.named_parameters(), model2.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)


@each_rule
def test_deepcopy_and_repr(rule: str) -> None:
    model, x = make("conv", torch.float32)
    wiring = wire(model, rule)
    other = copy.deepcopy(model)
    assert torch.equal(model.eval()(x), other.eval()(x))
    with torch.no_grad():
        for layer in wiring.layers:
            layer.weight.zero_()
    assert not torch.equal(model(x), other(x)), "the copy has weights and wiring of its own"
    assert type(wiring.rule).__name__ in repr(wiring)
    assert isinstance(rules.get(rule), Rule)


@each_rule
@pytest.mark.parametrize("share", ["erk", "global"])
def test_other_shares_meet_the_total(rule: str, share: str) -> None:
    if rules.get(rule).own_budget:
        with pytest.raises(wirings.WiringError, match="fixes the number of edges itself"):
            wirings.wire_(make("conv", torch.float32)[0], rule, share=share)
        return
    model, x = make("conv", torch.float32)
    wiring = wire(model, rule, density=0.25, share=share)
    total = sum(layer.weight.numel() for layer in wiring.layers) // 4
    for _ in range(3):
        train(model, wiring, x, 1)
        assert sum(int(mask.sum()) for mask in wiring.masks().values()) == total
    out = model.eval()(x)
    assert torch.equal(wirings.finalize_(model)(x), out)


@each_rule
def test_follows_a_schedule(rule: str) -> None:
    if rules.get(rule).own_budget:
        pytest.skip("takes no budget")
    model, x = make("conv", torch.float32)
    wiring = wire(model, rule, density=wirings.LinearSchedule(1.0, 0.2, steps=4))
    sizes = {layer.name: layer.weight.numel() for layer in wiring.layers}
    for step, density in enumerate([1.0, 0.8, 0.6, 0.4, 0.2, 0.2]):
        counts = {name: int(mask.sum()) for name, mask in wiring.masks().items()}
        expected = {name: int(density * n + 1e-6) for name, n in sizes.items()}
        assert sum(counts.values()) == sum(expected.values()), step
        assert counts == expected or rules.get(rule).moves_budget, step
        train(model, wiring, x, 1)


@each_rule
@pytest.mark.parametrize("share", ["uniform", "erk", "global"])
def test_a_schedule_of_the_rule_leads_to_the_budget(rule: str, share: str) -> None:
    """A schedule given as plain values, in fractions of training, works for any rule and share, and is saved."""
    schedule = {"kind": "linear", "start": 0.8, "begin": 0.25, "end": 0.75}
    model, x = make("conv", torch.float32)
    if rules.get(rule).own_budget:
        with pytest.raises(wirings.WiringError, match="fixes the number of edges itself; drop schedule="):
            wirings.wire_(model, get(rule, schedule=schedule))
        return
    wiring = wirings.wire_(model, get(rule, schedule=schedule), k=81, share=share)
    wiring.plan(4)
    # At first 28 of 36 and 230 of 288 edges, or 259 of all together (with ERK, the first layer's budget is 32 of its
    # 36); after two of four steps, half-way to the 81.
    first = {"uniform": 258, "erk": 262, "global": 259}[share]
    expected = [first, first, (first + 81) // 2, 81, 81]
    for step, count in enumerate(expected):
        assert abs(sum(report.edges for report in wiring.look()) - count) <= (step == 2), step
        if step < 4:
            train(model, wiring, x, 1)
    other, _ = make("conv", torch.float32, seed=1)
    again = wirings.wire_(other, get(rule, schedule=schedule), k=81, share=share)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.eval()(x), model.eval()(x)), "the number of edges was loaded with the model"
    again.load_state_dict(wiring.state_dict())
    assert [r.edges for r in again.look()] == [r.edges for r in wiring.look()]
    train(other.train(), again, x, 1)  # and how long the training is, with the handle
    assert sum(report.edges for report in again.look()) == 81


@pytest.mark.parametrize("name", ["random", "expander", "set", "rigl", "sparse_momentum"])
@pytest.mark.parametrize("seed", ["abc", 1.5, True, 2**64])
def test_rejects_invalid_seeds(name: str, seed: object) -> None:
    with pytest.raises(wirings.WiringError, match=f"{name}: seed must be a whole number, or left out, got {seed!r}"):
        rules.get(name, seed=seed)
