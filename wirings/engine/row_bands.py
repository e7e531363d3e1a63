"""Cut maps into bands of rows, one for each thread, so that the band of each thread stays in its own cache.

A band has rows of its own, and the few rows of its neighbours that the next step reads. A step that computes such a row
writes it to all bands that hold it. Bands have separate memory with the same layout.
"""

from __future__ import annotations

from wirings.engine.memory_layout import MapMemory
from wirings.engine.step import LoweredStep

LEAST_ROWS = 14
"""The smallest number of rows of a band; with fewer, too large a share would be rows of its neighbours."""


def rows_of(height: int, band: int, bands: int) -> tuple[int, int]:
    """The first row of a band, and the row after its last."""
    return height * band // bands, height * (band + 1) // bands


def cut_into_bands(memory: MapMemory, steps: list[LoweredStep], bands: int) -> None:
    """Cut maps into bands if every step that uses them works on strips of rows."""
    classes = memory.classes()
    needs: dict[int, list[tuple[int, int]]] = {}
    whole: set[int] = set()
    for step in steps:
        read = {memory.root(b.number) for maps in step.reads() for b in memory.of(maps)}
        rows = step.rows_read()
        if rows is None:
            whole |= read
        else:
            for root in read:
                needs.setdefault(root, []).append(rows)
        if step.out is not None and not step.writes_bands:
            whole |= {memory.root(b.number) for b in memory.of(step.out)}
    for root, taken in needs.items():
        buffers = classes[root]
        height = buffers[0].height
        fits = all(b.height == height and not b.zeros and not b.packed for b in buffers)
        if root in whole or not fits or height < LEAST_ROWS * bands:
            continue
        kept = []
        for band in range(bands):
            first, last = rows_of(height, band, bands)
            for out_height, stride in taken:
                start, stop = rows_of(out_height, band, bands)
                first = min(first, max(0, start * stride - 1))
                last = max(last, min(height, (stop - 1) * stride + 2))
            kept.append((first, last))
        for buffer in buffers:
            buffer.kept = kept
