"""Which nodes the edges of a wiring join.

Every weight entry of every wired layer is a possible edge and has a **flat index**, counted through all layers in their
order; the entries of node kernels follow. A **tile** says which nodes the edges of a range of indices join. Nodes are
numbered through the model as well, in **groups**: the blocks of a graph, or the inputs and outputs of layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from wirings.errors import WiringError
from wirings.graph.liveness import path_liveness, step_liveness
from wirings.history.blocks import Transformer, WeightMatrix, find_transformer
from wirings.selection.structure import FREE, Structure


@dataclass(frozen=True, eq=False)
class RecordedTile:
    """The nodes joined by a range of possible edges, from flat index ``start`` on.

    Edges are laid out row by row and, within a row, column by column, with ``inner`` edges for each pair of nodes (the
    entries of a kernel). Rows receive and columns send; with ``flip``, the other way round. Instead of a rectangle, a
    tile may list ``pairs``: the receiving and the sending node of each of its edges. If these are real in blocks,
    ``sides`` are the receiving and the sending nodes of the rectangle that they are in, in its order.
    """

    start: int
    targets: int = 0
    rows: int = 0
    sources: int = 0
    cols: int = 0
    inner: int = 1
    flip: bool = False
    pairs: tuple[np.ndarray, np.ndarray] | None = None
    sides: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def count(self) -> int:
        """The number of possible edges."""
        return self.rows * self.cols * self.inner if self.pairs is None else len(self.pairs[0])

    def endpoints(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The receiving and the sending node of each edge, for flat indices within this tile."""
        within = indices - self.start
        if self.pairs is not None:
            return self.pairs[0][within], self.pairs[1][within]
        row, col = np.divmod(within // self.inner, self.cols)
        if self.flip:
            return self.targets + col, self.sources + row
        return self.targets + row, self.sources + col

    def to_json(self) -> dict[str, Any]:
        if self.pairs is not None:
            listed = {"pairs": self.pairs} | ({} if self.sides is None else {"sides": self.sides})
            return {"start": self.start, **{name: [one.tolist() for one in two] for name, two in listed.items()}}
        names = ("start", "targets", "rows", "sources", "cols", "inner", "flip")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RecordedTile:
        if "pairs" in data:
            into, out_of = (np.asarray(side, np.int64) for side in data["pairs"])
            if "sides" not in data:
                return cls(int(data["start"]), pairs=(into, out_of))
            receive, send = (np.asarray(side, np.int64) for side in data["sides"])
            return cls(int(data["start"]), pairs=(into, out_of), sides=(receive, send))
        keys = ("start", "targets", "rows", "sources", "cols", "inner")
        start, targets, rows, sources, cols, inner = (int(data[key]) for key in keys)
        return cls(start, targets, rows, sources, cols, inner, bool(data["flip"]))


class NodeGroup(NamedTuple):
    """Nodes ``start`` to ``stop``: a block of a graph, or the inputs or outputs of a layer."""

    name: str
    start: int
    stop: int


class RecordedLayer(NamedTuple):
    """A wired weight, whose possible edges have flat indices ``start`` to ``stop``."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


class NodeKernels(NamedTuple):
    """The convolution kernels of ``nodes``, whose entries have flat indices from ``start`` on."""

    nodes: list[int]
    start: int
    shape: tuple[int, ...]


class DiscreteTime(NamedTuple):
    """How a discrete-time graph runs: the number of steps, and when it reads inputs and gives outputs."""

    steps: int
    """0 if it runs for as many steps as its input has."""
    every_in: bool
    """Whether inputs are fed in at every step, not only at the first."""
    every_out: bool
    """Whether outputs are read at every step, not only at the last."""


@dataclass(frozen=True, eq=False)
class WiringStructure:
    """The nodes and the possible edges of a wiring."""

    nodes: int
    groups: list[NodeGroup]
    layers: list[RecordedLayer]
    tiles: list[RecordedTile]
    inputs: np.ndarray
    outputs: np.ndarray
    kernels: list[NodeKernels] = field(default_factory=list)
    layout: str = "columns"
    """How to draw it: ``"columns"``, one for each group, or ``"circle"``, for graphs without an order."""
    paths_known: bool = True
    """Whether paths across layers are those of the model, not a guess."""
    discrete_time: DiscreteTime | None = None
    """How a discrete-time graph runs, which decides which nodes act too late to matter."""
    heads: dict[str, int] = field(default_factory=dict)
    """The number of attention heads, by the name of the layer that holds the queries, as far as it is known."""
    edge_groups: str = FREE
    """Which edges are real together, as ``structure=`` of `wirings.wire_` says it: such as ``"32x32"`` or ``"2:4"``."""

    @cached_property
    def block(self) -> tuple[int, int] | None:
        """The outputs and inputs of a block of edges that are real together; None for other structures."""
        return in_blocks(self.edge_groups)

    @property
    def edges(self) -> int:
        """The number of possible edges."""
        return self.layers[-1].stop

    @property
    def size(self) -> int:
        """The number of flat indices: possible edges and kernel entries."""
        last = self.kernels[-1:]
        return last[0].start + len(last[0].nodes) * int(np.prod(last[0].shape)) if last else self.edges

    def endpoints(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The receiving and the sending node of each edge, for ascending flat indices."""
        targets, sources = np.empty(len(indices), np.int64), np.empty(len(indices), np.int64)
        bounds = np.searchsorted(indices, [tile.start for tile in self.tiles] + [self.edges])
        for tile, first, last in zip(self.tiles, bounds[:-1], bounds[1:], strict=True):
            if first < last:
                targets[first:last], sources[first:last] = tile.endpoints(indices[first:last])
        return targets, sources

    def group_of(self) -> np.ndarray:
        """The index of each node's group."""
        return np.repeat(np.arange(len(self.groups)), [group.stop - group.start for group in self.groups])

    @cached_property
    def matrices(self) -> list[WeightMatrix]:
        """The layers as matrices, as far as they are."""
        tiles = {tile.start: tile for tile in self.tiles}
        matrices = []
        for layer in self.layers:
            first = tiles.get(layer.start)
            kernel = 1 if len(layer.shape) < 3 or first is None else first.inner
            matrices.append(as_matrix(layer.name, layer.shape, first is not None and first.flip, kernel > 1))
        return matrices

    @cached_property
    def transformer(self) -> Transformer | None:
        """The blocks of a transformer; None for other networks."""
        return find_transformer(self.matrices, self.heads)

    def with_heads(self, heads: int) -> WiringStructure:
        """The structure of a transformer whose attentions have this number of heads each.

        Needed for histories that do not know it, since the model keeps it where it was not found.
        """
        found = self.transformer
        if found is None:
            raise WiringError("heads can only be given for transformers, but no blocks with attention were found.")
        names = {self.layers[one.query_layer].name: heads for one in found.attentions}
        given = replace(self, heads=names)
        if not all(one.heads for one in given.transformer.attentions):  # type: ignore[union-attr]
            one = next(one for one in given.transformer.attentions if not one.heads)  # type: ignore[union-attr]
            layer = self.layers[one.query_layer]
            raise WiringError(f"{layer.name} of shape {layer.shape} cannot be split into {heads} heads.")
        return given

    def same_edges(self, other: WiringStructure) -> bool:
        """Whether flat indices stand for the same edges in both, so that the records of one continue the other's.

        Which layers are drawn as sharing nodes, and what is known about heads, may differ: releases guess differently.
        """
        if any(len(layer.shape) < 2 for layer in self.layers):  # graphs say which nodes their edges join
            return self.to_json() == other.to_json()
        mine, theirs = ([(tile.start, tile.count, tile.flip) for tile in one.tiles] for one in (self, other))
        return self.layers == other.layers and self.kernels == other.kernels and mine == theirs

    def to_json(self) -> dict[str, Any]:
        """The structure as it is stored in files; these keys are part of the file format."""
        return {
            "nodes": self.nodes,
            "groups": [list(group) for group in self.groups],
            "layers": [[*layer[:3], list(layer.shape)] for layer in self.layers],
            "tiles": [tile.to_json() for tile in self.tiles],
            "inputs": self.inputs.tolist(),
            "outputs": self.outputs.tolist(),
            "kernels": [[kernel.nodes, kernel.start, list(kernel.shape)] for kernel in self.kernels],
            "layout": self.layout,
            "sure": self.paths_known,
            "walk": None if self.discrete_time is None else list(self.discrete_time),
            **({"heads": self.heads} if self.heads else {}),
            **({"edge_groups": self.edge_groups} if self.edge_groups != FREE else {}),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> WiringStructure:
        return cls(
            nodes=int(data["nodes"]),
            groups=[NodeGroup(str(name), int(start), int(stop)) for name, start, stop in data["groups"]],
            layers=[RecordedLayer(str(n), int(a), int(b), tuple(map(int, shape))) for n, a, b, shape in data["layers"]],
            tiles=[RecordedTile.from_json(tile) for tile in data["tiles"]],
            inputs=np.asarray(data["inputs"], np.int64),
            outputs=np.asarray(data["outputs"], np.int64),
            kernels=[NodeKernels([int(v) for v in nodes], int(a), tuple(s)) for nodes, a, s in data["kernels"]],
            layout=str(data["layout"]),
            paths_known=bool(data["sure"]),
            discrete_time=None if data["walk"] is None else DiscreteTime(*data["walk"]),
            heads={str(name): int(count) for name, count in data.get("heads", {}).items()},
            edge_groups=str(data.get("edge_groups", FREE)),
        )


def in_blocks(edge_groups: str) -> tuple[int, int] | None:
    """The outputs and inputs of a block of edges, if they are real in blocks.

    >>> in_blocks("4x2"), in_blocks("2:4"), in_blocks("row")
    ((4, 2), None, None)
    """
    given = Structure.of(edge_groups)
    height, width = (None, None) if given is None else given.block
    return None if height is None or width is None else (height, width)


def positions(nodes: np.ndarray, among: np.ndarray) -> np.ndarray:
    """The position of each node in a list that has them all."""
    order = np.argsort(among)
    return order[np.searchsorted(among, nodes, sorter=order)]


def as_matrix(name: str, shape: tuple[int, ...], flip: bool, kernel: bool) -> WeightMatrix:
    """A weight as a matrix, as far as it is one.

    Args:
        name: the name of the weight.
        shape: its shape; three dimensions are several matrices, unless it has a kernel.
        flip: whether its first dimension is that of the inputs.
        kernel: whether the third dimension and those after it are a kernel.
    """
    edges = int(np.prod(shape))
    if len(shape) == 3 and shape[2] > 1 and not kernel:
        return WeightMatrix(name, shape[1], shape[2], edges, shape[0])
    if len(shape) < 2 or edges != shape[0] * shape[1]:
        return WeightMatrix(name, 0, 0, edges)
    gives, takes = (shape[1], shape[0]) if flip else (shape[0], shape[1])
    return WeightMatrix(name, gives, takes, edges, flip=flip)


def alive(structure: WiringStructure, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Boolean mask of the nodes that are not dead, given the real edges; agrees with `Graph.dead_nodes`."""
    time, ends = structure.discrete_time, (structure.inputs, structure.outputs)
    if time is None:
        return path_liveness(sources, targets, structure.nodes, *ends).nodes
    return step_liveness(
        sources,
        targets,
        structure.nodes,
        *ends,
        steps=time.steps or None,
        input_steps=None if time.every_in else 1,
        read_every_step=time.every_out,
    ).nodes
