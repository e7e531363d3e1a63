"""Choosing the edges of many weights at once against doing it one by one: on a GPU, and in Triton's interpreter."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from kernels import on_gpu, without_waiting
from torch import Tensor

from wirings.selection import batched, functional

pytest.importorskip("triton", reason="Triton is not installed")
from wirings.selection import _select_many_cuda as many

SMALL = [(10,), (33, 20), (8, 16, 1, 1), (4, 10, 5, 5), (1, 1), (64, 9, 3, 3), (97, 53)]
LARGE = [(64, 3, 3, 3), (10,), (129, 33), (32, 64, 1, 1), (16, 40, 5, 5), (1, 1), (300, 250), (41, 128, 4, 4)]


def weights_of(kind: str, dtype: torch.dtype, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    if kind == "ties":
        made = [w.mul(2).round().div(2) for w in made]
    elif kind == "equal":
        made = [torch.full_like(w, -0.5) for w in made]
    elif kind == "zeros":
        made = [torch.zeros_like(w) for w in made]
    elif kind == "extreme":
        for w in made:
            w.view(-1)[0] = float("inf")
            w.view(-1)[-1] = float("nan")
    elif kind == "misleading":  # the sample is far from representative
        made = [w * torch.where(torch.arange(w.numel()).view(w.shape) % 7 == 3, 1e-3, 1.0) for w in made]
        made[-1].view(-1)[::5] = made[-1].view(-1)[0]
    elif kind == "channels_last":
        made = [w.to(memory_format=torch.channels_last) if w.dim() == 4 else w for w in made]
    elif kind == "channels_last_ties":
        made = [w.mul(2).round().to(memory_format=torch.channels_last) if w.dim() == 4 else w.round() for w in made]
    return [w.to(dtype) for w in made]


KINDS = ["plain", "ties", "equal", "zeros", "extreme", "misleading", "channels_last", "channels_last_ties"]
WANTED: dict[str, dict[str, Any]] = {
    "kept": {},
    "masks": {"power": None, "masked": True},
    "shrunk": {"power": 3.0},
    "softly shrunk, with masks": {"power": 1.0, "masked": True},
    "half precision": {"dtype": torch.bfloat16, "power": 2.5},
    "superset": {"more": True, "masked": True},
    "superset in half precision": {"more": True, "masked": True, "dtype": torch.bfloat16},
}


def agrees(kind: str, dtype: torch.dtype, device: str, masked: bool, shared: bool, wanted: dict[str, Any]) -> None:
    plain = weights_of(kind, dtype, LARGE if device == "cuda" else SMALL)
    generator = torch.Generator().manual_seed(2)
    masks: list[Tensor | None] = [None] * len(plain)
    if masked:
        for i, w in enumerate(plain):
            allowed = (torch.rand(w.shape, generator=generator) < 0.6) | (w == w.flatten()[0])
            masks[i] = torch.empty_like(w, dtype=torch.bool).copy_(allowed)
    possible = [w.numel() if m is None else int(m.sum()) for w, m in zip(plain, masks, strict=True)]
    if shared:
        possible = [sum(possible)] * len(plain)
    options = {"power": math.inf, "masked": False, "shared": shared, **wanted, "dtype": wanted.get("dtype", dtype)}
    for share in (0.0, 0.1, 0.5, 1.0):
        more = [int(max(0.2, share) * n) for n in possible] if wanted.get("more") else []
        options["more"] = more[:1] if shared else more
        ks = [torch.tensor(int(share * n)) for n in possible]
        expected = batched.kept_of(plain, ks, masks, **{**options, "dtype": dtype})
        if options["power"] not in (None, math.inf):
            expected = shrunk(plain, ks, masks, shared, options["power"]), expected[1]
        elif options["dtype"] != dtype:
            expected = [precise(kept).float().to(options["dtype"]) for kept in expected[0]], expected[1]
        weights = [w.to(device) for w in plain]
        allowed_there = [m if m is None else m.to(device) for m in masks]
        there = [k.to(device) for k in ks]
        begins = batched.begins_of(weights)
        if shared:
            there = there[:1] * len(there)
        table = many.table_of(weights, there, allowed_there, options["more"], shared)
        assert table is not None
        rest = (bool(more), options["power"], options["masked"], options["dtype"])
        got = many.kept_of(weights[0], table, *rest)
        for row, wants in zip(got, expected, strict=True):
            if not wants:
                assert not len(row)
                continue
            assert len(row) == begins[-1]
            for part, want, weight in zip(batched.parts_of(row.cpu(), plain), wants, plain, strict=True):
                assert part.stride() == weight.stride()
                power = options["power"]
                cut_off = device == "cpu" and want.dtype != dtype  # instead of rounded, by Triton's interpreter
                if want.dtype != torch.bool and (cut_off or power not in (None, math.inf)):
                    half = options["dtype"] != torch.float32
                    tolerance = {"rtol": 1e-2, "atol": 1e-6} if half else {"rtol": 1e-5, "atol": 1e-7}
                    torch.testing.assert_close(precise(part), precise(want), equal_nan=True, **tolerance)
                else:
                    assert torch.equal(part.nan_to_num(7.0), want.nan_to_num(7.0))


def precise(tensor: Tensor) -> Tensor:
    """A tensor in double precision, by NumPy: PyTorch's conversion of float16 loses NaN on some processors."""
    if tensor.dtype == torch.bfloat16:  # which NumPy does not know: the upper half of a float32
        tensor = (tensor.view(torch.int16).int() << 16).view(torch.float32)
    return torch.from_numpy(tensor.numpy().astype(np.float64))


