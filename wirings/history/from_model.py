"""The structure of a wired model, derived from its layers and graphs.

A layer does not know where its inputs come from. If it has as many inputs as the previous layer has outputs (or a
multiple, as after flattening maps), the two are taken to be the same nodes. That is right for layers in a row and a
guess for models with branches: `WiringStructure.paths_known` is then False, and paths across layers must not be used to
conclude that a node is dead. In the blocks of a transformer, queries, keys and values read the same nodes, and the
output projection reads the values.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from wirings.errors import WiringError
from wirings.history.blocks import MLP, OUTPUT, VALUE, Transformer, find_transformer
from wirings.history.structure import (
    DiscreteTime,
    NodeGroup,
    NodeKernels,
    RecordedLayer,
    RecordedTile,
    WiringStructure,
    as_matrix,
    in_blocks,
)
from wirings.selection.structure import FREE
from wirings.utils.checks import is_int
from wirings.utils.layers import CONVOLUTIONS, axes_of, is_transposed_linear, sends_first
from wirings.wire.handle import Wiring
from wirings.wire.parametrization import HANDLES

_HEADS = re.compile("(n|num|number_of)?_?(attention|query|q)?_?heads?")
"""How modules and configurations call their number of heads: heads, num_heads, n_head, nhead, num_attention_heads."""


class WiredWeight(NamedTuple):
    """A weight that is wired, or was before its model was finalized."""

    name: str
    module: nn.Module
    attribute: str
    weight: Tensor


def wired_weights_of(wiring: Wiring) -> list[WiredWeight]:
    """The weights that a handle wires, in the order of the model."""
    return [WiredWeight(layer.name, layer.module, layer.attribute, layer.weight) for layer in wiring.layers]


def structure_of(
    weights: Sequence[WiredWeight], model: nn.Module | None = None, edge_groups: str = FREE
) -> WiringStructure:
    """The structure of wired weights.

    Args:
        weights: the weights in the order of the model.
        model: the model, whose modules say how many heads their attention has.
        edge_groups: which edges are real together.
    """
    if not weights:
        raise WiringError("a history needs at least one wired layer, got none.")
    matrices = [
        as_matrix(one.name, tuple(one.weight.shape), sends_first(one.module), isinstance(one.module, CONVOLUTIONS))
        for one in weights
    ]
    transformer = find_transformer(matrices, {})
    builder = _StructureBuilder(transformer, in_blocks(edge_groups) is not None)
    if transformer is not None and model is not None:
        queries = [matrices[one.query_layer].name for one in transformer.attentions]
        builder.heads = {name: count for name in queries if (count := _heads_of(model, name))}
    for weight in weights:
        if weight.attribute in getattr(weight.module, "wired_weights", ()):
            builder.add_graph(weight)
        else:
            builder.add_layer(weight)
    return replace(builder.build(), edge_groups=edge_groups)


def structure_of_wiring(wiring: Wiring) -> WiringStructure:
    """The structure of the weights that a handle wires, which its histories have."""
    groups = FREE if wiring.structure is None else wiring.structure.text
    return structure_of(wired_weights_of(wiring), wiring.model, groups)


def edge_groups_of(model: nn.Module) -> str:
    """Which edges of a wired model are real together; ``"free"`` if it is wired in several ways."""
    handles = [handle for module in model.modules() for handle in module.__dict__.get(HANDLES, ())]
    found = {FREE if handle.structure is None else handle.structure.text for handle in handles if not handle.ended}
    return found.pop() if len(found) == 1 else FREE


def kernel_weights(weights: Sequence[WiredWeight]) -> list[Tensor]:
    """The kernels of graphs' nodes, each of shape (nodes, …), in the order of `WiringStructure.kernels`."""
    return [kernel for weight in weights for _, kernel in _kernels(weight.module)]


