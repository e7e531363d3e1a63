"""`wire_(…, start="weights")`: rules start from the wiring of a network that is sparse already."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rule_options import OPTIONS
from torch import Tensor, nn

import wirings
from wirings import WiringError, rules, wire_

pytestmark = pytest.mark.filterwarnings("ignore:.*had not removed the others yet")
CANNOT = {"dense", "expander"}
CAN = sorted(set(rules.names()) - CANNOT)
FIXED = {"fine_tune", "keep", "lottery", "random", "gmp", "l1_anneal"}
each = pytest.mark.parametrize("name", CAN)


def pruned(density: float = 0.3, seed: int = 0) -> tuple[nn.Sequential, dict[str, Tensor]]:
    """A network with zeros, and where its weights are not zero."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8))
    with torch.no_grad():
        for place in (0, 2):
            weight = model[place].weight
            weight[torch.rand_like(weight) >= density] = 0.0
            weight.view(-1)[-1] = 0.5
    return model, {f"{place}.weight": model[place].weight.detach() != 0 for place in (0, 2)}


def train(model: nn.Module, wiring: wirings.Wiring, steps: int = 6) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.randn(16, 12)) - 1).square().mean().backward()
        optimizer.step()
        wiring.step(optimizer)


def get(name: str) -> Any:
    return rules.get(name, **OPTIONS.get(name, {}))


@each
@given(density=st.floats(0.05, 0.9), seed=st.integers(0, 99))
def test_the_first_wiring_is_where_weights_are_not_zero(name: str, density: float, seed: int) -> None:
    model, real = pruned(density, seed)
    before = {key: model.get_parameter(key).clone() for key in real}
    wiring = wire_(model, get(name), start="weights")
    for layer in wiring.layers:
        assert torch.equal(wiring.masks()[layer.name], real[layer.name])
        assert torch.equal(layer.weight, before[layer.name]), "weights are unchanged"
        assert int(layer.edges.k) == int(real[layer.name].sum())


@each
def test_training_goes_on_with_as_many_edges(name: str) -> None:
    model, real = pruned()
    wiring = wire_(model, get(name), start="weights")
    wiring.plan(6)
    train(model, wiring)
    total = sum(int(mask.sum()) for mask in real.values())
    masks = wiring.masks()
    assert sum(int(mask.sum()) for mask in masks.values()) == total
    swapped = any(not torch.equal(masks[key], real[key]) for key in real)
    assert swapped == (name not in FIXED | {"no_update", "str"}), "others swap edges from there"
    wirings.finalize_(model)
    assert sum(int(model.get_parameter(key).count_nonzero()) for key in real) <= total


@each
def test_rewire_restores_what_has_started_from_weights(name: str) -> None:
    model, _ = pruned()
    wiring = wire_(model, get(name), start="weights")
    wiring.plan(6)
    train(model, wiring, 3)
    other, _ = pruned(1.0, seed=1)
    again = wirings.rewire_(other, wiring.describe(), model.state_dict())
    for key, mask in wiring.masks().items():
        assert torch.equal(again.masks()[key], mask)
    for one, handle in ((model, wiring), (other, again)):
        torch.manual_seed(5)
        train(one, handle, 2)
    x = torch.randn(4, 12)
    assert torch.equal(model.eval()(x), other.eval()(x))


@pytest.mark.parametrize("share", ["uniform", "global"])
@pytest.mark.parametrize("name", sorted(set(CAN) - {"keep"}))
def test_a_smaller_budget_is_met_within_the_start(name: str, share: str) -> None:
    model, real = pruned(0.5)
    wiring = wire_(model, get(name), density=0.2, share=share, start="weights")
    masks = wiring.masks()
    assert sum(int(mask.sum()) for mask in masks.values()) == (38 + 25 if share == "uniform" else 64)
    assert all(not (mask & ~real[key]).any() for key, mask in masks.items())
    if name in ("set", "rigl", "sparse_momentum"):  # the strongest of them
        mask, weight = masks["0.weight"], pruned(0.5)[0][0].weight.abs()
        assert share == "global" or weight[mask].min() >= weight[real["0.weight"] & ~mask].max()


@pytest.mark.parametrize("name", ["set", "rigl", "sparse_momentum", "random", "dnw", "soft_threshold"])
def test_a_larger_budget_adds_edges(name: str) -> None:
    model, real = pruned(0.3)
    wiring = wire_(model, get(name), density=0.5, start="weights")
    for key, mask in wiring.masks().items():
        assert not (real[key] & ~mask).any()
        assert int(mask.sum()) == mask.numel() // 2


@pytest.mark.parametrize("name", ["gmp", "l1_anneal"])
def test_rules_that_remove_permanently_never_leave_the_start(name: str) -> None:
    model, real = pruned(0.5)
    with pytest.raises(WiringError, match=r"removes edges permanently and has .* left, but the budget asks for 153"):
        wire_(model, get(name), density=0.8, start="weights")
    wiring = wire_(model, get(name), density=0.2, start="weights")
    wiring.plan(6)
    train(model, wiring, 2)
    for layer in wiring.layers:
        assert not (layer.edges.left & ~real[layer.name]).any()
        assert int(layer.edges.left.sum()) > int(layer.edges.k)


def test_a_schedule_of_a_random_graph_keeps_its_order() -> None:
    """Edges go and come back in one random order, with the given ones first."""
    model, real = pruned(0.5)
    start = real["0.weight"]
    wiring = wire_(model, rules.Random(seed=1), density=wirings.LinearSchedule(0.7, 0.2, steps=4), start="weights")
    masks = [wiring.masks()["0.weight"]]
    for _ in range(4):
        train(model, wiring, 1)
        masks.append(wiring.masks()["0.weight"])
    assert [int(mask.sum()) for mask in masks] == [int(d * 192 + 1e-6) for d in (0.7, 0.575, 0.45, 0.325, 0.2)]
    assert not (start & ~masks[0]).any()
    for before, after in itertools.pairwise(masks):
        assert not (after & ~before).any()


@pytest.mark.parametrize("name", sorted(CANNOT))
def test_rules_that_cannot_raise_and_leave_the_model_unchanged(name: str) -> None:
    model, _ = pruned()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(WiringError, match=f"rule '{name}' cannot start from these weights: in 0.weight it leaves out"):
        wire_(model, get(name), start="weights")
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    wire_(model, "keep")


@pytest.mark.parametrize("structure", ["2:4", "2:4, transposable"])
def test_n_of_m_weights_start_an_n_of_m_wiring(structure: str) -> None:
    model, _ = pruned(1.0)
    wirings.finalize_(wire_(model, structure=structure).model)
    real = model[0].weight != 0
    wiring = wire_(model, "rigl", structure=structure, start="weights")
    assert torch.equal(wiring.masks()["0.weight"], real)


def test_rejects_what_does_not_fit() -> None:
    model, _ = pruned()
    for arguments, message in (
        ({"start": "weight"}, "unknown start 'weight'"),
        ({"start": "weights", "share": "erk"}, "drop share='erk', or add a budget"),
        ({"start": "weights", "scale_weights": True}, "is for trained weights, which must not be scaled"),
        ({"start": 10**5000}, "unknown start 'an integer of 16,610 bits'"),
    ):
        with pytest.raises(WiringError, match=message):
            wire_(model, "rigl", **arguments)  # type: ignore[arg-type]
    with torch.no_grad():
        model[0].weight.zero_()
    with pytest.raises(WiringError, match=r"0.weight has no edge to start from: .* skip=\['0.weight'\]"):
        wire_(model, "rigl", start="weights")
    wire_(model, "rigl", start="weights", skip=["0"])
