"""Soft thresholds: how real edges are shrunk, and where the gradient goes."""

import pytest
import torch
from torch import Tensor, nn

import wirings
from wirings import WiringError, rules
from wirings.rules import SoftThreshold

WEIGHT = torch.tensor([[4.0, -3.0], [1.0, -0.5]])


def wired(rule: object, weight: Tensor = WEIGHT, **settings: object) -> tuple[nn.Linear, wirings.Wiring]:
    model = nn.Linear(2, 2, bias=False, dtype=weight.dtype)
    with torch.no_grad():
        model.weight.copy_(weight)
    return model, wirings.wire_(model, rule, **{"k": 2, **settings})


@pytest.mark.parametrize(
    ("shape", "used"),
    [
        ("soft", [[3.0, -2.0], [0, 0]]),  # all are shrunk by the strongest hallucinated edge, 1
        ("feather", [[63 ** (1 / 3), -(26 ** (1 / 3))], [0, 0]]),  # 4³ − 1 and 3³ − 1
        (2, [[15**0.5, -(8**0.5)], [0, 0]]),
        ("hard", [[4.0, -3.0], [0, 0]]),
    ],
)
def test_by_hand(shape: str | float, used: list[list[float]]) -> None:
    model, wiring = wired(SoftThreshold(shape))
    torch.testing.assert_close(model.weight.detach(), torch.tensor(used))
    assert wiring.masks()["weight"].tolist() == [[True, True], [False, False]]
    model.weight.sum().backward()
    assert wiring.layers[0].weight.grad.tolist() == [[1, 1], [1, 1]], "as if the weights had not been shrunk"
    torch.testing.assert_close(wirings.finalize_(model).weight.detach(), torch.tensor(used))


def test_the_default_is_feathers() -> None:
    assert torch.equal(wired("soft_threshold")[0].weight, wired(SoftThreshold("feather"))[0].weight)


def test_hallucinated_edges_get_a_part_of_the_gradient() -> None:
    model, wiring = wired(SoftThreshold(factor=0.25))
    model.weight.sum().backward()
    assert wiring.layers[0].weight.grad.tolist() == [[1, 1], [0.25, 0.25]]


def test_rescale_must_be_a_bool() -> None:
    with pytest.raises(WiringError, match="rescale must be true or false, got 'no'"):
        SoftThreshold(rescale="no")


def test_rescaled() -> None:
    model, _ = wired(SoftThreshold("soft", rescale=True))
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[3.0, -2.0], [0, 0]]) * 7 / 5)
    model, _ = wired(SoftThreshold("soft", rescale=True), torch.ones(2, 2))
    assert model.weight.tolist() == [[0, 0], [0, 0]], "equal weights do not cause a division by zero"


@pytest.mark.parametrize("shape", ["soft", "feather"])
def test_an_edge_enters_from_zero(shape: str) -> None:
    """The weight in use is a continuous function where the edge becomes real; with a hard threshold, it jumps."""
    seen = []
    for size in (2.99, 3.0, 3.001, 3.01):
        model, _ = wired(SoftThreshold(shape), torch.tensor([[4.0, -3.0], [size, -0.5]]))
        seen.append(float(model.weight[1, 0].detach()))
    assert seen[:2] == [0, 0]
    assert 0 < seen[2] < seen[3] < (0.011 if shape == "soft" else 0.7)


def test_full_density_leaves_weights_unchanged() -> None:
    model, _ = wired(SoftThreshold(), k=4)
    torch.testing.assert_close(model.weight.detach(), WEIGHT)


def test_disallowed_edges_do_not_set_the_threshold() -> None:
    allowed = torch.tensor([[True, True], [False, True]])
    model, wiring = wired(SoftThreshold("soft"), allowed={"weight": allowed})
    assert model.weight.tolist() == [[3.5, -2.5], [0, 0]]
    model.weight.sum().backward()
    assert wiring.layers[0].weight.grad.tolist() == [[1, 1], [0, 1]]


def test_one_threshold_for_layers_that_share_a_budget() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(WEIGHT)
        model[1].weight.copy_(torch.tensor([[2.0, 5.0]]))
    wirings.wire_(model, SoftThreshold("soft"), k=3, share="global")
    for _ in range(2):
        assert model[0].weight.tolist() == [[2, -1], [0, 0]], "the strongest hallucinated edge is in the other layer"
        assert model[1].weight.tolist() == [[0, 3]]
    with torch.no_grad():
        model[1].parametrizations.weight.original[0, 0] = 2.5
    assert model[0].weight.tolist() == [[1.5, -0.5], [0, 0]], "recomputed when a weight has changed"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    model, _ = wired(SoftThreshold(), WEIGHT.to(dtype))
    assert model.weight.dtype == dtype
    torch.testing.assert_close(
        model.weight.detach().double(), torch.tensor([[3.9791, -2.9625], [0, 0]]).double(), atol=2e-2, rtol=0
    )


def test_with_its_schedule_in_plain_values() -> None:
    """As in a recipe: from all edges to k in the first half of training."""
    rule = rules.get("soft_threshold", shape="soft", schedule={"kind": "cubic", "end": 0.5})
    model = nn.Linear(10, 10, bias=False)
    wiring = wirings.wire_(model, rule, density=0.1)
    wiring.plan(8)
    counts = []
    for _ in range(6):
        counts.append(int(model.weight.count_nonzero()))
        wiring.step()
    assert counts == [100, 10 + int(90 * 0.75**3), 10 + int(90 / 8), 10 + int(90 / 64), 10, 10]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"shape": "round"}, "shape must be one of 'soft', 'feather', 'hard', or a power of at least 1, got 'round'"),
        ({"shape": 0.5}, "a power of at least 1, got 0.5"),
        ({"shape": True}, "got True"),
        ({"factor": 2}, "factor must be a number from 0 to 1, got 2"),
    ],
)
def test_mistakes(settings: dict[str, object], says: str) -> None:
    with pytest.raises(WiringError, match=says):
        SoftThreshold(**settings)  # type: ignore[arg-type]