class _StructureBuilder:
    """Takes wired weights one by one and numbers their nodes and possible edges."""

    def __init__(self, transformer: Transformer | None, blocks: bool) -> None:
        self.blocks = blocks
        """Whether edges are real in blocks."""
        self.groups: list[NodeGroup] = []
        self.layers: list[RecordedLayer] = []
        self.tiles: list[RecordedTile] = []
        self.kernels: list[tuple[list[int], tuple[int, ...]]] = []
        self.inputs: list[np.ndarray] = []
        self.outputs: list[np.ndarray] = []
        self.nodes = self.index = 0
        self.before: range | None = None
        """The outputs of the previous layer, if they are the last nodes."""
        self.units: dict[int, range] = {}
        """The nodes of each recurrent module's units, by the id of the module."""
        self.unordered: list[bool] = []
        """For each weight, whether its nodes have no order."""
        self.times: list[DiscreteTime | None] = []
        self.heads: dict[str, int] = {}
        self.readings = {} if transformer is None else _readings(transformer)
        self.joined: list[tuple[range, range]] = []
        """For each weight, the nodes of its inputs and of its outputs; none for graphs."""

    def add_graph(self, weight: WiredWeight) -> None:
        graph: Any = weight.module
        inputs, outputs = np.asarray(graph.inputs), np.asarray(graph.outputs)
        first = len(inputs) if np.array_equal(inputs, np.arange(len(inputs))) else 0
        joins = self.before is not None and len(self.before) == first and first > 0
        offset = self.nodes - first if joins else self.nodes
        if not joins:
            self.inputs.append(inputs + offset)
        sizes = getattr(graph.topology, "sizes", None)
        self.unordered.append(sizes is None)
        discrete = hasattr(graph, "inflow")
        time = DiscreteTime(graph.steps or 0, graph.inflow == "every", graph.reads == "every") if discrete else None
        self.times.append(time)
        prefix = weight.name.rpartition(".")[0]
        for name, start, stop in _graph_groups(sizes, graph.nodes, inputs, outputs):
            if not (joins and start < first):
                self.groups.append(
                    NodeGroup(f"{prefix} {name}" if self._needs_prefix(weight) else name, offset + start, offset + stop)
                )
        for tile in graph.tiles:
            self._add_graph_tile(tile, offset)
        for nodes, kernel in _kernels(graph):
            self.kernels.append(([v + offset for v in nodes], tuple(kernel.shape[2:])))
        self.nodes = offset + graph.nodes
        self.outputs.append(outputs + offset)
        last = np.array_equal(outputs, np.arange(graph.nodes - len(outputs), graph.nodes))
        self.before = range(self.nodes - len(outputs), self.nodes) if last else None
        self.joined.append((range(0), range(0)))
        self._finish_weight(weight)

    def _needs_prefix(self, weight: WiredWeight) -> bool:
        """Whether group names must say which graph of the model they belong to."""
        return "." in weight.name.rpartition(".")[0] or bool(self.layers)

    def _add_graph_tile(self, tile: Any, offset: int) -> None:
        targets, sources = np.asarray(tile.targets), np.asarray(tile.sources)
        start = self.index + tile.start
        if tile.places is None and _is_range(targets) and _is_range(sources):
            first = (int(targets[0]) + offset, len(targets), int(sources[0]) + offset, len(sources))
            self.tiles.append(RecordedTile(start, *first))
        else:
            into, out_of, rows, cols = (x.astype(np.int64) + offset for x in (*tile.edge_list(), targets, sources))
            self.tiles.append(RecordedTile(start, pairs=(into, out_of), sides=(rows, cols) if self.blocks else None))

    def add_layer(self, weight: WiredWeight) -> None:
        module, shape = weight.module, tuple(weight.weight.shape)
        self.unordered.append(False)
        recurrent = isinstance(module, (nn.RNNBase, nn.RNNCellBase)) and not weight.attribute.startswith("weight_hr")
        axes = axes_of(module, weight.attribute, weight.weight)
        if axes is not None and axes[0] == "experts":  # matrices that share no nodes, as groups of channels
            (groups, rows, cols), inner, flip = shape, 1, axes[1] == "in"
            gives, takes = (cols * groups, rows * groups) if flip else (rows * groups, cols * groups)
        elif isinstance(module, CONVOLUTIONS) or is_transposed_linear(module):
            inner, groups, flip = int(np.prod(shape[2:])), getattr(module, "groups", 1), sends_first(module)
            rows, cols = shape[0] // groups, shape[1]
            gives, takes = (cols * groups, rows * groups) if flip else (rows * groups, cols * groups)
        else:
            inner, groups, flip = 1, 1, False
            gives = module.hidden_size if recurrent else shape[0]  # type: ignore[assignment]
            rows, cols = gives, int(np.prod(shape[1:]))
            takes = cols
        own = self.units.get(id(module)) if recurrent and "_hh" in weight.attribute else None
        if own is not None:  # edges between the units of one layer
            sources = targets = own
        else:
            sources, shared = self._sources(weight, takes)
            if shared > 1:  # maps were flattened: each node supplies several inputs
                inner, cols = shared, cols // shared
            targets = self._add_group(weight.name.removesuffix(".weight"), gives)
            self.before = targets
        self.joined.append((sources, targets))
        if recurrent:
            self.units[id(module)] = targets
        step = rows * cols * inner
        parts = groups if not recurrent else shape[0] // rows  # groups of channels, or gates of the same units
        for i in range(parts):
            into, out_of = (cols if flip else rows) * i, (rows if flip else cols) * i
            into, out_of = (0, 0) if recurrent else (into, out_of)
            where = (targets.start + into, rows, sources.start + out_of, cols)
            self.tiles.append(RecordedTile(self.index + i * step, *where, inner=inner, flip=flip))
        self._finish_weight(weight)

    def _sources(self, weight: WiredWeight, takes: int) -> tuple[range, int]:
        """The nodes that a layer gets its inputs from, and the number of inputs that each of them supplies."""
        before, reading = self.before, self.readings.get(len(self.layers))
        if reading is not None and reading.layer < len(self.layers):
            inputs, outputs = self.joined[reading.layer] if reading.layer >= 0 else (range(0), range(0))
            before = inputs if reading.outputs is None else outputs[reading.outputs]
        if before is not None and takes == len(before):
            return before, 1
        if reading is None and before is not None and isinstance(weight.module, nn.Linear) and takes % len(before) == 0:
            return before, takes // len(before)
        nodes = self._add_group(f"{weight.name.removesuffix('.weight')} in", takes)
        self.inputs.append(np.asarray(nodes))
        return nodes, 1

    def _add_group(self, name: str, count: int) -> range:
        nodes = range(self.nodes, self.nodes + count)
        self.groups.append(NodeGroup(name, nodes.start, nodes.stop))
        self.nodes += count
        return nodes

    def _finish_weight(self, weight: WiredWeight) -> None:
        stop = self.index + weight.weight.numel()
        self.layers.append(RecordedLayer(weight.name, self.index, stop, tuple(weight.weight.shape)))
        self.index = stop

    def build(self) -> WiringStructure:
        outputs = np.asarray(self.before) if self.before is not None else self.outputs[-1]
        kernels, start = [], self.index
        for nodes, shape in self.kernels:
            kernels.append(NodeKernels(nodes, start, shape))
            start += len(nodes) * int(np.prod(shape))
        return WiringStructure(
            nodes=self.nodes,
            groups=self.groups,
            layers=self.layers,
            tiles=self.tiles,
            inputs=np.concatenate(self.inputs) if self.inputs else np.arange(0),
            outputs=outputs,
            kernels=kernels,
            layout="circle" if self.unordered == [True] else "columns",
            paths_known=len(self.layers) == 1,
            discrete_time=self.times[0] if len(self.times) == 1 else None,
            heads=self.heads,
        )


