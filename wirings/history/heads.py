"""The real edges of a transformer: by block and kind of layer, and by attention head, at every record of a history.

A head is dead if it cannot do its part: without an edge into its values or out of them it adds nothing (but biases) to
the block's output; without an edge into its queries or keys it cannot compare tokens. What is missing is said by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from wirings.errors import WiringError
from wirings.history.blocks import KEY, OUTPUT, QUERY, VALUE, AttentionLayer, Transformer
from wirings.history.replay import WiringState
from wirings.history.structure import WiringStructure

PROJECTIONS = (QUERY, KEY, VALUE, OUTPUT)
NO_PATH = "path"
"""What a head lacks whose values and output projection have real edges that do not meet."""


class HeadCounts(NamedTuple):
    """The heads of one attention, record by record."""

    attention: AttentionLayer
    edges: np.ndarray
    """Real edges of shape (records, heads, 4), for q, k, v and out; -1 for projections that are not wired."""
    possible: np.ndarray
    """Possible edges of a head, shape (4,); 0 for projections that are not wired.

    Heads that share their keys and values count them in full."""
    missing: list[list[str]]
    """For each record and head, what it lacks, such as ``"v"`` or ``"q, k"``; empty if it is alive."""

    @property
    def dead(self) -> np.ndarray:
        """Which heads are dead, a boolean array of shape (records, heads)."""
        return np.array([[bool(text) for text in row] for row in self.missing])


class TransformerCounts(NamedTuple):
    """The real edges of a transformer, record by record."""

    transformer: Transformer
    steps: list[int]
    real: np.ndarray
    """The real edges of each cell of the grid, shape (records, cells)."""
    outside: np.ndarray
    """The real edges of each layer that is in no block, shape (records, layers)."""
    heads: list[HeadCounts]
    """For each attention whose number of heads is known."""

    def densities(self) -> np.ndarray:
        """The density of each cell in percent, shape (records, blocks, columns); NaN where there is no such layer."""
        blocks, columns, cells = self.transformer.blocks, self.transformer.columns, self.transformer.cells
        grid = np.full((len(self.steps), len(blocks), len(columns)), np.nan)
        for i, cell in enumerate(cells):
            grid[:, cell.block, columns.index(cell.column)] = 100 * self.real[:, i] / cell.edges
        return grid

    def column_densities(self) -> np.ndarray:
        """The density of each kind of layer over all blocks in percent, shape (records, columns)."""
        columns, cells = self.transformer.columns, self.transformer.cells
        of = np.array([columns.index(cell.column) for cell in cells])
        possible = np.bincount(of, [cell.edges for cell in cells], len(columns))
        return np.array([100 * np.bincount(of, row, len(columns)) / possible for row in self.real])

    def live_heads(self) -> np.ndarray:
        """The number of heads that are not dead at each record."""
        return np.sum([(~one.dead).sum(1) for one in self.heads], axis=0)


def count_edges(structure: WiringStructure, states: Iterable[WiringState]) -> TransformerCounts:
    """Count the real edges of a transformer.

    Args:
        structure: the structure of a transformer.
        states: its states; they are not kept.
    """
    found = structure.transformer
    if found is None:
        raise WiringError("expected the wiring of a transformer, but no blocks with attention were found.")
    known = [one for one in found.attentions if one.heads]
    steps, real, outside = [], [], []
    edges: list[list[np.ndarray]] = [[] for _ in known]
    missing: list[list[list[str]]] = [[] for _ in known]
    split = {i for cell in found.cells for i, own in cell.parts if own is not None}
    split |= {layer for one in known for layer, _ in one.parts.values()}
    for state in states:
        whole = state.counts()
        units = {i: _count_units(state, i) for i in split}
        steps.append(state.step)
        outside.append(whole[found.outside])
        real.append(
            [sum(whole[i] if own is None else units[i][0][own].sum() for i, own in cell.parts) for cell in found.cells]
        )
        for i, attention in enumerate(known):
            edges[i].append(_head_edges(attention, units))
            missing[i].append(_missing(attention, edges[i][-1], units))
    heads = [HeadCounts(one, np.array(edges[i]), _possible(structure, one), missing[i]) for i, one in enumerate(known)]
    return TransformerCounts(found, steps, np.array(real, np.int64), np.array(outside, np.int64), heads)


def _count_units(state: WiringState, i: int) -> tuple[np.ndarray, np.ndarray]:
    """The number of real edges into each output and out of each input of a matrix."""
    layer = state.structure.layers[i]
    first, last = np.searchsorted(state.indices, (layer.start, layer.stop))
    rows, columns = np.divmod(state.indices[first:last] - layer.start, layer.shape[1])
    first_side, second_side = (
        np.bincount(rows, minlength=layer.shape[0]),
        np.bincount(columns, minlength=layer.shape[1]),
    )
    return (second_side, first_side) if state.structure.matrices[i].flip else (first_side, second_side)


def _by_head(attention: AttentionLayer, kind: str, units: dict[int, tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """The real edges of each unit of each head, shape (heads, units of a head)."""
    layer, own = attention.parts[kind]
    counts = units[layer][1 if kind == OUTPUT else 0][own]
    heads = attention.key_heads if kind in (KEY, VALUE) else attention.heads
    return np.repeat(counts.reshape(heads, -1), attention.heads // heads, axis=0)


def _head_edges(attention: AttentionLayer, units: dict[int, tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    found = np.full((attention.heads, len(PROJECTIONS)), -1, np.int64)
    for i, kind in enumerate(PROJECTIONS):
        if kind in attention.parts:
            found[:, i] = _by_head(attention, kind, units).sum(1)
    return found


def _missing(
    attention: AttentionLayer, edges: np.ndarray, units: dict[int, tuple[np.ndarray, np.ndarray]]
) -> list[str]:
    """For each head, which projections have no real edge; or that those of its values do not meet its output's."""
    lacks = [[kind for kind, count in zip(PROJECTIONS, row, strict=True) if count == 0] for row in edges]
    if VALUE in attention.parts and OUTPUT in attention.parts:
        into, out_of = (_by_head(attention, kind, units) for kind in (VALUE, OUTPUT))
        if into.shape == out_of.shape:
            meet = ((into > 0) & (out_of > 0)).any(1)
            for head in np.flatnonzero(~meet):
                if not {VALUE, OUTPUT} & set(lacks[head]):
                    lacks[head].append(NO_PATH)
    return [", ".join(kinds) for kinds in lacks]


def _possible(structure: WiringStructure, attention: AttentionLayer) -> np.ndarray:
    """The possible edges of a head in each of its projections."""
    found = np.zeros(len(PROJECTIONS), np.int64)
    for i, kind in enumerate(PROJECTIONS):
        if kind in attention.parts:
            layer, own = attention.parts[kind]
            matrix = structure.matrices[layer]
            heads = attention.key_heads if kind in (KEY, VALUE) else attention.heads
            found[i] = len(own) // heads * (matrix.gives if kind == OUTPUT else matrix.takes)
    return found