def shrunk(
    weights: list[Tensor], ks: list[Tensor], allowed: list[Tensor | None], shared: bool, power: float
) -> list[Tensor]:
    """What shrunk edges should weigh, in double precision."""
    masks = batched.kept_of(weights, ks, allowed, power=None, masked=True, shared=shared)[1]
    values = [precise(weight) for weight in weights]
    sizes = [value.abs() for value in values]
    rest = [
        size[~real if among is None else among & ~real] for size, real, among in zip(sizes, masks, allowed, strict=True)
    ]
    if shared:
        rest = [torch.cat(rest)] * len(rest)
    found = []
    for value, size, real, others in zip(values, sizes, masks, rest, strict=True):
        threshold = others.max() if len(others) else torch.zeros(())
        used = torch.where(size.isfinite(), (size**power - threshold**power).clamp(min=0) ** (1 / power), size)
        found.append(torch.where(real, used * value.sign().nan_to_num(1.0), 0.0))
    return found


def parametrized(test: Any) -> Any:
    for name, values in (("masked", [False, True]), ("shared", [False, True]), ("wanted", list(WANTED)),
                         ("dtype", [torch.float32, torch.bfloat16, torch.float16]), ("kind", KINDS)):  # fmt: skip
        test = pytest.mark.parametrize(name, values)(test)
    return test


@pytest.mark.usefixtures("interpreter")
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
@parametrized
def test_in_the_interpreter(
    kind: str, dtype: torch.dtype, wanted: str, shared: bool, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many, "_GUESS_FROM", 2048)
    monkeypatch.setattr(many, "_SAMPLE", 1024)
    agrees(kind, dtype, "cpu", masked, shared, WANTED[wanted])


@on_gpu
@parametrized
def test_on_a_gpu(kind: str, dtype: torch.dtype, wanted: str, shared: bool, masked: bool) -> None:
    agrees(kind, dtype, "cuda", masked, shared, WANTED[wanted])


