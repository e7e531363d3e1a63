"""HAM: a multiplicative step after every step of an optimizer."""

import copy
import math
from typing import Any

import pytest
import torch
from kernels import on_gpu
from torch import Tensor, nn

import wirings
from wirings import WiringError, rules


def test_by_hand() -> None:
    """SGD first: [1, -2] - 0.1 · [0.5, 0.25] = [0.95, -2.025]; then the factors with signs +, -."""
    layer = nn.Linear(2, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, -2.0]]))
        layer.bias.fill_(3.0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    wirings.HAM(optimizer, alpha=4.0, beta=0.2)
    layer.weight.grad, layer.bias.grad = torch.tensor([[0.5, 0.25]]), torch.tensor([1.0])
    optimizer.step()
    expected = [0.95 * math.exp(-0.1 * (4 * 0.5 + 0.2)), -2.025 * math.exp(-0.1 * (-4 * 0.25 + 0.2))]
    assert layer.weight[0].tolist() == pytest.approx(expected)
    assert layer.bias.item() == pytest.approx(2.9), "vectors do not take part"
    assert layer.weight.grad[0].tolist() == [0.5, 0.25], "gradients are unchanged"


def test_the_exponent_is_limited() -> None:
    layer = nn.Linear(2, 1, bias=False)
    nn.init.ones_(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    wirings.HAM(optimizer, limit=0.5)
    layer.weight.grad = torch.tensor([[1e6, -1e6]])
    optimizer.step()
    assert layer.weight[0].tolist() == pytest.approx([-999 * math.exp(0.5), 1001 * math.exp(0.5)])


def test_only_parameters_with_a_gradient_change_and_groups_have_their_own_rates() -> None:
    torch.manual_seed(0)
    first, second, idle = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
    groups = [{"params": first.parameters(), "lr": 0.1}, {"params": [*second.parameters(), *idle.parameters()]}]
    optimizer = torch.optim.SGD(groups, lr=0.2)  # type: ignore[arg-type]
    before = [layer.weight.detach().clone() for layer in (first, second, idle)]
    wirings.HAM(optimizer, alpha=0.0, beta=1.0)
    for layer in (first, second):
        layer.weight.grad = torch.zeros(3, 3)
    optimizer.step()
    for layer, old, factor in zip((first, second, idle), before, (math.exp(-0.1), math.exp(-0.2), 1.0), strict=True):
        torch.testing.assert_close(layer.weight.detach(), old * factor)


@pytest.mark.parametrize("rule", ["dnw", "rigl", "soft_threshold", "acdc", "sparse_momentum"])
def test_goes_with_rules(rule: str) -> None:
    def run(ham: bool) -> tuple[wirings.Wiring, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        options: dict[str, Any] = {"every": 2, "seed": 0} if rule in ("rigl", "sparse_momentum") else {}
        wiring = wirings.wire_(model, rules.get(rule, **options), density=0.25)
        wiring.plan(10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        if ham:
            wirings.HAM(optimizer, wiring)
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(8, 8)).square().mean().backward()
            optimizer.step()
            wiring.step(optimizer)
        return wiring, wiring.layers[0].weight.detach()

    (wiring, weight), (_, plain) = run(True), run(False)
    assert sum(report.edges for report in wiring.report()) == 40
    assert weight.isfinite().all()
    assert not torch.equal(weight, plain)


def test_edges_of_graphs_take_part_if_the_wiring_is_given() -> None:
    graph = wirings.StaticGraph([4, 6, 2], edges=12, rule="dnw")
    wiring = graph.wiring
    assert wiring is not None
    (layer,) = wiring.layers
    assert layer.weight.dim() == 1
    for handle, shrinks in ((None, False), (wiring, True)):
        optimizer = torch.optim.SGD([layer.weight], lr=0.1)
        ham = wirings.HAM(optimizer, handle, alpha=0.0, beta=1.0)
        before = layer.weight.detach().clone()
        layer.weight.grad = torch.zeros_like(layer.weight)
        optimizer.step()
        torch.testing.assert_close(layer.weight.detach(), before * (math.exp(-0.1) if shrinks else 1.0))
        ham.remove()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_remove_leaves_the_optimizer_as_it_was(kind: Any) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 3)
    twin = copy.deepcopy(layer)
    optimizers = [kind(one.parameters(), lr=0.01) for one in (layer, twin)]
    wirings.HAM(optimizers[0]).remove()
    for one, optimizer in zip((layer, twin), optimizers, strict=True):
        one.weight.grad = torch.ones(3, 3)
        optimizer.step()
    assert torch.equal(layer.weight, twin.weight)


def test_a_step_that_the_scaler_skips_changes_nothing() -> None:
    layer = nn.Linear(2, 2, bias=False)
    before = layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    wirings.HAM(optimizer)
    layer.weight.grad = torch.tensor([[float("nan"), float("inf")], [1.0, -float("inf")]])
    optimizer.found_inf = torch.ones(())  # as GradScaler does while a fused optimizer runs
    optimizer._optimizer_step_post_hooks[next(iter(optimizer._optimizer_step_post_hooks))](optimizer, (), {})
    assert torch.equal(layer.weight.detach(), before)


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"alpha": -1.0}, "alpha"), ({"beta": "1"}, "beta"), ({"limit": -0.1}, "limit")],
)
def test_rejects_invalid_settings(settings: dict[str, Any], says: str) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(WiringError, match=says):
        wirings.HAM(optimizer, **settings)
    with pytest.raises(WiringError, match=r"expects a torch\.optim\.Optimizer, got Linear"):
        wirings.HAM(nn.Linear(2, 2))  # type: ignore[arg-type]


@on_gpu
def test_a_captured_step_sees_new_learning_rates() -> None:
    weight = nn.Parameter(torch.randn(64, 64, device="cuda"))
    weight.grad = torch.zeros_like(weight)
    lr = torch.tensor(0.1, device="cuda")
    optimizer = torch.optim.SGD([weight], lr=lr, fused=True)
    wirings.HAM(optimizer, alpha=0.0, beta=1.0)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    before = weight.detach().clone()
    lr.fill_(0.5)
    graph.replay()
    torch.testing.assert_close(weight.detach(), before * math.exp(-0.5))
