"""Structures: how they are written, and that groups are chosen as a naive implementation chooses them."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from largest_tensor import LargestTensor
from torch import Tensor

from wirings import WiringError
from wirings.selection.block_groups import BlockGroups
from wirings.selection.nm_groups import NMGroups, strongest_of_groups
from wirings.selection.structure import Structure
from wirings.selection.weight_layout import WeightLayout

KERNELS = {0: (), 1: (3,), 2: (2, 3)}


@pytest.mark.parametrize(
    ("text", "nm", "block", "padded"),
    [
        ("2:4", (2, 4), (None, None), False),
        ("3:3", (3, 3), (None, None), False),
        ("32x16", None, (32, 16), False),
        ("5x1, padded", None, (5, 1), True),
        ("5x1,padded", None, (5, 1), True),
        ("row", None, (1, None), False),
        ("column", None, (None, 1), False),
    ],
)
def test_reads(text: str, nm: Any, block: Any, padded: bool) -> None:
    made = Structure.of(text)
    assert made is not None
    assert (made.nm, made.block, made.padded) == (nm, block, padded)
    assert Structure.of(made.text) == made, "it can be written and read again"
    assert Structure.of("free") is None


@pytest.mark.parametrize("text", ["2" + " " * 10**7 + "2", "2" + " " * 10**7 + "x 2", "9" * 10**7 + ":1"])
def test_long_texts_are_refused_at_once(text: str) -> None:
    """A million spaces would take hours: patterns that end in spaces are tried at each of them."""
    with pytest.raises(WiringError, match="structure= expects") as refused:
        Structure.of(text)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("2:0", "N must be from 1 to M, got N = 2 and M = 0"),
        ("0:4", "N must be from 1 to M, got N = 0 and M = 4"),
        ("4:2", "N must be from 1 to M, got N = 4 and M = 2"),
        ("0x3", "at least one output and one input, got 0 and 3"),
        *(
            (bad, 'structure= expects "free", an N:M such as "2:4", a block such as "32x32"')
            for bad in ("32*32", "", None, 4, "2:4, padded", "-1:4", "1.5x2", "rows", "32x32x32", ["2:4"], "9" * 40)
        ),
    ],
)
def test_rejects(given: object, says: str) -> None:
    with pytest.raises(WiringError, match=says):
        Structure.of(given)


def layouts(draw: Any) -> WeightLayout:
    """A layout of random sizes and any order of its axes."""
    outputs, inputs = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    kernel = KERNELS[draw(st.integers(0, 2))]
    pair = (outputs, inputs), ("out", "in")
    if draw(st.booleans()):
        pair = (inputs, outputs), ("in", "out")
    if not kernel and draw(st.booleans()):
        return WeightLayout((draw(st.integers(1, 3)), *pair[0]), ("experts", *pair[1]))
    parts = draw(st.integers(1, 2))
    return WeightLayout((parts * pair[0][0], pair[0][1], *kernel), (*pair[1], *("kernel",) * len(kernel)), parts)


def places(layout: WeightLayout) -> list[tuple[tuple[int, ...], tuple[int, int, int]]]:
    """The position of every edge, with its matrix, output and input."""
    _, outputs, inputs = layout.matrices
    found = []
    for at in itertools.product(*map(range, layout.shape)):
        axes = dict(zip(layout.axes[::-1], at[::-1], strict=True))
        out, into, stack = axes["out"], axes["in"], axes.get("experts", 0)
        if layout.parts > 1:
            stack, within = divmod(at[0], outputs if layout.axes[0] == "out" else inputs)
            out, into = (within, into) if layout.axes[0] == "out" else (out, within)
        found.append((at, (stack, out, into)))
    return found


def naive_blocks(
    layout: WeightLayout, block: tuple[int, int], weight: Tensor, k: int, allowed: Tensor | None
) -> Tensor:
    """The k blocks with the largest root mean square, in Python and double precision."""
    members: dict[tuple[int, int, int], list[tuple[int, ...]]] = {}
    for at, (stack, out, into) in places(layout):
        if allowed is None or allowed[at]:
            members.setdefault((stack, out // block[0], into // block[1]), []).append(at)
    scores = {key: sum(float(weight[at]) ** 2 for at in own) / len(own) for key, own in members.items()}
    first = sorted(scores, key=lambda key: (-scores[key], key))[:k]
    real = torch.zeros(layout.shape, dtype=torch.bool)
    for key in first:
        for at in members[key]:
            real[at] = True
    return real


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_blocks_equal_a_naive_reference(data: Any) -> None:
    layout = layouts(data.draw)
    _, outputs, inputs = layout.matrices
    block = data.draw(st.integers(1, outputs)), data.draw(st.integers(1, inputs))
    torch.manual_seed(data.draw(st.integers(0, 10**6)))
    weight = torch.randn(layout.shape)
    allowed = torch.rand(layout.shape) < 0.6 if data.draw(st.booleans()) else None
    if allowed is not None and not allowed.any():
        allowed.view(-1)[0] = True
    groups = BlockGroups(layout, block, allowed)
    k = data.draw(st.integers(0, groups.possible))
    real = groups.choose(weight, k, allowed, allowed)
    assert torch.equal(real, naive_blocks(layout, block, weight, k, allowed))
    assert int(groups.count(real)) == k
    assert groups.whole(real, allowed)
    everything = groups.choose(weight, groups.possible, allowed, allowed)
    assert int(everything.sum()) == groups.edges
    part = real.clone().reshape(-1)
    part[torch.rand(part.shape) < 0.5] = False
    completed = groups.complete(part.view(real.shape), 0, allowed)
    assert not (completed & ~real).any()
    assert int(groups.count(completed)) == int(groups.count(part.view(real.shape)))


def test_equal_blocks_go_by_position() -> None:
    groups = BlockGroups(WeightLayout((4, 4), ("out", "in")), (2, 2))
    expected = [[True] * 4] * 2 + [[True, True, False, False]] * 2
    assert groups.choose(torch.ones(4, 4), 3, None, None).tolist() == expected
    assert groups.choose(-torch.ones(4, 4).half(), 3, None, None).tolist() == expected


def test_blocks_are_ranked_in_float32() -> None:
    weight = torch.full((2, 64), 1.0).bfloat16()
    weight[1, 0] = 1.0078125  # the next number: in bfloat16 both sums would be equal
    groups = BlockGroups(WeightLayout((2, 64), ("out", "in")), (1, 64))
    assert groups.scores(weight, None).dtype == torch.float32
    assert groups.choose(weight, 1, None, None).any(1).tolist() == [False, True]


def test_smaller_blocks_are_ranked_by_their_root_mean_square() -> None:
    groups = BlockGroups(WeightLayout((1, 3), ("out", "in")), (1, 2))
    assert groups.scores(torch.tensor([[3.0, 4.0, 3.6]]), None).flatten().tolist() == pytest.approx([12.5**0.5, 3.6])
    assert groups.choose(torch.tensor([[3.0, 4.0, 3.6]]), 1, None, None).tolist() == [[False, False, True]]


def test_a_threshold_shrinks_blocks_as_a_whole() -> None:
    groups = BlockGroups(WeightLayout((1, 4), ("out", "in")), (1, 2))
    weight = torch.tensor([[3.0, -4.0, 1.0, 1.0]])
    real = groups.choose(weight, 1, None, None)
    threshold = groups.next_magnitude(weight, real, None, None)
    ratio = 1 / 12.5**0.5  # of the root mean squares
    torch.testing.assert_close(threshold[real], torch.tensor([3 * ratio, 4 * ratio]))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_nm_equals_a_naive_reference(data: Any) -> None:
    layout = layouts(data.draw)
    _, _, inputs = layout.matrices
    m = data.draw(st.sampled_from([d for d in range(1, inputs + 1) if inputs % d == 0]))
    n = data.draw(st.integers(0, m))
    torch.manual_seed(data.draw(st.integers(0, 10**6)))
    weight = torch.randint(-3, 4, layout.shape).float()  # with ties
    members: dict[Any, list[tuple[int, tuple[int, ...]]]] = {}
    for at, (stack, out, into) in places(layout):
        kernel = tuple(x for x, axis in zip(at, layout.axes, strict=True) if axis == "kernel")
        members.setdefault((stack, out, into // m, kernel), []).append((into, at))
    expected = torch.zeros(layout.shape, dtype=torch.bool)
    for own in members.values():
        for _, at in sorted(own, key=lambda one: (-abs(float(weight[one[1]])), one[0]))[:n]:
            expected[at] = True
    groups = NMGroups(layout, m)
    real = groups.choose(weight, n, None, None)
    assert torch.equal(real, expected)
    assert torch.equal(groups.choose(weight, torch.tensor(n), None, None), expected)
    assert int(groups.count(real)) == n
    assert groups.whole(real, None)
    start = torch.rand(layout.shape) < 0.3
    assert not (groups._grouped(groups.complete(start, n, None)).sum(-1) < n).any()


def test_nm_exchanges_edges_within_groups() -> None:
    groups = NMGroups(WeightLayout((2, 4), ("out", "in")), 4)
    weight = torch.tensor([[5.0, 4.0, 0, 0], [1.0, 2.0, 0, 0]])
    wiring, scores = weight != 0, torch.tensor([[0, 0, 1.0, 2.0], [9.0, 9.0, 1.0, 2.0]])
    kept, now = groups.exchange(weight, wiring, ~wiring, 2, 0.5, lambda: scores, None)
    assert kept.tolist() == [[True, True, False, False], [False] * 4], "the weakest of the whole weight go"
    assert now.tolist() == [[True, True, False, False], [False, False, True, True]], "their groups grow as many"
    same = groups.exchange(weight, wiring, ~wiring, 2, 0.5, lambda: None, None)
    assert all(torch.equal(mask, wiring) for mask in same)


@pytest.mark.parametrize(("n", "m"), [(2, 4), (4, 8), (1, 4), (3, 3), (1, 16)])
@pytest.mark.parametrize("shape", [(6, 48), (5, 48, 3, 3), (4, 48, 5), (2, 48, 2, 2, 2)])
def test_every_group_has_n(n: int, m: int, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape)
    real = strongest_of_groups(weight, n, m)
    groups, sizes = (t.movedim(1, -1).reshape(-1, m) for t in (real, weight.abs()))
    assert (groups.sum(1) == n).all()
    weakest = sizes.masked_fill(~groups, float("inf")).amin(1)
    strongest = sizes.masked_fill(groups, 0).amax(1)
    assert (weakest >= strongest).all()


@pytest.mark.parametrize("m", [4, 32, 64, 4096])
def test_nm_groups_of_any_size_take_little_memory(m: int) -> None:
    """On a GPU, for which a device without values stands in here."""
    groups = NMGroups(WeightLayout((4, 8192), ("out", "in")), m)
    with LargestTensor() as largest:
        groups._first(torch.empty(4, 8192, device="meta", dtype=torch.int32), 2, None)
    assert largest.entries <= 32 * 4 * 8192