def masked(device: str, dtype: torch.dtype, result: torch.dtype) -> None:
    """Compare `masked_each` with doing it one by one; at another address the second time."""
    for shapes in [SMALL, LARGE[::-1]]:
        tensors = [t.to(device) for t in weights_of("channels_last", dtype, shapes)]
        tensors[0][(0,) * tensors[0].dim()] = float("nan")
        masks: list[Tensor | None] = [None if i == 1 else t > 0 for i, t in enumerate(tensors)]
        for _ in range(2):
            got = many.masked_each(tensors, masks, result)
            assert got is not None
            for part, tensor, mask in zip(got, tensors, masks, strict=True):
                want = tensor if mask is None else torch.where(mask, tensor, 0.0)
                assert part.stride() == tensor.stride()
                assert torch.equal(part.nan_to_num(7.0), want.to(result).nan_to_num(7.0))
            tensors = [t.clone() for t in tensors]


CONVERSIONS = pytest.mark.parametrize(
    ("dtype", "result"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float16, torch.float32)],
)


@pytest.mark.usefixtures("interpreter")
@CONVERSIONS
def test_masked_tensors_in_the_interpreter(dtype: torch.dtype, result: torch.dtype) -> None:
    masked("cpu", dtype, result)


@on_gpu
@CONVERSIONS
def test_masked_tensors_on_a_gpu(dtype: torch.dtype, result: torch.dtype) -> None:
    masked("cuda", dtype, result)


def copies_of_runs(device: str) -> int:
    """How many more times the runs of edges are copied to the device when gradients are passed on."""
    before = many._runs_of.cache_info().misses
    tensors = [t.to(device) for t in weights_of("plain", torch.float32, SMALL)]
    masks, ks = [t != 0 for t in tensors], [torch.tensor(1, device=device)] * len(tensors)
    _, real, thresholds = batched.shrunk_of(tensors, ks, masks, 1.0)
    pulls = torch.ones(len(tensors), 2, device=device)
    for _ in range(2):
        assert many.masked_each(tensors, masks, torch.float32) is not None
        made = many.through_shrunk(tensors, real, tensors, range(len(tensors)), thresholds, pulls, torch.float32)
        assert made is not None
    return many._runs_of.cache_info().misses - before


@pytest.mark.usefixtures("interpreter")
def test_another_stream_copies_runs_again_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    many._runs_of.cache_clear()
    assert copies_of_runs("cpu") == 1
    assert copies_of_runs("cpu") == 0
    monkeypatch.setattr(many, "_stream_of", lambda tensor: 1)
    assert copies_of_runs("cpu") == 1


@on_gpu
def test_another_stream_copies_runs_again_on_a_gpu() -> None:
    many._runs_of.cache_clear()
    assert copies_of_runs("cuda") == 1
    assert copies_of_runs("cuda") == 0
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert copies_of_runs("cuda") == 1


def learned(device: str, kind: str, dtype: torch.dtype, result: torch.dtype, share: float = 0.3) -> None:
    """Compare what learned thresholds need, forward and backward, with doing it one by one."""
    plain = weights_of(kind, dtype, LARGE if device == "cuda" else SMALL)
    weights = [w.to(device) for w in plain]
    ks = [torch.tensor(int(share * w.numel()), device=device) for w in weights]
    table = many.table_of(weights, ks, [None] * len(ks), (), False)
    assert table is not None
    out, mask, thresholds = many.shrunk_of(weights[0], table, 1.0, result)
    used, masks = batched.parts_of(out, weights), batched.parts_of(mask, weights)
    for weight, k, one, real, threshold in zip(weights, ks, used, masks, thresholds, strict=True):
        assert torch.equal(real, functional.choose(weight, k))
        next_one = functional.next_magnitude(weight, real, None)
        assert threshold == (next_one.float() if k else 0)
        assert not (one.signbit() ^ weight.signbit())[real].any(), "of zeros, too"
        if device == "cuda":
            want = torch.where(real, weight - weight.sign() * next_one, 0.0).to(result)
            assert torch.equal(one, want)
    generator = torch.Generator().manual_seed(3)
    grads = [torch.empty_like(w).copy_(torch.randn(w.shape, generator=generator)).to(result) for w in weights]
    pulls = torch.randn(len(weights), len(weights) + 2, generator=generator).to(device)
    unused = 3
    for places in (range(len(weights)), [i for i in range(len(weights)) if i != unused], [len(weights) - 1]):
        some = [[values[i] for i in places] for values in (grads, masks, used)]
        made = many.through_shrunk(*some, places, thresholds, pulls, dtype)
        assert made is not None
        given = [grad if i in places else None for i, grad in enumerate(grads)]
        with torch.enable_grad():  # with PyTorch's operators
            expected, total = batched.through_shrunk(given, masks, used, thresholds, pulls, dtype)
        for i, grad in zip(places, made[0], strict=True):
            want = expected[i]
            assert want is not None
            assert grad.dtype == dtype
            assert grad.stride() == weights[i].stride()
            assert torch.equal(grad, want)
        torch.testing.assert_close(made[1], total, rtol=1e-4, atol=1e-4)


