"""Transposable N:M: every tile has the best of all its patterns, as a search in Python's fractions finds it."""

import functools
import itertools
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from largest_tensor import LargestTensor
from test_groups import layouts, places
from torch import Tensor, nn

import wirings
from wirings import WiringError
from wirings.selection import tile_patterns
from wirings.selection.structure import Structure
from wirings.selection.tile_patterns import choose_tiles, patterns, tile_thresholds
from wirings.selection.transposable_groups import TransposableGroups
from wirings.selection.weight_layout import WeightLayout

Mask = tuple[tuple[int, ...], ...]


def matrix(rows: int, columns: int | None = None) -> WeightLayout:
    return WeightLayout((rows, columns or rows), ("out", "in"))


@functools.cache
def all_masks(n: int, m: int) -> list[Mask]:
    """All m × m masks with n edges in every row and column, those with earlier edges first."""
    rows = list(itertools.product((1, 0), repeat=m))
    masks = itertools.product(rows, repeat=m)
    return [one for one in masks if all(sum(line) == n for line in (*one, *zip(*one, strict=True)))]


def naive(tile: Tensor, n: int) -> Mask:
    """The first of the masks with the largest sum of magnitudes, exactly."""
    size = [[Fraction(abs(float(value))) for value in row] for row in tile]

    def total(mask: Mask) -> Fraction:
        return sum((size[i][j] for i, row in enumerate(mask) for j, bit in enumerate(row) if bit), Fraction(0))

    return max(all_masks(n, len(tile)), key=total)  # the first of equal ones


@pytest.mark.parametrize(("m", "counts"), [(1, [1, 1]), (2, [1, 2, 1]), (3, [1, 6, 6, 1]), (4, [1, 24, 90, 24, 1])])
def test_all_patterns(m: int, counts: list[int]) -> None:
    for n, count in enumerate(counts):
        found = [tuple(tuple(row >> column & 1 for column in range(m)) for row in one) for one in patterns(n, m)]
        assert len(found) == count
        assert found == all_masks(n, m)


def test_by_hand() -> None:
    weight = torch.tensor([[9.0, 8, 7, 0], [9, 8, 7, 0], [0, 1, 0, 1], [1, 0, 1, -5]])
    groups = TransposableGroups(matrix(4), 4)
    assert groups.choose(weight, 2, None, None).int().tolist() == [
        [1, 1, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 1],
        [0, 0, 1, 1],
    ]
    assert groups.choose(weight, 1, None, None).int().tolist() == [  # 9 + 8, not 8 + 9
        [1, 0, 0, 0],
        [0, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 0, 1],
    ]
    greedy = torch.tensor([[10.0, 9], [9, 1]])  # the largest weight is not in the best pattern
    assert TransposableGroups(matrix(2), 2).choose(greedy, 1, None, None).tolist() == [[False, True], [True, False]]


