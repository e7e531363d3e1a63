"""Weights in int8, with a scale for each row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MOST = 127
"""The largest weight in int8; -128 is not used, so that a weight and its negative are rounded alike."""
BYTES = 255
"""The largest byte of an input."""
MAX_EDGES = (2**31 - 1) // (2 * BYTES * MOST)
"""The most edges of a row, whose sum and its offset fit into 32 bits in any case."""

LEAST_SPAN = 1e-30
"""Numbers whose range is smaller are all treated as zero."""
SMALL_SHARE = 1e-4
"""The least range of a channel, as a share of the largest one."""


@dataclass(frozen=True)
class Int8Rows:
    """The weights of edges in int8. A weight is its value times the scale of its row."""

    value: np.ndarray
    """(edges,), int8."""
    scale: np.ndarray
    """(rows,)."""
    offset: np.ndarray
    """(rows,): the sum of a row's values, each times the byte that stands for 0."""


def round_rows(row: np.ndarray, value: np.ndarray, rows: int, zero: np.ndarray | None = None) -> Int8Rows:
    """Round weights to int8, with a scale for every row by its largest weight.

    Args:
        row: the row of each edge.
        value: the weight of each edge.
        rows: the number of rows.
        zero: for each edge, the byte of its input that stands for 0; by default 1, for inputs whose zero is only known
            when they are quantised.
    """
    largest = np.zeros(rows, np.float32)
    np.maximum.at(largest, row, np.abs(value).astype(np.float32))
    scale = np.maximum(largest / np.float32(MOST), np.finfo(np.float32).tiny)
    made = np.clip(np.rint(value / scale[row]), -MOST, MOST).astype(np.int8)
    offset = np.bincount(row, made.astype(np.float64) * (1.0 if zero is None else zero), rows).astype(np.int64)
    return Int8Rows(made, scale, offset)


def byte_ranges(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The scale, its inverse and the byte of 0 for numbers from ``low`` to ``high``, such that 0 is exact."""
    low, high = np.minimum(low, 0).astype(np.float32), np.maximum(high, 0).astype(np.float32)
    span = high - low
    some = span > LEAST_SPAN
    span = np.where(some, span, np.float32(1))
    inverse = np.where(some, np.float32(BYTES) / span, np.float32(0))
    return span / np.float32(BYTES), inverse, np.rint(-low * inverse)


def widened(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ranges of channels that are less different: each is the geometric mean of its own and the largest one.

    The scale of a channel multiplies its weights, which share one scale for each row: a channel with a much larger
    range than others would leave few steps for the weights of these. Channels that were always zero get a small range.
    """
    low, high = np.minimum(low, 0).astype(np.float64), np.maximum(high, 0).astype(np.float64)
    span = high - low
    largest = span.max(initial=0.0)
    if not LEAST_SPAN < largest < np.inf:
        return low.astype(np.float32), high.astype(np.float32)
    wide = np.sqrt(np.maximum(span, SMALL_SHARE * largest) * largest)
    factor = wide / np.where(span > 0, span, 1)
    low, high = np.where(span > 0, low * factor, -wide if low.min() < 0 else 0), np.where(span > 0, high * factor, wide)
    return low.astype(np.float32), high.astype(np.float32)


def in_fours(
    row: np.ndarray, place: np.ndarray, value: np.ndarray, rows: int, block: int
) -> tuple[np.ndarray, np.ndarray]:
    """Dense groups of ``block`` rows: the places that any row reads, four at a time, and the weights of each group.

    Returns:
        The places, and for every group, every four places and every row of the group, four weights in one word.
    """
    places, number = np.unique(place, return_inverse=True)
    count = -(-max(len(places), 1) // 4) * 4
    groups = -(-rows // block)
    weights = np.zeros((groups * block, count), np.int8)
    weights[row, number] = value
    words = np.ascontiguousarray(weights.reshape(groups, block, count // 4, 4).transpose(0, 2, 1, 3)).view("<i4")
    padded = np.full(count, places[0] if len(places) else 0)
    padded[: len(places)] = places
    return padded, words.reshape(-1)
