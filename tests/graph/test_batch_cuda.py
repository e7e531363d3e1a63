"""The Triton kernels of nodes with a batch norm match plain PyTorch: on a GPU, and in Triton's interpreter."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernels import on_gpu
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")
from wirings.graph._batch_cuda import _TILE, batch_map
from wirings.graph.nodes import ConvNode, Convolutions

EPS = 1e-5
SIZES = [(3, 5, 1, 1), (2, 3, 2, 2), (4, 7, 5, 4), (2, 9, 16, 16), (1, 2, 33, 17)]
EVERY = list(itertools.product(SIZES, [1, 2], [True, False], [True, False]))
# Several strips of columns, of images with an odd width; the second shape has more strips than a node has programs.
EVERY += itertools.product([(2, 20, 9, 15), (1, 700, 2, 25)], [1, 2], [True], [True])


def reference(x: Tensor, gamma: Tensor, beta: Tensor, mean: Any, var: Any, kernel: Tensor, relu: bool, stride: int):
    """The same in plain PyTorch."""
    y = x.transpose(0, 1)
    y = F.batch_norm(y, mean, var, gamma, beta, training=mean is None, eps=EPS)
    y = F.relu(y) if relu else y
    return F.conv2d(y, kernel, stride=stride, padding=1, groups=len(x)).transpose(0, 1)


def inputs(size: tuple[int, ...], own: bool, device: str, dtype: torch.dtype = torch.float64) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    nodes = size[0]
    x = draw(*size) * 3 + 20 * draw(nodes, 1, 1, 1)  # means far from zero, to detect cancellation
    parts = [x, draw(nodes), draw(nodes), None, None, draw(nodes, 1, 3, 3)]
    if not own:
        parts[3:5] = [x.mean((1, 2, 3)) + 1, draw(nodes).abs() + 0.5]
    return [part if part is None else part.to(device, dtype) for part in parts]


def compare(size: tuple[int, ...], stride: int, relu: bool, own: bool, device: str, dtype=torch.float32) -> None:
    exact = inputs(size, own, "cpu")
    exact[0] = exact[0].to(dtype).double()
    rounded = [p if p is None else p.to(device, dtype if i == 0 else torch.float32) for i, p in enumerate(exact)]
    for group in (exact, rounded):
        for i in (0, 1, 2, 5):
            group[i].requires_grad_()
    expected = reference(*exact, relu, stride)
    out, mean, var = batch_map(*rounded, EPS, relu, stride)
    if own:
        rows = exact[0].detach().flatten(1)
        torch.testing.assert_close(mean.cpu().double(), rows.mean(1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(var.cpu().double(), rows.var(1, unbiased=False), rtol=1e-4, atol=1e-4)
    half = dtype != torch.float32
    close = {"rtol": 2e-2, "atol": 4e-2} if half else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(out.cpu().double(), expected, **close)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    expected.backward(grad.double())
    out.backward(grad.to(device))
    for i in (0, 1, 2, 5):
        size_of = exact[i].grad.abs().max().item()
        tolerance = (3e-2 if half else 2e-4) * max(size_of, 1.0)
        torch.testing.assert_close(rounded[i].grad.cpu().double(), exact[i].grad, rtol=0, atol=tolerance)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("size", "stride", "relu", "own"), EVERY)
def test_matches_plain_pytorch_in_the_interpreter(size, stride, relu, own) -> None:
    if own and size[1] * size[2] * size[3] < 3:
        pytest.skip("a norm needs several values")
    compare(size, stride, relu, own, "cpu")


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "stride", "relu", "own"), [*EVERY, ((3, 90, 32, 32), 2, True, True)])
def test_matches_plain_pytorch_on_a_gpu(size, stride, relu, own, dtype) -> None:
    assert 64 * _TILE < 90 * 32 * 32  # the last one needs several tiles per program
    compare(size, stride, relu, own, "cuda", dtype)


@on_gpu
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("compiled", [False, True])
def test_nodes_use_the_kernels_and_keep_running_statistics(stride: int, compiled: bool) -> None:
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False
    recipe = ConvNode(norm="batch", stride=stride, eps=0.1)
    node, plain = (Convolutions(recipe, 6, ("norm", "activation", "conv"), ()).cuda() for _ in range(2))
    plain.load_state_dict(node.state_dict())
    call = torch.compile(node.on_rows, fullgraph=True) if compiled else node.on_rows
    for _ in range(3):
        x = torch.randn(6, 11, 8, 8, device="cuda") + 2
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        out, expected = call("before", ours, 0.0), plain.before(theirs.transpose(0, 1), 0.0).transpose(0, 1)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        (out**2).sum().backward()
        (expected**2).sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(node.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    for module in (node, plain):
        module.eval()
    torch.testing.assert_close(node.on_rows("before", x, 0.0), plain.on_rows("before", x.cpu().cuda(), 0.0))
    for (name, p), q in zip(node.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-3, msg=name)
