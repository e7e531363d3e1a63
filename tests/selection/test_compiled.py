"""The compiled kernel makes the same choice as NumPy, bit for bit, and is used only when it is there."""

import ctypes
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import wirings
from wirings.rules import soft_threshold
from wirings.selection import compiled, cpu
from wirings.selection.compiled import CompiledKernel
from wirings.utils.compiler import Declare, MissingError, compilers

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
POWERS = [1.0, 2.5, 3.0, math.inf]
needs_compiler = pytest.mark.skipif(not compilers(os.environ.get("CXX", "")), reason="there is no C++ compiler")


@pytest.fixture(autouse=True, scope="module")
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    kernel = CompiledKernel()
    kernel.build()
    assert kernel.library is not None
    return kernel.library


def with_kernel(library: ctypes.CDLL | None, function: Callable[..., Tensor], *args: object) -> Tensor:
    """Call a function with the kernel, or with NumPy if there is none."""
    before, compiled.kernel = compiled.kernel, CompiledKernel()
    compiled.kernel.library, compiled.kernel._settled = library, True
    try:
        return function(*args)
    finally:
        compiled.kernel = before


def bits(x: Tensor) -> Tensor:
    return x if x.dtype == torch.bool else x.view(cpu.KEYS[x.dtype])


def assert_same(library: ctypes.CDLL, weight: Tensor, k: int, allowed: Tensor | None, power: float = 3.0) -> None:
    args = weight, torch.tensor(k), allowed
    for function in (cpu.choose, cpu.real_edges):
        one, other = with_kernel(library, function, *args), with_kernel(None, function, *args)
        assert torch.equal(bits(one), bits(other)), function.__name__
        # The stride of a dimension of size 1 means nothing.
        strides = [[x.stride(d) for d in range(x.dim()) if x.shape[d] > 1] for x in (one, other)]
        assert strides[0] == strides[1], "memory format"
    one, other = with_kernel(library, cpu.next_magnitude, *args), with_kernel(None, cpu.next_magnitude, *args)
    assert torch.equal(bits(one), bits(other)) or (one.isnan() and other.isnan())
    one, other = (with_kernel(each, cpu.shrunk_edges, *args, power) for each in (library, None))
    assert torch.equal(bits(one), bits(other)), "shrunk"


def used(library: ctypes.CDLL, weight: Tensor, allowed: Tensor | None = None) -> bool:
    """Whether the kernel can do it."""
    return with_kernel(library, compiled.select, weight, 1, allowed) is not None  # type: ignore[arg-type]


@st.composite
def small_cases(draw: st.DrawFn) -> tuple[Tensor, int, Tensor | None, float]:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.sampled_from([(1,), (7,), (3, 5), (4, 3, 2, 2), (2, 3, 2, 2, 2), (6, 1)]))
    n, info = math.prod(shape), torch.finfo(dtype)
    extreme = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, info.tiny, -info.tiny / 4, info.max]  # with ties
    number = st.one_of(st.floats(width=16), st.sampled_from(extreme))
    numbers = draw(st.lists(number, min_size=n, max_size=n))
    weight = torch.tensor(numbers, dtype=torch.float64).to(dtype).view(shape)
    if weight.dim() == 4:
        weight = weight.contiguous(memory_format=draw(st.sampled_from([torch.contiguous_format, torch.channels_last])))
    elif weight.dim() == 2:
        change = draw(st.sampled_from([lambda w: w, torch.t, lambda w: w[:, ::2], lambda w: w[:1].expand(w.shape)]))
        weight = change(weight)
    n, allowed = weight.numel(), None
    if draw(st.booleans()):
        allowed = torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n))).view(weight.shape)
    k = draw(st.integers(0, n if allowed is None else int(allowed.sum())))
    return weight, k, allowed, draw(st.sampled_from(POWERS))


@needs_compiler
@given(small_cases())
def test_same_bits_as_numpy(library: ctypes.CDLL, case: tuple[Tensor, int, Tensor | None, float]) -> None:
    weight, k, allowed, power = case
    assert_same(library, weight, k, allowed, power)


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "ties": lambda x: (8 * x).round(),
    "all equal": lambda x: torch.ones_like(x).copysign(x),
    "mostly zero": lambda x: torch.where(x > 2, x, 0.0),
    "many orders of magnitude": lambda x: (10 * x).exp(),
    "sorted": lambda x: x.sort().values,
    "NaN and infinity": lambda x: torch.where(x > 1, math.nan, torch.where(x < -1, -math.inf, x)),
    "denormal": lambda x: x * 1e-7 * torch.finfo(torch.float32).tiny,
}


