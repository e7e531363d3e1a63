"""Blocks, rows and columns of a weight as groups of edges that are real together."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from wirings.selection.ranked_groups import RankedGroups
from wirings.selection.weight_layout import WeightLayout


class BlockGroups(RankedGroups):
    """Blocks of neighbouring outputs and inputs, with all places of a convolution's kernel.

    Their positions are counted block by block in a row of blocks. At the lower and right edges of a matrix that blocks
    do not divide, they are smaller.

    Args:
        layout: the shape of the weight, and what its dimensions are.
        block: the outputs and inputs of a block.
        allowed: the edges that may exist, or None for all. A block exists if one of its edges may, and has those only.
    """

    def __init__(self, layout: WeightLayout, block: tuple[int, int], allowed: Tensor | None = None) -> None:
        self.layout, self.block = layout, block
        stack, outputs, inputs = layout.matrices
        self.shape = (stack, -(-outputs // block[0]), -(-inputs // block[1]))
        """The number of matrices, and of blocks along their outputs and inputs."""
        self.equal = outputs % block[0] == 0 and inputs % block[1] == 0 and allowed is None
        """Whether all blocks have the same number of edges."""
        everything = stack * outputs * inputs * layout.places
        self.edges = everything if allowed is None else int(torch.count_nonzero(allowed))
        blocks = self.shape[0] * self.shape[1] * self.shape[2]
        self.possible = blocks if allowed is None else int(self._touched(allowed).sum())

    def spread(self, of_groups: Tensor, allowed: Tensor | None = None) -> Tensor:
        (stack, rows, columns), (height, width) = self.shape, self.block
        _, outputs, inputs = self.layout.matrices
        tiled = of_groups[:, :, None, :, None].expand(stack, rows, height, columns, width)
        matrices = tiled.reshape(stack, rows * height, columns * width)[:, :outputs, :inputs]
        edges = self.layout.from_matrices(matrices.unsqueeze(-1))
        return edges & allowed if allowed is not None and edges.dtype == torch.bool else edges

    def _sums(self, values: Tensor) -> Tensor:
        _, outputs, inputs = self.layout.matrices
        matrices = self.layout.to_matrices(values).sum(-1)
        (_, rows, columns), (height, width) = self.shape, self.block
        if rows * height > outputs or columns * width > inputs:
            matrices = pad(matrices, (0, columns * width - inputs, 0, rows * height - outputs))
        return matrices.unflatten(1, (rows, height)).unflatten(3, (columns, width)).sum((2, 4))

    def _sizes(self, like: Tensor, allowed: Tensor | None) -> float | Tensor:
        if self.equal:
            return float(self.block[0] * self.block[1] * self.layout.places)
        if allowed is not None:
            return self._sums(allowed.to(like.dtype)).clamp(min=1)
        _, outputs, inputs = self.layout.matrices
        (_, rows, columns), (height, width) = self.shape, self.block
        # Computed on the device, so that nothing is copied to it while a CUDA graph is captured.
        high = (outputs - height * torch.arange(rows, device=like.device)).clamp(max=height)
        wide = (inputs - width * torch.arange(columns, device=like.device)).clamp(max=width)
        return (high[:, None] * wide * self.layout.places).to(like.dtype)
