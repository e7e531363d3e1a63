"""Soft thresholds: real edges that weigh less than their magnitude, so that edges enter and leave at zero."""

import torch
from torch import Tensor


def shrunk(size: Tensor, threshold: Tensor, power: float) -> Tensor:
    """Shrink magnitudes of at least ``threshold``: (sizeᵖ − thresholdᵖ)^(1/p), which is 0 at the threshold.

    Computed from the ratio of threshold and magnitude, which no power takes out of range.

    >>> shrunk(torch.tensor([1.0, 2.0]), torch.tensor(1.0), 3.0)
    tensor([0.0000, 1.9129])
    """
    if power == 1:
        return (size - threshold).clamp(min=0.0)
    ratio = torch.where(size > threshold, threshold / size, 1.0)
    return size * (1.0 - ratio**power) ** (1.0 / power)