def test_equal_weights_go_by_position() -> None:
    groups = TransposableGroups(matrix(4, 8), 4)
    for weight in (torch.zeros(4, 8), -torch.ones(4, 8)):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            real = groups.choose(weight.to(dtype), 2, None, None)
            assert real.int().tolist() == [[1, 1, 0, 0] * 2] * 2 + [[0, 0, 1, 1] * 2] * 2
            first = groups.choose(weight.to(dtype), 1, None, None)
            assert first.nonzero()[:, 1].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_equals_a_naive_reference(data: Any) -> None:
    layout = layouts(data.draw)
    _, outputs, inputs = layout.matrices
    m = data.draw(st.sampled_from([d for d in range(1, 4) if outputs % d == 0 and inputs % d == 0]))
    n = data.draw(st.integers(0, m))
    torch.manual_seed(data.draw(st.integers(0, 10**6)))
    weight = torch.randint(-3, 4, layout.shape).float() if data.draw(st.booleans()) else torch.randn(layout.shape)
    groups = TransposableGroups(layout, m)
    real = groups.choose(weight, n, None, None)
    tiles: dict[Any, list[tuple[int, int, tuple[int, ...]]]] = {}
    for at, (stack, out, into) in places(layout):
        kernel = tuple(x for x, axis in zip(at, layout.axes, strict=True) if axis == "kernel")
        tiles.setdefault((stack, out // m, into // m, kernel), []).append((out % m, into % m, at))
    for members in tiles.values():
        tile = torch.empty(m, m)
        for row, column, at in members:
            tile[row, column] = weight[at]
        expected = naive(tile, n)
        assert all(bool(real[at]) == bool(expected[row][column]) for row, column, at in members)
    assert torch.equal(groups.choose(weight, torch.tensor(n), None, None), real)
    assert int(groups.count(real)) == n
    assert groups.whole(real, None)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_tiles_of_four_equal_a_naive_reference(n: int) -> None:
    torch.manual_seed(n)
    tiles = torch.cat([torch.randn(40, 4, 4), torch.randint(-2, 3, (40, 4, 4)).float()])
    found = choose_tiles(tiles, torch.tensor(n)).int()
    assert [tuple(map(tuple, one.tolist())) for one in found] == [naive(tile, n) for tile in tiles]


def test_the_same_in_every_precision() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 32).bfloat16()
    groups = TransposableGroups(matrix(64, 32), 4)
    real = groups.choose(weight, 2, None, None)
    assert torch.equal(groups.choose(weight.float(), 2, None, None), real)
    assert torch.equal(groups.choose(weight.double(), 2, None, None), real)
    assert torch.equal(groups.choose(weight.t().contiguous().t(), 2, None, None), real), "memory does not matter"


def test_infinities_and_nan_are_chosen_first() -> None:
    inf, nan, large = float("inf"), float("nan"), 1e308
    groups = TransposableGroups(matrix(2), 2)

    def diagonal(rows: list[list[float]], dtype: torch.dtype = torch.float64) -> bool:
        return bool(groups.choose(torch.tensor(rows, dtype=dtype), 1, None, None)[0, 0])

    assert diagonal([[1.0, 0.0], [0.0, 1.0]])
    assert not diagonal([[large, large], [-inf, 0.0]])
    assert not diagonal([[inf, nan], [0.0, inf]])
    assert not diagonal([[3.0, inf], [inf, inf]]), "two infinities are more than one"
    assert not diagonal([[3.0, inf], [1.0, 3.0]], torch.float16)
    assert diagonal([[nan, inf], [inf, 0.0]], torch.bfloat16)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 4), st.integers(0, 4))
def test_smaller_wirings_within_larger_ones(seed: int, first: int, second: int) -> None:
    torch.manual_seed(seed)
    n, more = sorted((first, second))
    groups, weight = TransposableGroups(matrix(8), 4), torch.randn(8, 8)
    larger = groups.choose(torch.randn(8, 8), more, None, None)
    real = groups.choose(weight, n, larger, None)
    assert not (real & ~larger).any()
    assert (int(groups.count(real)), groups.whole(real, None)) == (n, True)
    for tile, inside, found in zip(*map(groups._tiles, (weight, larger, real)), strict=True):
        masks = [mask for mask in all_masks(n, 4) if not (torch.tensor(mask).bool() & ~inside).any()]
        best = max(float((tile.abs() * torch.tensor(mask)).sum()) for mask in masks)
        assert float((tile.abs() * found).sum()) == pytest.approx(best), "nothing within is better"
    others = groups.choose(weight, 4 - more, ~larger, None)
    assert torch.equal(others, ~larger), "what is left is N:M too"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 4))
def test_a_superset_has_the_real_edges(seed: int, n: int, least: int) -> None:
    torch.manual_seed(seed)
    groups, weight = TransposableGroups(matrix(8), 4), torch.randn(8, 8)
    real = groups.choose(weight, n, None, None)
    more = groups.choose_more(weight, torch.tensor(n), least, None, None)
    assert not (real & ~more).any()
    assert (int(groups.count(more)), groups.whole(more, None)) == (max(n, least), True)
    assert torch.equal(groups.choose_more(weight, torch.tensor(n), least, torch.ones(8, 8).bool(), None), more)


