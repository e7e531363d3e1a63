"""Topologies: which edges a graph may have, and how its weights are stored.

Nodes are numbered from 0. A graph's weights are one vector that holds the allowed edges and nothing else: tile after
tile, each tile row by row, with a row for every node that receives. A **tile** is the rectangle of edges from some
nodes to some others. A full tile is a slice of the vector viewed as a matrix, so blocks need no index and never
multiply by edges that cannot exist.

A static graph computes its nodes in **groups**, and within a group in **levels**, whose nodes do not feed each other.
A group's far edges come from earlier groups and are multiplied in one product for the whole group; its near edges come
from earlier levels of the same group. With blocks, each group is one level. In a general DAG every node may be a level
of its own; a group then has 32 of them, so that most edges are still multiplied in large products.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from wirings.errors import WiringError
from wirings.utils.checks import check_int
from wirings.utils.text import brief

GROUP = 32
"""The number of nodes that a static graph gathers, level by level, before it starts a new group."""

MAX_NODES = 2**31 - 1
"""The largest number of nodes that a topology takes; far fewer fit into memory."""

Nodes = range | np.ndarray


@dataclass(frozen=True, eq=False)
class EdgeTile:
    """The edges from ``sources`` to ``targets``: entries ``start`` to ``start + count`` of a graph's weights."""

    targets: Nodes
    sources: Nodes
    start: int
    places: tuple[np.ndarray, np.ndarray] | None = None
    """The rows and columns of the allowed edges, row by row; None if all are allowed."""

    @property
    def count(self) -> int:
        """The number of allowed edges."""
        return len(self.targets) * len(self.sources) if self.places is None else len(self.places[0])

    def edge_list(self) -> tuple[np.ndarray, np.ndarray]:
        """For every weight, the node that receives and the node that sends."""
        targets, sources = np.asarray(self.targets), np.asarray(self.sources)
        if self.places is None:
            return np.repeat(targets, len(sources)), np.tile(sources, len(targets))
        return targets[self.places[0]], sources[self.places[1]]


@dataclass(frozen=True, eq=False)
class LevelGroup:
    """Nodes of a static graph whose far edges are multiplied in one product."""

    levels: list[tuple[int, int]]
    """The positions (start, stop) of each level in the order of the nodes."""
    far: EdgeTile | None
    """The edges from earlier groups."""
    near: EdgeTile | None
    """The edges between levels of this group."""

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
    def tiles(self) -> list[EdgeTile]:
        """The tiles of a dynamic graph. Any two of them have either the same targets or no target in common."""

    @abstractmethod
    def groups(self, inputs: np.ndarray, where: str) -> tuple[np.ndarray, list[LevelGroup]]:
        """The order in which a static graph computes its nodes, and its groups.

        Args:
            inputs: the numbers of the input nodes, which come first in the order and are group 0.
            where: the graph that asks, for error messages.

        Raises:
            WiringError: if the allowed edges contain a cycle, or lead to an input.
        """

    def default_inputs(self) -> int | None:
        """The number of first nodes that are inputs by default; None if the user has to choose."""
        return None

    def default_outputs(self) -> int | None:
        """The number of last nodes that are outputs by default; None if the user has to choose."""
        return None

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value!r}" for key, value in vars(self).items() if key[0] != "_")
        return f"{type(self).__name__}({settings})"


