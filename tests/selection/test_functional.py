"""The primitive: exactly k edges by magnitude, ties by position; gradients to all edges, and through real ones only."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import wirings
from wirings.selection import functional as edges
from wirings.selection.functional import choose, real_edges, straight_through

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INF, NAN = math.inf, math.nan


def by_sorting(weight: Tensor, k: int, allowed: Tensor | None = None) -> Tensor:
    """The definition in plain Python: by magnitude, NaN above infinity, ties by position."""
    values = weight.double().reshape(-1).abs().tolist()
    may = [True] * len(values) if allowed is None else allowed.reshape(-1).tolist()

    def rank(i: int) -> tuple[int, float, int]:
        return (0, 0.0, i) if math.isnan(values[i]) else (1, -values[i], i)

    chosen = sorted((i for i in range(len(values)) if may[i]), key=rank)[:k]
    mask = torch.zeros(len(values), dtype=torch.bool)
    mask[chosen] = True
    return mask.view(weight.shape)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, int, Tensor | None]:
    shape = draw(st.sampled_from([(1,), (7,), (3, 5), (4, 3, 2, 2), (2, 3, 2, 2, 2), (6, 1)]))
    n = math.prod(shape)
    number = st.one_of(
        st.floats(width=16, allow_nan=False),
        st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, INF, -INF]),  # so that ties are common
    )
    weight = torch.tensor(draw(st.lists(number, min_size=n, max_size=n))).view(shape).to(draw(st.sampled_from(DTYPES)))
    if weight.dim() == 4 and draw(st.booleans()):
        weight = weight.contiguous(memory_format=torch.channels_last)
    elif weight.dim() == 2:
        change = draw(st.sampled_from([lambda w: w, torch.t, lambda w: w[:, ::2], lambda w: w[:1].expand(w.shape)]))
        weight = change(weight)
    n = weight.numel()
    allowed = None
    if draw(st.booleans()):
        allowed = torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n))).view(weight.shape)
    most = n if allowed is None else int(allowed.sum())
    return weight, draw(st.integers(0, most)), allowed


@given(cases())
def test_exactly_k_by_definition(case: tuple[Tensor, int, Tensor | None]) -> None:
    weight, k, allowed = case
    expected = by_sorting(weight, k, allowed)
    assert torch.equal(choose(weight, k, allowed), expected)
    assert int(choose(weight, k, allowed).sum()) == k
    kept = real_edges(weight, k, allowed)
    assert torch.equal(kept, torch.where(expected, weight, 0.0))
    layout = [
        (a, b) for a, b, n in zip(kept.stride(), torch.empty_like(weight).stride(), weight.shape, strict=True) if n > 1
    ]
    assert all(a == b for a, b in layout), "memory format kept"
    # The fallback for other devices gives the same result, bit for bit.
    assert torch.equal(edges._choose_device(weight, torch.tensor(k), allowed), expected)
    assert torch.equal(edges._real_edges_device(weight, torch.tensor(k), allowed), kept)


@pytest.mark.parametrize(
    ("weight", "k", "expected"),
    [
        ([[3.0, -1.0], [-2.0, 2.0]], 1, [[1, 0], [0, 0]]),
        ([[3.0, -1.0], [-2.0, 2.0]], 2, [[1, 0], [1, 0]]),  # |-2| = |2|: the earlier one
        ([[3.0, -1.0], [-2.0, 2.0]], 0, [[0, 0], [0, 0]]),
        ([[3.0, -1.0], [-2.0, 2.0]], 4, [[1, 1], [1, 1]]),
        ([[5.0, 5.0], [5.0, 5.0]], 3, [[1, 1], [1, 0]]),
        ([[0.0, -0.0], [0.0, 1.0]], 2, [[1, 0], [0, 1]]),
        ([[-INF, 1.0], [INF, 7.0]], 1, [[1, 0], [0, 0]]),
        ([[INF, 1.0], [NAN, 7.0]], 1, [[0, 0], [1, 0]]),  # so that a NaN shows in the loss
    ],
)
def test_by_hand(weight: list[list[float]], k: int, expected: list[list[int]]) -> None:
    assert choose(torch.tensor(weight), k).int().tolist() == expected


@pytest.mark.filterwarnings("ignore:.*(nested tensors|Sparse CSR):UserWarning")
@pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr", "nested"])
def test_refuses_weights_that_are_not_dense(kind: str) -> None:
    x = torch.eye(3)
    weight = {
        "sparse_coo": x.to_sparse,
        "sparse_csr": x.to_sparse_csr,
        "nested": lambda: torch.nested.nested_tensor([x[0], x[1]]),
    }[kind]()
    for function in (choose, real_edges):
        with pytest.raises(wirings.WiringError, match=f"ranked in dense tensors, got a {kind} one"):
            function(weight, 1)


def test_allowed_by_hand() -> None:
    weight = torch.tensor([[9.0, 1.0], [8.0, 2.0]])
    allowed = torch.tensor([[False, True], [True, True]])
    assert choose(weight, 2, allowed).int().tolist() == [[0, 0], [1, 1]]
    weight.requires_grad_()
    real_edges(weight, 1, allowed).sum().backward()
    assert weight.grad.tolist() == [[0.0, 1.0], [1.0, 1.0]], "the gradient reaches allowed edges only"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_edges_with_ties_in_any_memory_format(dtype: torch.dtype) -> None:
    """Large enough for ties at the boundary in every half-precision weight, in rows and in channels_last."""
    rows = torch.randn(64, 32, 3, 3).to(dtype)
    last = rows.contiguous(memory_format=torch.channels_last)
    for k in (1, 1843, 9216, 18431):
        mask = choose(rows, k)
        assert int(mask.sum()) == k
        assert torch.equal(mask, edges._choose_device(rows, torch.tensor(k), None))
        assert torch.equal(choose(last, k), mask)
        assert torch.equal(real_edges(last, k), torch.where(mask, rows, 0.0))
        assert real_edges(last, k).is_contiguous(memory_format=torch.channels_last)


@given(st.integers(0, 12), st.integers(0, 1000))
def test_the_gradient_reaches_all_edges_and_flows_through_real_ones(k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(3, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    x = torch.randn(5, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    seen = torch.randn(5, 3, dtype=torch.float64, generator=generator)
    (x @ real_edges(w, k).T * seen).sum().backward()
    torch.testing.assert_close(w.grad, seen.T @ x.detach())  # <Z_u, dL/dI_v>, whether the edge is real or not
    torch.testing.assert_close(x.grad, seen @ torch.where(by_sorting(w.detach(), k), w.detach(), 0.0))


def test_straight_through_by_hand() -> None:
    w = torch.tensor([3.0, -1.0, 2.0], requires_grad=True)
    real, reach = torch.tensor([True, False, False]), torch.tensor([True, True, False])
    out = straight_through(w, real, reach)
    assert out.tolist() == [3.0, 0.0, 0.0]
    (out * torch.tensor([5.0, 6.0, 7.0])).sum().backward()
    assert w.grad.tolist() == [5.0, 6.0, 0.0]


def test_k_may_be_a_tensor_that_changes() -> None:
    w, k = torch.randn(40), torch.tensor(3)
    compiled = torch.compile(lambda w: real_edges(w, k), backend="aot_eager", fullgraph=True)
    assert int(compiled(w).count_nonzero()) == 3
    k.fill_(7)
    assert int(compiled(w).count_nonzero()) == 7


def test_compiles_as_one_graph() -> None:
    def loss(w: Tensor, x: Tensor, allowed: Tensor) -> Tensor:
        return (x @ real_edges(w, 5).T).square().sum() + straight_through(w, choose(w, 3, allowed), allowed).sum()

    x, allowed = torch.randn(2, 6), torch.rand(4, 6) < 0.7
    w1 = torch.randn(4, 6, requires_grad=True)
    w2 = w1.detach().clone().requires_grad_()
    loss(w1, x, allowed).backward()
    torch.compile(loss, backend="aot_eager", fullgraph=True)(w2, x, allowed).backward()
    assert torch.equal(w1.grad, w2.grad)


def test_operators_are_well_behaved() -> None:
    """PyTorch's own checks of a custom operator: its schema, its fake version, autograd registration."""
    allowed = torch.rand(4, 6) < 0.7
    for operator in (torch.ops.wirings.choose.default, torch.ops.wirings.real_edges.default):
        for weight in (torch.randn(4, 6), torch.randn(6, 4).t(), torch.randn(4, 6).bfloat16()):
            for mask in (None, allowed):
                results = torch.library.opcheck(operator, (weight, torch.tensor(5), mask))
                assert set(results.values()) == {"SUCCESS"}


