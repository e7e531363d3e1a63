"""Constant maps: one number per pixel of a channel."""

from __future__ import annotations

import torch
from torch import Tensor


def uniform_values(maps: Tensor) -> Tensor | None:
    """One number per channel if each channel's map, (channels, …), has the same number everywhere; else None."""
    flat = maps.flatten(1)
    low, high = flat.amin(1), flat.amax(1)
    same = (high - low) <= 1e-12 * torch.maximum(low.abs(), high.abs())
    return (low + high) / 2 if bool(same.all()) else None


def remove_noise(maps: Tensor) -> Tensor:
    """Make neighbouring rows and columns of maps, (channels, …), equal to the last bit if they differ by rounding only.

    Products are rounded differently from pixel to pixel; maps without such noise are saved in a few numbers.
    """
    noise = 1e-12 * float(maps.abs().max())
    maps = maps.clone()
    for dim in range(1, maps.dim()):
        lines = list(maps.unbind(dim))
        for i in range(1, len(lines)):
            if float((lines[i] - lines[i - 1]).abs().max()) <= noise:
                lines[i] = lines[i - 1]
        maps = torch.stack(lines, dim)
    return maps
