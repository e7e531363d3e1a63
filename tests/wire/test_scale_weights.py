"""Scaling starting weights at a density: `wire_(…, scale_weights=…)`."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wirings
from wirings import WiringError, models, rules, wire_
from wirings.budgets.budget import CubicSchedule


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 100, bias=False), nn.Linear(100, 40, bias=False))
    for layer in model:
        nn.init.normal_(layer.weight)
    return model


def wired(rule: str | rules.Rule = "dnw", **arguments: Any) -> tuple[list[Tensor], list[Tensor], wirings.Wiring]:
    """The weights of all edges before and after wiring, and the handle."""
    model = network()
    before = [layer.weight.detach().clone() for layer in model]
    wiring = wire_(model, rule, **arguments)
    return before, [layer.weight.detach() for layer in wiring.layers], wiring


def factors(before: list[Tensor], after: list[Tensor]) -> list[float]:
    """By how much each weight was multiplied, where it is not zero now."""
    found = []
    for old, new in zip(before, after, strict=True):
        there = new != 0
        ratio = new[there] / old[there]
        torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))
        found.append(float(ratio[0]))
    return found


def test_weights_are_left_alone_by_default() -> None:
    before, after, _ = wired(density=0.1)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    "rule", ["dnw", "random", "soft_threshold", "set", "rigl", "sparse_momentum", "str", "top_kast"]
)
def test_scales_by_the_density_of_each_layer(rule: str) -> None:
    before, after, _ = wired(rule, budget={"0": 0.25, "1": 1000}, scale_weights=True)
    assert factors(before, after) == pytest.approx([2.0, 2.0])
    before, after, _ = wired(rule, budget={"0": 0.04, "1": 1.0}, scale_weights=True)
    assert factors(before, after) == pytest.approx([5.0, 1.0])


def test_scales_by_the_density_of_the_structure() -> None:
    before, after, _ = wired("dnw", structure="1:4", scale_weights=True)
    assert factors(before, after) == pytest.approx([2.0, 2.0])


def test_a_random_graph_passes_on_the_variance_of_the_dense_network() -> None:
    torch.manual_seed(0)
    dense, x = nn.Linear(512, 512, bias=False), torch.randn(1000, 512)
    expected = dense(x).std().item()
    wire_(dense, "random", density=0.1, scale_weights=True)
    assert dense(x).std().item() == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("rule", ["gmp", "l1_anneal"])
def test_rules_that_begin_with_all_edges_scale_nothing(rule: str) -> None:
    for share in ("uniform", "global"):
        before, after, _ = wired(rule, density=0.1, share=share, scale_weights=True)
        assert factors(before, after) == [1.0, 1.0]


def test_schedules_scale_by_the_density_that_they_begin_with() -> None:
    rule = rules.get("soft_threshold", schedule="cubic")
    before, after, _ = wired(rule, density=0.1, scale_weights=True)
    assert factors(before, after) == [1.0, 1.0]
    before, after, _ = wired(density=CubicSchedule.over(0.25, 0.1), scale_weights=True)
    assert factors(before, after) == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize("rule", ["dnw", "soft_threshold", "random", "str"])
def test_global_shares_keep_their_wiring(rule: str) -> None:
    """Layers that are ranked together have one factor, so that the ranking stays the same."""
    torch.manual_seed(1)
    made = rules.Random(seed=3) if rule == "random" else rule
    before, after, plain = wired(made, density=0.25, share="global")
    before, after, scaled = wired(made, density=0.25, share="global", scale_weights=True)
    assert factors(before, after) == pytest.approx([2.0, 2.0])
    assert [r.edges for r in scaled.look()] == [r.edges for r in plain.look()]
    for name, mask in plain.masks().items():
        assert torch.equal(mask, scaled.masks()[name])


def test_a_ranked_budget_of_multiply_adds_has_one_factor() -> None:
    before, after, wiring = wired(mult_adds=0.25, example_input=(64,), share="global", scale_weights=True)
    factor = math.sqrt((64 * 100 + 100 * 40) / sum(report.edges for report in wiring.look()))
    assert factors(before, after) == pytest.approx([factor] * 2)


def test_density_is_that_of_allowed_edges() -> None:
    allowed = torch.zeros(100, 64, dtype=torch.bool)
    allowed[:, :16] = True
    before, after, _ = wired(density=0.25, allowed={"0": allowed}, scale_weights=True)
    assert factors(before, after) == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize("factor", [0.5, 1, 3])
def test_scales_by_a_number(factor: float) -> None:
    before, after, _ = wired(density=0.1, scale_weights=factor)
    assert factors(before, after) == pytest.approx([factor] * 2)


def test_tied_weights_are_scaled_once() -> None:
    model = network()
    model.append(nn.Linear(64, 100, bias=False))
    model[2].weight = model[0].weight
    before = model[0].weight.detach().clone()
    wiring = wire_(model, density=0.25, scale_weights=True)
    assert len(wiring.layers) == 2
    torch.testing.assert_close(wiring.layers[0].weight.detach(), 2 * before)


def test_loaded_weights_are_not_scaled_again() -> None:
    _, _, wiring = wired("set", density=0.1, scale_weights=True)
    _, _, other = wired("set", density=0.1, scale_weights=True)
    state = {name: value.clone() for name, value in wiring.model.state_dict().items()}
    other.model.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in other.model.state_dict().items())


def test_an_error_restores_the_weights() -> None:
    class Broken(rules.DNW):
        name = "broken"

        def setup(self, layers: Any) -> None:
            raise WiringError("no")

    model = network()
    before = model[0].weight.detach().clone()
    with pytest.raises(WiringError, match="no"):
        wire_(model, Broken(), density=0.1, scale_weights=True)
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("scale", [0, -1.0, float("nan"), float("inf"), "auto", None])
def test_rejects_other_values(scale: Any) -> None:
    with pytest.raises(WiringError, match=r"scale_weights= expects True, .* False, or the factor itself.*got"):
        wired(density=0.1, scale_weights=scale)


@pytest.mark.parametrize("rule", ["fine_tune", "lottery"])
def test_rejects_rules_for_trained_weights(rule: str) -> None:
    with pytest.raises(WiringError, match=f"'{rule}' is for trained weights, which must not be scaled; drop scale_w"):
        wired(rule, density=0.1, scale_weights=True)


def test_models_take_it_as_an_option() -> None:
    weights = []
    for scale in (False, True):
        torch.manual_seed(0)
        model = models.get("resnet18", rule="dnw", density=0.25, scale_weights=scale)
        weights.append(model.wiring.layers[0].weight.detach())
    torch.testing.assert_close(weights[1] / weights[0], torch.full_like(weights[0], 2.0), rtol=0.05, atol=0)
