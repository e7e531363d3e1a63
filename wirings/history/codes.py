"""Strengths of edges as one signed byte each, on a logarithmic scale.

0 is an edge that is not real. Else the sign is the weight's, and the size m, 1 to 127, stands for 2 ** ((m - 97) / 6):
from 1.5e-5 to 32 in steps of 12 %, so that a weight is known to 6 %. What is weaker or stronger is at the end of the
scale. The scale is the same in every file, so that nothing has to be known of the weights before they are seen.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

STEPS, ONE, MOST = 6, 97, 127
"""Steps an octave; the code of weight 1; the largest code."""


def encode(weight: Tensor, real: Tensor | None) -> Tensor:
    """The codes of a weight, int8, on its device; without ``real`` all are real. Nothing is read by the host.

    >>> encode(torch.tensor([1.0, -0.5, 0.3]), torch.tensor([True, True, False]))
    tensor([ 97, -91,   0], dtype=torch.int8)
    """
    weight = weight.detach()
    if real is not None and not weight.is_cuda:  # most edges are not real; on a GPU to count them would be to wait
        codes = torch.zeros(weight.shape, dtype=torch.int8, device=weight.device)
        codes[real] = encode(weight[real], None)
        return codes
    size = weight.abs().float().log2_().mul_(STEPS).add_(ONE).round_()
    size.nan_to_num_(nan=MOST, posinf=MOST, neginf=1).clamp_(1, MOST)
    codes = torch.copysign(size, weight).to(torch.int8)
    return codes if real is None else codes * real


VALUES: np.ndarray = np.concatenate(
    [2.0 ** ((np.arange(128) - ONE) / STEPS), -(2.0 ** ((128.0 - np.arange(128) - ONE) / STEPS))]
)
"""The weight of each code, which is read as an unsigned byte; that of 0 is 0."""
VALUES[0] = 0.0


def decode(codes: np.ndarray) -> np.ndarray:
    """The weights that int8 codes stand for, float64.

    >>> decode(np.array([97, -91, 0], np.int8))
    array([ 1. , -0.5,  0. ])
    """
    values: np.ndarray = VALUES[codes.view(np.uint8)]
    return values
