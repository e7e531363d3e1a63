"""Batches of sentence pairs: their shapes, labels and order."""

from typing import Any

import numpy as np
import pytest
import torch
from kernels import without_waiting

from wirings import WiringError
from wirings.models.seq2seq import END, PAD, START
from wirings.train.data.pair_loader import IGNORED, PairLoader

SOURCE = [[3], [4, 5, 6, 7], [8, 9], [10], [11, 12]]
TARGET = [[13, 14], [15], [16], [17, 18, 19, 20, 21], [22, 23]]


def loader(**options: Any) -> PairLoader:
    return PairLoader(SOURCE, TARGET, **{"lengths": (3, 6), "batch": 4, **options})


def test_batches_are_pairs_with_the_targets_next_tokens() -> None:
    (x, y), (long_x, long_y) = loader().epoch(0)
    assert x.tolist() == [
        [[3, END, PAD], [START, 13, 14]],
        [[8, 9, END], [START, 16, END]],
        [[11, 12, END], [START, 22, 23]],
        [[END, PAD, PAD], [START, PAD, PAD]],  # fills the batch up
    ]
    assert y.tolist() == [[13, 14, END], [16, END, IGNORED], [22, 23, END], [IGNORED] * 3]
    assert long_x.tolist() == [
        [[4, 5, 6, 7, END, PAD], [START, 15, END, PAD, PAD, PAD]],
        [[10, END, PAD, PAD, PAD, PAD], [START, 17, 18, 19, 20, 21]],
    ]
    assert long_y.tolist() == [[15, END, *[IGNORED] * 4], [17, 18, 19, 20, 21, END]]
    assert x.dtype == y.dtype == torch.int64


def many(**options: Any) -> PairLoader:
    random = np.random.default_rng(0)
    sides = [[list(random.integers(3, 99, n)) for n in random.integers(1, 12, 50)] for _ in range(2)]
    return PairLoader(*sides, **{"lengths": (6, 12), "batch": 8, "shuffle": True, **options})


def test_every_epoch_has_all_pairs_once_in_a_new_order() -> None:
    data = many()
    orders = [np.concatenate(data.draw(number)) for number in (0, 1)]
    for order in orders:
        assert sorted(order[order < 50]) == list(range(50))
    assert not np.array_equal(*orders)
    assert np.array_equal(orders[0], np.concatenate(many().draw(0)))
    assert not np.array_equal(orders[0], np.concatenate(many(seed=1).draw(0)))
    assert len(data) == len(data.sizes()) == len(data.draw(0))
    assert set(data.sizes()) == {8, 4}
    assert data.sizes() != sorted(data.sizes())  # lengths are mixed


def test_an_epoch_continues_where_it_is_started() -> None:
    whole = list(many().epoch(3))
    rest = list(many().epoch(3, 5))
    assert len(rest) == len(whole) - 5
    for (x, y), (same_x, same_y) in zip(rest, whole[5:], strict=True):
        assert torch.equal(x, same_x)
        assert torch.equal(y, same_y)


def test_ranks_share_every_batch() -> None:
    ranks = [list(many(rank=rank, world=2).epoch(1)) for rank in range(2)]
    for (x, y), (a, b) in zip(many().epoch(1), zip(*ranks, strict=True), strict=True):
        assert torch.equal(x, torch.cat([a[0], b[0]]))
        assert torch.equal(y, torch.cat([a[1], b[1]]))


def test_only_one_epoch_is_read_at_a_time() -> None:
    data = many()
    first = data.epoch(0)
    next(first)
    data.epoch(1)
    with pytest.raises(WiringError, match="another epoch was started while epoch 0 was being read"):
        next(first)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": (6, 3)}, r"data\.options\.lengths must be increasing integers above 1, got \(6, 3\)"),
        ({"lengths": ()}, r"data\.options\.lengths must be increasing integers above 1, got \(\)"),
        ({"lengths": (3, 5)}, r"ends with 5, but a sentence has 6 tokens with its end\. Append a larger length"),
        ({"batch": 1}, r"batch = 1 is too small for pairs of the lengths 3, 6: .* of 1, 0 pairs"),
    ],
)
def test_rejects_lengths_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(WiringError, match=message):
        loader(**options)


@pytest.mark.gpu
def test_captured_graphs_see_new_pairs_at_every_replay() -> None:
    data = many(device="cuda")
    data.begin(0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for size in data.sizes():
            data.next(size)
    torch.cuda.current_stream().wait_stream(stream)
    graphs, batches = {}, {}
    for size in set(data.sizes()):
        graphs[size] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[size]):
            batches[size] = data.next(size)
    for number, start in ((0, 0), (1, 0), (1, 4)):
        data.begin(number, start)
        for size, (x, y) in zip(data.sizes()[start:], many().epoch(number, start), strict=True):
            graphs[size].replay()
            assert torch.equal(batches[size][0].cpu(), x)
            assert torch.equal(batches[size][1].cpu(), y)


@pytest.mark.gpu
def test_the_host_never_waits() -> None:
    data = many(device="cuda")
    data.begin(0)
    with without_waiting():
        data.next(8)
