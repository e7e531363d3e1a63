"""Which blocks of a matrix are not zero, as lists that kernels read. They are made without waiting for the GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wirings.errors import WiringError

BLOCKS = (16, 32, 64, 128)
"""Sides of the square blocks that there are kernels for."""


class BlockLists(NamedTuple):
    """The blocks of a matrix by row and by column: int32 tensors, which are parts of one."""

    row_offsets: Tensor
    """Where the list of each row begins; one entry more than rows."""
    columns: Tensor
    """The columns of the blocks, row by row, in order; beyond the last block, anything."""
    rows: Tensor
    """The row of each block in the same order; beyond the last block, -1."""
    column_offsets: Tensor
    column_rows: Tensor
    """The rows of the blocks, column by column."""


def list_blocks(mask: Tensor, blocks: int) -> Tensor:
    """The lists of a mask of blocks, in one int32 tensor that `unpack` takes apart.

    Args:
        mask: whether each block exists, a bool tensor of shape (rows of blocks, columns of blocks).
        blocks: the largest number of blocks that may exist. More are ignored.
    """
    sides = []
    for side in (mask, mask.T):
        count = side.flatten().cumsum(0)
        # Blocks that do not exist go to an entry beyond the end, as do all that are too many.
        place = torch.where(side.flatten(), count - 1, blocks).clamp_(max=blocks)
        numbers = torch.arange(side.shape[1], dtype=torch.int32, device=mask.device).expand(side.shape)
        lines = torch.arange(len(side), dtype=torch.int32, device=mask.device)[:, None].expand(side.shape)
        indices, of_line = (torch.full((blocks + 1,), -1, dtype=torch.int32, device=mask.device) for _ in range(2))
        indices.scatter_(0, place, numbers.reshape(-1))
        of_line.scatter_(0, place, lines.reshape(-1))
        ends = count.view(side.shape)[:, -1].clamp(max=blocks).to(torch.int32)
        sides.append((torch.cat([ends.new_zeros(1), ends]), indices[:blocks], of_line[:blocks]))
    (row_offsets, columns, rows), (column_offsets, column_rows, _) = sides
    return torch.cat([row_offsets, columns, rows, column_offsets, column_rows])


def packed_length(rows: int, columns: int, blocks: int) -> int:
    """The length of the tensor that holds the lists of up to ``blocks`` blocks."""
    return rows + columns + 2 + 3 * blocks


def unpack(lists: Tensor, rows: int, columns: int) -> BlockLists:
    """The parts of what `list_blocks` returns for a mask of this many rows and columns."""
    blocks = (len(lists) - rows - columns - 2) // 3
    return BlockLists(*lists.split([rows + 1, blocks, blocks, columns + 1, blocks]))


def spread(mask: Tensor, block: int) -> Tensor:
    """A mask of weights, of shape (outputs, inputs), from one of blocks."""
    rows, columns = mask.shape
    wide = mask[:, None, :, None].expand(rows, block, columns, block)
    return wide.reshape(rows * block, columns * block)


def nonzero_blocks(weight: Tensor, block: int) -> Tensor:
    """Whether each block of a matrix has a weight that is not zero."""
    if weight.dim() != 2 or weight.shape[0] % block or weight.shape[1] % block:
        raise WiringError(
            f"blocks of {block} x {block} do not divide a weight of shape {tuple(weight.shape)}. Use a block that "
            "divides both its outputs and its inputs."
        )
    return (weight.detach().unflatten(0, (-1, block)).unflatten(2, (-1, block)) != 0).any(3).any(1)


class BlockLayout:
    """The blocks of a matrix that are not zero. Their lists are made on demand.

    Args:
        mask: whether each block exists, a bool tensor of shape (rows of blocks, columns of blocks).
        block: the side of a block, in weights.
        blocks: the number of blocks that exist, or an upper limit. Training knows it from the budget; without it, the
            GPU has to be asked.
        lists: its lists, if they are known.
        density: about the fraction of the blocks that exist, if their number is only a limit.

    >>> layout = BlockLayout(torch.tensor([[True, False, True], [False, False, True]]), 16)
    >>> layout, layout.shape
    (BlockLayout(3 of 6 blocks of 16 x 16), (32, 48))
    """

    def __init__(
        self,
        mask: Tensor,
        block: int,
        blocks: int | None = None,
        lists: Tensor | None = None,
        density: float | None = None,
    ) -> None:
        if mask.dim() != 2 or mask.dtype != torch.bool:
            raise WiringError(
                f"BlockLayout expects a bool mask of shape (rows, columns) of blocks, got {mask.dtype} of shape "
                f"{tuple(mask.shape)}."
            )
        self.mask, self.block = mask, block
        self.blocks = int(mask.sum()) if blocks is None else blocks
        self.density = self.blocks / mask.numel() if density is None else density
        self.lists = lists
        """The lists of blocks (`list_blocks`); None until they are needed (`operators.lists_of`)."""

    @classmethod
    def of_weight(cls, weight: Tensor, block: int, blocks: int | None = None) -> BlockLayout:
        """The layout of a matrix: a block exists if one of its weights is not zero."""
        return cls(nonzero_blocks(weight, block), block, blocks)

    @property
    def shape(self) -> tuple[int, int]:
        """The outputs and inputs of the matrix."""
        return self.mask.shape[0] * self.block, self.mask.shape[1] * self.block

    def spread(self) -> Tensor:
        """The mask of weights, of shape (outputs, inputs)."""
        return spread(self.mask, self.block)

    def __repr__(self) -> str:
        return f"BlockLayout({self.blocks} of {self.mask.numel()} blocks of {self.block} x {self.block})"
