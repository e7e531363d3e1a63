"""`Wiring.clip_grad_norm_`: which edges count, and what it costs."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wirings
from tests.kernels import on_gpu, without_waiting
from tests.rule_options import OPTIONS
from wirings import rules
from wirings.selection import functional, passes
from wirings.wire.clipping import _parts_of
from wirings.wire.parametrization import wired


def network(device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)


def with_gradients(rule: str | rules.Rule, device: str = "cpu", **budget: Any) -> tuple[nn.Module, wirings.Wiring]:
    """A wired model after a backward pass with large gradients."""
    model = network(device)
    if isinstance(rule, str):
        rule = rules.get(rule, **OPTIONS.get(rule, {}))
    wiring = wirings.wire_(model, rule, **({} if rule.own_budget else {"density": 0.25, **budget}))
    wiring.plan(10)
    (model(torch.randn(32, 8, device=device)) * 10).square().sum().backward()
    return model, wiring


def norm_over_used(model: nn.Module, wiring: wirings.Wiring, order: float = 2.0) -> Tensor:
    """The norm that clipping should find, by asking the rule about each layer."""
    used = {id(layer.weight): wiring.rule.used(layer.weight.detach(), layer.edges) for layer in wiring.layers}
    grads = [(p.grad, used.get(id(p))) for p in model.parameters() if p.grad is not None]
    return torch.cat([(g if mask is None else g[mask]).reshape(-1) for g, mask in grads]).norm(order)


@pytest.mark.parametrize("at_once", [False, True], ids=["one_by_one", "at_once"])
@pytest.mark.parametrize(
    ("rule", "share"),
    [
        (name, share)
        for name in rules.names()
        for share in (["uniform"] if rules.get(name).own_budget else ["uniform", "global"])
    ],
)
def test_norm_is_that_of_used_edges(rule: str, share: str, at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, wiring = with_gradients(rule, share=share)
    expected, before = norm_over_used(model, wiring), [p.grad.clone() for p in model.parameters() if p.grad is not None]
    if at_once:
        monkeypatch.setattr(passes, "DEVICES", ("cpu",))
    norm = wiring.clip_grad_norm_(1.0)
    torch.testing.assert_close(norm, expected)
    for grad, old in zip([p.grad for p in model.parameters() if p.grad is not None], before, strict=True):
        torch.testing.assert_close(grad, old / (norm + 1e-6))


@pytest.mark.parametrize("at_once", [False, True], ids=["one_by_one", "at_once"])
@pytest.mark.parametrize(("first", "second"), [("dnw", "random"), ("soft_threshold", "dnw"), ("rigl", "top_kast")])
def test_edges_of_every_wiring_count_by_their_own_rule(
    first: str, second: str, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network()
    handles = [
        wirings.wire_(model, first, density=0.25, share="global", include=["0", "2"]),
        wirings.wire_(model[4], second, density=0.1),  # on a part of the model
    ]
    model(torch.randn(32, 8)).square().sum().backward()
    parts = []
    for layer in (layer for handle in handles for layer in handle.layers):
        mask = layer.edges.rule.used(layer.weight.detach(), layer.edges)
        parts += [layer.weight.grad[mask], layer.module.bias.grad]
    if at_once:
        monkeypatch.setattr(passes, "DEVICES", ("cpu",))
    torch.testing.assert_close(handles[0].clip_grad_norm_(1e9), torch.cat(parts).norm())
    torch.testing.assert_close(handles[1].clip_grad_norm_(1e9), torch.cat(parts[4:]).norm())


@pytest.mark.parametrize("order", [0.5, 1.0, 2.0, 3.0, float("inf")])
def test_other_norms(order: float) -> None:
    model, wiring = with_gradients("dnw")
    expected = norm_over_used(model, wiring, order)
    torch.testing.assert_close(wiring.clip_grad_norm_(0.5, order), expected)


@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_only_edges_in_use_make_the_norm_infinite(value: float, order: float) -> None:
    model, wiring = with_gradients("dnw")
    layer = wiring.layers[0]
    used = wiring.rule.used(layer.weight.detach(), layer.edges)
    assert used is not None
    assert layer.weight.grad is not None
    layer.weight.grad[~used] = value
    expected = norm_over_used(model, wiring, order)
    assert expected.isfinite()
    torch.testing.assert_close(wiring.clip_grad_norm_(1e9, order), expected)
    layer.weight.grad[used] = value
    expected = norm_over_used(model, wiring, order)
    assert not expected.isfinite()
    torch.testing.assert_close(wiring.clip_grad_norm_(1e9, order), expected, equal_nan=True)


def test_one_walk_finds_what_pytorch_does() -> None:
    """Tied weights, a module in two places, no module at a place, and parameters without gradients."""
    model = nn.ModuleDict({"a": network(), "b": network()})
    model["b"][2].weight = model["a"][2].weight  # type: ignore[index]
    model["c"] = nn.Sequential(model["a"][0], nn.LayerNorm(8))  # type: ignore[index]
    model.register_module("d", None)
    model["c"].register_module("parametrizations", None)
    wirings.wire_(model["a"], "dnw", density=0.25)
    wirings.wire_(model["b"], "rigl", density=0.25, include=["4"])
    for name, parameter in model.named_parameters():
        parameter.grad = None if name.startswith("b.0") else torch.ones_like(parameter)
    parameters, places = _parts_of(model)
    assert [id(p) for p in parameters] == [id(p) for p in model.parameters() if p.grad is not None]
    expected = {(id(module), attribute, id(edges)) for _, module, attribute, edges in wired(model)}
    assert {(id(module), attribute, id(edges)) for module, attribute, edges in places} == expected
    assert len(places) == len(expected) == 4


def test_model_without_gradients() -> None:
    wiring = wirings.wire_(network(), "dnw", density=0.25)
    assert wiring.clip_grad_norm_(1.0) == 0


def test_a_shared_ranking_of_the_forward_pass_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, wiring = with_gradients("dnw", share="global")
    expected, ranked, plain = norm_over_used(model, wiring), [], functional.choose
    monkeypatch.setattr(functional, "choose", lambda *args: ranked.append(args) or plain(*args))
    torch.testing.assert_close(wiring.clip_grad_norm_(1.0), expected)
    assert not ranked


def test_rule_with_its_own_used_edges_is_asked() -> None:
    class Everything(rules.DNW):
        name = "everything"

        def used(self, weight: Tensor, edges: rules.EdgesLike) -> Tensor | None:
            return None

    model, wiring = with_gradients(Everything())
    total = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).norm()
    torch.testing.assert_close(wiring.clip_grad_norm_(1.0), total)


@on_gpu
@pytest.mark.parametrize("share", ["uniform", "global"])
@pytest.mark.parametrize("rule", ["dnw", "soft_threshold", "random", "rigl"])
def test_does_not_wait_for_the_gpu(rule: str, share: str) -> None:
    model, wiring = with_gradients(rule, "cuda", share=share)
    expected = norm_over_used(model, wiring)
    with without_waiting():
        norm = wiring.clip_grad_norm_(1.0)
    torch.testing.assert_close(norm, expected)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"max_norm": float("nan")}, "max_norm"),
        ({"max_norm": -1.0}, "max_norm"),
        ({"max_norm": "a"}, "max_norm"),
        ({"max_norm": None}, "max_norm"),
        ({"max_norm": 10**400}, "max_norm"),
        ({"max_norm": 1.0, "norm_type": 0}, "norm_type"),
        ({"max_norm": 1.0, "norm_type": float("nan")}, "norm_type"),
        ({"max_norm": 1.0, "norm_type": "inf"}, "norm_type"),
    ],
)
def test_rejects_invalid_norms(given: dict[str, Any], what: str) -> None:
    model, wiring = with_gradients("dnw")
    before = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(wirings.WiringError, match=f"{what} must be a number"):
        wiring.clip_grad_norm_(**given)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before, strict=True))


def test_an_infinite_limit_only_measures() -> None:
    model, wiring = with_gradients("dnw")
    before = [p.grad.clone() for p in model.parameters()]
    assert wiring.clip_grad_norm_(math.inf) > 0
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before, strict=True))