def test_completes_what_is_there() -> None:
    groups = TransposableGroups(matrix(4), 4)
    start = torch.zeros(4, 4, dtype=torch.bool)
    start[0, 3] = start[1, 2] = True
    whole = groups.complete(start, 2, None)
    assert (int(groups.count(whole)), groups.whole(whole, None)) == (2, True)
    assert not (start & ~whole).any()
    assert torch.equal(groups.complete(whole, 2, None), whole)
    start[:3, 3] = True  # a column of three
    whole = groups.complete(start, torch.tensor(2), None)
    assert (int(groups.count(whole)), groups.whole(whole, None)) == (3, True)
    start[:, 0] = True  # a column and a node with all: nothing less than everything has them
    assert groups.complete(start, 2, None).all()
    assert not groups.whole(start, None)
    rows_only = torch.tensor([[True, True, False, False]]).expand(4, 4)
    assert not groups.whole(rows_only, None), "2:4 along inputs alone"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.floats(0, 1))
def test_exchanges_units_of_the_weakest_tiles(seed: int, n: int, rate: float) -> None:
    torch.manual_seed(seed)
    groups, weight, scores = TransposableGroups(matrix(8, 16), 4), torch.randn(8, 16), torch.rand(8, 16)
    wiring = groups.choose(weight, n, None, None)
    kept, now = groups.exchange(weight, wiring, ~wiring, n, rate, lambda: scores, None)
    units = int(rate * n * 8 + 1e-6)
    lost = wiring & ~kept
    assert int(lost.sum()) == 4 * min(units, 8)
    assert torch.equal(now & wiring, kept), "what is lost does not come back"
    assert (int(groups.count(now)), groups.whole(now, None)) == (n, True)
    tiles = groups._tiles(lost)
    gone = tiles.any(2).any(1)
    assert (tiles[gone].sum(1) == 1).all()
    assert (tiles[gone].sum(2) == 1).all()
    unit = groups.choose(weight, n - 1, wiring, None)
    weakest = groups._tiles(weight.abs() * (wiring & ~unit)).sum((1, 2))
    if gone.any() and not gone.all():
        assert weakest[gone].max() <= weakest[~gone].min()
    grown = now & ~wiring
    best = groups.choose(scores, 1, ~wiring, None)
    assert torch.equal(groups._tiles(grown)[gone], groups._tiles(best)[gone]), "the best unit of others grows"


def test_lost_edges_come_back_where_no_others_may_grow() -> None:
    groups = TransposableGroups(matrix(2), 2)
    weight = torch.eye(2)
    wiring, none = weight.bool(), torch.zeros(2, 2, dtype=torch.bool)
    kept, now = groups.exchange(weight, wiring, none, 1, 1.0, lambda: torch.rand(2, 2), None)
    assert torch.equal(now, wiring)
    assert torch.equal(kept, wiring)
    same = groups.exchange(weight, wiring, ~wiring, torch.tensor(1), 1.0, lambda: None, None)
    assert all(torch.equal(mask, wiring) for mask in same)


def test_thresholds_are_where_the_pattern_changes() -> None:
    torch.manual_seed(0)
    tiles = torch.randn(20, 4, 4).double()
    real, thresholds = (f(tiles, torch.tensor(2)) for f in (choose_tiles, tile_thresholds))
    assert torch.equal(thresholds[~real], tiles.abs()[~real])
    assert (thresholds <= tiles.abs()).all()
    changed = 0
    for tile, mask, threshold in zip(tiles, real, thresholds, strict=True):
        for at in mask.nonzero().tolist():
            row, column = at
            t = float(threshold[row, column])
            for size, stays in ((t + 1e-9, True), (t - 1e-9, False)):
                if size >= 0:
                    moved = tile.clone()
                    moved[row, column] = size
                    again = choose_tiles(moved[None], torch.tensor(2))[0]
                    assert bool(again[row, column]) is stays
                    changed += not stays
    assert changed > 20
    assert not tile_thresholds(tiles, torch.tensor(4)).any(), "with all edges, nothing is shrunk"


