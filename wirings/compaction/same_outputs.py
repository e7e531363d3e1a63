"""Whether a model still returns the same, up to the rounding of half precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from wirings.utils.example_input import tensors_in

# A number in bfloat16 has 8 significant bits: rounding moves it by up to 0.4 %. Sums in another order, and a GELU of a
# sum that was not rounded before, make these roundings differ, and layers add to that. The logits of GPTs of 48
# layers, with random weights, then differed by 2 % in the root mean square, and single ones by 9 % of what is below.
# The limits are twice that.
ALL_CLOSE = 4e-2  # of the root mean square of the outputs: that of the differences
EACH_CLOSE = 2e-1  # of the root mean square of the outputs plus the output itself: each difference


def difference(ours: Any, expected: Any) -> str:
    """Why outputs are not known to be equal up to rounding; empty if they are.

    All tensors of floating-point or complex numbers in them are compared. Infinities and NaNs must be in the same
    places.

    >>> difference((torch.ones(2), 3), (torch.tensor([1.0, 1.001]), 3))
    ''
    >>> difference(torch.zeros(2), torch.ones(2))
    'its outputs would differ by more than rounding'
    """
    found, wanted = _numbers(ours), _numbers(expected)
    if not wanted:
        return "its outputs have no floating-point tensor that can be compared"
    shapes = [x.shape for x in found] == [x.shape for x in wanted]
    if shapes and all(_close(a, b) for a, b in zip(found, wanted, strict=True)):
        return ""
    return "its outputs would differ by more than rounding"


def _numbers(value: Any) -> list[Tensor]:
    tensors = [x for leaf in tree_leaves(value) for x in tensors_in(leaf)]
    tensors = [torch.view_as_real(x) if x.is_complex() else x for x in tensors]
    return [x.detach() for x in tensors if x.is_floating_point() and x.numel()]


def _close(a: Tensor, b: Tensor) -> bool:
    a, b = a.float(), b.float()
    finite = b.isfinite()
    same = (a == b) | (a.isnan() & b.isnan())
    if not finite.any():
        return bool(same.all())
    sizes = torch.where(finite, b.abs(), 0)
    scale = sizes.amax().clamp_min(torch.finfo(torch.float32).tiny)  # squares must not overflow
    sizes, gaps = sizes / scale, torch.where(same, 0, (a - b).abs() / scale)
    mean = sizes.square().sum().div(finite.sum()).sqrt()
    every = gaps <= EACH_CLOSE * (mean + sizes)  # false for NaN
    return bool(every.all() and gaps.square().sum().div(finite.sum()).sqrt() <= ALL_CLOSE * mean)
