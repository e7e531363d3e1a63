"""Sums over edges in narrow tiles, in the order in which ``source/tiled_sums.h`` reads them."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import numpy as np

from wirings.engine.step import Fields, StepContext, pointers

TILED = "sparse tiled"
"""The way of computing sums edge by edge in narrow tiles, which keeps what they read in the level-1 cache."""
TILE = 4
"""Vectors of a tile; ``TILED`` in C++."""
TILE_BYTES = 64 * 1024
"""Bytes of a tile's inputs that stay in the level-1 cache, or come from the level-2 cache only now and then."""
CHUNK_BYTES = 256 * 1024
"""Bytes of sums that wait in the level-2 cache."""
TASKS = 1
"""Pieces of work per thread: the more rows there are in a piece, the more often each input is used."""
FIRST, LAST = 1, 2
"""Flags of a segment: its sums begin with the bias; they end with the activation."""
LEAST_EDGES = 3
"""Fewer edges per row than this do not pay for the additional loads and stores."""
READ_BEYOND = 8
"""Weights after the last that may be read."""


class TiledEdges(ctypes.Structure):
    """Edges in tiles; see ``source/tiled_sums.h``."""

    _fields_ = list(pointers("starts", "segments", "rows", "places", "weights"))


NOT_TILED: Fields = dict.fromkeys((name for name, _ in TiledEdges._fields_), 0)  # type: ignore[misc]


def with_tiling(ways: list[str], edges: int, rows: int) -> list[str]:
    """The ways of computing sums, with tiles where rows have enough edges."""
    return [*ways, TILED] if "sparse" in ways and edges >= LEAST_EDGES * rows else ways


def tiled_chunks(costs: np.ndarray, context: StepContext, strips: int, row_floats: int) -> np.ndarray:
    """Divide rows into chunks, where each begins and the end of the last.

    Args:
        costs: what each row costs, in multiply-adds.
        context: what a step needs to know.
        strips: the number of tasks that each chunk is divided into.
        row_floats: floats of a row of sums.
    """
    chunks = context.chunks(costs, strips, TASKS)
    most = max(1, CHUNK_BYTES // 4 // max(row_floats, 1))  # rows
    return np.unique(np.concatenate([chunks, *(np.arange(a, b, most) for a, b in pairwise(chunks))]))


def tiled_fields(edges: Fields, chunks: np.ndarray, lanes: int) -> Fields:
    """Fields of `EdgeGroups` for tiles, from those for one row after the other.

    Args:
        edges: the fields; their records are sorted by row and place.
        chunks: the rows of every task.
        lanes: floats per vector.
    """
    place, weight = edges["records"][:, 0], edges["records"][:, 1].view(np.float32)
    bounds = edges["starts"] // 2
    starts: list[np.ndarray] = [np.zeros(3, np.int64)]
    segments, rows, order = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    for first, last in pairwise(chunks):
        own = slice(bounds[first], bounds[last])
        row = np.repeat(np.arange(first, last), np.diff(bounds[first : last + 1]))
        about, entry_rows, sequence = _segments(row, _blocks(place[own], lanes), int(first), int(last))
        segments.append(about)
        rows.append(entry_rows)
        order.append(bounds[first] + sequence)
        starts.append(starts[-1] + [len(about), len(entry_rows), len(sequence)])
    sequence = np.concatenate(order)
    return {
        **edges,
        "starts": 0,
        "records": 0,
        "tiled": {
            "starts": np.stack(starts),
            "segments": np.concatenate(segments),
            "rows": np.concatenate(rows),
            "places": place[sequence],
            "weights": np.concatenate([weight[sequence], np.zeros(READ_BEYOND, np.float32)]),
        },
    }


def places_read(edges: Fields) -> np.ndarray:
    """The places that edges read for the first pixel of a map."""
    places: np.ndarray = edges["records"][:, 0] if edges["tiled"] is NOT_TILED else edges["tiled"]["places"]
    return places


def _blocks(place: np.ndarray, lanes: int) -> np.ndarray:
    """The block of each edge: what a tile reads for the edges of a block fits into the level-1 cache."""
    places, number = np.unique(place, return_inverse=True)
    ends = places + TILE * lanes
    before = np.concatenate([[-1 << 40], ends[:-1]])
    read = np.cumsum(ends - np.maximum(places, before))  # floats, those of neighbouring places once
    count = -(-4 * int(read[-1]) // TILE_BYTES) if len(read) else 1
    return np.minimum(read * count // max(int(read[-1]) + 1, 1), count - 1)[number] if len(read) else number


def _segments(row: np.ndarray, block: np.ndarray, first: int, last: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The segments of the rows ``first`` to ``last``, the row of each entry, and the edges in their order."""
    sequence = np.lexsort((row, block))  # edges of a row stay sorted by place
    key = block[sequence] * (last + 1) + row[sequence]
    begins = np.flatnonzero(np.diff(key, prepend=-1))
    edges = np.diff(begins, append=len(key))
    entry_block, entry_row = key[begins] // (last + 1), key[begins] % (last + 1)
    empty = np.setdiff1d(np.arange(first, last), entry_row)  # only a bias
    begins, edges = np.append(begins, np.zeros_like(empty)), np.append(edges, np.zeros_like(empty))
    entry_block, entry_row = np.append(entry_block, np.zeros_like(empty)), np.append(entry_row, empty)

    least, most = np.full(last, np.iinfo(np.int64).max), np.full(last, -1)
    np.minimum.at(least, entry_row, entry_block)
    np.maximum.at(most, entry_row, entry_block)
    flags = FIRST * (least[entry_row] == entry_block) + LAST * (most[entry_row] == entry_block)
    entries = np.lexsort((entry_row, flags, -edges, entry_block))
    begins, edges, entry_row = begins[entries], edges[entries], entry_row[entries]
    kinds = np.stack([entry_block[entries], edges, flags[entries]], 1)
    new = np.flatnonzero(np.append(True, (np.diff(kinds, axis=0) != 0).any(1))[: len(kinds)])
    segments = np.stack([edges[new], np.diff(new, append=len(kinds)), kinds[new, 2]], 1)
    ends = np.cumsum(edges)
    moved = np.repeat(begins - (ends - edges), edges) + np.arange(int(edges.sum()))
    return segments, entry_row, sequence[moved]
