"""Bands: maps cut into as many pieces as there are threads, so that each thread's piece stays in its own cache.

A band has rows of its own, and beside them the few rows of its neighbours that the next step reads; whoever writes
those rows writes them there, too. Each band lies in memory of its own, laid out alike.
"""

from __future__ import annotations

from wirings.engine.layout import Memory
from wirings.engine.parts import Lowered, Nodes, Sum

LEAST_ROWS = 14
"""Rows of a band: of fewer, too many would be those that it holds beside its own."""


def rows_of(height: int, band: int, bands: int) -> tuple[int, int]:
    """A band's own rows: the first, and the one after the last."""
    return height * band // bands, height * (band + 1) // bands


def cut(memory: Memory, steps: list[Lowered], bands: int) -> None:
    """Cut maps into bands where every step that uses them works strip by strip."""
    classes = memory.classes()
    needs: dict[int, list[tuple[int, int]]] = {}
    whole: set[int] = set()
    for step in steps:
        read = {memory.root(b.number) for maps in step.reads() for b in memory.of(maps)}
        if isinstance(step.pending, Nodes) and (step.pending.caller or not _moved(step.pending.sums)):
            for root in read:
                needs.setdefault(root, []).append((step.pending.height, step.pending.stride))
        else:
            whole |= read
            if step.out is not None and not isinstance(step.pending, Nodes):
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


def _moved(sums: Sum) -> bool:
    """Whether a row of the sums takes other rows of the maps."""
    return any(term.dy.any() for term in sums.terms)
