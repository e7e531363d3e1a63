"""Coarser versions of graphs that are too large to draw node by node.

Neighbouring nodes of a block become one dot, and all edges between two dots become one line. The strength of a line is
its density: the edges it stands for, divided by the pairs of nodes it joins. Its sign is that of most of its edges.
"""

from __future__ import annotations

import numpy as np
import torch

from wirings.history import History, WiringState, file_format
from wirings.history.quantize import encode
from wirings.history.structure import NodeGroup, RecordedLayer, RecordedTile, WiringStructure

MAX_EDGES, MAX_NODES = 60_000, 3_000
"""The largest graph that is drawn node by node."""
DOTS = 320
"""The approximate number of dots for a larger graph."""


def too_large(state: WiringState) -> bool:
    """Whether a wiring is too large to draw node by node."""
    return len(state) > MAX_EDGES or state.structure.nodes > MAX_NODES


class NodeBins:
    """Groups the nodes of a structure into about ``dots`` dots: runs of neighbouring nodes within a group."""

    def __init__(self, structure: WiringStructure, dots: int = DOTS) -> None:
        side = 1 if structure.block is None else max(structure.block)  # lines then stand for whole blocks
        self.size = side * max(1, round(structure.nodes / (dots * side)))
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
            tiles=[RecordedTile(0, 0, count, 0, count)],
            inputs=np.unique(self.of_node[structure.inputs]),
            outputs=np.unique(self.of_node[structure.outputs]),
            layout=structure.layout,
            paths_known=False,  # a path of dots need not be a path of nodes
            edge_groups=structure.edge_groups,
        )

    def codes(self, state: WiringState) -> np.ndarray:
        """The codes of the lines, flattened from (receiving dot, sending dot); 0 where no edge joins the dots."""
        count, sizes = len(self.sizes), np.array(self.sizes)
        pairs = self.of_node[state.targets] * count + self.of_node[state.sources]
        edges = np.bincount(pairs, minlength=count * count).reshape(count, count)
        signs = np.bincount(pairs, np.sign(state.weights), count * count).reshape(count, count)
        density = edges / np.outer(sizes, sizes)
        signed = torch.from_numpy(np.where(signs < 0, -density, density))
        codes: np.ndarray = encode(signed, torch.from_numpy(edges > 0)).numpy().reshape(-1)
        return codes

    def note(self) -> str:
        """A caption that explains dots and lines."""
        return (
            f"Too large to draw node by node: each dot stands for up to {self.size} neighbouring nodes of a block, "
            "each line for all edges between two dots."
        )


def coarsen(history: History, dots: int = DOTS) -> History:
    """The history of a smaller graph, whose nodes stand for several nodes each."""
    bins = NodeBins(history.structure, dots)
    about = {**history.about, "note": bins.note(), "grouped": bins.names, "nodes": history.structure.nodes}
    about["edges"] = [len(history.state()), history.structure.edges]
    about["births"] = history.births.tolist()  # of edges; a line remains while any of its edges is real
    chunks, before = [], np.zeros(bins.structure.size, np.int8)
    for state in history.states():
        after = bins.codes(state)
        chunks.append(file_format.pack_record(state.step, before, after))
        before = after
    chunks += [chunk for chunk in history.chunks if chunk.kind == file_format.NOTE]
    return History(bins.structure, about, chunks)


def coarsen_if_large(state: WiringState) -> tuple[WiringState, str]:
    """A state that can be drawn node by node, and a caption.

    Returns:
        The state itself and an empty caption, or a coarser state and a caption that says so.
    """
    if not too_large(state):
        return state, ""
    bins = NodeBins(state.structure)
    codes = bins.codes(state)
    indices = np.flatnonzero(codes)
    steps = np.full(len(indices), state.step)
    return WiringState(bins.structure, state.step, indices, codes[indices], steps), bins.note()
