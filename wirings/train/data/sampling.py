"""Which examples a rank sees, in which random order, and which ones are held out for validation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from wirings.errors import WiringError
from wirings.utils.checks import is_int
from wirings.utils.text import brief

ORDER, EXAMPLE, BUFFER, HOLDOUT = range(4)
"""Purposes of random numbers. Each purpose has a stream of its own, see `random_stream`."""


def random_stream(seed: int, epoch: int, purpose: int = ORDER, number: int = 0) -> np.random.Generator:
    """Random numbers that depend on the arguments alone, and on no global state."""
    return np.random.default_rng([seed, epoch, purpose, number])


def rank_slice(count: int, rank: int, world: int) -> range:
    """Return which of ``count`` examples belong to a rank.

    The slices are contiguous and differ by at most one example; the first ranks get the larger ones.
    """
    each, extra = divmod(count, world)
    start = rank * each + min(rank, extra)
    return range(start, start + each + (rank < extra))


def rank_slices(examples: int, batch: int, rank: int, world: int) -> list[range]:
    """Return a rank's part of every batch of an epoch, as positions from 0 to ``examples`` - 1 in the epoch's order."""
    parts = []
    for start in range(0, examples, batch):
        mine = rank_slice(min(batch, examples - start), rank, world)
        parts.append(range(start + mine.start, start + mine.stop))
    return parts


def hold_out(labels: np.ndarray, count: Any) -> tuple[np.ndarray, np.ndarray]:
    """Split a training set in two, so that settings can be chosen without looking at the test set.

    The split depends on the labels and the count alone, not on a run's seed, so that runs are compared on the same
    images. It is stratified: every class gives the same number of images. If ``count`` is not a multiple of the number
    of classes, the first classes give one image more.

    Args:
        labels: Labels of all training images, (n,).
        count: Number of images to hold out.

    Returns:
        The indices of the images to train on and those of the held-out images, both sorted.
    """
    classes, sizes = np.unique(labels, return_counts=True)
    if not is_int(count) or count < len(classes):
        raise WiringError(
            f"holdout must be an integer of at least {len(classes)} (one image for each class), got {brief(count)}. "
            "Leave it out to hold out nothing."
        )
    parts = [len(rank_slice(count, number, len(classes))) for number in range(len(classes))]
    for label, size, part in zip(classes, sizes, parts, strict=True):
        if part >= size:
            raise WiringError(
                f"holdout = {count} takes {part} images of class {label}, which has only {size}, so none would be "
                "left to train on. Hold out fewer images."
            )
    return hold_out_of_each(labels, parts)


def hold_out_of_each(labels: np.ndarray, counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Hold out a number of images of each class, in the order of their labels; see `hold_out`."""
    held = [
        random_stream(0, 0, HOLDOUT, number).permutation(np.flatnonzero(labels == label))[:count]
        for number, (label, count) in enumerate(zip(np.unique(labels), counts, strict=True))
    ]
    chosen = np.sort(np.concatenate(held))
    return np.setdiff1d(np.arange(len(labels)), chosen), chosen
