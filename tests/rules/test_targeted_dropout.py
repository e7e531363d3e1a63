"""Targeted dropout: which edges may be dropped, how often, and which are real in evaluation."""

import pytest
import torch
from torch import Tensor, nn

import wirings
from wirings import StaticGraph, WiringError
from wirings.graph import ActivationNode
from wirings.rules import TargetedDropout

W = torch.tensor([[4.0, -1.0, 2.0, -3.0], [0.5, 8.0, -6.0, 7.0]])
ALL = torch.ones(2, 4).bool()
TOGETHER = torch.tensor([[1, 0, 0, 0], [0, 1, 1, 1]]).bool()  # 4, 8, −6 and 7: the 4 strongest of all
EACH = torch.tensor([[1, 0, 0, 1], [0, 1, 0, 1]]).bool()  # 4 and −3, 8 and 7: the 2 strongest of each row


def layer(rule: TargetedDropout, weight: Tensor = W, **budget: object) -> tuple[nn.Module, wirings.Wiring]:
    model = nn.Linear(weight.shape[1], weight.shape[0], bias=False).to(weight.dtype)
    with torch.no_grad():
        model.weight.copy_(weight)
    return model, wirings.wire_(model, rule, **(budget or {"k": 4}))


@pytest.mark.parametrize(("regular", "real"), [(False, TOGETHER), (True, EACH)])
def test_which_edges_may_be_dropped(regular: bool, real: Tensor) -> None:
    model, wiring = layer(TargetedDropout(rho=0.5, regular=regular))
    seen = torch.stack([model.weight.detach() != 0 for _ in range(100)])
    assert seen[:, real].all(), "the k strongest are always used"
    assert seen[:, ~real].any(0).all(), "each of the others is sometimes used"
    assert (~seen[:, ~real]).any(0).all(), "and sometimes not"
    assert torch.equal(wiring.masks()["weight"], real)
    used = model.eval().weight
    assert torch.equal(used, torch.where(real, W, 0.0)), "signs are kept"


@pytest.mark.parametrize(("rho", "there"), [(0.0, ALL), (1.0, TOGETHER)])
def test_probabilities_of_zero_and_one(rho: float, there: Tensor) -> None:
    model, _ = layer(TargetedDropout(rho=rho))
    for _ in range(20):
        assert torch.equal(model.weight, torch.where(there, W, 0.0))


def test_dropped_edges_get_no_gradient_and_spared_ones_do() -> None:
    model, wiring = layer(TargetedDropout(rho=0.5))
    weight, spared = wiring.layers[0].weight, 0
    for _ in range(20):
        weight.grad = None
        used = model.weight
        (2 * used).sum().backward()
        assert torch.equal(weight.grad, torch.where(used != 0, 2.0, 0.0))
        spared += int((used != 0).sum()) - 4
    assert 20 < spared < 60  # 40 of 80 are expected


def test_gradients_are_clipped_by_the_norm_over_spared_edges() -> None:
    model, wiring = layer(TargetedDropout(rho=0.0))
    model(torch.ones(1, 4)).sum().backward()
    assert wiring.clip_grad_norm_(1.0) == pytest.approx(8**0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rho", "density", "dropped"), [(0.9, 0.5, 0.9), (0.99, 0.1, 0.99), ("gamma", 0.25, 0.75), ("gamma", 0.1, 0.9)]
)
def test_drop_frequency(rho: float | str, density: float, dropped: float, dtype: torch.dtype) -> None:
    weight = torch.randn(400, 500).to(dtype)
    model, wiring = layer(TargetedDropout(rho=rho), weight, density=density)
    weak = ~wiring.masks()["weight"]
    n = int(weak.sum())
    share = float((model.weight[weak] == 0).sum()) / n
    assert abs(share - dropped) < 5 * (dropped * (1 - dropped) / n) ** 0.5


