"""Lists of blocks by row and by column, compared with loops over a mask."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from wirings import WiringError
from wirings.wire.block_products.layout import BlockLayout, list_blocks, unpack
from wirings.wire.block_products.operators import block_lists, lists_of

MASKS = st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**36 - 1)).map(
    lambda drawn: torch.tensor([drawn[2] >> i & 1 for i in range(drawn[0] * drawn[1])]).bool().view(*drawn[:2])
)


def naive(mask: Tensor) -> tuple[list[int], list[int]]:
    offsets, indices = [0], []
    for row in mask:
        indices += row.nonzero().flatten().tolist()
        offsets.append(len(indices))
    return offsets, indices


def check_lists(mask: Tensor, blocks: int) -> None:
    parts = unpack(block_lists(mask, blocks), *mask.shape)
    count = int(mask.sum())
    assert (parts.row_offsets.tolist(), parts.columns[:count].tolist()) == naive(mask)
    assert (parts.column_offsets.tolist(), parts.column_rows[:count].tolist()) == naive(mask.T)
    assert parts.rows.tolist() == [*mask.nonzero()[:, 0].tolist(), *[-1] * (blocks - count)]


@given(MASKS, st.integers(0, 3))
def test_lists(mask: Tensor, more: int) -> None:
    check_lists(mask, int(mask.sum()) + more)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("shape", [(1, 1), (3, 20), (33, 5)])
def test_lists_of_the_kernel(shape: tuple[int, int]) -> None:
    mask = torch.rand(shape) < 0.3
    mask[0, 0] = True
    check_lists(mask, int(mask.sum()) + 2)
    assert torch.equal(block_lists(mask, 3), list_blocks(mask, 3))


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
    parts = unpack(lists_of(layout), 3, 3)
    assert parts.row_offsets.tolist() == [0, 3, 4, 4]
    assert parts.columns.tolist() == [0, 1, 2, 0]


def test_rejects_masks_and_weights_that_do_not_fit() -> None:
    with pytest.raises(WiringError, match=r"bool mask of shape \(rows, columns\) of blocks, got torch.float32"):
        BlockLayout(torch.ones(2, 2), 16)
    with pytest.raises(WiringError, match=r"blocks of 32 x 32 do not divide a weight of shape \(32, 48\)"):
        BlockLayout.of_weight(torch.zeros(32, 48), 32)
