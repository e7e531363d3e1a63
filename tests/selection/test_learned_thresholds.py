"""Edges that are shrunk by learned thresholds (`KeptEdges.learned`, rule `str`), made for all layers at once."""

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from kernels import on_gpu
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import wirings
from wirings import WiringError, rules
from wirings.selection import functional, passes
from wirings.selection.kept_edges import KeptEdges


@pytest.fixture(autouse=True)
def _precise_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


class Network(nn.Sequential):
    """Three layers to wire, of which the first ``depth`` run, with one kind of checkpoints or the other, or none."""

    depth = 6
    reentrant: bool | None = None

    def __init__(self) -> None:
        layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 5))
        super().__init__(*layers)

    def forward(self, x: Any) -> Any:
        for layer in list(self)[: self.depth]:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def network(device: str, share: str = "uniform") -> tuple[Network, wirings.Wiring]:
    torch.manual_seed(0)
    model = Network().to(device)
    model[2].to(memory_format=torch.channels_last)
    wiring = wirings.wire_(model, "str", density=0.3, share=share)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for layer, value in zip(wiring.layers, (0.5, -0.3, 0.1), strict=True):  # the layers' shares differ
        layer.edges.held.fill_(value)
    wiring.layers[0].edges.threshold.detach().copy_(torch.tensor([0.5, -0.3, 0.1]))
    wiring.step(optimizer)
    return model, wiring


def batch(device: str) -> Tensor:
    return torch.linspace(-1, 1, 4 * 3 * 36, device=device).sin().view(4, 3, 6, 6)


def gradients(wiring: wirings.Wiring) -> list[Tensor]:
    return [layer.weight.grad for layer in wiring.layers] + [wiring.layers[0].edges.threshold.grad]


def by_hand(wiring: wirings.Wiring, out: list[Tensor]) -> list[Tensor]:
    """The gradients of weights and thresholds, given those of the weights of the forward pass, as formulas say."""
    found, learned = [], torch.zeros(len(wiring.layers), dtype=torch.float64)
    for layer, grad in zip(wiring.layers, out, strict=True):
        weight, real = layer.weight.detach(), layer.edges.real(layer.weight)
        threshold = weight.abs()[~real].max()
        found.append(torch.where(real, grad, 0.0))
        learned -= layer.edges.pull.cpu() * (threshold * weight.sign() * found[-1]).double().sum().cpu()
    return [*found, learned.float()]


@pytest.mark.parametrize("share", ["uniform", "global", "scaled"])
def test_one_node_for_all_layers_gives_the_gradients_of_the_formula(share: str, device: str) -> None:
    model, wiring = network(device, share)
    seen: list[Tensor] = []

    def note(module: nn.Module, *_: Any) -> None:
        module.weight.retain_grad()  # type: ignore[union-attr, operator]
        seen.append(module.weight)  # type: ignore[arg-type]

    for layer in wiring.layers:
        layer.module.register_forward_hook(note)
    model(batch(device)).square().sum().backward()
    assert len({weight.grad_fn for weight in seen}) == 1
    for used, layer in zip(seen, wiring.layers, strict=True):
        weight, real = layer.weight.detach(), layer.edges.real(layer.weight)
        threshold = weight.abs()[~real].max()
        assert torch.equal(used.detach(), torch.where(real, weight - weight.sign() * threshold, 0.0))
    expected = by_hand(wiring, [weight.grad for weight in seen])  # type: ignore[misc]
    for grad, want in zip(gradients(wiring), expected, strict=True):
        torch.testing.assert_close(grad.cpu(), want.cpu(), rtol=1e-4, atol=1e-5)


WAYS = ["hooks", "frozen", "frozen thresholds", "double precision", "a layer without a gradient"]
WAYS += ["checkpoints", "reentrant checkpoints", "hooks, checkpoints", "hooks, reentrant checkpoints"]


