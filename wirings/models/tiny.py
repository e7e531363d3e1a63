"""The tiny classifiers of the paper's Table 1: 41k parameters, for images of 32 × 32 pixels.

A stem turns an image into 32 maps of 8 × 8 pixels, the states of the input nodes of a neural graph with 800 nodes. A
linear head reads the centre of the last 100 nodes' maps. In the static graph, the 100 outputs are nodes of their own
without a function, beside the 32 + 4 × 192 nodes that compute. (In the authors' network, the last block also feeds the
nodes that are read.)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from wirings.graph import ContinuousGraph, DiscreteGraph, Graph, StaticGraph
from wirings.graph.nodes import ConvNode
from wirings.models.option_groups import DEFAULT_GRAPH, GraphWiring
from wirings.models.registry import register
from wirings.utils.checks import check_int
from wirings.wire.handle import Wiring

INPUTS, BLOCKS, BLOCK, OUTPUTS = 32, 4, 192, 100
NODES = INPUTS + BLOCKS * BLOCK
EDGES = NODES * NODES // 20


class TinyClassifier(nn.Module):
    """A stem, a neural graph and a head. Takes images, (batch, 3, 32, 32), and returns logits, (batch, classes).

    Args:
        graph: A graph with 32 input and 100 output nodes, whose states are maps.
        classes: Number of classes.
    """

    input_shape = (3, 32, 32)

    def __init__(self, graph: Graph, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, stride=2, padding=1, groups=16),
            nn.Conv2d(16, INPUTS, 1),
            nn.BatchNorm2d(INPUTS),
        )
        self.graph = graph
        self.head = nn.Linear(OUTPUTS, classes)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.graph(self.stem(images))
        return self.head(maps[..., 2:4, 2:4].mean((-2, -1)))

    @property
    def wiring(self) -> Wiring | None:
        """The handle of the graph's wiring, or None if the graph has no rule."""
        return self.graph.wiring

    def paper_parameters(self) -> dict[str, int]:
        """Count parameters as the paper does: real edges, node convolutions, stem and head, but no norms of nodes."""
        kernels = [p for name, p in self.graph.named_parameters() if name.endswith("kernel")]
        counts = {
            "edges": int(self.graph.real().sum()),
            "nodes": sum(p.numel() for p in kernels),
            "stem": sum(p.numel() for p in self.stem.parameters()),
            "head": sum(p.numel() for p in self.head.parameters()),
        }
        return {**counts, "total": sum(counts.values())}


def _dynamic_node() -> ConvNode:
    return ConvNode(before=["activation", "conv"], after=["norm"])


@register
def tiny_static(
    wiring: GraphWiring = DEFAULT_GRAPH, classes: int = 10, blocks: int = BLOCKS, block_nodes: int = BLOCK
) -> TinyClassifier:
    """Blocks of 32 and 4 × 192 nodes (norm, ReLU and convolution before the edges), and 100 output nodes.

    ``blocks`` and ``block_nodes`` are the number and the size of the blocks between input and output.
    """
    check_int("tiny_static", "blocks", blocks)
    check_int("tiny_static", "block_nodes", block_nodes)
    graph = StaticGraph([INPUTS, *[block_nodes] * blocks, OUTPUTS], node=ConvNode(), **wiring.arguments(EDGES))
    return TinyClassifier(graph, classes)


@register(passes_on=("inflow", "reads", "checkpoint"))
def tiny_discrete(
    wiring: GraphWiring = DEFAULT_GRAPH, classes: int = 10, steps: int = 5, **settings: Any
) -> TinyClassifier:
    """800 nodes with all edges allowed, 5 steps. Further options are those of `DiscreteGraph`."""
    settings |= {"steps": steps, **wiring.arguments(EDGES)}
    graph = DiscreteGraph(NODES, inputs=INPUTS, outputs=OUTPUTS, node=_dynamic_node(), **settings)
    return TinyClassifier(graph, classes)


@register(passes_on=("solver", "rtol", "atol", "steps", "until", "max_steps", "adjoint"))
def tiny_continuous(wiring: GraphWiring = DEFAULT_GRAPH, classes: int = 10, **settings: Any) -> TinyClassifier:
    """800 nodes with all edges allowed, from time 0 to 1. Further options are those of `ContinuousGraph`."""
    settings |= wiring.arguments(EDGES)
    graph = ContinuousGraph(NODES, inputs=INPUTS, outputs=OUTPUTS, node=_dynamic_node(), **settings)
    return TinyClassifier(graph, classes)
