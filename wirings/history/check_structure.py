"""Check that the structure in a file is consistent, before it is used to index arrays and to reserve memory."""

from __future__ import annotations

import math

import numpy as np

from wirings.errors import WiringError
from wirings.history.structure import RecordedTile, WiringStructure
from wirings.selection.structure import Structure

MAX_NODES = 2**24
"""The most nodes of a structure. Drawing takes tens of bytes for each."""
MAX_SIZE = 2**48
"""The most flat indices of a structure, so that sums of them fit 64 bits."""
MAX_NODE_STEPS = 2**28
"""The most nodes times steps of a discrete-time graph; finding the dead nodes takes four bytes for each."""
LAYOUTS = ("columns", "circle")


def check_structure(structure: WiringStructure) -> None:
    """Raise ValueError unless groups, layers, tiles and kernels follow one another, and all nodes exist."""
    _expect(0 <= structure.nodes <= MAX_NODES, f"expected at most {MAX_NODES:,} nodes, got {structure.nodes}")
    _expect(structure.layout in LAYOUTS, "unknown layout")
    end = 0
    for group in structure.groups:
        _expect(group.start == end <= group.stop, "the groups of nodes do not follow one another")
        end = group.stop
    _expect(end == structure.nodes, "the groups do not contain all nodes")
    end = 0
    for layer in structure.layers:
        _expect(all(side >= 0 for side in layer.shape), "a layer has a negative size")
        _expect(layer.start == end, "the layers do not follow one another")
        _expect(layer.stop - layer.start == math.prod(layer.shape) <= MAX_SIZE, "a layer has another size")
        end = layer.stop
    _expect(0 < end <= MAX_SIZE, "the layers have no edges, or too many")
    _expect(bool(structure.tiles) and structure.tiles[0].start == 0, "the first edges are in no tile")
    for tile, stop in zip(structure.tiles, [*(tile.start for tile in structure.tiles[1:]), end], strict=True):
        _check_tile(tile, structure.nodes)
        _expect(tile.start + tile.count == stop, "the tiles of edges do not follow one another")
    for ends in (structure.inputs, structure.outputs):
        _check_nodes(ends, structure.nodes)
    for kernels in structure.kernels:
        _check_nodes(np.asarray(kernels.nodes, np.int64), structure.nodes)
        _expect(all(type(side) is int and 0 < side <= MAX_NODES for side in kernels.shape), "a kernel has no size")
        _expect(kernels.start == end, "the kernels do not follow the edges")
        end += len(kernels.nodes) * math.prod(kernels.shape)
        _expect(end <= MAX_SIZE, "there are too many kernels")
    if structure.discrete_time is not None:
        steps = structure.discrete_time.steps
        _expect(type(steps) is int and 0 <= steps * max(1, structure.nodes) <= MAX_NODE_STEPS, "too many time steps")
    _expect(all(count > 0 for count in structure.heads.values()), "a layer has no heads")
    try:
        Structure.of(structure.edge_groups)
    except WiringError as error:
        raise ValueError("unknown groups of edges") from error


def _check_tile(tile: RecordedTile, nodes: int) -> None:
    if tile.pairs is not None:
        into, out_of = tile.pairs
        _expect(len(into) == len(out_of), "an edge has one end only")
        _check_nodes(into, nodes)
        _check_nodes(out_of, nodes)
        for ends, side in zip(tile.pairs, tile.sides or (), strict=False):
            _check_nodes(side, nodes)
            _expect(bool(np.isin(ends, side).all()), "an edge is outside of its rectangle")
        return
    sides = (tile.targets, tile.rows, tile.sources, tile.cols)
    _expect(all(0 <= side <= nodes for side in sides) and 0 < tile.inner <= MAX_SIZE, "a tile has an invalid size")
    # With flip, the rows are those of the sending nodes.
    receiving, sending = (tile.cols, tile.rows) if tile.flip else (tile.rows, tile.cols)
    _expect(
        tile.targets + receiving <= nodes and tile.sources + sending <= nodes, "a tile joins nodes that do not exist"
    )


def _check_nodes(numbers: np.ndarray, nodes: int) -> None:
    _expect(numbers.ndim == 1, "expected a list of nodes")
    _expect(not len(numbers) or (numbers.min() >= 0 and numbers.max() < nodes), "a node does not exist")


def _expect(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)
