"""When ``wiring.step`` or ``wire_`` raises, everything that it changed is restored."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from rule_options import OPTIONS
from torch import Tensor, nn

import wirings
from wirings import rules
from wirings.selection import batched, functional

STEPS = 8


def build(rule: str | rules.Rule, share: str = "uniform") -> tuple[nn.Module, wirings.Wiring, torch.optim.Optimizer]:
    """A model of two layers whose budget changes after every step, trained for three of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 8))
    made = rules.get(rule, **OPTIONS.get(rule, {})) if isinstance(rule, str) else rule
    budget: dict[str, Any] = {"density": wirings.LinearSchedule(0.9, 0.2, steps=STEPS), "share": share}
    wiring = wirings.wire_(model, made, **({} if made.own_budget else budget))
    wiring.plan(STEPS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        train(model, optimizer)
        wiring.step(optimizer)
    train(model, optimizer)
    return model, wiring, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 12)).square().mean().backward()
    optimizer.step()


def everything(model: nn.Module, wiring: wirings.Wiring, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that a step may change: parameters, buffers, optimizer state, the rule and the handle."""
    return copy.deepcopy(
        {
            "parameters": dict(model.named_parameters()),
            "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
            "trained": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
            "buffers": dict(model.named_buffers()),
            "saved": sorted(model.state_dict()),
            "optimizer": optimizer.state_dict(),
            "rule": vars(wiring.rule),
            "handle": wiring.state_dict(),
            "masks": wiring.masks(),
            "swapped": [report.swapped for report in wiring.report()],
        }
    )


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


class Careless(rules.Rule):
    """Changes everything it can, then raises in the middle of the layers."""

    name = "careless"
    fails = False
    count = 0

    def real(self, weight: Tensor, edges: rules.EdgesLike) -> Tensor:
        return edges.choose(weight)

    @torch.no_grad()
    def update(self, layers: Sequence[rules.LayerLike], training: rules.Training, optimizer: Any) -> None:
        if not self.fails:
            return
        self.count += 1
        for number, layer in enumerate(layers):
            if number == 1:
                raise RuntimeError("in the middle")
            layer.weight.neg_()
            layer.weight[0] = 7.0
            layer.weight[1:, 2].zero_()
            layer.weight.data.add_(1.0)
            weight = layer.weight
            weight *= 2
            torch.add(weight, 1.0, out=weight)
            layer.edges.k.fill_(1)
            layer.edges.remember("score", torch.ones_like(layer.weight))
            layer.edges.remember("passing", torch.ones(1), saved=False)
            optimizer.state[layer.weight]["momentum_buffer"].fill_(3.0)
            optimizer.state[layer.weight]["more"] = torch.ones(1)
            optimizer.param_groups[0]["lr"] = 5.0
            torch._foreach_mul_([layers[1].weight], 2.0)
            layer.weight.grad.mul_(2.0)
            layer.weight.grad = torch.ones_like(layer.weight)
            layer.weight.grad.mul_(2.0)
            layer.weight.data = layers[1].weight.new_zeros(layer.weight.shape)
            layer.weight.add_(1.0)
            layer.weight.requires_grad = False
            layers[1].weight.grad = None
            layers[1].weight.data = optimizer.state[layers[1].weight]["momentum_buffer"]
            layers[1].weight.zero_()
            optimizer.zero_grad()


@pytest.mark.parametrize("share", ["uniform", "global"])
def test_a_rule_that_raises_in_the_middle_changes_nothing(share: str) -> None:
    rule = Careless()
    model, wiring, optimizer = build(rule, share)
    rule.fails = True
    before = everything(model, wiring, optimizer)
    with pytest.raises(RuntimeError, match="in the middle"):
        wiring.step(optimizer)
    after = everything(model, wiring, optimizer)
    assert [key for key in before if not same(before[key], after[key])] == []
    rule.fails = False
    wiring.step(optimizer)
    assert wiring.steps == 4


def test_references_to_gradients_are_restored() -> None:
    rule = Careless()
    _, wiring, optimizer = build(rule)
    rule.fails = True
    before = [layer.weight.grad for layer in wiring.layers]
    addresses = [layer.weight.data_ptr() for layer in wiring.layers]
    with pytest.raises(RuntimeError, match="in the middle"):
        wiring.step(optimizer)
    assert all(layer.weight.grad is grad for layer, grad in zip(wiring.layers, before, strict=True))
    assert [layer.weight.data_ptr() for layer in wiring.layers] == addresses


def freeze(layer: rules.LayerLike, optimizer: Any) -> None:
    layer.weight.requires_grad_(False)


def set_other_memory(layer: rules.LayerLike, optimizer: Any) -> None:
    layer.weight.mul_(2.0)
    layer.weight.set_(optimizer.state[layer.weight]["momentum_buffer"])
    layer.weight.mul_(2.0)
    layer.edges.k.set_(torch.ones_like(layer.edges.k))


def transpose(layer: rules.LayerLike, optimizer: Any) -> None:
    layer.weight.mul_(2.0)
    layer.weight.t_()


def accumulate(layer: rules.LayerLike, optimizer: Any) -> None:
    with torch.enable_grad():
        layer.weight.square().sum().backward()
        torch.autograd.backward(layer.weight.square().sum())


def keep_history(layer: rules.LayerLike, optimizer: Any) -> None:
    with torch.enable_grad():
        optimizer.state[layer.weight]["momentum_buffer"].mul_(layer.weight)


def optimize(layer: rules.LayerLike, optimizer: Any) -> None:
    weight = layer.weight
    momentum = optimizer.state[weight]["momentum_buffer"]
    settings = {"weight_decay": 0.1, "momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": False}
    flags = {"maximize": False, "is_first_step": False}
    torch._fused_sgd_([weight], [torch.ones_like(weight)], [momentum], **settings, **flags)


@pytest.mark.parametrize("has_gradients", [True, False])
@pytest.mark.parametrize("change", [freeze, set_other_memory, transpose, accumulate, keep_history, optimize])
def test_changes_that_are_not_plain_writes_are_undone(change: Callable[..., None], has_gradients: bool) -> None:
    model, wiring, optimizer = build(Careless())
    if not has_gradients:
        optimizer.zero_grad()
    before = everything(model, wiring, optimizer)
    addresses = [layer.weight.data_ptr() for layer in wiring.layers]

    def update(layers: Sequence[rules.LayerLike], training: rules.Training, optimizer: Any) -> None:
        with torch.no_grad():
            change(layers[0], optimizer)
        raise RuntimeError("in the middle")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Careless, "update", staticmethod(update))
        with pytest.raises(RuntimeError, match="in the middle"):
            wiring.step(optimizer)
    after = everything(model, wiring, optimizer)
    assert [key for key in before if not same(before[key], after[key])] == []
    assert [layer.weight.data_ptr() for layer in wiring.layers] == addresses


class CarelessSetup(rules.Rule):
    """Changes weights and gradients when a model is wired, and then raises."""

    name = "careless setup"

    def real(self, weight: Tensor, edges: rules.EdgesLike) -> Tensor:
        return edges.choose(weight)

    @torch.no_grad()
    def setup(self, layers: Sequence[rules.LayerLike]) -> None:
        self.seen = len(layers)
        for layer in layers:
            layer.weight.zero_()
            layer.weight.grad = None
        raise RuntimeError("too late")


class ChoosesForEachLayer(rules.SET):
    """Zeros hallucinated weights, as `SET` does, and ignores that all layers share one budget."""

    name = "chooses for each layer"

    def setup(self, layers: Sequence[rules.LayerLike]) -> None:
        super().setup(layers)
        for layer in layers:
            layer.edges.wiring.zero_()


@pytest.mark.parametrize(
    ("rule", "message"), [(CarelessSetup(), "too late"), (ChoosesForEachLayer(seed=0), "should have 20 real edges")]
)
def test_a_model_that_cannot_be_wired_keeps_its_weights(rule: rules.Rule, message: str) -> None:
    model = nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 8))
    model(torch.randn(4, 12)).sum().backward()
    parameters = dict(model.named_parameters())
    state, settings = copy.deepcopy(model.state_dict()), dict(vars(rule))
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    with pytest.raises((RuntimeError, wirings.WiringError), match=message):
        wirings.wire_(model, rule, k=20, share="global")
    assert same(dict(model.state_dict()), dict(state))
    assert all(model.get_parameter(name) is parameter for name, parameter in parameters.items())
    assert all(model.get_parameter(name).grad is grad for name, grad in gradients.items())
    assert vars(rule) == settings


@pytest.mark.parametrize("share", ["uniform", "global"])
@pytest.mark.parametrize("rule", rules.names())
def test_unsuitable_optimizers_change_nothing(rule: str, share: str) -> None:
    if rules.get(rule).own_budget and share == "global":
        pytest.skip("takes no budget")
    model, wiring, optimizer = build(rule, share)
    part = torch.optim.SGD([wiring.layers[0].weight, model[0].bias], lr=0.1, momentum=0.9)
    part.state.update({p: optimizer.state[p] for p in part.param_groups[0]["params"]})
    before = everything(model, wiring, optimizer)
    for unsuitable in (part, None, "adam"):
        try:
            wiring.step(unsuitable)  # type: ignore[arg-type]
        except wirings.WiringError:
            after = everything(model, wiring, optimizer)
            assert [key for key in before if not same(before[key], after[key])] == []
        else:  # the rule does not need the optimizer
            assert rule not in ("rigl", "sparse_momentum", "str", "l1_anneal", "top_kast")
            before = everything(model, wiring, optimizer)


@pytest.mark.parametrize("share", ["uniform", "global"])
@pytest.mark.parametrize("rule", rules.names())
def test_a_selection_that_fails_half_way_changes_nothing(
    rule: str, share: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any of the selections in a step may be the one that fails."""
    if rules.get(rule).own_budget and share == "global":
        pytest.skip("takes no budget")
    model, wiring, optimizer = build(rule, share)
    before = everything(model, wiring, optimizer)
    for allowed in range(20):
        calls = 0

        def counted(plain: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls > allowed:  # noqa: B023
                    raise MemoryError
                return plain(*args, **options)

            return call

        with monkeypatch.context() as patch:
            for module, name in ((functional, "choose"), (batched, "kept_of")):
                patch.setattr(module, name, counted(getattr(module, name)))
            try:
                wiring.step(optimizer)
            except MemoryError:
                pass
            else:
                break
        after = everything(model, wiring, optimizer)
        assert [key for key in before if not same(before[key], after[key])] == [], allowed
    assert wiring.steps == 4
    assert not same(before["handle"], wiring.state_dict())


def test_a_rule_with_its_own_update_declares_itself_whether_that_is_atomic() -> None:
    class Plain(rules.DNW):
        pass

    class Acts(rules.GMP):
        def update(self, *args: Any) -> None:
            super().update(*args)

    class Declares(Acts):
        atomic = True

    assert Plain().updates_at_once
    assert not Acts().updates_at_once
    assert Declares().updates_at_once
    assert all(rules.get(name).updates_at_once for name in rules.names())
