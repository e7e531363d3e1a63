"""Blocks, rows and columns of a weight as groups of edges that are real together."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from wirings.selection import functional
from wirings.selection.weight_groups import WeightGroups
from wirings.selection.weight_layout import WeightLayout


class BlockGroups(WeightGroups):
    """Blocks of neighbouring outputs and inputs, with all places of a convolution's kernel.

    A block is ranked by the root mean square of its allowed weights, which for blocks of one size is the order of their
    L2 norms; equal ones by position, block by block in a row of blocks. It is computed in float32, in float64 for
    weights in float64. At the lower and right edges of a matrix that blocks do not divide, they are smaller.

    Args:
        layout: the shape of the weight, and what its dimensions are.
        block: the outputs and inputs of a block.
        allowed: the edges that may exist, or None for all. A block exists if one of its edges may, and has those only.
    """

    unit = "groups of edges"

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

    def scores(self, values: Tensor, allowed: Tensor | None) -> Tensor:
        """The root mean square of the allowed values of each block: a tensor of shape ``self.shape``.

        Summed in double precision, so that squares neither vanish nor overflow, and the order of sums hardly matters.
        """
        squares = values.detach().double().square()
        if allowed is not None:
            squares = torch.where(allowed, squares, 0.0)
        found = (self._sums(squares) / self._sizes(squares, allowed)).sqrt()
        return found.to(torch.promote_types(values.dtype, torch.float32))

    def choose(self, values: Tensor, k: int | Tensor, within: Tensor | None, allowed: Tensor | None) -> Tensor:
        return self.spread(functional.choose(self.scores(values, allowed), k, self.among(within)), allowed)

    def among(self, within: Tensor | None) -> Tensor | None:
        """The blocks that have edges in a mask; None for all."""
        return None if within is None else self._touched(within)

    def spread(self, of_blocks: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Give every edge the value of its block; a mask is limited to the allowed edges."""
        (stack, rows, columns), (height, width) = self.shape, self.block
        _, outputs, inputs = self.layout.matrices
        tiled = of_blocks[:, :, None, :, None].expand(stack, rows, height, columns, width)
        matrices = tiled.reshape(stack, rows * height, columns * width)[:, :outputs, :inputs]
        edges = self.layout.from_matrices(matrices.unsqueeze(-1))
        return edges & allowed if allowed is not None and edges.dtype == torch.bool else edges

    def count(self, mask: Tensor) -> Tensor:
        return self._touched(mask).sum()

    def complete(self, mask: Tensor, k: int | Tensor, allowed: Tensor | None) -> Tensor:
        return self.spread(self._touched(mask), allowed)

    def whole(self, mask: Tensor, allowed: Tensor | None) -> bool:
        return torch.equal(mask, self.spread(self._touched(mask), allowed))

    def next_magnitude(
        self, values: Tensor, real: Tensor, within: Tensor | None, allowed: Tensor | None, score: Tensor | None = None
    ) -> Tensor:
        scores = self.scores(values, allowed)
        if score is None:
            score = functional.next_magnitude(scores, self._touched(real), self.among(within))
        # An edge has the same part of its block's score as of the threshold's, so the block is shrunk as a whole.
        ratio = torch.where(scores > 0, score.to(scores.dtype) / scores, 0.0)
        return values.detach().abs().to(scores.dtype) * self.spread(ratio)

    def draw(self, generator: torch.Generator | None = None, device: torch.device | None = None) -> Tensor:
        return self.spread(torch.rand(self.shape, generator=generator, device=device))

    def _touched(self, mask: Tensor) -> Tensor:
        """The blocks of which a mask has an edge."""
        return self._sums(mask.float()) > 0

    def _sums(self, values: Tensor) -> Tensor:
        """Sums over the edges of each block."""
        _, outputs, inputs = self.layout.matrices
        matrices = self.layout.to_matrices(values).sum(-1)
        (_, rows, columns), (height, width) = self.shape, self.block
        if rows * height > outputs or columns * width > inputs:
            matrices = pad(matrices, (0, columns * width - inputs, 0, rows * height - outputs))
        return matrices.unflatten(1, (rows, height)).unflatten(3, (columns, width)).sum((2, 4))

    def _sizes(self, like: Tensor, allowed: Tensor | None) -> float | Tensor:
        """The number of allowed edges of each block, at least 1."""
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
