"""``share="scaled"``: all layers ranked together, each divided by the scale that it starts with."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wirings
from wirings import rules

RANKING = [name for name in rules.names() if name not in ("dense", "random", "expander", "keep")]


def two_layers() -> nn.Sequential:
    """Two layers whose magnitudes differ by a factor of ten; their scales (RMS) are 2 and 20."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[3.0, -1.0], [-math.sqrt(5.0), 1.0]]))
        model[1].weight.copy_(torch.tensor([[10.0, 30.0], [10.0, -math.sqrt(500.0)]]))
    return model


def masks(wiring: wirings.Wiring) -> list[list[list[int]]]:
    return [mask.int().tolist() for mask in wiring.masks().values()]


def test_magnitudes_are_divided_by_the_scale_of_their_layer() -> None:
    with pytest.warns(UserWarning, match="leaves no edges in 1 of 2 layers"):
        wiring = wirings.wire_(two_layers(), k=3, share="global")
    assert masks(wiring) == [[[0, 0], [0, 0]], [[1, 1], [0, 1]]]  # 30, 22.4, and the first of two 10s
    wiring = wirings.wire_(two_layers(), k=3, share="scaled")
    assert [float(layer.edges.rank_factor) for layer in wiring.layers] == pytest.approx([1 / 2, 1 / 20])
    assert masks(wiring) == [[[1, 0], [1, 0]], [[0, 1], [0, 0]]]  # 1.5 in both, and of two 1.118s the earlier
    with torch.no_grad():  # the scale is that of the beginning
        wiring.layers[1].weight.mul_(1.1)
    assert masks(wiring) == [[[1, 0], [0, 0]], [[0, 1], [0, 1]]]


def test_ties_are_broken_by_position() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(3.0)
        model[1].weight.fill_(-0.25)
    wiring = wirings.wire_(model, k=21, share="scaled")
    assert [int(mask.sum()) for mask in wiring.masks().values()] == [16, 5]
    assert wiring.masks()["1.weight"].flatten().tolist() == [True] * 5 + [False] * 11


def test_only_allowed_edges_count_for_the_scale() -> None:
    model, allowed = two_layers(), torch.tensor([[True, False], [False, False]])
    wiring = wirings.wire_(model, k=4, share="scaled", allowed={"0": allowed})
    assert float(wiring.layers[0].edges.rank_factor) == pytest.approx(1 / 3)


def test_weights_that_are_all_zero_have_a_factor_of_one() -> None:
    model = two_layers()
    nn.init.zeros_(model[0].weight)
    wiring = wirings.wire_(model, k=5, share="scaled")
    assert float(wiring.layers[0].edges.rank_factor) == 1.0
    assert masks(wiring) == [[[1, 0], [0, 0]], [[1, 1], [1, 1]]]


def test_a_soft_threshold_lies_at_the_scale_of_each_layer() -> None:
    model = two_layers()
    wirings.wire_(model, rules.get("soft_threshold", shape="soft"), k=2, share="scaled")
    next_score = math.sqrt(5.0) / 2  # of the third edge
    assert model[0].weight.flatten().tolist() == pytest.approx([3.0 - 2 * next_score, 0, 0, 0], abs=1e-6)
    assert model[1].weight.flatten().tolist() == pytest.approx([0, 30.0 - 20 * next_score, 0, 0], abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", RANKING)
def test_every_rule_that_ranks_magnitudes(rule: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 5)).to(dtype)
    nn.init.normal_(model[0].weight, std=5.0)  # a global ranking would take edges of this layer alone
    nn.init.normal_(model[2].weight, std=0.01)
    expected = expected_masks(model, 200)
    wiring = wirings.wire_(model, rules.get(rule, **options(rule)), density=0.1, share="scaled")
    if rule not in ("set", "rigl", "sparse_momentum"):  # these start at random
        assert all(torch.equal(mask, expected[name]) for name, mask in wiring.masks().items())
    assert all(int(mask.sum()) > 5 for mask in wiring.masks().values())
    train(model, wiring, dtype)
    assert sum(int(mask.sum()) for mask in wiring.masks().values()) == 200


