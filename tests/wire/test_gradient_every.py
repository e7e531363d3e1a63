"""``gradient_every=``: the gradient reaches hallucinated edges in every so many steps, real ones in all of them."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wirings
from wirings import WiringError


def wired(rule: Any = "dnw", **more: Any) -> tuple[nn.Module, wirings.Wiring]:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    options = {"density": 0.25, "structure": "2x2", "gradient_every": 3, **more}
    return model, wirings.wire_(model, rule, **options)


def reached(model: nn.Module, wiring: wirings.Wiring) -> list[tuple[bool, bool]]:
    """For every layer, whether the gradient reaches all real edges, and a hallucinated one."""
    model.zero_grad()
    model(torch.randn(64, 8)).square().sum().backward()
    found = []
    for layer in wiring.layers:
        grad, real = layer.weight.grad, layer.edges.real(layer.weight)
        assert isinstance(grad, Tensor)
        found.append((bool((grad[real] != 0).all()), bool((grad[~real] != 0).any())))
    return found


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"share": "global"},
        {"structure": "2:4", "density": None},
        {"structure": "row"},
        {"structure": "2:4, transposable", "density": None},
    ],
)
@pytest.mark.parametrize("rule", ["dnw", "soft_threshold", "decayed_gradient"])
def test_hallucinated_edges_get_a_gradient_in_every_third_step(rule: str, more: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model, wiring = wired(rule, **more)
    if rule == "decayed_gradient":
        wiring.plan(100)
    found = []
    for step in range(7):
        assert wiring.gradient_to_all == (step % 3 == 0)
        found.append([beyond for _, beyond in reached(model, wiring)])
        wiring.step()
    assert found == [[step % 3 == 0] * 2 for step in range(7)]


def test_real_edges_have_the_same_gradient_in_every_step() -> None:
    model, wiring = wired()
    plain = copy.deepcopy(model)
    x = torch.randn(5, 8)
    grads = []
    for _ in range(2):
        model.zero_grad()
        model(x).square().sum().backward()
        grads.append([layer.weight.grad for layer in wiring.layers])
        wiring.step()
    for layer, all_edges, real_only in zip(wiring.layers, *grads, strict=True):
        assert all_edges is not None
        assert torch.equal(real_only, torch.where(layer.edges.real(layer.weight), all_edges, 0))  # type: ignore[arg-type]
    assert torch.equal(plain(x), model(x))  # a copy has its own selection


def test_copies_and_checkpoints_continue() -> None:
    model, wiring = wired()
    wiring.step()
    copied = copy.deepcopy(model)
    assert not next(m for m in copied.modules() if hasattr(m, "selection")).selection.gradient_to_all  # type: ignore
    again, other = wired()
    again.load_state_dict(model.state_dict())
    other.load_state_dict(wiring.state_dict())
    assert not other.gradient_to_all
    for _ in range(2):
        other.step()
    assert other.gradient_to_all
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    restored = wirings.rewire_(plain, wiring.describe(), model.state_dict())
    assert restored.describe()["gradient_every"] == 3
    assert not restored.gradient_to_all


def test_compiled() -> None:
    torch._dynamo.reset()
    model, wiring = wired()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x, found = torch.randn(5, 8), []
    for _ in range(4):
        both = []
        for run in (model, compiled):
            model.zero_grad()
            run(x).square().sum().backward()
            both.append([layer.weight.grad for layer in wiring.layers])
        for a, b in zip(*both, strict=True):
            torch.testing.assert_close(a, b)
        found.append(bool((both[0][0][~wiring.layers[0].edges.real(wiring.layers[0].weight)] != 0).any()))
        wiring.step()
    assert found == [True, False, False, True]


def test_rejects_what_it_cannot_be_combined_with() -> None:
    with pytest.raises(WiringError, match="needs a structure of edges"):
        wired(structure="free")
    with pytest.raises(WiringError, match="decides itself which edges it reaches"):
        wired("rigl")
    with pytest.raises(WiringError, match="gradient_every must be a whole number, at least 1, got 0"):
        wired(gradient_every=0)
