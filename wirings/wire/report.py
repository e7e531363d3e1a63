"""What the wiring of every layer looks like now: reports, and the table that printing a handle shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from wirings.budgets.budget import LayerSize
from wirings.selection import sharded
from wirings.utils.layers import joined
from wirings.utils.tables import text_table
from wirings.wire.layer import Layer

Packed = list[np.ndarray]
"""The wiring of every layer as packed bits (`numpy.packbits`)."""


@dataclass(frozen=True)
class LayerReport:
    """What the wiring of one layer looks like now."""

    name: str
    shape: tuple[int, ...]
    edges: int
    """The number of real edges."""
    possible: int
    """The number of allowed edges."""
    swapped: int
    """The number of edges that are real now and were not at the last `Wiring.look`."""
    without_input: int
    """The number of nodes that no real edge of this layer leads to."""
    without_output: int
    """The number of nodes that no real edge of this layer leaves from."""
    groups: int | None = None
    """The number of real groups, if the wiring has a structure: blocks, rows or columns; for N:M, edges of a group."""

    @property
    def counted(self) -> int:
        """The number that the budget is about: of real edges, or of groups."""
        return self.edges if self.groups is None else self.groups

    @property
    def density(self) -> float:
        """The fraction of the allowed edges that is real."""
        return self.edges / max(self.possible, 1)


def report_layers(
    layers: Sequence[Layer], sizes: Sequence[LayerSize], masks: Sequence[Tensor], before: Packed
) -> tuple[list[LayerReport], Packed]:
    """A report on every layer, and their wiring as packed bits.

    Args:
        layers: the wired layers.
        sizes: their sizes.
        masks: their wiring; it may be sharded.
        before: the earlier wiring from which swapped edges are counted; empty if there is none.
    """
    reports, packed = [], []
    for i, (layer, size, mask) in enumerate(zip(layers, sizes, masks, strict=True)):
        real = sharded.whole(mask)
        packed.append(np.packbits(real.cpu().numpy()))
        receives, sends = joined(layer.module, layer.attribute, real)
        reports.append(
            LayerReport(
                name=layer.name,
                shape=size.shape,
                edges=int(torch.count_nonzero(real)),
                possible=layer.edges.possible_edges,
                swapped=int(np.bitwise_count(packed[i] & ~before[i]).sum()) if before else 0,
                without_input=int((~receives).sum()),
                without_output=int((~sends).sum()),
                groups=None if layer.edges.groups is None else int(layer.edges.count(real)),
            )
        )
    return reports, packed


def table(reports: list[LayerReport]) -> str:
    """Layer reports as a text table with a line for the total."""
    head = ["layer", "shape", "edges", "density", "swapped", "no input", "no output"]
    rows = [[r.name.removesuffix(".weight"), "×".join(map(str, r.shape)), *_numbers([r])] for r in reports]
    layers = f"{len(reports)} layer{'s' if len(reports) > 1 else ''}"
    total = [layers, f"{sum(r.possible for r in reports):,}", *_numbers(reports)]
    return "\n".join(text_table(head, rows, align="llrrrrr", footer=[total]))


def _numbers(reports: list[LayerReport]) -> list[str]:
    edges, possible = sum(r.edges for r in reports), sum(r.possible for r in reports)
    rest = [sum(getattr(r, name) for r in reports) for name in ("swapped", "without_input", "without_output")]
    return [f"{edges:,}", f"{100 * edges / max(possible, 1):.2f} %", *(f"{number:,}" for number in rest)]