def test_gamma_follows_a_schedule_of_the_density() -> None:
    model, wiring = layer(TargetedDropout("gamma"), torch.randn(200, 200), density=wirings.LinearSchedule(1.0, 0.1, 1))
    assert model.weight.count_nonzero() == 40_000
    wiring.step()
    weak = ~wiring.masks()["weight"]
    assert 0.88 < float((model.weight[weak] == 0).float().mean()) < 0.92


def test_regular_shares_by_largest_remainders() -> None:
    # 3 edges over 2 nodes: 1½ each, and the earlier node gets the remaining one.
    _, wiring = layer(TargetedDropout(regular=True), k=3)
    assert wiring.masks()["weight"].tolist() == [[True, False, False, True], [False, True, False, False]]
    # Node 0 may have 2 edges and node 1 may have 4: 3 edges are split into 1 and 2.
    allowed = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]]).bool()
    model, wiring = layer(TargetedDropout(rho=0.0, regular=True), k=3, allowed={"weight": allowed})
    assert wiring.masks()["weight"].tolist() == [[False, False, True, False], [False, True, False, True]]
    assert torch.equal(model.weight != 0, allowed), "edges that are not allowed are never used"


def test_regular_ties_go_to_the_earlier_edge() -> None:
    _, wiring = layer(TargetedDropout(regular=True), torch.tensor([[1.0, -1.0, 1.0], [-2.0, 2.0, 2.0]]), k=4)
    assert wiring.masks()["weight"].tolist() == [[True, True, False]] * 2


def test_regular_on_channels_and_channels_last() -> None:
    weight = torch.randn(4, 3, 2, 2)
    masks = []
    for layout in (torch.contiguous_format, torch.channels_last):
        model = nn.Conv2d(3, 4, 2)
        with torch.no_grad():
            model.weight.copy_(weight)
        wiring = wirings.wire_(model.to(memory_format=layout), TargetedDropout(regular=True), k=20)
        masks.append(wiring.masks()["weight"])
    assert torch.equal(*masks)
    strongest = weight.abs().flatten(1).topk(5).indices
    assert torch.equal(masks[0].flatten(1), torch.zeros(4, 12).bool().scatter(1, strongest, True))


def test_regular_on_a_graph() -> None:
    """Nodes 2 and 3 may receive from 0 and 1, node 4 from all four: 4 edges are split into 1, 1 and 2."""
    graph = StaticGraph([2, 2, 1], node=ActivationNode("tanh"), edges=4, rule=TargetedDropout(regular=True))
    with torch.no_grad():
        graph.all_weights().copy_(torch.tensor([9.0, 8.0, -6.0, 7.0, 1.0, 2.0, -3.0, 4.0]))
    assert graph.real().tolist() == [True, False, False, True, False, False, True, True]


def test_regular_with_one_budget_for_all_layers() -> None:
    """3 of 12 edges over the nodes of both layers, whose 4, 4, 2 and 2 incoming edges give them 1, 1, ½ and ½."""
    model = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(W)
        model[1].weight.copy_(torch.tensor([[1.0, 2.0], [4.0, 3.0]]))
    wiring = wirings.wire_(model, TargetedDropout(regular=True), k=3, share="global")
    masks = wiring.masks()
    assert masks["0.weight"].nonzero().tolist() == [[0, 0], [1, 1]]
    assert masks["1.weight"].nonzero().tolist() == [[0, 1]]


def test_buffers_of_regular_are_not_saved() -> None:
    model, _ = layer(TargetedDropout(regular=True))
    assert list(model.state_dict()) == ["weight"]
    model.load_state_dict(nn.Linear(4, 2, bias=False).state_dict())


def test_regular_must_be_a_bool() -> None:
    with pytest.raises(WiringError, match="targeted_dropout: regular must be true or false, got 'no'"):
        TargetedDropout(regular="no")


@pytest.mark.parametrize("rho", [-0.1, 1.5, float("nan"), "gama", "0.9", None, True])
def test_bad_rho(rho: object) -> None:
    with pytest.raises(WiringError, match=r'targeted_dropout: rho must be a number from 0 to 1.*is written "gamma"'):
        TargetedDropout(rho=rho)
