"""The structure of a wired model, found in its layers and graphs.

A layer does not say where its inputs come from. Where it has as many as the layer before has outputs (or a multiple, as
after flattening maps), the two are taken to be the same nodes, which is right for layers in a row and a guess where
there are branches: then `Structure.sure` is false, and nobody should conclude from paths across layers that a node is
dead. Graphs are known by what they name, as on the rest of the ground floor, which imports none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from wirings.errors import WiringError
from wirings.history.structure import Group, Kernels, LayerOf, Structure, Tile, Walk
from wirings.utils.layers import CONVOLUTIONS, is_transposed_linear, sends_first


class Place(NamedTuple):
    """One weight that is wired, or was."""

    name: str
    module: nn.Module
    attribute: str
    weight: Tensor


def structure_of(places: Sequence[Place]) -> Structure:
    """The structure of wired weights, in the order of the model."""
    if not places:
        raise WiringError("a history needs at least one wired layer, but the wiring has none.")
    made = _Builder()
    for place in places:
        if place.attribute in getattr(place.module, "wired_weights", ()):
            made.graph(place)
        else:
            made.layer(place)
    return made.done()


def kernel_weights(places: Sequence[Place]) -> list[Tensor]:
    """The kernels of graphs' nodes, (nodes, …) each, in the order of `Structure.kernels`."""
    return [weight for place in places for _, weight in _kernels(place.module)]


