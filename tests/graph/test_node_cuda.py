"""The Triton kernels of a graph's nodes match plain PyTorch: on a GPU, and in Triton's interpreter."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernels import on_gpu
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")
from wirings.graph import _combine_cuda, _node_cuda
from wirings.graph._combine_cuda import combine
from wirings.graph._node_cuda import fits, node_map

EPS = 1e-3
HALVES = [torch.bfloat16, torch.float16]
COMBINATIONS = list(itertools.product([True, False], repeat=3))


def reference(x: Tensor, gamma: Tensor | None, beta: Tensor | None, kernel: Tensor | None, relu: bool) -> Tensor:
    """The same in plain PyTorch, in the dtype of its arguments; maps of a single pixel are allowed."""
    if gamma is not None and beta is not None:
        off = x - x.mean((2, 3), keepdim=True)
        x = off * (off.square().mean((2, 3), keepdim=True) + EPS).rsqrt()
        x = x * gamma.view(-1, 1, 1, 1) + beta.view(-1, 1, 1, 1)
    if relu:
        x = F.relu(x)
    if kernel is not None:
        x = F.conv2d(x.transpose(0, 1), kernel[:, None], padding=1, groups=len(kernel)).transpose(0, 1)
    return x


def case(
    shape: tuple[int, ...],
    norm: bool = True,
    conv: bool = True,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    parameters: torch.dtype = torch.float32,
) -> list[Tensor | None]:
    """States, gamma, beta and kernel, all of which require a gradient."""
    generator, n = torch.Generator(device).manual_seed(sum(shape)), shape[0]
    draw = lambda *size: torch.randn(size, generator=generator, device=device)  # noqa: E731
    x = (draw(*shape) * 2 + 0.5).to(dtype)
    gamma, beta, kernel = (t.to(parameters) for t in (draw(n) + 1, draw(n), draw(n, 3, 3)))
    tensors = [x, *((gamma, beta) if norm else (None, None)), kernel if conv else None]
    return [t if t is None else t.requires_grad_() for t in tensors]


def gradients(out: Tensor, grad: Tensor, tensors: list[Tensor | None]) -> list[Tensor]:
    return list(torch.autograd.grad(out, [t for t in tensors if t is not None], grad))


def agree(tensors: list[Tensor | None], relu: bool, tolerance: float, out_dtype: torch.dtype | None = None) -> None:
    """Compare values and gradients with the plain computation in float64, up to a fraction of the largest.

    Among very many values, a few may differ: those so close to zero that rounding changes the side of the ReLU.
    """
    out = node_map(*tensors, EPS, relu, out_dtype)
    x = tensors[0]
    assert x is not None
    assert out.dtype == (out_dtype or x.dtype)
    assert out.is_contiguous()
    wide = [t if t is None else t.detach().double().requires_grad_() for t in tensors]
    want = reference(*wide, relu)  # type: ignore[arg-type]
    grad = torch.randn(out.shape, generator=torch.Generator(out.device).manual_seed(1), device=out.device).to(out.dtype)
    pairs = [(out, want)]
    if out.requires_grad:
        mine = gradients(out, grad, tensors)
        assert [g.dtype for g in mine] == [t.dtype for t in tensors if t is not None]
        pairs += zip(mine, gradients(want, grad.double(), wide), strict=True)
    for place, (got, expected) in enumerate(pairs):
        assert got.shape == expected.shape
        error, size = (got.double() - expected).abs(), expected.abs().max().clamp(min=1)
        wrong = int((error <= tolerance * size).logical_not().sum())
        assert wrong <= error.numel() // 100_000, (place, wrong, float(error.max()), float(size))


# ---- norm, ReLU and convolution -------------------------------------------------------------------------------


@pytest.mark.parametrize("banded", [False, True])
@pytest.mark.parametrize("space", [(8, 8), (4, 4), (5, 7), (1, 1), (1, 9), (3, 2)])
@pytest.mark.parametrize(("norm", "relu", "conv"), COMBINATIONS)
def test_node_map(
    interpreter: None, monkeypatch: pytest.MonkeyPatch, norm: bool, relu: bool, conv: bool, space: Any, banded: bool
) -> None:
    if banded:  # in float32, so that only the algorithm makes a difference
        monkeypatch.setattr(_node_cuda, "_BANDED", (torch.float32,))
    agree(case((3, 5, *space), norm, conv), relu, 1e-5)


@pytest.mark.parametrize("programs", [1, 7, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_batch_in_parts(interpreter: None, monkeypatch: pytest.MonkeyPatch, programs: int, dtype: torch.dtype) -> None:
    monkeypatch.setattr(_node_cuda, "_PROGRAMS", programs)
    agree(case((2, 150, 3, 4), dtype=dtype), True, 1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("norm", "relu", "conv"), COMBINATIONS)
def test_half_precision(interpreter: None, norm: bool, relu: bool, conv: bool, dtype: torch.dtype) -> None:
    agree(case((2, 5, 8, 8), norm, conv, dtype), relu, 2e-2 if dtype == torch.bfloat16 else 5e-3)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_other_dtype_for_the_result(interpreter: None, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    agree(case((2, 5, 5, 7), dtype=dtypes[0], parameters=torch.bfloat16), True, 2e-2, dtypes[1])


def test_strided_tensors(interpreter: None) -> None:
    x, *parameters = case((3, 4, 4, 4))
    assert x is not None
    turned = x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    want, got = (node_map(t, *parameters, EPS, True) for t in (x, turned))  # type: ignore[arg-type]
    assert torch.equal(got, want)
    for grad in (torch.randn(4, 3, 4, 4).transpose(0, 1), torch.ones(()).expand_as(got)):
        (mine,) = torch.autograd.grad(got, turned, grad, retain_graph=True)
        (plain,) = torch.autograd.grad(want, x, grad.contiguous(), retain_graph=True)
        assert torch.equal(mine, plain)


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (3, 0, 4, 4)])
def test_empty_tensors(interpreter: None, shape: tuple[int, ...]) -> None:
    tensors = case(shape)
    out = node_map(*tensors, EPS, True)
    assert out.shape == shape
    out.sum().backward()
    assert all(t is not None and t.grad is not None and not t.grad.any() for t in tensors)


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # NumPy, of the missing images
def test_padding_does_not_leak(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_node_cuda, "_BANDED", (torch.float32,))
    x, gamma, beta, kernel = case((1, 3, 3, 3))
    out = node_map(x, gamma, beta, kernel, 0.0, True)  # a missing image has variance 0
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(g).all() for g in gradients(out, torch.ones_like(out), [x, gamma, beta, kernel]))


def test_nan_propagates(interpreter: None) -> None:
    x = torch.tensor([float("nan"), 1.0, -1.0, 0.0]).view(1, 1, 2, 2).requires_grad_()
    out = node_map(x, None, None, None, EPS, True)
    torch.testing.assert_close(out, F.relu(x), equal_nan=True)
    assert torch.equal(*(gradients(y, torch.ones_like(y), [x])[0] for y in (out, F.relu(x))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_deterministic(interpreter: None, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(_node_cuda, "_PROGRAMS", 6)
    tensors = case((2, 70, 4, 4), dtype=dtype)
    runs = []
    for _ in range(2):
        out = node_map(*tensors, EPS, True)
        runs.append([out, *gradients(out, torch.ones_like(out), tensors)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize(("norm", "relu", "conv"), [(True, True, True), (True, False, False), (False, True, True)])
def test_operator(interpreter: None, norm: bool, relu: bool, conv: bool) -> None:
    tensors = case((2, 3, 4, 4), norm, conv)
    results = torch.library.opcheck(torch.ops.wirings.node_map, (*tensors, EPS, relu, torch.float32))
    assert set(results.values()) == {"SUCCESS"}
    plain = [t if t is None else t.detach() for t in tensors]
    results = torch.library.opcheck(torch.ops.wirings.node_map_backward, (plain[0], *plain, EPS, relu))
    assert set(results.values()) == {"SUCCESS"}


def test_rejects_invalid_arguments() -> None:
    x, gamma, _, _ = case((2, 3, 4, 4))
    with pytest.raises(ValueError, match="both"):
        node_map(x, gamma, None, None, EPS, True)  # type: ignore[arg-type]


def test_fits() -> None:
    assert not fits(torch.zeros(2, 3, 8, 8))  # not on a GPU
    if torch.cuda.is_available():
        x = torch.zeros(2, 3, 8, 8, device="cuda")
        assert all(fits(x.to(dtype)) for dtype in (torch.float32, *HALVES))
        assert fits(x, torch.bfloat16)
        assert not fits(x.double())
        assert not fits(x, torch.float64)
        assert not fits(x[0])
        assert not fits(torch.zeros(2, 3, 8, 9, device="cuda"))


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("shape", [(800, 512, 8, 8), (100, 512, 4, 4), (33, 77, 7, 7), (3, 5, 5, 7), (5, 1, 1, 1)])
def test_node_map_on_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    agree(case(shape, dtype=dtype, device="cuda"), True, {torch.float32: 1e-4}.get(dtype, 3e-2))


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("norm", "relu", "conv"), COMBINATIONS)
def test_combinations_on_gpu(norm: bool, relu: bool, conv: bool, dtype: torch.dtype) -> None:
    agree(case((40, 130, 8, 8), norm, conv, dtype, "cuda"), relu, {torch.float32: 1e-4}.get(dtype, 3e-2))
    out_dtype = torch.bfloat16 if dtype == torch.float32 else torch.float32
    agree(case((7, 65, 5, 7), norm, conv, dtype, "cuda"), relu, 3e-2, out_dtype)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_deterministic_on_gpu(dtype: torch.dtype) -> None:
    tensors = case((32, 512, 8, 8), dtype=dtype, device="cuda")
    runs = []
    for _ in range(5):
        out = node_map(*tensors, EPS, True)
        runs.append([out, *gradients(out, torch.ones_like(out), tensors)])
    assert all(torch.equal(a, b) for again in runs[1:] for a, b in zip(runs[0], again, strict=True))


@on_gpu
def test_compile_on_gpu() -> None:
    tensors = case((20, 96, 8, 8), dtype=torch.bfloat16, device="cuda")

    def step(*args: Tensor) -> Tensor:
        return node_map(*args, EPS, True) * 2

    want, got = step(*tensors), torch.compile(step, fullgraph=True)(*tensors)  # type: ignore[arg-type]
    assert torch.equal(got, want)
    grad = torch.randn(want.shape, device="cuda").to(want.dtype)
    for mine, plain in zip(gradients(got, grad, tensors), gradients(want, grad, tensors), strict=True):
        torch.testing.assert_close(mine, plain)


@on_gpu
def test_capture_on_gpu() -> None:
    tensors = case((20, 96, 8, 8), dtype=torch.bfloat16, device="cuda")
    grad = torch.randn(20, 96, 8, 8, device="cuda").to(torch.bfloat16)

    def step() -> list[Tensor]:
        out = node_map(*tensors, EPS, True)
        both = combine(out, [out, out], [0.5, -0.25])
        return [both.detach(), *gradients(both, grad, tensors)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # kernels are compiled before the capture
        step(), step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        with torch.no_grad():
            tensors[0].add_(0.5)  # type: ignore[union-attr]
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


# ---- y + sum of c k -------------------------------------------------------------------------------------------


def combine_agrees(
    shape: tuple[int, ...], dtypes: list[torch.dtype], y_dtype: torch.dtype | None, tolerance: float, device: str
) -> None:
    y = None if y_dtype is None else torch.randn(shape, device=device).to(y_dtype).requires_grad_()
    ks = [torch.randn(shape, device=device).to(dtype).requires_grad_(i != 1) for i, dtype in enumerate(dtypes)]
    coefficients = [0.3 * (i + 1) * (-1) ** i for i in range(len(ks))]
    out = combine(y, ks, coefficients)
    assert out.dtype == (y_dtype or torch.float32)  # without y it is an error estimate, which must not be rounded
    wide = [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in (y, *ks)]
    want = sum((c * k for c, k in zip(coefficients, wide[1:], strict=True)), 0 if wide[0] is None else wide[0])
    assert isinstance(want, Tensor)
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)
    grad = torch.randn_like(out)
    asked = [(t, w) for t, w in zip((y, *ks), wide, strict=True) if t is not None and t.requires_grad]
    if not asked:
        return
    mine = torch.autograd.grad(out, [t for t, _ in asked], grad)
    plain = torch.autograd.grad(want, [w for _, w in asked if w is not None], grad.double())
    for got, expected, (t, _) in zip(mine, plain, asked, strict=True):
        assert got.dtype == t.dtype
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
    compiled_path = _combine_cuda._plain(y, ks, coefficients)
    assert compiled_path.dtype == out.dtype
    torch.testing.assert_close(compiled_path, out)


@pytest.mark.parametrize("count", range(8))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_combine(interpreter: None, count: int, dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    combine_agrees((3, 700), [dtype] * count, dtype, tolerance, "cpu")
    if count:
        combine_agrees((3, 7), [dtype] * count, None, tolerance, "cpu")


def test_combine_dtypes(interpreter: None) -> None:
    combine_agrees((5, 9), [torch.bfloat16, torch.float32, torch.float16], torch.float32, 1e-2, "cpu")
    combine_agrees((5, 9), [torch.float64] * 3, torch.float64, 1e-14, "cpu")  # coefficients are not rounded to float32


def test_combine_empty_and_strided_tensors(interpreter: None) -> None:
    assert combine(torch.zeros(0, 3), [torch.zeros(0, 3)], [2.0]).shape == (0, 3)
    y, k = torch.randn(4, 6).t(), torch.randn(6, 4)
    torch.testing.assert_close(combine(y, [k], [2]), y + 2 * k)
    k.requires_grad_()
    combine(None, [k], [3.0]).sum().backward()  # a gradient expanded from one number
    assert torch.equal(k.grad, torch.full_like(k, 3.0))  # type: ignore[arg-type]


def test_combine_rejects_invalid_arguments() -> None:
    y = torch.zeros(3)
    for ks, coefficients in (([y], []), ([y] * 8, [1.0] * 8)):
        with pytest.raises(ValueError, match="coefficients"):
            combine(y, ks, coefficients)
    with pytest.raises(ValueError, match="coefficients"):
        combine(None, [], [])
    with pytest.raises(ValueError, match="shape"):
        combine(y, [torch.zeros(4)], [1.0])


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_combine_on_gpu(dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float64: 1e-13}[dtype]
    for count in range(8):
        combine_agrees((3, 70_001), [dtype] * count, dtype, tolerance, "cuda")
    combine_agrees((40, 512, 8, 8), [torch.bfloat16, torch.float32, dtype], dtype, 3e-2, "cuda")


@on_gpu
def test_new_coefficients_do_not_compile_on_gpu() -> None:
    y, k = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
    combine(y, [k], [0.5])
    caches = _combine_cuda._sum.device_caches[torch.cuda.current_device()][0]
    before = len(caches)
    for c in (0.0, 1.0, 16.0, -3.25, 1e-300):
        torch.testing.assert_close(combine(y, [k], [c]), y + c * k)
        _combine_cuda.KernelLauncher.known.clear()
    assert len(caches) == before
