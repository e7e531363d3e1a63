"""Choosing the edges of many weights at once compared with one by one: on a GPU, and in Triton's interpreter."""

import pytest
import torch
from kernels import on_gpu, without_waiting
from torch import Tensor

from wirings.selection import functional as edges

pytest.importorskip("triton", reason="Triton is not installed")
from wirings.selection import _select_many_cuda as many


def weights_of(kind: str, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(64, 3, 3, 3), (10,), (129, 33), (32, 64, 1, 1), (16, 40, 5, 5), (1, 1), (300, 70)]
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
    elif kind == "channels_last":
        made = [w.to(memory_format=torch.channels_last) if w.dim() == 4 else w for w in made]
    elif kind == "channels_last_ties":
        made = [w.mul(2).round().to(memory_format=torch.channels_last) if w.dim() == 4 else w.round() for w in made]
    return [w.to(dtype) for w in made]


KINDS = ["plain", "ties", "equal", "zeros", "extreme", "channels_last", "channels_last_ties"]


def agrees(kind: str, dtype: torch.dtype, device: str, masked: bool) -> None:
    plain = weights_of(kind, dtype)
    generator = torch.Generator().manual_seed(2)
    masks = [(torch.rand(w.shape, generator=generator) < 0.6) | (w == w.flatten()[0]) if masked else None
             for w in plain]  # fmt: skip
    masks = [
        m if m is None else torch.empty_like(w, dtype=torch.bool).copy_(m) for m, w in zip(masks, plain, strict=True)
    ]
    for share in (0.0, 0.1, 0.5, 1.0):
        counts = [int(share * (w.numel() if m is None else int(m.sum()))) for w, m in zip(plain, masks, strict=True)]
        expected = [edges.real_edges(w, k, m) for w, k, m in zip(plain, counts, masks, strict=True)]
        weights = [w.to(device) for w in plain]
        allowed = [m if m is None else m.to(device) for m in masks]
        ks = [torch.tensor(k, device=device) for k in counts]
        flat = many.real_edges(weights, ks, allowed, edges._begins(weights))
        begins = edges._begins(weights)
        assert len(flat) == begins[-1]
        for w, begin, want in zip(weights, begins, expected, strict=False):
            got = flat[begin : begin + w.numel()].as_strided(w.shape, w.stride()).cpu()
            bits = torch.int32 if dtype == torch.float32 else torch.int16
            assert torch.equal(got.contiguous().view(bits), want.contiguous().view(bits))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_in_the_interpreter(kind: str, dtype: torch.dtype, masked: bool) -> None:
    agrees(kind, dtype, "cpu", masked)


@on_gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(kind: str, dtype: torch.dtype, masked: bool) -> None:
    agrees(kind, dtype, "cuda", masked)


@on_gpu
def test_large_weights_and_many_of_them_on_a_gpu() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(n, device="cuda") for n in (3_000_000, 5, 700_001, *range(1000, 1060))]
    weights.append(torch.randn(512, 512, 3, 3, device="cuda").to(memory_format=torch.channels_last))
    weights.append(weights[-1].mul(100).round().div(100))
    ks = [torch.tensor(w.numel() // 10, device="cuda") for w in weights]
    flat = many.real_edges(weights, ks, [None] * len(weights), edges._begins(weights))
    for w, k, begin in zip(weights, ks, edges._begins(weights), strict=False):
        got = flat[begin : begin + w.numel()].as_strided(w.shape, w.stride())
        assert torch.equal(got, edges.real_edges(w, k))


@on_gpu
def test_a_captured_choice_sees_new_weights_and_budgets() -> None:
    weights = [torch.randn(5000, device="cuda"), torch.randn(40, 50, device="cuda")]
    ks = [torch.tensor(500, device="cuda"), torch.tensor(7, device="cuda")]
    call = lambda: many.real_edges(weights, ks, [None, None], edges._begins(weights))  # noqa: E731
    call()
    with without_waiting():
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flat = call()
    weights[0].normal_()
    ks[1].fill_(300)
    graph.replay()
    begin = edges._begins(weights)[1]
    assert torch.equal(flat[:5000], edges.real_edges(weights[0], 500))
    assert torch.equal(flat[begin : begin + 2000].view(40, 50), edges.real_edges(weights[1], 300))


@on_gpu
def test_the_table_of_a_captured_choice_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "_tables", {})
    monkeypatch.setattr(many, "_captured", {})
    weights = [torch.randn(1000, device="cuda") for _ in range(70)]
    k, graph = torch.tensor(100, device="cuda"), torch.cuda.CUDAGraph()

    def choose(weight: Tensor) -> Tensor:
        return many.real_edges([weight], [k], [None], edges._begins([weight]))

    choose(weights[0])
    with torch.cuda.graph(graph):
        kept = choose(weights[0])
    (table,) = [held for held, _ in many._tables.values()]
    for other in weights[1:]:
        choose(other)
    assert all(held is not table for held, _ in many._tables.values())  # not in the cache, but used by the graph
    assert [held for held, _ in many._captured.values()] == [table]
    weights[0].normal_()
    graph.replay()
    assert torch.equal(kept[:1000], edges.real_edges(weights[0], 100))
    choose(weights[0])
    assert any(held is table for held, _ in many._tables.values())
