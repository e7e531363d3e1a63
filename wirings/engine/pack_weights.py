"""Pack weights in the order in which the compiled kernels read them."""

from __future__ import annotations

import numpy as np


def filled(values: np.ndarray, rows: int) -> np.ndarray:
    """An array padded with rows of zeros."""
    made = np.zeros((rows, *values.shape[1:]), np.float32)
    made[: len(values)] = values
    return made


def grouped(
    row: np.ndarray, place: np.ndarray, value: np.ndarray, block: int, groups: int
) -> tuple[np.ndarray, np.ndarray]:
    """Where the records of each group of ``block`` rows begin, in words, and the records."""
    if block > 1:
        return _shared(row, place, value, block, groups)
    key = row.astype(np.int64) * 2**33 + place
    if len(key) and (key[1:] <= key[:-1]).any():  # the edges of most layers are sorted
        key, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        row, place = row[first], place[first]
        value = np.bincount(inverse, value, len(key)).astype(np.float32)
    records = np.empty((len(row), 2), np.int32)
    records[:, 0] = place
    records[:, 1] = value.astype(np.float32).view(np.int32)
    return 2 * np.concatenate([[0], np.cumsum(np.bincount(row, minlength=groups))]), records


def _shared(
    row: np.ndarray, place: np.ndarray, value: np.ndarray, block: int, groups: int
) -> tuple[np.ndarray, np.ndarray]:
    """Records with a weight for each row of a group; places that no row of the group reads are left out."""
    least, most = (int(place.min()), int(place.max())) if len(place) else (0, 0)
    read = np.zeros(most - least + 1, bool)  # faster than sorting
    read[place - least] = len(place) > 0
    places, number = np.flatnonzero(read) + least, np.cumsum(read) - 1
    every = groups * block * len(places)
    weights = np.bincount(row.astype(np.int64) * len(places) + number[place - least], value, every).astype(np.float32)
    weights = weights.reshape(groups, block, len(places)).transpose(0, 2, 1)
    group, column = np.nonzero(weights.any(2))
    records = np.empty((len(group), 1 + block), np.int32)
    records[:, 0] = places[column]
    records[:, 1:] = weights[group, column].view(np.int32)
    return (1 + block) * np.concatenate([[0], np.cumsum(np.bincount(group, minlength=groups))]), records


def sliced(
    weight: np.ndarray, places: np.ndarray, lanes: int, padding: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The edges of a linear layer, ``lanes`` rows at a time, sorted by their number of edges.

    Args:
        weight: (rows, inputs).
        places: the offset of each input.
        lanes: rows per slice.
        padding: the offset in records that only pad a slice, whose weight is zero.

    Returns:
        Where the records of each slice begin, in words; the records; and the order of the rows.
    """
    counts = np.count_nonzero(weight, 1)
    order = np.argsort(-counts, kind="stable")
    starts, parts = [0], []
    for i in range(0, len(weight), lanes):
        own = order[i : i + lanes]
        longest = int(counts[own].max())
        record = np.full((longest, 2, lanes), padding, np.int32)
        weights = np.zeros((longest, lanes), np.float32)
        for lane, r in enumerate(own):
            columns = np.flatnonzero(weight[r])
            record[: len(columns), 0, lane] = places[columns]
            weights[: len(columns), lane] = weight[r, columns]
        record[:, 1] = weights.view(np.int32)
        parts.append(record.reshape(-1))
        starts.append(starts[-1] + len(parts[-1]))
    return np.array(starts), np.concatenate([*parts, np.zeros(0, np.int32)]), order