def test_under_autocast() -> None:
    w, x = torch.randn(8, 16, requires_grad=True), torch.randn(4, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = torch.nn.functional.linear(x, real_edges(w, 10))
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert w.grad.dtype == torch.float32
    assert int(w.grad.count_nonzero()) == w.numel()


def test_under_torch_func() -> None:
    def loss(w: Tensor) -> Tensor:
        return real_edges(w, 3).square().sum() / 2

    ws = torch.randn(4, 6)
    each = torch.stack([real_edges(w, 3) for w in ws])
    assert torch.equal(torch.func.grad(loss)(ws[0]), each[0])
    assert torch.equal(torch.vmap(torch.func.grad(loss))(ws), each), "every member of a batch has k edges of its own"
    assert torch.equal(torch.vmap(lambda w: choose(w, 3))(ws), each != 0)
    assert torch.equal(torch.vmap(real_edges, in_dims=(1, None), out_dims=1)(ws.T, 3), each.T)


def test_second_derivative() -> None:
    w = torch.tensor([3.0, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(real_edges(w, 2).pow(3).sum(), w, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), w)
    assert second.tolist() == [18.0, 0.0, 12.0]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda w: choose(w, -1), "between 0 and the 6 edges"),
        (lambda w: real_edges(w, 7), "between 0 and the 6 edges"),
        (lambda w: choose(w.int(), 1), "got torch.int32"),
        (lambda w: choose(w, 1, torch.ones(3, 2, dtype=torch.bool)), r"boolean mask of the weight's shape \(2, 3\)"),
        (lambda w: choose(w, 1, torch.ones(2, 3)), "torch.float32"),
        (lambda w: choose(w, 3, torch.eye(2, 3).bool()), "only 2 are allowed"),
    ],
)
def test_mistakes(call: object, says: str) -> None:
    with pytest.raises(wirings.WiringError, match=says):
        call(torch.randn(2, 3))  # type: ignore[operator]


@pytest.mark.parametrize("k", [1.5, 2.0, True, torch.tensor(1.5), "3", None, [1], {}, 1j])
def test_rejects_counts_that_are_not_integers(k: Any) -> None:
    with pytest.raises(wirings.WiringError, match="k must be an int or an integer scalar tensor, got"):
        choose(torch.randn(10), k)


def test_an_empty_weight_has_no_edges() -> None:
    assert choose(torch.zeros(0), 0).shape == (0,)
    assert choose(torch.zeros(0, 3), 0).shape == (0, 3)
    with pytest.raises(wirings.WiringError, match="k must be between 0 and the 0 edges"):
        choose(torch.zeros(0), 1)
