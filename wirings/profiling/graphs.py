"""The real edges of neural graphs, and which of them are alive. What they cost: `wirings.graph.work`.

Which edges are alive depends on the whole network: on which inputs of the graph are fed at all, and on which of its
outputs matter to what comes after. Both are arguments here; `wirings.profiling.live` finds them.
"""

from __future__ import annotations

import numpy as np

from wirings.budgets.mult_adds import Call
from wirings.graph import DiscreteGraph, Graph, Liveness
from wirings.graph.liveness import path_liveness, step_liveness
from wirings.graph.work import steps_of


class GraphEdges:
    """A graph and its real edges."""

    def __init__(self, graph: Graph, real: np.ndarray) -> None:
        self.graph = graph
        targets, sources = graph.edge_list()
        self.targets, self.sources = targets[real], sources[real]
        """The nodes that each real edge leads to, and leaves."""
        self.receives, self.sends = np.zeros((2, graph.nodes), bool)
        """For each node, whether a real edge leads to it, and whether one leaves it."""
        self.receives[self.targets] = self.sends[self.sources] = True

    def dense_pixels(self, sent: np.ndarray) -> int:
        """The pixels that all allowed edges would carry if nodes send ``sent`` pixels."""
        return sum(
            int(len(tile.targets) * sent[np.asarray(tile.sources)].sum())
            if tile.places is None
            else int(sent[tile.edge_list()[1]].sum())
            for tile in self.graph.tiles
        )

    def liveness(self, call: Call, fed: np.ndarray, wanted: np.ndarray) -> Liveness:
        """What is alive in a call if only some inputs are fed and only some outputs matter; boolean vectors."""
        graph = self.graph
        edges = self.sources, self.targets, graph.nodes, graph.inputs[fed], graph.outputs[wanted]
        if not isinstance(graph, DiscreteGraph):
            return path_liveness(*edges)
        steps, input_steps = steps_of(graph, call)
        return step_liveness(*edges, steps=steps, input_steps=input_steps, read_every_step=graph.reads == "every")
