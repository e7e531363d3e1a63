"""What a model computes from the batch size alone, such as a mask or a token that is repeated for every example."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wirings.compaction.aten import BatchConstant

BATCHES = (1, 2, 3, 7, 100)
"""Batch sizes at which something that is taken for a constant is compared."""


class BatchValue:
    """A number or a tensor that depends on the batch size only.

    Args:
        call: computes it for a batch size.
        emit: adds what computes it to the program.
    """

    def __init__(self, call: Callable[[int], Any], emit: Callable[[], Any]) -> None:
        self.call, self.emit = functools.cache(call), functools.cache(emit)

    def simplified(self) -> Any:
        """A constant, if it is the same for all batch sizes or all examples; otherwise this value."""
        found = [self.call(batch) for batch in BATCHES]
        first = found[0]
        if not isinstance(first, Tensor):
            return first if isinstance(first, (int, float)) and all(x == first for x in found) else self
        if all(x.shape == first.shape and torch.equal(x, first) for x in found):
            return first
        repeated = all(x.dim() > 0 and len(x) == batch for x, batch in zip(found, BATCHES, strict=True))
        if repeated and all(torch.equal(x, first[:1].expand(len(x), *first.shape[1:])) for x in found):
            return BatchConstant(first[:1].clone())
        return self
