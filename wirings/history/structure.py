"""What a wiring's edges join: all nodes of a model, numbered through, and the tiles that its weights are laid out in.

Every weight of every wired layer has a **place**, numbered through the layers in their order; so has every entry of a
graph's node kernels, after them. A **tile** says which nodes the edges of a run of places join. Nodes are numbered
through as well, in **groups**: the blocks of a graph, or the inputs and outputs of layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np


@dataclass(frozen=True, eq=False)
class Tile:
    """Places from ``start`` on: row by row, in each row column by column, ``inner`` weights for each pair of nodes.

    Rows receive and columns send, unless ``flip``. Instead of a rectangle a tile may have ``pairs``, the node that
    receives and the node that sends for each of its places.
    """

    start: int
    targets: int = 0
    rows: int = 0
    sources: int = 0
    cols: int = 0
    inner: int = 1
    flip: bool = False
    pairs: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def count(self) -> int:
        return self.rows * self.cols * self.inner if self.pairs is None else len(self.pairs[0])

    def ends(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The nodes that receive and those that send, for places of this tile."""
        within = places - self.start
        if self.pairs is not None:
            return self.pairs[0][within], self.pairs[1][within]
        row, col = np.divmod(within // self.inner, self.cols)
        if self.flip:
            return self.targets + col, self.sources + row
        return self.targets + row, self.sources + col

    def to_json(self) -> dict[str, Any]:
        if self.pairs is not None:
            return {"start": self.start, "pairs": [side.tolist() for side in self.pairs]}
        names = ("start", "targets", "rows", "sources", "cols", "inner", "flip")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Tile:
        if "pairs" in data:
            into, out_of = (np.asarray(side, np.int64) for side in data["pairs"])
            return cls(int(data["start"]), pairs=(into, out_of))
        keys = ("start", "targets", "rows", "sources", "cols", "inner")
        start, targets, rows, sources, cols, inner = (int(data[key]) for key in keys)
        return cls(start, targets, rows, sources, cols, inner, bool(data["flip"]))


class Group(NamedTuple):
    """Nodes ``start`` to ``stop``: a block, or a layer's inputs or outputs."""

    name: str
    start: int
    stop: int


class LayerOf(NamedTuple):
    """A wired weight: its places are ``start`` to ``stop``."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


class Kernels(NamedTuple):
    """The kernels of ``nodes``, whose entries have places from ``start`` on."""

    nodes: list[int]
    start: int
    shape: tuple[int, ...]


class Walk(NamedTuple):
    """A discrete-time graph's steps (0: as many as its input has), and when its inputs come in and outputs are read."""

    steps: int
    every_in: bool
    every_out: bool


@dataclass(frozen=True, eq=False)
class Structure:
    """The nodes, the layers and the tiles of a wiring. See the module's text."""

    nodes: int
    groups: list[Group]
    layers: list[LayerOf]
    tiles: list[Tile]
    inputs: np.ndarray
    outputs: np.ndarray
    kernels: list[Kernels] = field(default_factory=list)
    layout: str = "columns"
    """``"columns"``, a column for each group, or ``"circle"``, for graphs that have no order."""
    sure: bool = True
    """Whether paths across layers are known to be the model's."""
    walk: Walk | None = None
    """How a discrete-time graph runs, which says which nodes come too late to count."""

    @property
    def edges(self) -> int:
        """How many edges are possible, that is the first place that is none."""
        return self.layers[-1].stop

    @property
    def places(self) -> int:
        """All places, those of kernels included."""
        last = self.kernels[-1:]
        return last[0].start + len(last[0].nodes) * int(np.prod(last[0].shape)) if last else self.edges

    def ends(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The nodes that receive and those that send, for sorted places of edges."""
        targets, sources = np.empty(len(places), np.int64), np.empty(len(places), np.int64)
        bounds = np.searchsorted(places, [tile.start for tile in self.tiles] + [self.edges])
        for tile, first, last in zip(self.tiles, bounds[:-1], bounds[1:], strict=True):
            if first < last:
                targets[first:last], sources[first:last] = tile.ends(places[first:last])
        return targets, sources

    def group_of(self) -> np.ndarray:
        """The number of each node's group."""
        return np.repeat(np.arange(len(self.groups)), [group.stop - group.start for group in self.groups])

    def to_json(self) -> dict[str, Any]:
        return {
            "nodes": self.nodes,
            "groups": [list(group) for group in self.groups],
            "layers": [[*layer[:3], list(layer.shape)] for layer in self.layers],
            "tiles": [tile.to_json() for tile in self.tiles],
            "inputs": self.inputs.tolist(),
            "outputs": self.outputs.tolist(),
            "kernels": [[kernel.nodes, kernel.start, list(kernel.shape)] for kernel in self.kernels],
            "layout": self.layout,
            "sure": self.sure,
            "walk": None if self.walk is None else list(self.walk),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Structure:
        return cls(
            nodes=int(data["nodes"]),
            groups=[Group(str(name), int(start), int(stop)) for name, start, stop in data["groups"]],
            layers=[LayerOf(str(n), int(a), int(b), tuple(map(int, shape))) for n, a, b, shape in data["layers"]],
            tiles=[Tile.from_json(tile) for tile in data["tiles"]],
            inputs=np.asarray(data["inputs"], np.int64),
            outputs=np.asarray(data["outputs"], np.int64),
            kernels=[Kernels([int(v) for v in nodes], int(a), tuple(s)) for nodes, a, s in data["kernels"]],
            layout=str(data["layout"]),
            sure=bool(data["sure"]),
            walk=None if data["walk"] is None else Walk(*data["walk"]),
        )


def alive(structure: Structure, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The nodes that are not dead with these edges; what `Graph.dead_nodes` leaves."""
    if structure.walk is not None and structure.walk.steps:
        return _alive_in_time(structure, structure.walk, sources, targets)
    fed = _reached(structure.inputs, sources, targets, structure.nodes)
    leads = _reached(structure.outputs, targets, sources, structure.nodes)
    if structure.walk is None:
        return fed & leads
    once, onward, outputs = (np.zeros(structure.nodes, bool) for _ in range(3))
    once[targets[fed[sources]]] = onward[sources[leads[targets]]] = outputs[structure.outputs] = True
    return (fed & onward) | (once & outputs)  # what goes from an input takes an edge at least to be read


def _alive_in_time(structure: Structure, walk: Walk, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The same where what starts at an input must be at an output when it is read."""
    last, shape = walk.steps, (walk.steps + 1, structure.nodes)
    here, ahead = (
        np.zeros(shape, bool),
        np.zeros(shape, bool),
    )  # by edges, to here from an input, from here to an output
    for time in range(last):
        sending = here[time].copy()
        if time == 0 or walk.every_in:
            sending[structure.inputs] = True
        here[time + 1, targets[sending[sources]]] = True
    for time in range(last, 0, -1):
        wanted = ahead[time].copy()
        if time == last or walk.every_out:
            wanted[structure.outputs] = True
        ahead[time - 1, sources[wanted[targets]]] = True
    started, read = here.copy(), ahead.copy()
    started[: last if walk.every_in else 1, structure.inputs] = True
    read[1 if walk.every_out else last :, structure.outputs] = True
    return np.asarray(((started & ahead) | (here & read)).any(0))


def _reached(start: np.ndarray, sources: np.ndarray, targets: np.ndarray, nodes: int) -> np.ndarray:
    seen = np.zeros(nodes, bool)
    seen[start] = True
    while len(found := targets[seen[sources] & ~seen[targets]]):
        seen[found] = True
    return seen
