"""Graphs too large to draw node by node: neighbouring nodes of a block become one dot, their edges one line.

A line's strength is its density: the edges it stands for over the pairs of nodes that it joins; its sign, that of most
of them.
"""

from __future__ import annotations

import numpy as np
import torch

from wirings.history import History, WiringState, file_format
from wirings.history.quantize import encode
from wirings.history.structure import EdgeTile, NodeGroup, RecordedLayer, WiringStructure

MOST_EDGES, MOST_NODES = 60_000, 3_000
"""What is drawn node by node."""
DOTS = 320
"""About so many stand for a larger graph."""


def too_large(state: WiringState) -> bool:
    """Whether a wiring should not be drawn node by node."""
    return len(state) > MOST_EDGES or state.structure.nodes > MOST_NODES


class Bins:
    """Which nodes of a structure are drawn as one dot: as many neighbours of a group as leave about ``dots`` dots."""

    def __init__(self, structure: WiringStructure, dots: int = DOTS) -> None:
        self.size = max(1, round(structure.nodes / dots))
        groups, names, self.of_node = [], [], np.empty(structure.nodes, np.int64)
        self.sizes: list[int] = []
        for group in structure.groups:
            first = len(self.sizes)
            for start in range(group.start, group.stop, self.size):
                stop = min(start + self.size, group.stop)
                self.of_node[start:stop] = len(self.sizes)
                self.sizes.append(stop - start)
                names.append(f"{start}–{stop - 1}" if stop - start > 1 else str(start))
            groups.append(NodeGroup(group.name, first, len(self.sizes)))
        count = len(self.sizes)
        self.names = names
        self.structure = WiringStructure(
            nodes=count,
            groups=groups,
            layers=[RecordedLayer("all layers", 0, count * count, (count, count))],
            tiles=[EdgeTile(0, 0, count, 0, count)],
            inputs=np.unique(self.of_node[structure.inputs]),
            outputs=np.unique(self.of_node[structure.outputs]),
            layout=structure.layout,
            paths_known=False,  # a path along dots need not be one along nodes
        )

    def codes(self, state: WiringState) -> np.ndarray:
        """A code for every pair of dots, (receives, sends), 0 where no edge joins them."""
        count, sizes = len(self.sizes), np.array(self.sizes)
        pairs = self.of_node[state.targets] * count + self.of_node[state.sources]
        edges = np.bincount(pairs, minlength=count * count).reshape(count, count)
        signs = np.bincount(pairs, np.sign(state.weights), count * count).reshape(count, count)
        density = edges / np.outer(sizes, sizes)
        signed = torch.from_numpy(np.where(signs < 0, -density, density))
        codes: np.ndarray = encode(signed, torch.from_numpy(edges > 0)).numpy().reshape(-1)
        return codes

    def note(self) -> str:
        """What a reader must be told."""
        dot = f"a dot stands for up to {self.size} neighbouring nodes of a block"
        return f"Too large to draw node by node: {dot}, a line for all edges between two dots."


def coarse(history: History, dots: int = DOTS) -> History:
    """The same history of a smaller graph, whose nodes stand for several each."""
    bins = Bins(history.structure, dots)
    about = {**history.about, "note": bins.note(), "grouped": bins.names, "nodes": history.structure.nodes}
    about["edges"] = [len(history.state()), history.structure.edges]
    chunks, before = [], np.zeros(bins.structure.size, np.int8)
    for state in history.states():
        after = bins.codes(state)
        chunks.append(file_format.pack_record(state.step, before, after))
        before = after
    chunks += [chunk for chunk in history.chunks if chunk.kind == file_format.NOTE]
    return History(bins.structure, about, chunks)


def drawable(state: WiringState) -> tuple[WiringState, str]:
    """A state that can be drawn node by node, and what to say of it: itself and nothing, or a coarser one."""
    if not too_large(state):
        return state, ""
    bins = Bins(state.structure)
    codes = bins.codes(state)
    places = np.flatnonzero(codes)
    steps = np.full(len(places), state.step)
    return WiringState(bins.structure, state.step, places, codes[places], steps), bins.note()