def test_a_soft_threshold_changes_the_output_continuously() -> None:
    """While weights move, edges leave and enter a tile at zero, as with free edges."""
    torch.manual_seed(3)
    model = nn.Linear(4, 4, bias=False)
    wiring = wirings.wire_(model, wirings.rules.SoftThreshold("soft"), structure="2:4, transposable")
    weight, (start, end) = wiring.layers[0].weight, torch.randn(2, 4, 4)
    used, masks, step = [], [], 1e-3
    for part in torch.arange(0, 1, step):
        with torch.no_grad():
            weight.copy_(start.lerp(end, part))
        used.append(model.weight.detach().clone())
        masks.append(wiring.masks()["weight"])
    assert sum(not torch.equal(a, b) for a, b in itertools.pairwise(masks)) >= 3
    largest = max(float((a - b).abs().max()) for a, b in itertools.pairwise(used))
    assert largest < 16.1 * step * float((end - start).abs().max()), "a difference of two sums of eight weights"


def test_large_weights_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    values, k = torch.randn(10_000, 4, 4), torch.tensor(2)
    expected = choose_tiles(values, k), tile_thresholds(values, k)
    monkeypatch.setitem(tile_patterns._TILES, "cpu", 100)
    with LargestTensor() as largest:
        found = tile_patterns._choose_tiles(values, k, None), tile_patterns._tile_thresholds(values, k, None)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert largest.entries == values.numel(), "nothing is larger than the weight"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_gpu_chooses_the_same(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tiles = torch.cat([torch.randn(70_000, 4, 4), torch.randint(-2, 3, (1000, 4, 4)).float()]).to(dtype)
    there, rank = tiles.cuda(), torch.rand(tiles.shape) < 0.5
    for n in range(5):
        k = torch.tensor(n)
        assert torch.equal(choose_tiles(there, k.cuda()).cpu(), choose_tiles(tiles, k))
        assert torch.equal(choose_tiles(there, k.cuda(), rank.cuda()).cpu(), choose_tiles(tiles, k, rank))
        assert torch.equal(tile_thresholds(there, k.cuda()).cpu(), tile_thresholds(tiles, k))
    k, graph = torch.tensor(1, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        real = choose_tiles(there, k)
    for n in (2, 3):
        k.fill_(n)
        graph.replay()
        assert torch.equal(real.cpu(), choose_tiles(tiles, torch.tensor(n)))


def test_gradients_reach_unselected_edges() -> None:
    model = nn.Linear(8, 4, bias=False)
    wiring = wirings.wire_(model, "dnw", structure="2:4, transposable")
    x = torch.randn(3, 8)
    model(x).sum().backward()
    weight = wiring.layers[0].weight
    torch.testing.assert_close(weight.grad, x.sum(0).expand(4, 8))
    finished = wirings.finalize_(model).weight.detach()
    assert (finished.count_nonzero(0) == 2).all()
    assert (finished.view(4, 2, 4).count_nonzero(2) == 2).all()


@pytest.mark.parametrize(
    ("layer", "structure", "says"),
    [
        (nn.Linear(8, 6), "2:4, transposable", r"2 of every 4 inputs of a node and 2 of every 4 outputs of an input, "
         r"but weight of shape \(6, 8\) has 6 outputs, which is not a multiple of 4. Leave .* skip=\['weight'\]"),
        (nn.Linear(6, 8), "2:4, transposable", r"weight of shape \(8, 6\) has 6 inputs, which is not a multiple of 4"),
        (nn.Conv2d(8, 8, 1, groups=4), "2:4, transposable", r"each of the 4 groups of weight .* has 2 inputs"),
        (nn.Linear(8, 8), "4:8, transposable", r'M may be at most 4, got 8. Use "2:4, transposable", or "4:8" for'),
        (nn.Linear(8, 8), "5:4, transposable", r"N must be from 1 to M, got N = 5 and M = 4"),
    ],
)  # fmt: skip
def test_rejects(layer: nn.Module, structure: str, says: str) -> None:
    with pytest.raises(WiringError, match=says):
        wirings.wire_(layer, structure=structure)


def test_reads() -> None:
    made = Structure.of("2:4,transposable")
    assert made is not None
    assert (made.text, made.nm, made.transposable, made.fixed) == ("2:4, transposable", (2, 4), True, 0.5)
    assert Structure.of(made.text) == made