class _Reading(NamedTuple):
    """Where a weight of a transformer's block gets its inputs from."""

    layer: int
    """The index of the weight it depends on; -1 if there is none."""
    outputs: slice | None = None
    """The outputs of that weight that it reads; None if it reads what that weight reads."""


def _readings(transformer: Transformer) -> dict[int, _Reading]:
    """The weights of a transformer's blocks that do not read the outputs of the weight before them, by index."""
    found: dict[int, _Reading] = {}
    for attention in transformer.attentions:
        projections = sorted({layer for kind, (layer, _) in attention.parts.items() if kind != OUTPUT})
        if attention.family == "cross-attention":  # keys and values come from elsewhere
            projections = [layer for layer in projections if layer != attention.query_layer]
            found.update({layer: _Reading(-1) for layer in projections[:1]})
        found.update({layer: _Reading(projections[0]) for layer in projections[1:]})
        if OUTPUT in attention.parts and VALUE in attention.parts:
            layer, values = attention.parts[VALUE]
            if _is_range(values):
                found[attention.parts[OUTPUT][0]] = _Reading(layer, slice(int(values[0]), int(values[-1]) + 1))
    for block in range(len(transformer.blocks)):
        cells = [
            cell for cell in transformer.cells if cell.block == block and cell.column in ((MLP, "gate"), (MLP, "in"))
        ]
        into = sorted(layer for cell in cells for layer, _ in cell.parts)
        found.update({layer: _Reading(into[0]) for layer in into[1:]})
    return found


