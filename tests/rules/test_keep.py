"""`keep`: exactly the zeros of the start stay zero, whatever the optimizer, averages, copies and checkpoints do."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import wirings
from wirings import WiringError, finalize_, wire_

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.5),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.5, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
}


def pruned(density: float = 0.3, seed: int = 0) -> nn.Sequential:
    """A small network with zeros in its weights, as other tools leave them: plain tensors."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(54, 8), nn.Tanh(), nn.Linear(8, 3)
    )
    with torch.no_grad():
        for place in (0, 4, 6):
            weight = model[place].weight
            weight[torch.rand_like(weight) >= density] = 0.0
            weight.view(-1)[0] = 0.5  # at least one edge
    return model


def zeros_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() == 0 for name, p in model.named_parameters() if p.dim() > 1}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, wiring: Any = None, steps: int = 4) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(8, 2, 5, 5)), torch.randint(3, (8,))).backward()
        optimizer.step()
        if wiring is not None:
            wiring.step(optimizer)


def assert_same_zeros(model: nn.Module, zeros: dict[str, Tensor]) -> None:
    """Zeros where there were some, and nowhere else: weights are not zero by chance here."""
    for name, mask in zeros.items():
        assert torch.equal(model.get_parameter(name) == 0, mask), name


@given(density=st.floats(0.01, 1.0), seed=st.integers(0, 99), name=st.sampled_from(sorted(OPTIMIZERS)))
def test_exactly_the_zeros_of_the_start_stay(density: float, seed: int, name: str) -> None:
    model = pruned(density, seed)
    zeros = zeros_of(model)
    wiring = wire_(model, "keep")
    train(model, OPTIMIZERS[name](model.parameters()), wiring if seed % 2 else None)
    for layer in wiring.layers:
        assert not layer.weight[zeros[layer.name]].any(), "the optimizer's parameter has the zeros, too"
    assert_same_zeros(finalize_(model), zeros)


def test_a_real_edge_that_becomes_zero_stays_real() -> None:
    model = nn.Sequential(nn.Linear(3, 2, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]))
    wiring = wire_(model, "keep")
    real = wiring.masks()["0.weight"]
    assert real.tolist() == [[True, False, True], [False, True, False]]
    weight = wiring.layers[0].weight
    with torch.no_grad():
        weight[0, 0] = 0.0
    model(torch.ones(1, 3)).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    torch.optim.SGD([weight], lr=1.0).step()
    assert finalize_(model)[0].weight.tolist() == [[-1.0, 0.0, 1.0], [0.0, 2.0, 0.0]]


def test_clears_what_an_optimizer_remembers_about_zeros() -> None:
    """An optimizer that has trained the dense network has momentum where weights were pruned since."""
    model = pruned(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer)
    with torch.no_grad():
        model[4].weight[:, ::2] = 0.0
    zeros = zeros_of(model)
    wiring = wire_(model, "keep")
    train(model, optimizer, wiring, steps=1)
    weight = wiring.layers[1].weight
    assert not weight[zeros["4.weight"]].any()
    assert not optimizer.state[weight]["momentum_buffer"][zeros["4.weight"]].any()
    assert_same_zeros(finalize_(model), zeros)


@pytest.mark.parametrize("use_buffers", [False, True])
def test_averages_of_weights_keep_the_zeros(use_buffers: bool) -> None:
    model = pruned()
    zeros = zeros_of(model)
    wiring = wire_(model, "keep")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=use_buffers)
    for _ in range(5):
        train(model, optimizer, wiring, steps=1)
        average.update_parameters(model)
    update_bn([torch.randn(8, 2, 5, 5)], average)
    assert not torch.equal(average.module[4].weight, model[4].weight)
    assert_same_zeros(finalize_(average.module), zeros)
    assert_same_zeros(finalize_(model), zeros)


def test_copies_and_checkpoints_keep_the_zeros(tmp_path: Path) -> None:
    model = pruned()
    zeros, other = zeros_of(model), pruned(seed=0)
    wiring = wire_(model, "keep")
    train(model, torch.optim.AdamW(model.parameters()), wiring)
    replica = copy.deepcopy(model)
    train(replica, torch.optim.AdamW(replica.parameters(), lr=0.1))
    assert_same_zeros(finalize_(replica), zeros)
    torch.save(model.state_dict(), tmp_path / "model.pt")

    again = wire_(other, "keep")
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    again.load_state_dict(wiring.state_dict())
    train(other, torch.optim.SGD(other.parameters(), lr=0.1), again)
    assert_same_zeros(finalize_(other), zeros)


def test_rewire_restores_the_wiring_in_a_dense_model() -> None:
    model, fresh = pruned(), pruned(1.0, seed=3)
    zeros = zeros_of(model)
    wiring = wire_(model, "keep")
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), wiring)
    again = wirings.rewire_(fresh, wiring.describe(), model.state_dict())
    assert again.steps == 4
    assert [r.edges for r in again.report()] == [r.edges for r in wiring.report()]
    train(fresh, torch.optim.SGD(fresh.parameters(), lr=0.1), again)
    assert_same_zeros(finalize_(fresh), zeros)


