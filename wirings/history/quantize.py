"""Quantization of edge weights: one signed byte each, on a logarithmic scale.

Code 0 is an edge that is not real. Otherwise the sign is that of the weight, and the magnitude m, from 1 to 127, stands
for 2 ** ((m - 97) / 6). This covers 1.5e-5 to 32 in steps of 12 %, so weights are known to within 6 %; weaker and
stronger weights are clamped. The scale is the same in every file: nothing about the weights must be known in advance.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

STEPS, ONE, MOST = 6, 97, 127
"""Codes per octave; the code of weight 1; the largest code."""


def encode(weight: Tensor, real: Tensor | None) -> Tensor:
    """Quantize a weight to int8 codes on the weight's device, without synchronizing with the host.

    Args:
        weight: a tensor of any floating-point dtype.
        real: boolean mask of the real edges, of the weight's shape; None if all edges are real.

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
    """`encode` on a CPU. NumPy is several times faster for few edges, since only real edges are computed."""
    flat = weight.reshape(-1)
    values = flat.float().numpy() if flat.dtype == torch.bfloat16 else flat.numpy()
    if real is None:
        return _codes_of(values)
    codes = np.zeros(len(values), np.int8)
    indices = np.flatnonzero(real.reshape(-1).numpy())
    codes[indices] = _codes_of(values[indices])
    return codes


def _codes_of(values: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        size = np.rint(np.log2(np.abs(values), dtype=np.float32) * STEPS + ONE)
    size = np.fmin(np.fmax(size, 1), MOST)
    size[np.isnan(values)] = MOST  # fmax turns NaN into the weakest code, but NaN must stand out
    return np.copysign(size, values).astype(np.int8)


VALUES: np.ndarray = np.concatenate(
    [2.0 ** ((np.arange(128) - ONE) / STEPS), -(2.0 ** ((128.0 - np.arange(128) - ONE) / STEPS))]
)
"""The weight of each code, indexed by the code as an unsigned byte."""
VALUES[0] = 0.0


def decode(codes: np.ndarray) -> np.ndarray:
    """The float64 weights that int8 codes stand for.

    >>> decode(np.array([97, -91, 0], np.int8))
    array([ 1. , -0.5,  0. ])
    """
    values: np.ndarray = VALUES[codes.view(np.uint8)]
    return values