@needs_compiler
@given(
    st.sampled_from([511, 512, 513, 5_000, 40_000, 70_001]),
    st.sampled_from([*KINDS]),
    st.sampled_from(DTYPES),
    st.sampled_from([0.0, 1e-4, 0.1, 0.5, 0.95, 1.0]),
    st.sampled_from([None, 0.02, 0.5]),
    st.integers(1, 5),
)
def test_same_bits_as_numpy_in_many_blocks(
    library: ctypes.CDLL, n: int, kind: str, dtype: torch.dtype, density: float, may: float | None, threads: int
) -> None:
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(n)
    weight = KINDS[kind](torch.randn(n, generator=generator)).to(dtype)
    allowed = None if may is None else torch.rand(n, generator=generator) < may
    assert_same(library, weight, int(density * (n if allowed is None else int(allowed.sum()))), allowed)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_memory_format(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Ties go to the earlier edge in row-major order, also where that is not the order of memory."""
    torch.set_num_threads(3)
    rows = (4 * torch.randn(64, 96, 3, 3)).round().to(dtype)
    allowed = torch.rand(rows.shape) < 0.7
    for weight in (rows.to(memory_format=torch.channels_last), rows.permute(3, 1, 0, 2), rows.view(64, -1).t()):
        mask = allowed.view(-1)[: weight.numel()].view(weight.shape)
        assert used(library, weight)
        for k in (1, weight.numel() // 10, weight.numel() // 2):
            assert_same(library, weight, k, None)
            assert_same(library, weight, k, mask)
            chosen = with_kernel(library, cpu.choose, weight, torch.tensor(k), mask)
            expected = with_kernel(library, cpu.choose, weight.contiguous(), torch.tensor(k), mask)
            assert torch.equal(chosen, expected)
    assert not used(library, rows[:, ::2]), "memory with gaps"
    assert not used(library, rows[:1].expand(rows.shape)), "shared memory"


@needs_compiler
def test_sample_that_misleads(library: ctypes.CDLL) -> None:
    """The kernel guesses the threshold from a sample; here the sampled edges are unlike all others."""
    n = 2**16
    sampled = torch.arange(n) % (n // 256) < 16
    for scale in (1e-3, 1e3):
        weight = torch.where(sampled, scale, 1.0) * torch.randn(n)
        for k in (10, n // 10, n // 2, n - 10):
            assert_same(library, weight, k, None)


@needs_compiler
def test_several_threads_at_once(library: ctypes.CDLL) -> None:
    torch.set_num_threads(2)
    weights = [torch.randn(50_000) for _ in range(4)]
    k = torch.tensor(5_000)
    expected = [with_kernel(None, cpu.real_edges, weight, k, None) for weight in weights]
    found: list[Tensor | None] = [None] * 4

    def work(i: int) -> None:
        for _ in range(5):
            found[i] = cpu.real_edges(weights[i], k, None)

    def all_at_once() -> Tensor:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return weights[0]

    with_kernel(library, all_at_once)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))  # type: ignore[arg-type]


@needs_compiler
def test_too_few_allowed(library: ctypes.CDLL) -> None:
    weight, allowed = torch.randn(10), torch.arange(10) < 4
    for function in (cpu.choose, cpu.real_edges, cpu.next_magnitude, lambda *args: cpu.shrunk_edges(*args, 3.0)):
        for each in (library, None):
            with pytest.raises(wirings.WiringError, match=r"k = 5 edges were requested, but only 4 are allowed"):
                with_kernel(each, function, weight, torch.tensor(5), allowed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("power", POWERS)
def test_shrinks_as_the_rule_does(dtype: torch.dtype, power: float) -> None:
    weight, allowed, k = torch.randn(40, 50).to(dtype), torch.rand(40, 50) < 0.6, torch.tensor(300)
    real = cpu.choose(weight, k, allowed)
    size, threshold = weight.abs(), weight.abs()[allowed & ~real].max()
    assert torch.equal(cpu.next_magnitude(weight, k, allowed), threshold)
    if power != math.inf:
        wide = torch.promote_types(dtype, torch.float32)
        size = soft_threshold.shrunk(size.to(wide), threshold.to(wide), power).to(dtype)
    expected = torch.where(real, size.copysign(weight), 0.0)
    torch.testing.assert_close(cpu.shrunk_edges(weight, k, allowed, power), expected)


def test_shrunk_by_hand() -> None:
    weight = torch.tensor([[3.0, -1.0], [-4.0, 2.0]])
    assert cpu.shrunk_edges(weight, torch.tensor(2), None, 1.0).tolist() == [[1.0, 0.0], [-2.0, 0.0]]
    assert cpu.shrunk_edges(weight, torch.tensor(4), None, 1.0).tolist() == weight.tolist()
    assert cpu.shrunk_edges(weight, torch.tensor(0), None, 1.0).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert cpu.shrunk_edges(weight, torch.tensor(1), None, 2.0)[1, 0].item() == pytest.approx(-math.sqrt(7))


# ---- when it is there -----------------------------------------------------------------------------------------


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WIRINGS_CACHE", str(tmp_path))
    monkeypatch.delenv(compiled.SWITCH, raising=False)
    return tmp_path


def test_without_a_compiler(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy chooses, and nothing is said (warnings are errors here)."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(empty_cache))
    monkeypatch.setattr(compiled, "PATIENCE", compiled.LEAST)
    kernel = CompiledKernel()
    monkeypatch.setattr(compiled, "kernel", kernel)
    weight = torch.randn(2 * compiled.LEAST)
    for _ in range(3):
        assert int(cpu.choose(weight, torch.tensor(100), None).sum()) == 100
    assert kernel._builder is not None, "it has been tried"
    kernel._builder.join()
    assert kernel.get(compiled.LEAST) is None
    assert not list(empty_cache.iterdir())


@pytest.mark.parametrize("broken", ["nothing", "fails", "'"])
def test_compiler_that_fails(broken: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (empty_cache / "fails").write_text("#!/bin/sh\nexit 1\n")
    (empty_cache / "fails").chmod(0o755)
    monkeypatch.setenv("CXX", str(empty_cache / broken))
    kernel = CompiledKernel()
    kernel.build()
    assert kernel.get(compiled.LEAST) is None
    assert [path.name for path in empty_cache.iterdir()] == ["fails"]


class SlowSource:
    """A source that is compiled when the test says so."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library, self.begun, self.may_end, self.calls = library, threading.Event(), threading.Event(), 0

    def load_built(self, cache: Path, declare: Declare) -> ctypes.CDLL:
        raise MissingError("the cache is empty")

    def load(self, compiler: str, cache: Path, declare: Declare) -> ctypes.CDLL:
        self.calls += 1
        self.begun.set()
        assert self.may_end.wait(60)
        return self.library


@needs_compiler
def test_compiles_in_the_background_when_it_pays(
    library: ctypes.CDLL, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, kernel = SlowSource(library), CompiledKernel()
    monkeypatch.setattr(compiled, "SOURCE", source)
    monkeypatch.setattr(compiled, "PATIENCE", 10 * compiled.LEAST)
    for _ in range(100):
        assert kernel.get(compiled.LEAST - 1) is None
    for _ in range(10):
        assert kernel.get(compiled.LEAST) is None
    assert kernel._builder is None, "small weights do not count, and ten large ones are too few"
    assert kernel.get(compiled.LEAST) is None, "nobody waits"
    assert source.begun.wait(60)
    assert kernel.get(compiled.LEAST) is None
    source.may_end.set()
    assert kernel._builder is not None
    kernel._builder.join()
    assert kernel.get(compiled.LEAST) is library
    assert kernel.get(5) is library, "small weights use it too, once it is there"
    assert source.calls == 1


@needs_compiler
def test_library_in_the_cache_is_loaded_at_once(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = CompiledKernel()
    monkeypatch.delenv(compiled.SWITCH, raising=False)
    assert kernel.get(compiled.LEAST) is not None
    monkeypatch.setenv(compiled.SWITCH, "numpy")
    kernel = CompiledKernel()
    assert kernel.get(compiled.LEAST) is None
    assert kernel.get(compiled.PATIENCE) is None
    assert kernel._builder is None, "it is switched off"


@needs_compiler
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_after_a_fork(library: ctypes.CDLL) -> None:
    """OpenMP's threads do not exist in a forked process, which must not wait for them."""
    script = (
        "import os, torch\n"
        "from wirings.selection import compiled, cpu\n"
        "torch.set_num_threads(2)\n"
        "weight, k = torch.randn(100_000), torch.tensor(10_000)\n"
        "expected = cpu.real_edges(weight, k, None)\n"
        "assert compiled.kernel.library is not None\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if bytes(cpu.real_edges(weight, k, None).numpy()) == bytes(expected.numpy()) else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != compiled.SWITCH}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
