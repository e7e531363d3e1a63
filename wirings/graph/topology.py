"""Topologies: which edges a graph may have, and how its weights are stored.

Nodes are numbered from 0. A graph's weights are one vector that holds allowed edges and nothing else: tile after tile,
each tile row by row, a row for every node that receives. A **tile** is the rectangle of edges from some nodes to some
others; a full one is a slice of the vector read as a matrix, so blocks cost no index and no multiplication by edges
that cannot exist.

A static graph computes its nodes in **groups**, and within a group in **levels** whose nodes do not feed each other.
A group's far edges come from earlier groups, by one product for the whole group; its near edges from earlier levels of
the same group. Blocks have one level a group; a general DAG, whose every node is a level, has 32 of them, so that most
of its edges are multiplied in large products although its nodes come one by one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from wirings.errors import WiringError

GROUP = 32
"""Nodes that a static graph gathers, level by level, before it makes a new group."""

Nodes = range | np.ndarray


@dataclass(frozen=True, eq=False)
class Tile:
    """The edges from ``sources`` to ``targets``: the entries ``start`` to ``start + count`` of the weights."""

    targets: Nodes
    sources: Nodes
    start: int
    places: tuple[np.ndarray, np.ndarray] | None = None
    """The rows and columns of the allowed edges, row by row; None if all are allowed."""

    @property
    def count(self) -> int:
        return len(self.targets) * len(self.sources) if self.places is None else len(self.places[0])

    def edge_list(self) -> tuple[np.ndarray, np.ndarray]:
        """The nodes that receive and the nodes that send, one of each for every weight."""
        targets, sources = np.asarray(self.targets), np.asarray(self.sources)
        if self.places is None:
            return np.repeat(targets, len(sources)), np.tile(sources, len(targets))
        return targets[self.places[0]], sources[self.places[1]]


@dataclass(frozen=True, eq=False)
class Group:
    """Nodes of a static graph that are computed together; ``levels`` are (start, stop) positions in the order."""

    levels: list[tuple[int, int]]
    far: Tile | None
    near: Tile | None

    @property
    def start(self) -> int:
        return self.levels[0][0]

    @property
    def stop(self) -> int:
        return self.levels[-1][1]


class Topology(ABC):
    """Which edges are allowed among ``nodes`` nodes."""

    nodes: int

    @abstractmethod
    def tiles(self) -> list[Tile]:
        """The tiles of a dynamic graph. Two of them have the same targets or none in common."""

    @abstractmethod
    def groups(self, inputs: np.ndarray, where: str) -> tuple[np.ndarray, list[Group]]:
        """For a static graph: the order of the nodes, inputs first, and its groups; group 0 is the inputs.

        Tiles' ``sources`` and ``targets`` are node numbers. Raises `WiringError` where there is a cycle.
        """

    def default_inputs(self) -> int | None:
        """How many nodes, from the first, are inputs if the caller does not say; None if he must."""
        return None

    def default_outputs(self) -> int | None:
        """How many nodes, to the last, are outputs if the caller does not say; None if he must."""
        return None

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value!r}" for key, value in vars(self).items() if key[0] != "_")
        return f"{type(self).__name__}({settings})"


class Blocks(Topology):
    """Blocks of nodes, in order: an edge may lead from any block to any later one.

    Args:
        sizes: the number of nodes of each block. The first is the input, the last the output.
        reach: how many blocks an edge may go ahead; 1 is layers, None any number.

    >>> Blocks([2, 3, 1])
    Blocks(sizes=[2, 3, 1])
    >>> [tile.count for tile in Blocks([2, 3, 1]).tiles()]
    [6, 5]
    """

    def __init__(self, sizes: Sequence[int], reach: int | None = None) -> None:
        if not isinstance(sizes, Sequence):
            raise WiringError(f"Blocks takes a list with the size of each block, not {sizes!r}.")
        self.sizes, self.reach = list(sizes), reach
        for i, size in enumerate(self.sizes):
            whole("Blocks", f"the size of block {i}", size)
        if len(self.sizes) < 2:
            raise WiringError(f"Blocks needs at least 2 blocks, inputs and outputs, but sizes = {self.sizes}.")
        if reach is not None:
            whole("Blocks", "reach", reach)
        self.nodes = sum(self.sizes)

    def starts(self) -> list[int]:
        """The first node of each block, and the number of nodes at the end."""
        return [0, *np.cumsum(self.sizes).tolist()]

    def tiles(self) -> list[Tile]:
        starts, tiles, count = self.starts(), [], 0
        for j in range(1, len(self.sizes)):
            first = 0 if self.reach is None else starts[max(0, j - self.reach)]
            tiles.append(Tile(range(starts[j], starts[j + 1]), range(first, starts[j]), count))
            count += tiles[-1].count
        return tiles

    def groups(self, inputs: np.ndarray, where: str) -> tuple[np.ndarray, list[Group]]:
        if not np.array_equal(inputs, np.arange(self.sizes[0])):
            raise WiringError(
                f"{where}: with blocks the inputs are the first block, nodes 0 to {self.sizes[0] - 1}, but inputs = "
                f"{shown(inputs)} came. Leave inputs= out, or give the edges as a boolean matrix."
            )
        starts = self.starts()
        rest = [Group([(t.targets[0], t.targets[-1] + 1)], t, None) for t in self.tiles()]
        return np.arange(self.nodes), [Group([(0, starts[1])], None, None), *rest]

    def default_inputs(self) -> int:
        return self.sizes[0]

    def default_outputs(self) -> int:
        return self.sizes[-1]

    def __repr__(self) -> str:
        return f"Blocks(sizes={self.sizes}" + (f", reach={self.reach})" if self.reach is not None else ")")


class Dag(Topology):
    """Ordered nodes: an edge may lead from any node to any later one, as in the paper's Algorithm 1.

    Args:
        nodes: how many.
        inputs: the first so many are inputs: no edge leads to them.

    >>> sum(tile.count for tile in Dag(5, inputs=2).tiles())
    9
    """

    def __init__(self, nodes: int, inputs: int = 1) -> None:
        self.nodes, self.inputs = whole("Dag", "nodes", nodes), whole("Dag", "inputs", inputs)
        if inputs >= nodes:
            raise WiringError(f"Dag: inputs = {inputs} of {nodes} nodes leave none to wire; give more nodes.")

    def tiles(self) -> list[Tile]:
        return [t for g in self.groups(np.arange(self.inputs), "Dag")[1] for t in (g.far, g.near) if t is not None]

    def groups(self, inputs: np.ndarray, where: str) -> tuple[np.ndarray, list[Group]]:
        if not np.array_equal(inputs, np.arange(self.inputs)):
            raise WiringError(
                f"{where}: Dag({self.nodes}, inputs={self.inputs}) has the first {self.inputs} nodes as its inputs, "
                f"but inputs = {shown(inputs)} came. Say how many there are in the Dag alone."
            )
        groups, count = [Group([(0, self.inputs)], None, None)], 0
        for start in range(self.inputs, self.nodes, GROUP):
            own = range(start, min(start + GROUP, self.nodes))
            far = Tile(own, range(start), count)
            near = Tile(own, own, count + far.count, np.tril_indices(len(own), -1))
            count += far.count + near.count
            groups.append(Group([(v, v + 1) for v in own], far, near if near.count else None))
        return np.arange(self.nodes), groups

    def default_inputs(self) -> int:
        return self.inputs


class Complete(Topology):
    """Every edge is allowed, cycles and self-loops too.

    >>> Complete(4).tiles()[0].count
    16
    """

    def __init__(self, nodes: int) -> None:
        self.nodes = whole("Complete", "nodes", nodes)

    def tiles(self) -> list[Tile]:
        return [Tile(range(self.nodes), range(self.nodes), 0)]

    def groups(self, inputs: np.ndarray, where: str) -> tuple[np.ndarray, list[Group]]:
        raise WiringError(
            f"{where}: a complete graph has cycles, for one the edge from node 0 to itself, and a static graph has "
            "none. Take Blocks or Dag, or a DiscreteGraph."
        )


class Matrix(Topology):
    """Edges of the caller's own: ``allowed[v, u]`` says whether an edge may lead from node u to node v.

    Args:
        allowed: a boolean matrix, nodes × nodes.
    """

    def __init__(self, allowed: Tensor | np.ndarray) -> None:
        matrix = np.asarray(allowed)
        if matrix.dtype != bool or matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
            raise WiringError(
                "the allowed edges are a square boolean matrix, a row for every node that receives, but "
                f"{matrix.dtype} of shape {tuple(matrix.shape)} came."
            )
        if not matrix.any():
            raise WiringError(f"the matrix of {len(matrix)} × {len(matrix)} allowed edges allows none at all.")
        rows, columns = np.nonzero(matrix)
        self.nodes, self._edges = len(matrix), (rows, columns)  # of few edges the matrix itself would be the most

    def tiles(self) -> list[Tile]:
        nodes = range(self.nodes)
        return [Tile(nodes, nodes, 0, None if len(self._edges[0]) == self.nodes**2 else self._edges)]

    def groups(self, inputs: np.ndarray, where: str) -> tuple[np.ndarray, list[Group]]:
        order, levels = self._levels(inputs, where)
        position = np.argsort(order)
        targets, sources = position[self._edges[0]], position[self._edges[1]]
        by_row = np.lexsort((sources, targets))
        targets, sources, count = targets[by_row], sources[by_row], 0
        groups = [Group([levels[0]], None, None)]
        for gathered in _gathered(levels[1:]):
            start, stop = gathered[0][0], gathered[-1][1]
            own = slice(*np.searchsorted(targets, (start, stop)))
            rows, columns = targets[own] - start, sources[own]
            tiles: list[Tile | None] = []
            for first, last in ((0, start), (start, stop)):
                here = (columns >= first) & (columns < last)
                places = (rows[here], columns[here] - first)
                full = len(places[0]) == (stop - start) * (last - first)
                tile = Tile(order[start:stop], order[first:last], count, None if full else places)
                tiles.append(tile if tile.count else None)
                count += tile.count
            groups.append(Group(gathered, *tiles))
        return order, groups

    def _levels(self, inputs: np.ndarray, where: str) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Nodes in the order of their longest path from a node without parents, and where each level lies in it."""
        targets, sources = self._edges
        is_input = np.zeros(self.nodes, bool)
        is_input[inputs] = True
        into = np.flatnonzero(is_input[targets])
        if len(into):
            raise WiringError(
                f"{where}: node {targets[into[0]]} is an input, so it cannot have parents in a static graph, but the "
                f"edge from node {sources[into[0]]} to it is allowed. Take that edge away, or take a DiscreteGraph, "
                "whose inputs may have parents."
            )
        by_source = np.argsort(sources, kind="stable")
        ends = np.cumsum(np.bincount(sources, minlength=self.nodes))
        left, level = np.bincount(targets, minlength=self.nodes), np.full(self.nodes, -1)
        ready, depth = inputs, 0
        others = np.flatnonzero((left == 0) & ~is_input)  # parentless, and no inputs: they come one level later
        while len(ready):
            level[ready] = depth
            fed = [
                targets[by_source[end - n : end]]
                for end, n in zip(ends[ready], np.diff(ends, prepend=0)[ready], strict=True)
            ]
            fed_all = np.concatenate(fed) if fed else np.empty(0, int)
            np.subtract.at(left, fed_all, 1)
            ready = np.union1d(np.unique(fed_all[left[fed_all] == 0]), others if depth == 0 else others[:0]).astype(int)
            depth += 1
        if (level < 0).any():
            raise WiringError(
                f"{where}: a static graph has no cycles, but the allowed edges have one: "
                f"{' → '.join(map(str, self._cycle(level < 0)))}. Take one of these edges away, or take a "
                "DiscreteGraph."
            )
        order = np.argsort(level, kind="stable")
        order[: len(inputs)] = inputs  # level 0, as the caller numbers them
        stops = np.cumsum(np.bincount(level)).tolist()
        return order, list(zip([0, *stops[:-1]], stops, strict=True))

    def _cycle(self, among: np.ndarray) -> list[int]:
        """A cycle among nodes that all have a parent among them: walk from parent to parent."""
        targets, sources = self._edges
        inside = among[targets] & among[sources]
        parent = dict(zip(targets[inside].tolist(), sources[inside].tolist(), strict=True))
        path = [int(np.flatnonzero(among)[0])]
        while path[-1] not in path[:-1]:
            path.append(parent[path[-1]])
        return path[path.index(path[-1]) :][::-1]

    def __repr__(self) -> str:
        return f"Matrix(<{self.nodes} × {self.nodes}, {len(self._edges[0]):,} allowed>)"


def _gathered(levels: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Consecutive levels together until they have enough nodes for a product of their own."""
    groups: list[list[tuple[int, int]]] = []
    for level in levels:
        if groups and level[1] - groups[-1][0][0] <= GROUP:
            groups[-1].append(level)
        else:
            groups.append([level])
    return groups


def whole(where: str, what: str, value: Any) -> int:
    """``value``, checked to be a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise WiringError(f"{where}: {what} must be a whole number, at least 1, not {value!r}.")
    return int(value)


def shown(nodes: np.ndarray) -> str:
    """Node numbers, in short."""
    head = ", ".join(str(int(node)) for node in nodes[:4])
    return f"[{head}, … ({len(nodes)} nodes)]" if len(nodes) > 4 else f"[{head}]"
