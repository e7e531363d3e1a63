"""Groups of the edges of a neural graph, whose weights are one vector: tile after tile, each row by row.

A tile is a rectangle of edges from some nodes to others, of which some may be missing (`wirings.graph.topology`).
Blocks and N:M groups lie within tiles. Rows and columns belong to nodes, whose edges may be in many tiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from wirings.errors import WiringError
from wirings.selection.nm_groups import NMGroups
from wirings.selection.ranked_groups import RankedGroups
from wirings.selection.structure import Structure, nearest_divisor
from wirings.selection.weight_groups import WeightGroups
from wirings.selection.weight_layout import WeightLayout

TERMS = 32
"""The most terms that are added at once. Sums of more are sums of sums, so large groups take little memory."""

Nodes = range | np.ndarray


class Tile(Protocol):
    """What is asked of a tile of edges: see `wirings.graph.topology.EdgeTile`."""

    @property
    def targets(self) -> Nodes: ...
    @property
    def sources(self) -> Nodes: ...
    @property
    def places(self) -> tuple[np.ndarray, np.ndarray] | None: ...
    @property
    def count(self) -> int: ...
    def edge_list(self) -> tuple[np.ndarray, np.ndarray]: ...


def lay_over_graph(structure: Structure, name: str, tiles: Sequence[Tile], allowed: Tensor | None) -> WeightGroups:
    """The groups of a graph's edges; raises if the structure does not fit its tiles.

    Args:
        structure: the structure.
        name: the name of the graph's weight, for messages.
        tiles: the tiles of edges, in the order of the weights.
        allowed: the edges that may exist, or None for all of the tiles.
    """
    if structure.nm is not None:
        _check_nm(structure, structure.nm, name, tiles, allowed)
        return NMGroups(WeightLayout((sum(tile.count for tile in tiles),), ("in",)), structure.nm[1])
    height, width = structure.block
    if height is None or width is None:
        side = 0 if width is None else 1
        nodes = np.concatenate([tile.edge_list()[side] for tile in tiles])
        return GraphGroups(np.unique(nodes, return_inverse=True)[1], allowed)
    if not structure.padded:
        _check_blocks(structure, height, width, name, tiles)
    return GraphGroups(_in_blocks(tiles, height, width), allowed)


class GraphGroups(RankedGroups):
    """Groups of any of a graph's edges, as rows and columns that go through many tiles are.

    Args:
        of_edges: the number of the group of each edge, an array of (edges,). Numbers are the groups' positions, from 0
            on, and each has an edge.
        allowed: the edges that may exist, or None for all. A group exists if one of its edges may, and has those only.
    """

    def __init__(self, of_edges: np.ndarray, allowed: Tensor | None = None) -> None:
        sizes = np.bincount(of_edges)
        self.shape = (len(sizes),)
        self.equal = bool((sizes == sizes[0]).all()) and allowed is None
        self._tables = [_Tables.of(of_edges, sizes)]
        """The same tables on every device that values were on. They are kept, as captured CUDA graphs refer to them."""
        self.edges = len(of_edges) if allowed is None else int(torch.count_nonzero(allowed))
        self.possible = len(sizes) if allowed is None else int(self._touched(allowed).sum())

    def spread(self, of_groups: Tensor, allowed: Tensor | None = None) -> Tensor:
        edges = of_groups.index_select(0, self._on(of_groups.device).group)
        return edges & allowed if allowed is not None and edges.dtype == torch.bool else edges

    def _sums(self, values: Tensor) -> Tensor:
        for table in self._on(values.device).sums:
            terms = pad(values, (0, 1)).index_select(0, table.view(-1))  # the last value, 0, fills incomplete sums
            values = terms.unflatten(0, table.shape).sum(1)
        return values

    def _sizes(self, like: Tensor, allowed: Tensor | None) -> Tensor:
        if allowed is not None:
            return self._sums(allowed.to(like.dtype)).clamp(min=1)
        return self._on(like.device).sizes.to(like.dtype)

    def _on(self, device: torch.device) -> _Tables:
        for tables in self._tables:
            if tables.group.device == device:
                return tables
        self._tables.append(self._tables[0].to(device))
        return self._tables[-1]


@dataclass(frozen=True)
class _Tables:
    """Where the edges of groups are."""

    group: Tensor
    """The number of the group of each edge."""
    sizes: Tensor
    """The number of edges of each group."""
    sums: tuple[Tensor, ...]
    """The positions of the terms of sums, a row for each. The first are sums of edges, the next sums of those, and so
    on until there is one for each group. The order of additions is always the same; `Tensor.index_add` on a GPU has
    none."""

    @classmethod
    def of(cls, of_edges: np.ndarray, sizes: np.ndarray) -> _Tables:
        kind = np.int32 if 2 * len(of_edges) < 2**31 else np.int64
        terms, counts = np.argsort(of_edges, kind="stable"), sizes
        sums = []
        while True:
            width = min(TERMS, int(counts.max()))
            rows = -(-counts // width)  # of each group
            place = np.arange(len(terms)) - np.repeat(np.cumsum(counts) - counts, counts)
            table = np.full((rows.sum(), width), len(terms), kind)
            table[np.repeat(np.cumsum(rows) - rows, counts) + place // width, place % width] = terms
            sums.append(torch.from_numpy(table))
            if len(table) == len(sizes):
                return cls(torch.from_numpy(of_edges.astype(kind)), torch.from_numpy(sizes), tuple(sums))
            terms, counts = np.arange(len(table)), rows

    def to(self, device: torch.device) -> _Tables:
        return _Tables(self.group.to(device), self.sizes.to(device), tuple(table.to(device) for table in self.sums))


def _in_blocks(tiles: Sequence[Tile], height: int, width: int) -> np.ndarray:
    """The number of the block of each edge: tile after tile, and in a tile one row of blocks after the other."""
    found, first = [], 0
    for tile in tiles:
        sides = len(tile.targets), len(tile.sources)
        rows, columns = np.indices(sides).reshape(2, -1) if tile.places is None else tile.places
        blocks = rows // height * -(-sides[1] // width) + columns // width
        if tile.places is not None:  # some blocks may have no edge
            blocks = np.unique(blocks, return_inverse=True)[1]
        found.append(blocks + first)
        first += int(blocks.max()) + 1
    return np.concatenate(found)


def _check_blocks(structure: Structure, height: int, width: int, name: str, tiles: Sequence[Tile]) -> None:
    targets, sources = (math.gcd(*(len(side) for side in sides)) for sides in _sides(tiles))
    if targets % height == 0 and sources % width == 0:
        return
    near = f"{nearest_divisor(targets, height)}x{nearest_divisor(sources, width)}"
    raise WiringError(
        f"structure={structure.text!r}: blocks of {height} receiving and {width} sending nodes do not divide the tiles "
        f"of {name}, which have {_shown(tiles)} nodes. The nearest block that does is "
        f'"{near}". "{structure.text}, padded" makes the blocks at their edges smaller. {_otherwise(name)}.'
    )


def _check_nm(
    structure: Structure, nm: tuple[int, int], name: str, tiles: Sequence[Tile], allowed: Tensor | None
) -> None:
    n, m = nm
    if structure.transposable:
        raise WiringError(
            f"structure={structure.text!r} is for layers with a matrix of weights; {name} is that of a neural graph. "
            f'Use "{n}:{m}". {_otherwise(name)}.'
        )
    what = f"structure={structure.text!r} keeps {n} of every {m} neighbouring nodes that send to a node"
    if allowed is not None:
        raise WiringError(
            f"{what}, but allowed= excludes edges of {name}, so some groups would have fewer. Drop allowed=, "
            f"or use skip=[{name!r}]."
        )
    if any(tile.places is not None for tile in tiles):
        raise WiringError(
            f"{what}, but the topology of {name} allows only some of the edges from neighbouring nodes, so some groups "
            f'would have fewer. Use "row", "column" or blocks such as "{m}x{m}, padded", or a graph of blocks. '
            f"{_otherwise(name)}."
        )
    common = math.gcd(*(len(tile.sources) for tile in tiles))
    if common % m:
        near = nearest_divisor(common, m)
        raise WiringError(
            f"{what}, but {m} does not divide the sending nodes of the tiles of {name}, which have {_shown(tiles)} "
            f"nodes (receiving × sending). {f'The nearest M that does is {near}' if near > 1 else 'No M does'}. "
            f"{_otherwise(name)}."
        )


def _sides(tiles: Sequence[Tile]) -> tuple[list[Nodes], list[Nodes]]:
    return [tile.targets for tile in tiles], [tile.sources for tile in tiles]


def _shown(tiles: Sequence[Tile]) -> str:
    """The sizes of the first tiles."""
    sizes = list(dict.fromkeys(f"{len(tile.targets)} × {len(tile.sources)}" for tile in tiles))
    return ", ".join(sizes[:4]) + (f", … ({len(tiles)} tiles)" if len(sizes) > 4 else "")


def _otherwise(name: str) -> str:
    return f"Otherwise, drop structure=, or leave the graph as it is with skip=[{name!r}]"
