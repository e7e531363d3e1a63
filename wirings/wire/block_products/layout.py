"""Which blocks of a matrix are not zero, as lists that kernels read. They are made without waiting for the GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from wirings.errors import WiringError

BLOCKS = (16, 32, 64, 128)
"""Sides of the square blocks that there are kernels for."""


class BlockLayout:
    """The blocks of a matrix that are not zero, listed by row and by column. The lists are int32 and made on demand.

    Args:
        mask: whether each block exists, a bool tensor of shape (rows of blocks, columns of blocks).
        block: the side of a block, in weights.
        blocks: the number of blocks that exist. Training knows it from the budget; without it, the GPU has to be asked.

    >>> layout = BlockLayout(torch.tensor([[True, False, True], [False, False, True]]), 16)
    >>> [part.tolist() for part in layout.lists()], [part.tolist() for part in layout.lists(by_column=True)]
    ([[0, 2, 3], [0, 2, 2]], [[0, 1, 1, 3], [0, 0, 1]])
    """

    def __init__(self, mask: Tensor, block: int, blocks: int | None = None) -> None:
        if mask.dim() != 2 or mask.dtype != torch.bool:
            raise WiringError(
                f"BlockLayout expects a bool mask of shape (rows, columns) of blocks, got {mask.dtype} of shape "
                f"{tuple(mask.shape)}."
            )
        self.mask, self.block = mask, block
        self.blocks = int(mask.sum()) if blocks is None else blocks
        self._lists: dict[tuple[bool, int], tuple[Tensor, Tensor]] = {}
        self._runs: dict[int, Tensor] = {}
        self._places: Tensor | None = None

    @classmethod
    def of_weight(cls, weight: Tensor, block: int, blocks: int | None = None) -> BlockLayout:
        """The layout of a matrix: a block exists if one of its weights is not zero."""
        if weight.dim() != 2 or weight.shape[0] % block or weight.shape[1] % block:
            raise WiringError(
                f"blocks of {block} x {block} do not divide a weight of shape {tuple(weight.shape)}. Use a block that "
                "divides both its outputs and its inputs."
            )
        tiles = weight.detach().unflatten(0, (-1, block)).unflatten(2, (-1, block))
        return cls((tiles != 0).any(3).any(1), block, blocks)

    @property
    def shape(self) -> tuple[int, int]:
        """The outputs and inputs of the matrix."""
        return self.mask.shape[0] * self.block, self.mask.shape[1] * self.block

    def lists(self, *, by_column: bool = False, group: int = 1) -> tuple[Tensor, Tensor]:
        """Where the list of each row begins (one entry more than rows), and the columns of its blocks, in order.

        Args:
            by_column: exchange rows and columns.
            group: neighbouring rows with one list, of the columns in which one of them has a block.
        """
        if (by_column, group) not in self._lists:
            mask = self.mask.T if by_column else self.mask
            if group > 1:
                mask = mask.unflatten(0, (-1, group)).any(1)
            offsets = torch.zeros(len(mask) + 1, dtype=torch.int32, device=mask.device)
            offsets[1:] = mask.sum(1).cumsum(0)
            # Blocks that do not exist go to an entry beyond the end, as do all if there are more than was said.
            place = torch.where(mask.flatten(), mask.flatten().cumsum(0) - 1, self.blocks).clamp_(max=self.blocks)
            numbers = torch.arange(mask.shape[1], dtype=torch.int32, device=mask.device).expand(mask.shape)
            indices = torch.zeros(self.blocks + 1, dtype=torch.int32, device=mask.device)
            indices.scatter_(0, place, numbers.reshape(-1))
            self._lists[by_column, group] = offsets.clamp_(max=self.blocks), indices[: self.blocks]
        return self._lists[by_column, group]

    def places(self) -> Tensor:
        """The row and column of each block, in the order of the lists by row: of shape (blocks, 2)."""
        if self._places is None:
            offsets, columns = self.lists()
            number = torch.arange(self.blocks, dtype=torch.int32, device=offsets.device)
            rows = torch.searchsorted(offsets[1:], number, right=True)
            self._places = torch.stack([rows.to(torch.int32), columns], 1)
        return self._places

    def runs(self, size: int) -> Tensor:
        """The lists by row, cut into runs of up to ``size`` blocks: (row, begin, end), of shape (runs, 3).

        Their number has an upper limit that the host knows. Runs beyond the last one are empty.
        """
        if size not in self._runs:
            offsets, _ = self.lists()
            rows = len(offsets) - 1
            limit = min(self.blocks, (self.blocks + rows * (size - 1)) // size)
            each = (offsets.diff() + (size - 1)) // size
            ends = each.cumsum(0)
            number = torch.arange(limit, device=offsets.device)
            row = torch.searchsorted(ends, number, right=True)
            real = row < rows
            row = row.clamp_(max=rows - 1)
            begin = offsets[row] + (number - ends[row] + each[row]) * size
            end = torch.minimum(begin + size, offsets[row + 1])
            self._runs[size] = torch.stack([row, begin.where(real, 0), end.where(real, 0)], 1).to(torch.int32)
        return self._runs[size]

    def spread(self) -> Tensor:
        """The mask of weights, of shape (outputs, inputs)."""
        rows, columns = self.mask.shape
        wide = self.mask[:, None, :, None].expand(rows, self.block, columns, self.block)
        return wide.reshape(rows * self.block, columns * self.block)

    def __repr__(self) -> str:
        return f"BlockLayout({self.blocks} of {self.mask.numel()} blocks of {self.block} x {self.block})"
