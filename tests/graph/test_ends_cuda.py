"""The kernels before and after graphs of maps match PyTorch's layers: on a GPU, and in Triton's interpreter."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import layers_at_ends, run_ends, stem
from kernels import on_gpu
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from wirings import models
from wirings.graph import ends

pytest.importorskip("triton", reason="Triton is not installed")
from wirings.graph import _ends_cuda

HALF = [torch.bfloat16, torch.float16]
# images, channels, height, width; nodes; stride
CONVOLUTIONS = [
    ((2, 3, 8, 8), 32, 1),
    ((3, 3, 9, 7), 16, 2),
    ((2, 1, 5, 6), 16, 2),
    ((5, 3, 16, 17), 32, 2),
    ((1, 2, 1, 1), 64, 1),
    ((3, 3, 24, 24), 32, 1),  # several runs per program in the backward pass, and several shares
]
SIZES = [(3, 5, 1, 1), (4, 7, 2, 2), (2, 70, 7, 7), (5, 600, 2, 3), (2, 9, 16, 16)]


def compare_convolutions(
    size: tuple[int, ...], nodes: int, stride: int, device: str, given: torch.dtype, dtype: torch.dtype, last: bool
) -> None:
    """Compare with PyTorch's convolution of the rounded factors in double precision.

    The interpreter rounds to bfloat16 towards zero. There, images that have to be rounded become float16.
    """
    images = torch.randn(size).to(device, given)
    if last:
        images = images.to(memory_format=torch.channels_last)
    kernel = torch.randn(nodes, size[1], 3, 3).to(dtype).float().to(device).requires_grad_()
    exact = kernel.detach().to(dtype).double().requires_grad_()
    expected = F.conv2d(images.to(dtype).double(), exact, stride=stride, padding=1).transpose(0, 1)
    assert _ends_cuda.convolution_fits(images, kernel, dtype)
    maps = _ends_cuda.convolve(images, kernel, stride, dtype)
    assert maps.is_contiguous()
    assert maps.dtype == dtype
    torch.testing.assert_close(maps.double(), expected, rtol=1e-2, atol=1e-2)
    grad = torch.randn(expected.shape).to(device, dtype)
    maps.backward(grad)
    expected.backward(grad.double())
    assert kernel.grad is not None
    assert kernel.grad.dtype == torch.float32
    assert exact.grad is not None
    torch.testing.assert_close(kernel.grad.double(), exact.grad, rtol=1e-4, atol=1e-4 * expected[0].numel() ** 0.5)


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize(("size", "nodes", "stride"), CONVOLUTIONS)
def test_convolution_in_the_interpreter(
    interpreter: None, size: tuple[int, ...], nodes: int, stride: int, last: bool
) -> None:
    compare_convolutions(size, nodes, stride, "cpu", torch.float32, torch.float16, last)


@pytest.mark.parametrize("dtype", HALF)
def test_images_in_half_precision_in_the_interpreter(interpreter: None, dtype: torch.dtype) -> None:
    compare_convolutions((3, 3, 9, 7), 16, 2, "cpu", dtype, dtype, False)


def test_several_programs_and_runs_in_the_interpreter(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_PROGRAMS", 3), ("_BACK_PROGRAMS", 5), ("_BACK_RUNS", 1), ("_SHARES", 2)):
        monkeypatch.setattr(_ends_cuda, name, value)
    compare_convolutions((3, 3, 24, 24), 32, 1, "cpu", torch.float32, torch.float16, False)


@on_gpu
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize(("size", "nodes", "stride"), [*CONVOLUTIONS, ((300, 3, 64, 64), 32, 2)])
def test_convolution_on_a_gpu(
    size: tuple[int, ...], nodes: int, stride: int, last: bool, given: torch.dtype, dtype: torch.dtype
) -> None:
    compare_convolutions(size, nodes, stride, "cuda", given, dtype, last)


def test_what_the_convolution_supports() -> None:
    images, kernel = torch.zeros(2, 3, 4, 4), torch.zeros(32, 3, 3, 3)
    assert _ends_cuda.convolution_fits(images, kernel, torch.bfloat16)
    assert not _ends_cuda.convolution_fits(images, kernel, torch.float32)
    assert not _ends_cuda.convolution_fits(images.double(), kernel, torch.bfloat16)
    assert not _ends_cuda.convolution_fits(images[:0], kernel, torch.bfloat16)
    assert not _ends_cuda.convolution_fits(images[:, :1], kernel, torch.bfloat16)
    assert not _ends_cuda.convolution_fits(images[0], kernel, torch.bfloat16)
    assert not _ends_cuda.convolution_fits(images, kernel[:24], torch.bfloat16)
    assert not _ends_cuda.convolution_fits(torch.zeros(2, 4, 4, 4), torch.zeros(32, 4, 3, 3), torch.bfloat16)
    assert not _ends_cuda.convolution_fits(torch.zeros(1, 3, 1, 1).expand(2**22, 3, 4, 4), kernel, torch.bfloat16)


def compare_pooling(size: tuple[int, ...], own: bool, device: str, dtype: torch.dtype, turned: bool) -> None:
    """Compare with PyTorch's layers in double precision."""
    nodes = size[0]
    x = (3 * torch.randn(size) + 20 * torch.randn(nodes, 1, 1, 1)).to(dtype)  # means far from zero
    gamma, beta = torch.randn(nodes), torch.randn(nodes)
    mean, var = (None, None) if own else (x.float().mean((1, 2, 3)) + 1, torch.rand(nodes) + 0.5)
    exact = [t.double().requires_grad_() for t in (x, gamma, beta)]
    ours = [t.to(device, copy=True).requires_grad_() for t in (x, gamma, beta)]
    statistics = [t if t is None else t.double() for t in (mean, var)]
    y = F.batch_norm(exact[0].transpose(0, 1), *statistics, *exact[1:], training=own, eps=1e-5)
    expected = F.relu(y).mean((-2, -1)).t()
    assert _ends_cuda.pooling_fits(ours[0])
    pooled, *found = _ends_cuda.pool(*ours, *[t if t is None else t.to(device) for t in (mean, var)], 1e-5)
    assert pooled.dtype == dtype
    if own:
        rows = exact[0].detach().flatten(1)
        torch.testing.assert_close(found[0].cpu().double(), rows.mean(1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[1].cpu().double(), rows.var(1, unbiased=False), rtol=1e-4, atol=1e-4)
    close = 2e-2 if dtype in HALF else 1e-4
    torch.testing.assert_close(pooled.cpu().double(), expected, rtol=close, atol=close)
    grad = torch.randn(expected.shape).to(dtype)
    expected.backward(grad.double())
    pooled.backward((grad.t().contiguous().t() if turned else grad).to(device))
    for a, b in zip(ours, exact, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        scale = max(b.grad.abs().max().item(), 1.0)
        torch.testing.assert_close(
            a.grad.cpu().double(), b.grad, rtol=0, atol=(3e-2 if a.dtype in HALF else 2e-4) * scale
        )


@pytest.mark.parametrize(("size", "own"), list(itertools.product(SIZES, [True, False])))
def test_pooling_in_the_interpreter(interpreter: None, size: tuple[int, ...], own: bool) -> None:
    compare_pooling(size, own, "cpu", torch.float32, turned=own)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize(("size", "own"), list(itertools.product([*SIZES, (300, 500, 7, 7)], [True, False])))
def test_pooling_on_a_gpu(size: tuple[int, ...], own: bool, dtype: torch.dtype) -> None:
    compare_pooling(size, own, "cuda", dtype, turned=not own)


# ---- which layers the kernels replace ---------------------------------------------------------------------------


def test_layers_that_someone_looks_at_are_called() -> None:
    images, layer = torch.zeros(1, 3, 4, 4), stem()
    assert ends._kernels(images, layer) is not None
    handle = layer.register_forward_hook(lambda *_: None)
    assert ends._kernels(images, layer) is None
    handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert ends._kernels(images, layer) is None
    handle.remove()
    with FlopCounterMode(display=False):
        assert ends._kernels(images, layer) is None
    assert ends._kernels(images, layer) is not None


@on_gpu
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_layers_on_a_gpu(training: bool, dtype: torch.dtype) -> None:
    torch.backends.cudnn.allow_tf32 = False
    ours = layers_at_ends().cuda().train(training)
    called = copy.deepcopy(ours)
    for layer in called:
        layer.register_forward_hook(lambda *_: None)
    images = torch.randn(20, 3, 24, 24, device="cuda")
    with torch.autocast("cuda", dtype, enabled=dtype in HALF):
        assert ends.first_maps(ours[0], images).transpose(0, 1).is_contiguous() == (dtype in HALF)  # type: ignore[arg-type]
        results = [run_ends(layers, images) for layers in (ours, called)]
    for a, b in zip(*results, strict=True):
        scale = max(b.double().abs().max().item(), 1.0)
        assert a.dtype == b.dtype
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=(3e-2 if dtype in HALF else 1e-4) * scale)


@on_gpu
def test_a_network_uses_the_kernels() -> None:
    model = models.get("mobilenetv1_dnw", width=0.3, rule="dnw").cuda()
    given: list[Tensor] = []
    for part in (model.stages, model.head):
        part.register_forward_pre_hook(lambda _, args: given.append(args[0]))  # type: ignore[union-attr, operator]
    with torch.autocast("cuda", torch.bfloat16):
        model(torch.randn(6, 3, 32, 32, device="cuda")).square().sum().backward()
    assert all(x.transpose(0, 1).is_contiguous() for x in given)
    assert given[1].shape == (6, 1024)
    assert model.stem.weight.grad.dtype == torch.float32  # type: ignore[union-attr]
    assert int(model.norm.num_batches_tracked) == 1  # type: ignore[union-attr, arg-type]