class Blocks(Topology):
    """Ordered blocks of nodes: an edge may lead from any block to any later one.

    Args:
        sizes: the number of nodes in each block. The first block is the input, the last the output.
        reach: how many blocks ahead an edge may lead: 1 gives a layered network, None allows any number.

    >>> Blocks([2, 3, 1])
    Blocks(sizes=[2, 3, 1])
    >>> [tile.count for tile in Blocks([2, 3, 1]).tiles()]
    [6, 5]
    """

    def __init__(self, sizes: Sequence[int], reach: int | None = None) -> None:
        given: Any = sizes
        if not isinstance(given, Sequence) or isinstance(given, str):
            raise WiringError(f"Blocks expects a list with the size of each block, got {brief(sizes)}.")
        self.sizes, self.reach = list(sizes), reach
        for i, size in enumerate(self.sizes):
            check_int("Blocks", f"the size of block {i}", size, most=MAX_NODES)
        if len(self.sizes) < 2:
            raise WiringError(f"Blocks needs at least 2 blocks, inputs and outputs, got sizes={self.sizes}.")
        if reach is not None:
            check_int("Blocks", "reach", reach)
        self.nodes = sum(self.sizes)

    def starts(self) -> list[int]:
        """The first node of each block, followed by the number of nodes."""
        return [0, *np.cumsum(self.sizes).tolist()]

    def tiles(self) -> list[EdgeTile]:
        starts, tiles, count = self.starts(), [], 0
        for j in range(1, len(self.sizes)):
            first = 0 if self.reach is None else starts[max(0, j - self.reach)]
            tiles.append(EdgeTile(range(starts[j], starts[j + 1]), range(first, starts[j]), count))
            count += tiles[-1].count
        return tiles

    def groups(self, inputs: np.ndarray, where: str) -> tuple[np.ndarray, list[LevelGroup]]:
        if not np.array_equal(inputs, np.arange(self.sizes[0])):
            raise WiringError(
                f"{where}: with blocks, the inputs are the first block, nodes 0 to {self.sizes[0] - 1}, got inputs="
                f"{short_list(inputs)}. Leave inputs= out, or give the allowed edges as a boolean matrix."
            )
        starts = self.starts()
        rest = [LevelGroup([(t.targets[0], t.targets[-1] + 1)], t, None) for t in self.tiles()]
        return np.arange(self.nodes), [LevelGroup([(0, starts[1])], None, None), *rest]

    def default_inputs(self) -> int:
        return self.sizes[0]

    def default_outputs(self) -> int:
        return self.sizes[-1]

    def __repr__(self) -> str:
        return f"Blocks(sizes={self.sizes}" + (f", reach={self.reach})" if self.reach is not None else ")")


class Dag(Topology):
    """Ordered nodes: an edge may lead from any node to any later one, as in the paper's Algorithm 1.

    Args:
        nodes: the number of nodes.
        inputs: the number of first nodes that are inputs, to which no edge leads.

    >>> sum(tile.count for tile in Dag(5, inputs=2).tiles())
    9
    """

    def __init__(self, nodes: int, inputs: int = 1) -> None:
        self.nodes, self.inputs = check_int("Dag", "nodes", nodes, most=MAX_NODES), check_int("Dag", "inputs", inputs)
        if inputs >= nodes:
            raise WiringError(f"Dag: inputs={inputs} of {nodes} nodes leaves no node to wire; use more nodes.")

    def tiles(self) -> list[EdgeTile]:
        return [t for g in self.groups(np.arange(self.inputs), "Dag")[1] for t in (g.far, g.near) if t is not None]

    def groups(self, inputs: np.ndarray, where: str) -> tuple[np.ndarray, list[LevelGroup]]:
        if not np.array_equal(inputs, np.arange(self.inputs)):
            raise WiringError(
                f"{where}: the inputs of Dag({self.nodes}, inputs={self.inputs}) are its first {self.inputs} nodes, "
                f"got inputs={short_list(inputs)}. Leave inputs= out here and set it in the Dag."
            )
        groups, count = [LevelGroup([(0, self.inputs)], None, None)], 0
        for start in range(self.inputs, self.nodes, GROUP):
            own = range(start, min(start + GROUP, self.nodes))
            far = EdgeTile(own, range(start), count)
            near = EdgeTile(own, own, count + far.count, np.tril_indices(len(own), -1))
            count += far.count + near.count
            groups.append(LevelGroup([(v, v + 1) for v in own], far, near if near.count else None))
        return np.arange(self.nodes), groups

    def default_inputs(self) -> int:
        return self.inputs


class Complete(Topology):
    """All edges are allowed, including cycles and self-loops.

    Args:
        nodes: the number of nodes.

    >>> Complete(4).tiles()[0].count
    16
    """

    def __init__(self, nodes: int) -> None:
        self.nodes = check_int("Complete", "nodes", nodes, most=MAX_NODES)

    def tiles(self) -> list[EdgeTile]:
        return [EdgeTile(range(self.nodes), range(self.nodes), 0)]

    def groups(self, inputs: np.ndarray, where: str) -> tuple[np.ndarray, list[LevelGroup]]:
        raise WiringError(
            f"{where}: a complete graph has cycles, such as the edge from node 0 to itself, which a static graph "
            "cannot have. Use Blocks or a Dag, or a DiscreteGraph."
        )


