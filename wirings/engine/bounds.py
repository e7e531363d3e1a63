"""Checks before a step first runs: its numbers fit into 32 bits, and it stays inside its memory.

The compiled kernels check nothing, and NumPy and ctypes silently wrap integers that are too large, so that a bug would
crash the process.
"""

from __future__ import annotations

import numpy as np

from wirings.errors import WiringError

MAX_INT32 = 2**31 - 1
"""The largest number that the fields and offsets of the kernels can represent."""


def as_int32(values: np.ndarray, name: str) -> np.ndarray:
    """Integers as the kernels take them; raises if one does not fit. ``name`` is that of the step or field."""
    if values.dtype != np.int32 and values.size:
        expect_int32(name, int(values.min()), int(values.max()))
    return np.ascontiguousarray(values, np.int32)


def expect_int32(name: str, *numbers: int) -> None:
    """Raise unless numbers fit into 32 bits."""
    most = max(numbers, key=abs)
    if not -MAX_INT32 <= most <= MAX_INT32:
        raise WiringError(
            f"{name} is too large for the compiled kernels: expected sizes and offsets up to {MAX_INT32:,}, "
            f'got {most:,}. Compile the network for smaller images, or with engine="torch".'
        )


def expect_inside(name: str, places: np.ndarray, extent: int, size: int, before: int = 0) -> None:
    """Raise unless ``extent`` floats from every place are within ``size``, and at most ``before`` below 0."""
    if not places.size:
        return
    low, high = int(places.min()) + before, int(places.max()) + extent
    if low < 0 or high > size:
        raise WiringError(
            f"{name}: a compiled step would access floats {low - before:,} to {high:,} of {size:,}. This is a bug in "
            'wirings: please report it with the model, and compile with engine="torch" until it is fixed.'
        )


def expect_all_inside(name: str, count: int, size: int) -> None:
    """Raise unless the first ``count`` numbers of a tensor are within its ``size``."""
    expect_inside(name, np.zeros(1, int), count, size)
