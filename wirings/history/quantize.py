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
    if weight.device.type == "cpu":
        return torch.from_numpy(_encode_array(weight, real)).view(weight.shape)
    size = weight.abs().float().log2_().mul_(STEPS).add_(ONE).round_()
    size.nan_to_num_(nan=MOST, posinf=MOST, neginf=1).clamp_(1, MOST)
    codes = torch.copysign(size, weight).to(torch.int8)
    return codes if real is None else codes * real


def _encode_array(weight: Tensor, real: Tensor | None) -> np.ndarray:
    """The same on a CPU, in NumPy, which takes a fraction of the time for few edges; real ones alone are computed."""
    flat = weight.reshape(-1)
    values = flat.float().numpy() if flat.dtype == torch.bfloat16 else flat.numpy()
    if real is None:
        return _codes_of(values)
    codes = np.zeros(len(values), np.int8)
    places = np.flatnonzero(real.reshape(-1).numpy())
    codes[places] = _codes_of(values[places])
    return codes


def _codes_of(values: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        size = np.rint(np.log2(np.abs(values), dtype=np.float32) * STEPS + ONE)
    size = np.fmin(np.fmax(size, 1), MOST)  # NaN is not the least: it must show
    size[np.isnan(values)] = MOST
    return np.copysign(size, values).astype(np.int8)


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
