"""The Triton selection compared with the plain one: on a GPU, and in Triton's interpreter (TRITON_INTERPRET=1)."""

from typing import Any

import pytest
import torch
from kernels import INTERPRETED, on_gpu, without_waiting
from torch import Tensor

from wirings.selection import cpu as _select_cpu
from wirings.selection.functional import _choose_device

pytest.importorskip("triton", reason="Triton is not installed")
import triton.language as tl

from wirings.selection import _select_cuda as select

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = ["normal", "few values", "equal", "zeros", "special", "mostly zero", "sorted"]
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs only where TRITON_INTERPRET=1 is set")


def make(kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    generator = torch.Generator(device).manual_seed(len(kind) + sum(shape))
    w = torch.randn(shape, generator=generator, device=device)
    if kind == "few values":
        w = (w * 2).round()
    elif kind == "equal":
        w = torch.full_like(w, -0.5)
    elif kind == "zeros":
        w = torch.where(w > 0, 0.0, -0.0)
    elif kind == "special":
        for step, value in enumerate((float("inf"), float("nan"), -float("inf"), -0.0, 1e-42, -float("nan"))):
            w.view(-1)[step :: step + 5] = value
    elif kind == "mostly zero":
        w = torch.where(w.abs() > 1.5, w, 0.0)
    elif kind == "sorted":
        w = w.flatten().abs().sort().values.view(shape)
    return w.to(dtype)


def counts(n: int) -> list[int]:
    return sorted({0, 1, n // 10, n // 2, n - 1, n})


def agree(weight: Tensor, k: int, allowed: Tensor | None = None) -> None:
    count = torch.tensor(k, device=weight.device)
    want = _choose_device(weight, count, allowed)
    real, edges = select.choose(weight, count, allowed), select.real_edges(weight, count, allowed)
    assert real.stride() == edges.stride() == torch.empty_like(weight).stride()
    assert real.dtype == torch.bool
    assert torch.equal(real, want)
    bits = select._BITS[weight.dtype]  # compared as bits: NaN too, and the sign of zero
    assert edges.dtype == weight.dtype
    assert torch.equal(edges.view(bits), torch.where(want, weight, 0.0).view(bits))


def layouts(dtype: torch.dtype, device: str, scale: int) -> dict[str, Tensor]:
    conv = make("few values", (4 * scale, 6, 3, 3), dtype, device)
    conv_3d = make("few values", (4 * scale, 5, 3, 2, 3), dtype, device)
    matrix = make("few values", (20 * scale, 30), dtype, device)
    return {
        "channels_last": conv.to(memory_format=torch.channels_last),
        "channels_last, one filter": conv.view(1, -1, 3, 3).to(memory_format=torch.channels_last),
        "channels_last_3d": conv_3d.to(memory_format=torch.channels_last_3d),
        "transposed": matrix.t(),
        "strided": matrix[:, ::2],
        "offset": matrix.view(-1)[3:],
        "permuted": conv.permute(2, 0, 3, 1),
        "expanded": matrix[:1].expand(20 * scale, 30),
    }


# ---- on a GPU ---------------------------------------------------------------------------------------------------


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 31, 1024, 1025, 4097, 16384, 16385, 100_000, 640_001, 2**20, 3_000_017])
def test_same_choice_on_gpu(kind: str, n: int, dtype: torch.dtype) -> None:
    weight = make(kind, (n,), dtype, "cuda")
    for k in counts(n):
        agree(weight, k)
    allowed = torch.rand(n, device="cuda") < 0.4
    for k in counts(int(allowed.sum())):
        agree(weight, max(k, 0), allowed)


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1, 40, 3000, 8000])
def test_memory_formats_on_gpu(scale: int, dtype: torch.dtype) -> None:
    for weight in layouts(dtype, "cuda", scale).values():
        allowed = torch.rand(weight.shape, device="cuda") < 0.5
        for k in (0, weight.numel() // 3, weight.numel()):
            agree(weight, k)
        for k in (0, int(allowed.sum()) // 2, int(allowed.sum())):
            agree(weight, k, allowed)
            agree(weight, k, torch.empty_like(weight, dtype=torch.bool).copy_(allowed))


@on_gpu
@pytest.mark.parametrize("n", [10_000, 640_000, 3_000_000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_capture(n: int, dtype: torch.dtype) -> None:
    weight, k = make("normal", (n,), dtype, "cuda"), torch.tensor(n // 10, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # kernels are compiled before the capture
        select.choose(weight, k, None), select.real_edges(weight, k, None)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        real, edges = select.choose(weight, k, None), select.real_edges(weight, k, None)
    for count, replaced in ((n // 10, False), (n // 3, False), (0, False), (n, True), (n // 7, True)):
        k.fill_(count)
        if replaced:
            weight.copy_(make("few values", (n,), dtype, "cuda"))
        graph.replay()
        want = _choose_device(weight, k, None)
        assert torch.equal(real, want)
        assert torch.equal(edges, torch.where(want, weight, 0.0))


@on_gpu
def test_does_not_synchronize_with_the_gpu() -> None:
    for n in (10_000, 640_000, 3_000_000):
        weight, k = torch.randn(n, device="cuda"), torch.tensor(n // 10, device="cuda")
        select.choose(weight, k, None), select.real_edges(weight, k, None)
        with without_waiting():
            real, kept = select.choose(weight, k, None), select.real_edges(weight, k, None)
        assert int(real.sum()) == int(kept.count_nonzero()) == n // 10


@on_gpu
def test_is_deterministic() -> None:
    weight, k = make("few values", (3_000_000,), torch.float32, "cuda"), torch.tensor(1_234_567, device="cuda")
    first = select.choose(weight, k, None)
    assert int(first.sum()) == 1_234_567
    assert all(torch.equal(first, select.choose(weight, k, None)) for _ in range(20))


@on_gpu
def test_a_wrong_guess_on_gpu() -> None:
    agree(*misleading(2_000_000, select._SAMPLE, "cuda"))


# ---- in the interpreter -----------------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Small blocks and few programs, so that a few edges cover all code paths."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:  # NumPy no longer turns an array of one element into an int
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    for name, value in {"_SMALL": 64, "_BLOCK": 256, "_SAMPLE": 256, "_PROGRAMS": tl.constexpr(4)}.items():
        monkeypatch.setattr(select, name, value)
    return monkeypatch


@interpreted
@pytest.mark.parametrize("guess_from", [10**9, 257])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_same_choice(tiny: pytest.MonkeyPatch, kind: str, dtype: torch.dtype, guess_from: int) -> None:
    tiny.setattr(select, "_GUESS_FROM", guess_from)
    weight = make(kind, (2051,), dtype)  # three programs of three blocks each
    allowed = torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)) < 0.4
    for k in (0, 205, 2051):
        agree(weight, k)
    agree(weight, int(allowed.sum()) * 2 // 3, allowed)


@interpreted
@pytest.mark.parametrize("n", [0, 1, 2, 63, 64, 65, 256])
def test_few_edges(tiny: pytest.MonkeyPatch, n: int) -> None:
    weight = make("special", (n,), torch.float32)
    if n == 0:
        zero = torch.tensor(0)
        assert select.choose(weight, zero, None).shape == select.real_edges(weight, zero, weight > 0).shape == (0,)
        return
    for k in counts(n):
        agree(weight, k)


@interpreted
@pytest.mark.parametrize("guess_from", [10**9, 257])
def test_memory_formats(tiny: pytest.MonkeyPatch, guess_from: int) -> None:
    tiny.setattr(select, "_GUESS_FROM", guess_from)
    for name, weight in layouts(torch.float32, "cpu", 2).items():
        allowed = torch.rand(weight.shape) < 0.5
        agree(weight, weight.numel() // 3)
        agree(weight, int(allowed.sum()) // 2, allowed)
        if "channels" in name:
            agree(weight, int(allowed.sum()) // 2, torch.empty_like(weight, dtype=torch.bool).copy_(allowed))


@interpreted
def test_a_wrong_guess(tiny: pytest.MonkeyPatch) -> None:
    tiny.setattr(select, "_GUESS_FROM", 257)
    agree(*misleading(3000, 256, "cpu"))


@interpreted
def test_rejects_too_many_edges(tiny: pytest.MonkeyPatch) -> None:
    for n, guess_from in ((60, 10**9), (600, 10**9), (600, 257)):
        tiny.setattr(select, "_GUESS_FROM", guess_from)
        weight, allowed = make("normal", (n,), torch.float32), torch.arange(n) % 3 == 0
        assert torch.equal(select.choose(weight, torch.tensor(n), allowed), allowed)


def misleading(n: int, sample: int, device: str) -> tuple[Tensor, int]:
    """A weight whose sampled edges are all far smaller than the others, and a k that needs none of them."""
    weight, stretch = make("normal", (n,), torch.float32, device).abs() + 1, n // sample
    i = torch.arange(sample, device=device)
    weight[i * stretch + ((i * 2654435761 % 2**32) >> 5) % stretch] *= 1e-6
    return weight, n // 2


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_supports(dtype: torch.dtype) -> None:
    assert select.supports(torch.zeros(3, dtype=dtype)) == (dtype != torch.float64)


@interpreted
def test_same_choice_as_on_cpu(tiny: pytest.MonkeyPatch) -> None:
    weight = make("few values", (700,), torch.float32)
    for k in counts(700):
        assert torch.equal(
            select.choose(weight, torch.tensor(k), None), _select_cpu.choose(weight, torch.tensor(k), None)
        )
