"""Lists of blocks by row and by column, compared with loops over a mask."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from wirings import WiringError
from wirings.wire.block_products.layout import BlockLayout

MASKS = st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**36 - 1)).map(
    lambda drawn: torch.tensor([drawn[2] >> i & 1 for i in range(drawn[0] * drawn[1])]).bool().view(*drawn[:2])
)


def naive(mask: Tensor, group: int = 1) -> tuple[list[int], list[int]]:
    offsets, indices = [0], []
    for first in range(0, len(mask), group):
        indices += [c for c in range(mask.shape[1]) if any(mask[r, c] for r in range(first, first + group))]
        offsets.append(len(indices))
    return offsets, indices


@given(MASKS)
def test_lists(mask: Tensor) -> None:
    layout = BlockLayout(mask, 16)
    for by_column, side in ((False, mask), (True, mask.T)):
        for group in (g for g in (1, 2, 3) if len(side) % g == 0):
            offsets, indices = (part.tolist() for part in layout.lists(by_column=by_column, group=group))
            expected, columns = naive(side, group)
            assert offsets == expected
            assert indices[: len(columns)] == columns
    assert layout.places().tolist() == mask.nonzero().tolist()


@given(MASKS, st.integers(1, 4))
def test_runs_cover_each_block_once(mask: Tensor, size: int) -> None:
    layout = BlockLayout(mask, 16)
    runs = [run for run in layout.runs(size).tolist() if run[1] < run[2]]
    expected = []
    for row, (begin, end) in enumerate(zip(naive(mask)[0], naive(mask)[0][1:], strict=False)):
        expected += [[row, first, min(first + size, end)] for first in range(begin, end, size)]
    assert runs == expected


def test_layout_of_a_weight() -> None:
    weight = torch.zeros(32, 48)
    weight[17, 33] = weight[0, 0] = 1
    layout = BlockLayout.of_weight(weight, 16)
    assert layout.mask.tolist() == [[True, False, False], [False, False, True]]
    assert (layout.shape, layout.blocks, str(layout)) == ((32, 48), 2, "BlockLayout(2 of 6 blocks of 16 x 16)")
    assert torch.equal(layout.spread()[::16, ::16], layout.mask)
    assert layout.spread().shape == (32, 48)


def test_a_wrong_number_of_blocks_stays_in_bounds() -> None:
    layout = BlockLayout(torch.ones(3, 3, dtype=torch.bool), 16, blocks=4)
    offsets, indices = layout.lists()
    assert len(indices) == 4
    assert offsets.max() == 4
    assert layout.runs(2)[:, 2].max() <= 4


def test_rejects_masks_and_weights_that_do_not_fit() -> None:
    with pytest.raises(WiringError, match=r"bool mask of shape \(rows, columns\) of blocks, got torch.float32"):
        BlockLayout(torch.ones(2, 2), 16)
    with pytest.raises(WiringError, match=r"blocks of 32 x 32 do not divide a weight of shape \(32, 48\)"):
        BlockLayout.of_weight(torch.zeros(32, 48), 32)
