"""A graph of blocks as one operation matches the same graph block by block: on a GPU, and in Triton's interpreter."""

import copy
from typing import Any

import pytest
import torch
from kernels import on_gpu
from torch import Tensor

from wirings import StaticGraph, WiringError, models
from wirings.graph import Blocks
from wirings.graph.nodes import ConvNode, PlainNode

pytest.importorskip("triton", reason="Triton is not installed")
from wirings.graph import _blocks_cuda


def graph_of(stride: int, reach: int | None, last: Any = None) -> StaticGraph:
    torch.manual_seed(0)
    first, rest = ConvNode(norm="batch", stride=stride), ConvNode(norm="batch")
    graph = StaticGraph(Blocks([3, 4, 5, 2], reach=reach), node=[first, rest, rest, last or PlainNode()])
    for function in list(graph.functions)[:-1]:
        for parameter in (function.norm_weight, function.norm_bias):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)  # type: ignore[arg-type]
    return graph


def compared(graph: StaticGraph, x: Tensor, tolerance: float) -> None:
    """Compare outputs, gradients and running statistics with those of the graph block by block."""
    graph.zero_grad()
    other = copy.deepcopy(graph)
    other.__dict__["_one_operation"] = False
    results = []
    for one in (graph, other):
        given = x.clone().requires_grad_()
        y = one(given)
        y.square().sum().backward()
        gradients = [given.grad, *[parameter.grad for parameter in one.parameters()]]
        results.append([y.detach(), *gradients, *one.buffers()])
    for a, b in zip(*results, strict=True):
        size = b.double().abs().max().clamp(min=1.0).item()
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=tolerance * size)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("stride", "reach"), [(1, None), (2, None), (1, 1), (2, 2)])
def test_in_the_interpreter(
    interpreter: None, stride: int, reach: int | None, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = graph_of(stride, reach).train(training)
    runs = as_one_operation(monkeypatch)
    compared(graph, torch.randn(3, 3, 7, 6), 1e-4)
    assert runs == [graph]


def as_one_operation(monkeypatch: pytest.MonkeyPatch) -> list[StaticGraph]:
    """Compute graphs as one operation without asking for a GPU; return a list to which every run adds its graph."""
    runs: list[StaticGraph] = []

    def functions(self: StaticGraph, x: Tensor) -> list[_blocks_cuda.BlockFunction] | None:
        if not self._one_operation:
            return None
        runs.append(self)
        found = []
        for i, function in enumerate(self._convolutions()):
            gamma, beta, mean, var, kernel, *rest = function._arguments(function.parts["between" if i else "before"])
            found.append(_blocks_cuda.BlockFunction(gamma, beta, kernel, mean, var, *rest))
        return found

    monkeypatch.setattr(StaticGraph, "_block_functions", functions)
    return runs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_has_the_precision_of_the_weights(interpreter: None, dtype: torch.dtype) -> None:
    graph = graph_of(1, 2)
    x = torch.randn(3, 3, 7, 6).bfloat16()
    functions = []
    for i, function in enumerate(graph._convolutions()):
        gamma, beta, mean, var, kernel, *rest = function._arguments(function.parts["between" if i else "before"])
        functions.append(_blocks_cuda.BlockFunction(gamma, beta, kernel, mean, var, *rest))
    products, starts = list(graph.far.values()), [group.start for group in graph.groups[1:]]
    pairs = zip(products, starts, strict=True)
    tiles = [_blocks_cuda.BlockTile(p.start, *p.shape, start - p.shape[1]) for p, start in pairs]
    assert sum(tile.nodes * tile.sources for tile in tiles) == graph.weight.numel()
    results = []
    for given in (graph.weight.detach().bfloat16().to(dtype), graph.weight.detach()):
        weight = given.requires_grad_()
        y, _ = _blocks_cuda.run(x, weight, tiles, functions, torch.bfloat16)
        y.float().square().sum().backward()
        assert weight.grad is not None
        assert weight.grad.dtype == weight.dtype
        results.append((y, weight.grad.float()))
    for a, b in zip(*results, strict=True):  # the weights are rounded once, and so are their gradients
        assert torch.equal(a, b)


def test_statistics_get_no_zeros_as_gradients(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert as_one_operation(monkeypatch) == []
    y = graph_of(1, None)(torch.randn(3, 3, 7, 6))
    gradient = torch.ones_like(y)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y.backward(gradient)
    called = {event.key for event in profile.key_averages()}
    assert "aten::mm" in called
    assert not {"aten::zeros", "aten::zero_", "aten::fill_"} & called


@on_gpu
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("stride", "reach"), [(1, None), (2, None), (1, 1), (2, 2)])
@pytest.mark.parametrize("last", [None, ConvNode(norm="batch", before=[], after=["norm", "activation"])], ids=str)
def test_on_a_gpu(stride: int, reach: int | None, training: bool, last: Any) -> None:
    graph = graph_of(stride, reach, last).cuda().train(training)
    assert graph._block_functions(torch.randn(3, 5, 7, 6, device="cuda")) is not None
    compared(graph, torch.randn(5, 3, 7, 6, device="cuda"), 1e-4)
    with torch.autocast("cuda", torch.bfloat16):
        compared(graph, torch.randn(5, 3, 7, 6, device="cuda"), 6e-2)


@on_gpu
def test_a_network_on_a_gpu() -> None:
    torch.manual_seed(0)
    model = models.get("mobilenetv1_dnw", width=0.3, rule="dnw").cuda()
    other = copy.deepcopy(model)
    for stage in other.stages:  # type: ignore[union-attr]
        stage.__dict__["_one_operation"] = False  # type: ignore[union-attr]
    x = torch.randn(16, 3, 32, 32, device="cuda")
    results = []
    for one in (model, other):
        one(x).square().sum().backward()
        results.append([one(x).detach(), *[p.grad for p in one.parameters()]])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3 * max(b.abs().max().item(), 1.0))


@on_gpu
def test_one_value_cannot_be_normed() -> None:
    graph = graph_of(2, None).cuda()
    with pytest.raises(WiringError, match="more than one value"):
        graph(torch.randn(1, 3, 2, 2, device="cuda"))