@pytest.mark.parametrize("way", WAYS)
def test_other_ways_give_the_same(way: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for devices in (("cpu", "cuda"), ()):
        monkeypatch.setattr(passes, "DEVICES", devices)
        model, wiring = network(device)
        weights, learned = [layer.weight for layer in wiring.layers], wiring.layers[0].edges.threshold
        order: list[int] = []
        if "hooks" in way:
            for i, weight in enumerate(weights):
                weight.register_post_accumulate_grad_hook(lambda _, i=i, order=order: order.append(i))
        if way == "frozen":
            weights[1].requires_grad_(False)
        if way == "frozen thresholds":
            learned.requires_grad_(False)
        if way == "a layer without a gradient":
            model.depth = 3
        if way == "double precision":
            model.double()
        if "checkpoints" in way:
            model.reentrant = "reentrant" in way
        x = batch(device).to(weights[0].dtype).requires_grad_()
        model(x).square().sum().backward()
        assert order == ([2, 1, 0] if "hooks" in way else [])
        assert (weights[1].grad is None) == (way == "frozen")
        assert (learned.grad is None) == (way == "frozen thresholds")
        found.append([grad for grad in gradients(wiring) if grad is not None])
    for at_once, alone in zip(*found, strict=True):
        torch.testing.assert_close(at_once, alone, rtol=1e-4, atol=1e-5)


def test_half_precision_under_autocast(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for devices in (("cpu", "cuda"), ()):
        monkeypatch.setattr(passes, "DEVICES", devices)
        model, wiring = network(device)
        with torch.autocast(device, torch.bfloat16):
            y = model(batch(device))
        y.float().square().sum().backward()
        found.append([y.detach(), *gradients(wiring)])
    for at_once, alone in zip(*found, strict=True):
        assert at_once.dtype == alone.dtype
        # Autocast rounds the same weights, and their gradients are the same numbers; they are added up in float32.
        torch.testing.assert_close(at_once, alone, rtol=1e-4, atol=1e-5)


def test_what_happens_between_the_passes_does_not_matter(device: str) -> None:
    found = []
    for between in (False, True):
        model, wiring = network(device)
        loss = model(batch(device)).square().sum()
        if between:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            pull = wiring.layers[0].edges.pull.clone()
            for layer in wiring.layers:  # seen by no version
                layer.weight.data.mul_(torch.linspace(-2, 2, layer.weight.numel(), device=device).view_as(layer.weight))
            wiring.layers[0].edges.threshold.detach().add_(1.0)
            wiring.step(optimizer)
            assert not torch.equal(wiring.layers[0].edges.pull, pull)
        loss.backward()
        found.append(gradients(wiring))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_second_derivatives(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a threshold by its logarithm is the threshold itself."""
    found = []
    for devices in (("cpu", "cuda"), ()):
        monkeypatch.setattr(passes, "DEVICES", devices)
        model, wiring = network(device)
        learned = wiring.layers[0].edges.threshold
        (grad,) = torch.autograd.grad(model(batch(device)).square().sum(), [learned], create_graph=True)
        grad.square().sum().backward()
        found.append([grad.detach(), *gradients(wiring)])
    for at_once, alone in zip(*found, strict=True):
        torch.testing.assert_close(at_once, alone, rtol=1e-4, atol=1e-5)

    def plain(change: Tensor) -> Tensor:
        return torch.where(real, weight - weight.sign() * threshold * change.exp(), 0.0).square().sum()

    weight, real = torch.tensor([3.0, -2.0, 1.0]), torch.tensor([True, True, False])
    threshold, change = torch.tensor(1.0), torch.zeros((), requires_grad=True)
    used = torch.tensor([2.0, -1.0, 0.0])
    loss = functional.pass_shrunk(weight, used, real, threshold, change).square().sum()
    (first,) = torch.autograd.grad(loss, change, create_graph=True)
    (second,) = torch.autograd.grad(first, change)
    assert first == torch.func.grad(plain)(torch.zeros(())) == -6
    assert second == torch.func.grad(torch.func.grad(plain))(torch.zeros(())) == -2


def test_transforms_follow_thresholds(device: str) -> None:
    model, wiring = network(device)
    x = batch(device)
    model(x).square().sum().backward()
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    name = next(name for name in parameters if name.endswith("threshold"))

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    expected = wiring.layers[0].edges.threshold.grad
    for some in (parameters, {name: parameters[name]}):
        torch.testing.assert_close(torch.func.grad(loss)(some, x)[name], expected, rtol=1e-4, atol=1e-5)
        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(some, x.unsqueeze(1))
        torch.testing.assert_close(each[name].sum(0), expected, rtol=1e-4, atol=1e-5)


def test_edges_at_the_threshold_pull_at_it(device: str) -> None:
    """Real edges as strong as the next one weigh zero, and would not if the threshold were lower."""
    model = nn.Sequential(nn.Linear(4, 1, bias=False)).to(device)
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[-2.0, 3.0, 2.0, -2.0]]))
    wiring = wirings.wire_(model, "str", k=3)
    wiring.layers[0].edges.pull.fill_(1.0)  # a single layer has all the budget, whatever its threshold
    model(torch.tensor([[1.0, 10.0, 100.0, 1000.0]], device=device)).sum().backward()
    assert wiring.layers[0].weight.grad.tolist() == [[1.0, 10.0, 100.0, 0.0]]
    assert wiring.layers[0].edges.threshold.grad.tolist() == [-2.0 * (-1 + 10 + 100)]


@pytest.mark.parametrize("share", ["uniform", "global"])
def test_compiled_models_make_all_weights_at_once(share: str, device: str) -> None:
    torch._dynamo.reset()
    made = 0

    def note(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal made
        made += sum(str(node.target) == "wirings.kept_of.default" for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=note, bw_compiler=note, partition_fn=min_cut_rematerialization_partition)
    model, wiring = network(device, share)
    model(batch(device)).square().sum().backward()
    expected = [grad.clone() for grad in gradients(wiring)]
    model.zero_grad()
    torch.compile(model, backend=backend)(batch(device)).square().sum().backward()
    assert made == 1
    for grad, want in zip(gradients(wiring), expected, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-5)


@on_gpu
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_serve_all_layers_on_a_gpu(precision: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    many = pytest.importorskip("wirings.selection._select_many_cuda")
    served: list[bool] = []
    plain = many.through_shrunk

    def noted(*args: Any) -> Any:
        served.append((made := plain(*args)) is not None)
        return made

    monkeypatch.setattr(many, "through_shrunk", noted)
    model = nn.Sequential(*(nn.Linear(60, 60) for _ in range(5))).cuda()
    wiring = wirings.wire_(model, "str", density=0.3)
    x, found = torch.randn(7, 60, device="cuda"), []
    for devices in (("cuda",), ()):
        monkeypatch.setattr(passes, "DEVICES", devices)
        model.zero_grad()
        with torch.autocast("cuda", precision, enabled=precision != torch.float32):
            loss = model(x).float().square().sum()
        loss.backward()
        found.append([grad.clone() for grad in gradients(wiring)])
    assert served == [True]
    for at_once, alone in zip(*found, strict=True):
        torch.testing.assert_close(at_once, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("share", ["uniform", "global"])
def test_clipping_counts_the_edges_of_each_layer(share: str, device: str) -> None:
    model, wiring = network(device, share)
    model(batch(device)).square().sum().backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    chosen = wiring.layers[0].edges.selection.choose_all()
    for mask, layer in zip(chosen, wiring.layers, strict=True):
        assert torch.equal(mask, layer.edges.real(layer.weight))
    torch.testing.assert_close(wiring.clip_grad_norm_(1e9), norm)


def test_only_edges_that_layers_rank_by_themselves_learn_thresholds() -> None:
    with pytest.raises(WiringError, match=r"learned thresholds need power=1, factor=0.0 and own="):
        KeptEdges(learned="threshold")
    assert rules.STR().kept_at_once is not None