THRESHOLDS = pytest.mark.parametrize(
    ("kind", "dtype", "result"),
    [
        ("channels_last", torch.float32, torch.float32),
        ("channels_last_ties", torch.float32, torch.bfloat16),
        ("ties", torch.float32, torch.float16),
        ("plain", torch.bfloat16, torch.bfloat16),
        ("ties", torch.float16, torch.float16),
    ],
)


@pytest.mark.usefixtures("interpreter")
@THRESHOLDS
def test_learned_thresholds_in_the_interpreter(kind: str, dtype: torch.dtype, result: torch.dtype) -> None:
    learned("cpu", kind, dtype, result)


@on_gpu
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@THRESHOLDS
def test_learned_thresholds_on_a_gpu(kind: str, dtype: torch.dtype, result: torch.dtype, share: float) -> None:
    learned("cuda", kind, dtype, result, share)


def kept(weights: list[Tensor], ks: list[Tensor]) -> Tensor:
    table = many.table_of(weights, ks, [None] * len(weights), (), False)
    assert table is not None
    return many.kept_of(weights[0], table, False, math.inf, False, weights[0].dtype)[0]


@on_gpu
def test_large_weights_and_many_of_them_on_a_gpu() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(n, device="cuda") for n in (3_000_000, 5, 700_001, *range(1000, 1060))]
    weights.append(torch.randn(512, 512, 3, 3, device="cuda").to(memory_format=torch.channels_last))
    weights.append(weights[-1].mul(100).round().div(100))
    ks = [torch.tensor(w.numel() // 10, device="cuda") for w in weights]
    for w, k, got in zip(weights, ks, batched.parts_of(kept(weights, ks), weights), strict=True):
        assert torch.equal(got, torch.ops.wirings.real_edges(w, k, None))


@on_gpu
def test_a_captured_choice_sees_new_weights_and_budgets() -> None:
    weights = [torch.randn(5000, device="cuda"), torch.randn(40, 50, device="cuda")]
    ks = [torch.tensor(500, device="cuda"), torch.tensor(7, device="cuda")]
    kept(weights, ks)
    with without_waiting():
        kept(weights, ks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flat = kept(weights, ks)
    weights[0].normal_()
    ks[1].fill_(300)
    graph.replay()
    for w, k, got in zip(weights, ks, batched.parts_of(flat, weights), strict=True):
        assert torch.equal(got, torch.ops.wirings.real_edges(w, k, None))


@on_gpu
def test_the_table_of_a_captured_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "_tables", {})
    monkeypatch.setattr(many, "_captured", {})
    weights = [torch.randn(1000, device="cuda") for _ in range(70)]
    k, graph = torch.tensor(100, device="cuda"), torch.cuda.CUDAGraph()
    kept(weights[:1], [k])
    with torch.cuda.graph(graph):
        row = kept(weights[:1], [k])
    (table,) = many._tables.values()
    for other in weights[1:]:
        kept([other], [k])
    assert all(held is not table for held in many._tables.values())  # removed there, but not for the graph
    assert list(many._captured.values()) == [table]
    weights[0].normal_()
    graph.replay()
    assert torch.equal(row[:1000], torch.ops.wirings.real_edges(weights[0], k, None))
    kept(weights[:1], [k])
    assert any(held is table for held in many._tables.values())