class _Builder:
    """Takes layers one by one and numbers their nodes and places."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.layers: list[LayerOf] = []
        self.tiles: list[Tile] = []
        self.kernels: list[tuple[list[int], tuple[int, ...]]] = []
        self.inputs: list[np.ndarray] = []
        self.outputs: list[np.ndarray] = []
        self.nodes = self.place = 0
        self.before: range | None = None
        """The nodes that the layer before gives, if they come last."""
        self.units: dict[int, range] = {}
        """By recurrent module: the nodes that its units are."""
        self.circles: list[bool] = []
        self.walks: list[Walk | None] = []

    def graph(self, place: Place) -> None:
        graph: Any = place.module
        inputs, outputs = np.asarray(graph.inputs), np.asarray(graph.outputs)
        first = len(inputs) if np.array_equal(inputs, np.arange(len(inputs))) else 0
        joins = self.before is not None and len(self.before) == first and first > 0
        offset = self.nodes - first if joins else self.nodes
        if not joins:
            self.inputs.append(inputs + offset)
        sizes = getattr(graph.topology, "sizes", None)
        self.circles.append(sizes is None)
        discrete = hasattr(graph, "inflow")
        self.walks.append(Walk(graph.steps or 0, graph.inflow == "every", graph.reads == "every") if discrete else None)
        prefix = place.name.rpartition(".")[0]
        for name, start, stop in _graph_groups(sizes, graph.nodes, inputs, outputs):
            if not (joins and start < first):
                self.groups.append(
                    Group(f"{prefix} {name}" if self._several(place) else name, offset + start, offset + stop)
                )
        for tile in graph.tiles:
            self._graph_tile(tile, offset)
        for nodes, weight in _kernels(graph):
            self.kernels.append(([v + offset for v in nodes], tuple(weight.shape[2:])))
        self.nodes = offset + graph.nodes
        self.outputs.append(outputs + offset)
        last = np.array_equal(outputs, np.arange(graph.nodes - len(outputs), graph.nodes))
        self.before = range(self.nodes - len(outputs), self.nodes) if last else None
        self._add_layer(place)

    def _several(self, place: Place) -> bool:
        return "." in place.name.rpartition(".")[0] or bool(self.layers)

    def _graph_tile(self, tile: Any, offset: int) -> None:
        targets, sources = np.asarray(tile.targets), np.asarray(tile.sources)
        start = self.place + tile.start
        if tile.places is None and _is_range(targets) and _is_range(sources):
            first = (int(targets[0]) + offset, len(targets), int(sources[0]) + offset, len(sources))
            self.tiles.append(Tile(start, *first))
        else:
            into, out_of = tile.edge_list()
            self.tiles.append(Tile(start, pairs=(into.astype(np.int64) + offset, out_of.astype(np.int64) + offset)))

    def layer(self, place: Place) -> None:
        module, shape = place.module, tuple(place.weight.shape)
        self.circles.append(False)
        recurrent = isinstance(module, (nn.RNNBase, nn.RNNCellBase)) and not place.attribute.startswith("weight_hr")
        if isinstance(module, CONVOLUTIONS) or is_transposed_linear(module):
            inner, groups, flip = int(np.prod(shape[2:])), getattr(module, "groups", 1), sends_first(module)
            rows, cols = shape[0] // groups, shape[1]
            gives, takes = (cols * groups, rows * groups) if flip else (rows * groups, cols * groups)
        else:
            inner, groups, flip = 1, 1, False
            gives = module.hidden_size if recurrent else shape[0]  # type: ignore[assignment]
            rows, cols = gives, int(np.prod(shape[1:]))
            takes = cols
        own = self.units.get(id(module)) if recurrent and "_hh" in place.attribute else None
        if own is not None:  # what the units send to one another
            sources = targets = own
        else:
            sources, shared = self._sources(place, takes)
            if shared > 1:  # maps were flattened: several inputs are one node
                inner, cols = shared, cols // shared
            targets = self._column(place.name.removesuffix(".weight"), gives)
            self.before = targets
        if recurrent:
            self.units[id(module)] = targets
        step = rows * cols * inner
        parts = groups if not recurrent else shape[0] // rows  # groups of channels, or gates of the same units
        for i in range(parts):
            into, out_of = (cols if flip else rows) * i, (rows if flip else cols) * i
            into, out_of = (0, 0) if recurrent else (into, out_of)
            where = (targets.start + into, rows, sources.start + out_of, cols)
            self.tiles.append(Tile(self.place + i * step, *where, inner=inner, flip=flip))
        self._add_layer(place)

    def _sources(self, place: Place, takes: int) -> tuple[range, int]:
        """The nodes that a layer takes its inputs from, and how many inputs each of them is."""
        before = self.before
        if before is not None and takes == len(before):
            return before, 1
        if before is not None and isinstance(place.module, nn.Linear) and takes % len(before) == 0:
            return before, takes // len(before)
        nodes = self._column(f"{place.name.removesuffix('.weight')} in", takes)
        self.inputs.append(np.asarray(nodes))
        return nodes, 1

    def _column(self, name: str, count: int) -> range:
        nodes = range(self.nodes, self.nodes + count)
        self.groups.append(Group(name, nodes.start, nodes.stop))
        self.nodes += count
        return nodes

    def _add_layer(self, place: Place) -> None:
        stop = self.place + place.weight.numel()
        self.layers.append(LayerOf(place.name, self.place, stop, tuple(place.weight.shape)))
        self.place = stop

    def done(self) -> Structure:
        outputs = np.asarray(self.before) if self.before is not None else self.outputs[-1]
        kernels, start = [], self.place
        for nodes, shape in self.kernels:
            kernels.append(Kernels(nodes, start, shape))
            start += len(nodes) * int(np.prod(shape))
        return Structure(
            nodes=self.nodes,
            groups=self.groups,
            layers=self.layers,
            tiles=self.tiles,
            inputs=np.concatenate(self.inputs) if self.inputs else np.arange(0),
            outputs=outputs,
            kernels=kernels,
            layout="circle" if self.circles == [True] else "columns",
            sure=len(self.layers) == 1,
            walk=self.walks[0] if len(self.walks) == 1 else None,
        )


def _is_range(nodes: np.ndarray) -> bool:
    return len(nodes) > 0 and np.array_equal(nodes, np.arange(nodes[0], nodes[0] + len(nodes)))


def _graph_groups(
    sizes: list[int] | None, nodes: int, inputs: np.ndarray, outputs: np.ndarray
) -> list[tuple[str, int, int]]:
    """A graph's blocks; without blocks its inputs and outputs, where they come first and last, and the others."""
    if sizes is not None:
        ends = np.cumsum(sizes).tolist()
        return [(f"block {i}", end - size, end) for i, (size, end) in enumerate(zip(sizes, ends, strict=True))]
    first, last = len(inputs), nodes - len(outputs)
    apart = np.array_equal(inputs, np.arange(first)) and np.array_equal(outputs, np.arange(last, nodes))
    if not apart or first > last:
        return [("nodes", 0, nodes)]
    parts = [("inputs", 0, first), ("inner nodes", first, last), ("outputs", last, nodes)]
    return [part for part in parts if part[1] < part[2]]


def _kernels(graph: Any) -> list[tuple[list[int], Tensor]]:
    """The convolution kernels of a graph's nodes: which nodes, and the weights, (nodes, 1, …)."""
    if not hasattr(graph, "functions"):  # a dynamic graph has one function for all nodes
        whole = [(getattr(graph, "function", None), list(range(getattr(graph, "nodes", 0))))]
    else:  # a static one has some for each level of its nodes
        nodes: dict[int, list[int]] = {}
        levels = [level for group in graph.groups for level in group.levels]
        for (function, _), (start, stop) in zip(graph._function_of, levels, strict=True):
            nodes.setdefault(function, []).extend(int(v) for v in graph.order[start:stop])
        whole = [(graph.functions[function], list_of) for function, list_of in nodes.items()]
    return [found for function, list_of in whole for found in _kernels_within(function, list_of)]


def _kernels_within(function: Any, nodes: list[int]) -> list[tuple[list[int], Tensor]]:
    kernel = getattr(function, "kernel", None)
    if isinstance(kernel, Tensor):
        return [(nodes[: len(kernel)], kernel)] if len(kernel) <= len(nodes) else []
    found, start = [], 0
    for count, part in zip(getattr(function, "counts", ()), getattr(function, "functions", ()), strict=False):
        found += _kernels_within(part, nodes[start : start + count])
        start += count
    return found