class Matrix(Topology):
    """The allowed edges as a boolean matrix: ``allowed[v, u]`` says whether an edge may lead from node u to node v.

    Args:
        allowed: a boolean tensor or array of shape (nodes, nodes).
    """

    def __init__(self, allowed: Tensor | np.ndarray) -> None:
        matrix = np.asarray(allowed.cpu() if isinstance(allowed, Tensor) else allowed)
        if matrix.dtype != bool or matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
            raise WiringError(
                "topology= expects a Topology such as Blocks or Dag, or a square boolean matrix with a row for every "
                f"node that receives, got {matrix.dtype} of shape {tuple(matrix.shape)}."
            )
        if not matrix.any():
            raise WiringError(f"topology= is a {len(matrix)} × {len(matrix)} matrix that allows no edge at all.")
        rows, columns = np.nonzero(matrix)
        self.nodes, self._edges = (
            len(matrix),
            (rows, columns),
        )  # with few edges, the matrix itself would take the most memory

    def tiles(self) -> list[EdgeTile]:
        nodes = range(self.nodes)
        return [EdgeTile(nodes, nodes, 0, None if len(self._edges[0]) == self.nodes**2 else self._edges)]

    def groups(self, inputs: np.ndarray, where: str) -> tuple[np.ndarray, list[LevelGroup]]:
        order, levels = self._levels(inputs, where)
        position = np.argsort(order)
        targets, sources = position[self._edges[0]], position[self._edges[1]]
        by_row = np.lexsort((sources, targets))
        targets, sources, count = targets[by_row], sources[by_row], 0
        groups = [LevelGroup([levels[0]], None, None)]
        for gathered in _gathered(levels[1:]):
            start, stop = gathered[0][0], gathered[-1][1]
            own = slice(*np.searchsorted(targets, (start, stop)))
            rows, columns = targets[own] - start, sources[own]
            tiles: list[EdgeTile | None] = []
            for first, last in ((0, start), (start, stop)):
                here = (columns >= first) & (columns < last)
                places = (rows[here], columns[here] - first)
                full = len(places[0]) == (stop - start) * (last - first)
                tile = EdgeTile(order[start:stop], order[first:last], count, None if full else places)
                tiles.append(tile if tile.count else None)
                count += tile.count
            groups.append(LevelGroup(gathered, *tiles))
        return order, groups

    def _levels(self, inputs: np.ndarray, where: str) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """The nodes by the length of their longest path from a node without parents, and where each level lies."""
        targets, sources = self._edges
        is_input = np.zeros(self.nodes, bool)
        is_input[inputs] = True
        into = np.flatnonzero(is_input[targets])
        if len(into):
            raise WiringError(
                f"{where}: node {targets[into[0]]} is an input, so it cannot have parents in a static graph, but the "
                f"edge from node {sources[into[0]]} to it is allowed. Remove that edge, or use a DiscreteGraph, "
                "whose inputs may have parents."
            )
        by_source = np.argsort(sources, kind="stable")
        ends = np.cumsum(np.bincount(sources, minlength=self.nodes))
        left, level = np.bincount(targets, minlength=self.nodes), np.full(self.nodes, -1)
        ready, depth = inputs, 0
        others = np.flatnonzero((left == 0) & ~is_input)  # without parents, but not inputs: one level later
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
                f"{where}: a static graph cannot have cycles, but the allowed edges contain one: "
                f"{' → '.join(map(str, self._cycle(level < 0)))}. Remove one of these edges, or use a DiscreteGraph."
            )
        order = np.argsort(level, kind="stable")
        order[: len(inputs)] = inputs  # level 0, in the order of inputs=
        stops = np.cumsum(np.bincount(level)).tolist()
        return order, list(zip([0, *stops[:-1]], stops, strict=True))

    def _cycle(self, among: np.ndarray) -> list[int]:
        """A cycle among nodes that all have a parent among them, found by walking from parent to parent."""
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
    """Gather consecutive levels into groups of at most `GROUP` nodes."""
    groups: list[list[tuple[int, int]]] = []
    for level in levels:
        if groups and level[1] - groups[-1][0][0] <= GROUP:
            groups[-1].append(level)
        else:
            groups.append([level])
    return groups


def short_list(nodes: np.ndarray) -> str:
    """Node numbers, abbreviated."""
    head = ", ".join(str(int(node)) for node in nodes[:4])
    return f"[{head}, … ({len(nodes)} nodes)]" if len(nodes) > 4 else f"[{head}]"
