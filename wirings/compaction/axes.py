"""How a tensor of a model lies in the program, where channels always are dimension 1.

A transformer's tensors are (batch, tokens, features), and its attention splits, merges and reorders their dimensions.
In the program, the features are channels: such a tensor is stored as (batch, features, tokens), and views of it move
nothing. `Axes` say what each dimension of the model's tensor is: a list of factors of stored dimensions. For example,
(batch, heads, tokens, head size) has four dimensions of one factor each, two of which are factors of the channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


class Factor(NamedTuple):
    """A factor of a stored dimension: of an index i along the dimension, ``i // stride % size``."""

    dim: int
    """0 is the batch, 1 the channels."""
    size: int
    stride: int


@dataclass(frozen=True)
class Axes:
    """The dimensions of a model's tensor as factors of the dimensions that are stored."""

    stored: tuple[int, ...]
    """The sizes of the stored dimensions, that of the batch included."""
    dims: tuple[tuple[Factor, ...], ...]
    """For each dimension of the model's tensor, its factors, the outermost first; none if its size is 1."""

    @staticmethod
    def plain(shape: Sequence[int]) -> Axes:
        """The axes of a tensor that is stored as it is."""
        return Axes(tuple(shape), tuple((Factor(d, n, 1),) if n > 1 else () for d, n in enumerate(shape)))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the model's tensor."""
        return tuple(math.prod(f.size for f in dim) for dim in self.dims)

    @property
    def is_plain(self) -> bool:
        return self.dims == Axes.plain(self.stored).dims

    @property
    def batch_first(self) -> bool:
        """Whether dimension 0 is the batch and no other dimension has a part of it."""
        return bool(self.dims) and self.dims[0] == Axes.plain(self.stored).dims[0]

    def whole(self, dim: int) -> int | None:
        """The stored dimension that a dimension is equal to; None if it is something else."""
        dim %= len(self.dims)
        for number, size in enumerate(self.stored):
            if size > 1 and self.dims[dim] == (Factor(number, size, 1),):
                return number
        return None

    def is_channels(self, dim: int) -> bool:
        """Whether a dimension is that of the channels, all of them in order."""
        channels = self.stored[1]
        return self.dims[dim] == ((Factor(1, channels, 1),) if channels > 1 else ())

    # ---- views ------------------------------------------------------------------------------------------------------

    def permuted(self, order: Sequence[int]) -> Axes:
        return replace(self, dims=tuple(self.dims[d] for d in order))

    def reshaped(self, shape: Sequence[int]) -> Axes | None:
        """The axes of a view of another shape; None if the batch would be split, or a factor does not divide."""
        waiting = [f for dim in self.dims for f in dim][::-1]
        dims = []
        for size in shape:
            own: list[Factor] = []
            left = size
            while left > 1:
                if not waiting:
                    return None
                factor = waiting.pop()
                if left % factor.size == 0:
                    own.append(factor)
                    left //= factor.size
                elif factor.size % left == 0 and factor.dim != 0:
                    inner = factor.size // left
                    own.append(Factor(factor.dim, left, factor.stride * inner))
                    waiting.append(Factor(factor.dim, inner, factor.stride))
                    left = 1
                else:
                    return None
            dims.append(merged(own))
        return None if waiting else replace(self, dims=tuple(dims))

    # ---- parts of a dimension ---------------------------------------------------------------------------------------

    def without_part(self, dim: int, size: int) -> Axes:
        """The axes after a dimension of one factor was reduced to ``size`` entries."""
        (cut,) = self.dims[dim]
        stored = list(self.stored)
        stored[cut.dim] = stored[cut.dim] // cut.size * size

        def moved(factor: Factor) -> Factor:
            if factor.dim != cut.dim or factor.stride < cut.stride:
                return factor
            if factor == cut:
                return Factor(cut.dim, size, cut.stride)
            return factor._replace(stride=factor.stride // cut.size * size)

        dims = tuple(merged([f for f in map(moved, own) if f.size > 1]) for own in self.dims)
        return Axes(tuple(stored), dims)

    def channels_of_part(self, dim: int, taken: Tensor) -> Tensor:
        """The stored channels for some entries of a dimension that is one factor of the channels, in stored order."""
        (cut,) = self.dims[dim]
        grid = torch.arange(self.stored[1]).view(-1, cut.size, cut.stride)
        return grid[:, taken].flatten()

    # ---- moving numbers ---------------------------------------------------------------------------------------------

    def to_stored(self, constant: Tensor) -> Tensor | None:
        """A constant that broadcasts with the model's tensor, as it would be stored: (channels, …), without the batch.

        None if it does not broadcast, or differs from one example to the next.
        """
        shape = self.shape
        if constant.dim() > len(shape):
            return None
        constant = constant.reshape(*[1] * (len(shape) - constant.dim()), *constant.shape)
        parts: list[Factor] = []
        for d, own in enumerate(self.dims):
            has_batch = any(f.dim == 0 for f in own)
            if constant.shape[d] not in (1, shape[d]) or (has_batch and (len(own) > 1 or constant.shape[d] != 1)):
                return None
            parts += own
        sizes = [1 if any(f.dim == 0 for f in own) else n for own, n in zip(self.dims, shape, strict=True)]
        expanded = constant.expand(sizes)
        order = sorted(range(len(parts)), key=lambda i: (parts[i].dim, -parts[i].stride))
        moved = expanded.reshape([1 if f.dim == 0 else f.size for f in parts]).permute(order)
        return moved.reshape(self.stored[1:])

    def permuted_channels(self) -> Tensor | None:
        """If the model's tensor is the stored one with its channels in another order, that order; else None."""
        plain = Axes.plain(self.stored)
        same = len(self.dims) == len(plain.dims)
        if not same or any(a != b for d, (a, b) in enumerate(zip(self.dims, plain.dims, strict=True)) if d != 1):
            return None
        if len(self.dims) < 2 or any(f.dim != 1 for f in self.dims[1]):
            return None
        index = torch.zeros(1, dtype=torch.int64)
        for factor in self.dims[1]:
            index = (index[:, None] + torch.arange(factor.size) * factor.stride).flatten()
        return index


def merged(factors: Sequence[Factor]) -> tuple[Factor, ...]:
    """Neighbouring factors that are one contiguous part of a stored dimension, as one."""
    made: list[Factor] = []
    for factor in factors:
        before = made[-1] if made else None
        if before is not None and before.dim == factor.dim and before.stride == factor.stride * factor.size:
            made[-1] = Factor(factor.dim, before.size * factor.size, factor.stride)
        else:
            made.append(factor)
    return tuple(made)