def _heads_of(model: nn.Module, name: str) -> int:
    """The number of heads of the attention that a weight belongs to, from the nearest module that has it; 0 if none."""
    path = name.split(".")
    for length in range(len(path) - 1, -1, -1):
        try:
            module = model.get_submodule(".".join(path[:length]))
        except AttributeError:  # the name of a weight within a module
            continue
        for holder in (module, getattr(module, "config", None)):
            for attribute in dir(holder) if holder is not None else ():
                if _HEADS.fullmatch(attribute) and is_int(count := getattr(holder, attribute, None)):
                    return int(count)
    return 0


def _is_range(nodes: np.ndarray) -> bool:
    return len(nodes) > 0 and np.array_equal(nodes, np.arange(nodes[0], nodes[0] + len(nodes)))


def _graph_groups(
    sizes: list[int] | None, nodes: int, inputs: np.ndarray, outputs: np.ndarray
) -> list[tuple[str, int, int]]:
    """The groups of a graph's nodes as (name, start, stop).

    These are its blocks. A graph without blocks has inputs, inner nodes and outputs, if numbered in that order.
    """
    if sizes is not None:
        ends = np.cumsum(sizes).tolist()
        return [(f"block {i}", end - size, end) for i, (size, end) in enumerate(zip(sizes, ends, strict=True))]
    first, last = len(inputs), nodes - len(outputs)
    in_order = np.array_equal(inputs, np.arange(first)) and np.array_equal(outputs, np.arange(last, nodes))
    if not in_order or first > last:
        return [("nodes", 0, nodes)]
    parts = [("inputs", 0, first), ("inner nodes", first, last), ("outputs", last, nodes)]
    return [part for part in parts if part[1] < part[2]]


def _kernels(graph: Any) -> list[tuple[list[int], Tensor]]:
    """The convolution kernels of a graph: pairs of nodes and a tensor of shape (nodes, 1, …)."""
    if not hasattr(graph, "functions"):  # a dynamic graph has one function for all nodes
        functions = [(getattr(graph, "function", None), list(range(getattr(graph, "nodes", 0))))]
    else:  # a static graph has functions for each level of its nodes
        nodes: dict[int, list[int]] = {}
        levels = [level for group in graph.groups for level in group.levels]
        for (function, _), (start, stop) in zip(graph._function_of, levels, strict=True):
            nodes.setdefault(function, []).extend(int(v) for v in graph.order[start:stop])
        functions = [(graph.functions[i], of) for i, of in nodes.items()]
    return [found for function, of in functions for found in _kernels_within(function, of)]


def _kernels_within(function: Any, nodes: list[int]) -> list[tuple[list[int], Tensor]]:
    kernel = getattr(function, "kernel", None)
    if isinstance(kernel, Tensor):
        return [(nodes[: len(kernel)], kernel)] if len(kernel) <= len(nodes) else []
    found, start = [], 0
    for count, part in zip(getattr(function, "counts", ()), getattr(function, "functions", ()), strict=False):
        found += _kernels_within(part, nodes[start : start + count])
        start += count
    return found