def test_rewind_restores_old_weights_within_the_wiring() -> None:
    model = pruned(1.0)
    initial = copy.deepcopy(model.state_dict())
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        model[6].weight[1] = 0.0
    wire_(model, "keep")
    wirings.rewind_(model, initial)
    finalize_(model)
    assert torch.equal(model[6].weight[0], initial["6.weight"][0])
    assert not model[6].weight[1].any()


def test_compiled_training_keeps_the_zeros() -> None:
    torch._dynamo.reset()
    model = pruned()
    zeros = zeros_of(model)
    wiring = wire_(model, "keep")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    train(compiled, torch.optim.AdamW(model.parameters(), lr=0.05), wiring)
    assert_same_zeros(finalize_(model), zeros)


def test_a_plain_state_must_have_the_zeros() -> None:
    model, dense = pruned(), pruned(1.0, seed=5)
    wiring = wire_(model, "keep")
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        dense[0].weight.copy_(model[0].weight)
    with pytest.raises(
        WiringError, match=r"keeps the zeros of 4.weight, 3\d\d of 432 weights, but 3\d\d of them are not"
    ):
        model.load_state_dict(dense.state_dict())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "nothing was loaded"
    with pytest.raises(WiringError, match=r"keeps the zeros of weight"):
        model[4].load_state_dict(dense[4].state_dict())
    with torch.no_grad():
        for layer in wiring.layers:
            dense.get_parameter(layer.name).mul_(layer.edges.wiring)
    model.load_state_dict(dense.state_dict())
    assert torch.equal(model[4].weight, dense[4].weight)
    finalize_(model).load_state_dict(pruned(1.0).state_dict())  # a plain model again


def test_warns_of_zeros_that_are_loaded_after_wiring() -> None:
    """They would be trained: the model was wired while it had no zeros, or fewer."""
    model, sparse = pruned(1.0), pruned()
    wire_(model, "keep")
    lost = sum(int(mask.sum()) for mask in zeros_of(sparse).values())
    with pytest.warns(UserWarning, match=rf"{lost} zeros in the state to load, the first in 0\.weight, are"):
        model.load_state_dict(sparse.state_dict())
    finalize_(model).load_state_dict(sparse.state_dict())
    wire_(model, "keep")
    with torch.no_grad():
        sparse[4].weight[0, 0] = 0.0  # an edge that became zero in training, one of 432 weights
    model.load_state_dict(sparse.state_dict())


def test_warns_of_zeros_in_place_of_few_edges() -> None:
    """What counts is the share of the edges, of which one in a hundred weights is one."""
    model = nn.Sequential(nn.Linear(100, 100))
    with torch.no_grad():
        model[0].weight[torch.arange(10_000).view(100, 100) % 100 > 0] = 0.0
    state = {name: value.clone() for name, value in model.state_dict().items()}
    wire_(model, "keep")
    state["0.weight"][:50] = 0.0
    with pytest.warns(UserWarning, match="50 zeros in the state to load"):
        model.load_state_dict(state)


def test_a_wired_state_must_have_the_same_zeros() -> None:
    model, other = pruned(), pruned(0.2, seed=5)
    wire_(model, "keep")
    wire_(other, "keep")
    with pytest.raises(
        WiringError, match=r"the state to load was saved with other zeros, 8\d\. Load .* wirings.rewire_"
    ):
        model.load_state_dict(other.state_dict())


def test_finalized_models_and_pruned_ones() -> None:
    """What this library and `torch.nn.utils.prune` leave; the latter once its masks are permanent."""
    ours, theirs = pruned(1.0), pruned(1.0)
    finalize_(wire_(ours, "dnw", density=0.1).model)
    for place in (0, 4, 6):
        prune.l1_unstructured(theirs[place], "weight", amount=0.8)
    with pytest.raises(WiringError, match=r"prune\.remove\(model\.get_submodule\(\"0\"\), 'weight'\)"):
        wire_(theirs, "keep")
    for place in (0, 4, 6):
        prune.remove(theirs[place], "weight")
    for model, counts in ((ours, [10, 43, 2]), (theirs, [22, 86, 5])):
        zeros = zeros_of(model)
        wiring = wire_(model, "keep")
        assert [report.edges for report in wiring.report()] == counts
        train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1), wiring)
        assert_same_zeros(finalize_(model), zeros)


def test_takes_no_budget_and_respects_allowed() -> None:
    with pytest.raises(WiringError, match=r"fixes the number of edges itself; drop density=0\.2"):
        wire_(pruned(), "keep", density=0.2)
    with pytest.raises(WiringError, match="is for trained weights, which must not be scaled"):
        wire_(pruned(), "keep", scale_weights=True)
    model, allowed = pruned(), torch.zeros(3, 8, dtype=torch.bool)
    allowed[0] = True
    real = model[6].weight != 0
    wiring = wire_(model, "keep", allowed={"6": allowed})
    assert torch.equal(wiring.masks()["6.weight"], real & allowed)


def test_a_layer_of_zeros_stays_one() -> None:
    model = pruned()
    with torch.no_grad():
        model[4].weight.zero_()
    with pytest.warns(UserWarning, match="all weights of 1 of 3 layers are zero"):
        wiring = wire_(model, "keep")
    train(model, torch.optim.AdamW(model.parameters()), wiring)
    assert not finalize_(model)[4].weight.any()
