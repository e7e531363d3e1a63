"""Weights in the order in which the compiled kernels read them."""

from __future__ import annotations

from typing import Any

import numpy as np

from wirings.engine.parts import Dense


def filled(values: np.ndarray, rows: int) -> np.ndarray:
    """With rows of zeros added."""
    made = np.zeros((rows, *values.shape[1:]), np.float32)
    made[: len(values)] = values
    return made


def grouped(
    row: np.ndarray, place: np.ndarray, value: np.ndarray, block: int, groups: int
) -> tuple[np.ndarray, np.ndarray]:
    """The records of groups of ``block`` rows, and where each group's begin, in words."""
    key = row // block * (2**33) + place
    order = np.argsort(key, kind="stable")
    keys, first = np.unique(key[order], return_index=True)
    records = np.zeros((len(keys), 1 + block), np.int32)
    weights = np.zeros((len(keys), block), np.float32)
    number = np.repeat(np.arange(len(keys)), np.diff([*first, len(order)]))
    np.add.at(weights, (number, row[order] % block), value[order])
    records[:, 0] = place[order][first]
    records[:, 1:] = weights.view(np.int32)
    counts = np.bincount(row[order][first] // block, minlength=groups)
    return np.concatenate([[0], np.cumsum(counts)]) * (1 + block), records


def sliced(layer: Dense, places: np.ndarray, out: np.ndarray, lanes: int) -> dict[str, Any]:
    """A sparse linear layer: rows of about the same number of edges side by side, ``lanes`` at a time."""
    rows = len(layer.bias)
    counts = np.count_nonzero(layer.weight, 1)
    order = np.argsort(-counts, kind="stable")
    slices = -(-rows // lanes)
    starts, parts = [0], []
    for i in range(slices):
        own = order[i * lanes : (i + 1) * lanes]
        longest = int(counts[own].max())
        record = np.zeros((longest, 2, lanes), np.int32)
        weights = np.zeros((longest, lanes), np.float32)
        for lane, r in enumerate(own):
            columns = np.flatnonzero(layer.weight[r])
            record[: len(columns), 0, lane] = places[columns]
            weights[: len(columns), lane] = layer.weight[r, columns]
        record[:, 1] = weights.view(np.int32)
        parts.append(record.reshape(-1))
        starts.append(starts[-1] + len(parts[-1]))
    bias, to = np.zeros(slices * lanes, np.float32), np.full(slices * lanes, -1)
    bias[:rows], to[:rows] = layer.bias[order], out[order]
    return {
        "starts": np.array(starts),
        "records": np.concatenate([*parts, np.zeros(0, np.int32)]),
        "bias": bias,
        "out": to,
    }