def options(rule: str) -> dict[str, Any]:
    return {"every": 2} if rule in ("set", "rigl", "gmp", "l1_anneal") else {}


def expected_masks(model: nn.Module, k: int) -> dict[str, Tensor]:
    """The strongest edges of the linear layers of an untrained model, found by sorting."""
    weights = {name: p.detach() for name, p in originals(model).items()}
    kind = torch.float64 if next(iter(weights.values())).dtype == torch.float64 else torch.float32
    scores = [w.to(kind).abs() * (w.double().square().mean().sqrt() ** -1).float().to(kind) for w in weights.values()]
    order = torch.cat([score.flatten() for score in scores]).sort(descending=True, stable=True).indices[:k]
    row = torch.zeros(sum(w.numel() for w in weights.values()), dtype=torch.bool)
    row[order] = True
    parts = row.split([w.numel() for w in weights.values()])
    return {name: part.view(w.shape) for (name, w), part in zip(weights.items(), parts, strict=True)}


def originals(model: nn.Module) -> dict[str, Tensor]:
    return {name: w for name, w in model.state_dict().items() if name.endswith("weight")}


def train(model: nn.Module, wiring: wirings.Wiring, dtype: torch.dtype = torch.float32, steps: int = 6) -> None:
    wiring.plan(steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(8, 20, generator=generator).to(dtype)
        model(x).float().square().mean().backward()
        optimizer.step()
        wiring.step(optimizer)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 5))


def test_the_scale_is_saved_with_the_model() -> None:
    torch.manual_seed(0)
    model = network()
    wiring = wirings.wire_(model, density=0.1, share="scaled")
    train(model, wiring)
    state = model.state_dict()
    assert "0.weight.wiring.rank_factor" in state
    other = network()
    with torch.no_grad():
        other[0].weight.mul_(7.0)  # other weights, other scales
    again = wirings.wire_(other, density=0.1, share="scaled")
    before = again.masks()
    other.load_state_dict(state)
    again.load_state_dict(wiring.state_dict())
    assert all(torch.equal(mask, wiring.masks()[name]) for name, mask in again.masks().items())
    assert any(not torch.equal(mask, before[name]) for name, mask in again.masks().items())
    plain = network()
    rewired = wirings.rewire_(plain, wiring.describe(), state)
    assert all(torch.equal(mask, wiring.masks()[name]) for name, mask in rewired.masks().items())


def test_a_copy_has_the_same_wiring_and_can_be_finalized() -> None:
    model = network()
    wiring = wirings.wire_(model, density=0.1, share="scaled")
    x = torch.randn(3, 20)
    twin = wirings.finalize_(copy.deepcopy(model))
    assert torch.equal(twin(x), model(x))
    assert all(torch.equal(twin.state_dict()[name] != 0, mask) for name, mask in wiring.masks().items())


def test_a_schedule_changes_the_number_of_all_layers_together() -> None:
    model = network()
    wiring = wirings.wire_(model, rules.get("soft_threshold", schedule="cubic"), k=150, share="scaled")
    train(model, wiring)
    assert sum(int(mask.sum()) for mask in wiring.masks().values()) == 150


@pytest.mark.filterwarnings("ignore:share=.global. with mult_adds= leaves a single edge")
def test_multiply_adds_are_ranked_by_scale() -> None:
    torch.manual_seed(0)
    model = network()
    with torch.no_grad():
        model[0].weight.mul_(100.0)
    found = {}
    for share in ("global", "scaled"):
        wiring = wirings.wire_(copy.deepcopy(model), mult_adds=400, example_input=(20,), share=share)
        found[share] = [int(mask.sum()) for mask in wiring.masks().values()]
        assert sum(found[share]) == 400
    assert found["global"] == [398, 1, 1]
    assert all(count > 10 for count in found["scaled"])


@pytest.mark.parametrize("rule", ["dnw", "soft_threshold"])
def test_compiled_steps_equal_eager_ones(rule: str) -> None:
    torch.manual_seed(0)
    model = network()
    wirings.wire_(model, rule, density=0.2, share="scaled")
    x = torch.randn(4, 20)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
