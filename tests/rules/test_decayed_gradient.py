"""Decayed gradient: which part of the gradient reaches hallucinated edges, and how it decreases."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import wirings
from wirings import WiringError
from wirings.rules import DecayedGradient

WEIGHT = torch.tensor([[3.0, -1.0], [2.0, 0.5]])
GRADIENT = torch.tensor([[0.2, -0.4], [0.6, 0.8]])


def wired(rule: object, **settings: object) -> tuple[nn.Linear, wirings.Wiring]:
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(WEIGHT)
    return model, wirings.wire_(model, rule, k=2, **settings)


def gradient(model: nn.Linear, wiring: wirings.Wiring) -> Tensor:
    wiring.layers[0].weight.grad = None
    (model.weight * GRADIENT).sum().backward()
    return wiring.layers[0].weight.grad


def test_hallucinated_edges_get_a_fraction_of_the_gradient() -> None:
    model, wiring = wired(DecayedGradient(0.5))
    assert model.weight.tolist() == [[3, 0], [2, 0]]
    torch.testing.assert_close(gradient(model, wiring), torch.tensor([[0.2, -0.2], [0.6, 0.4]]))


def test_disallowed_edges_get_no_gradient() -> None:
    allowed = torch.tensor([[True, True], [True, False]])
    model, wiring = wired(DecayedGradient(0.5), allowed={"weight": allowed})
    torch.testing.assert_close(gradient(model, wiring), torch.tensor([[0.2, -0.2], [0.6, 0.0]]))


@pytest.mark.parametrize(
    ("kind", "factors"),
    [("linear", [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]), ("cosine", [1.0, 0.8828, 0.6, 0.3172, 0.2, 0.2])],
)
def test_the_factor_falls_over_training(kind: str, factors: list[float]) -> None:
    assert (1 + math.cos(math.pi / 4)) / 2 * 0.8 + 0.2 == pytest.approx(0.8828, abs=1e-4)
    model, wiring = wired(DecayedGradient(end=0.2, kind=kind))
    wiring.plan(4)
    seen = []
    for _ in factors:
        seen.append(float(gradient(model, wiring)[1, 1]) / 0.8)
        wiring.step()
    assert seen == pytest.approx(factors, abs=1e-4)


def test_constant_factor_needs_no_plan() -> None:
    model, wiring = wired(DecayedGradient(0.25, end=None))
    for _ in range(3):
        wiring.step()
    assert float(gradient(model, wiring)[1, 1]) == pytest.approx(0.2)


@pytest.mark.parametrize(("factor", "same"), [(1.0, "dnw"), (0.0, "no_update")])
def test_factors_of_one_and_zero_are_dnw_and_no_update(factor: float, same: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    x, states = torch.randn(32, 8), []
    for rule in (DecayedGradient(factor, end=None), same):
        model = copy.deepcopy(plain)
        wirings.wire_(model, rule, density=0.2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        for _ in range(10):
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
        states.append(model.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[1].items() if ".wiring." not in name)
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"factor": 1.5}, "factor must be a number from 0 to 1, got 1.5"),
        ({"end": -1}, "end must be a number from 0 to 1, got -1"),
        ({"kind": "cubic"}, "unknown kind of decay 'cubic'.*cosine, linear"),
    ],
)
def test_mistakes(settings: dict[str, object], says: str) -> None:
    with pytest.raises(WiringError, match=says):
        DecayedGradient(**settings)  # type: ignore[arg-type]
