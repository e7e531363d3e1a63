"""The tiny classifiers of the paper's Table 1: 41k parameters, for images of 32 × 32 pixels.

A stem makes 32 maps of 8 × 8 of an image, a neural graph of 800 nodes computes, and the middle of the last 100 nodes'
maps is read. The static graph has its 100 outputs as nodes of their own, without a function: 32 + 4 × 192 nodes
compute, as in the authors' network, whose last block also feeds the nodes that are read.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from wirings.budgets.budget import Amount
from wirings.graph import ContinuousGraph, DiscreteGraph, Graph, StaticGraph
from wirings.graph.nodes import ConvNode
from wirings.models.registry import budget, register
from wirings.rules import Rule
from wirings.wire.handle import Wiring

INPUTS, BLOCK, OUTPUTS = 32, 192, 100
NODES = INPUTS + 4 * BLOCK
EDGES = NODES * NODES // 20


class TinyClassifier(nn.Module):
    """A stem, a neural graph from 32 nodes to 100, and a head. Takes images, (batch, 3, 32, 32); gives one number a
    class.

    Args:
        graph: with 32 input nodes and 100 output nodes that carry maps.
        classes: how many.
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
        """The handle of the graph's wiring; None if it was made without a rule."""
        return self.graph.wiring

    def paper_parameters(self) -> dict[str, int]:
        """Parameters as the paper counts them: real edges, node convolutions, stem and head; no norms of the graph."""
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
def tiny_static(rule: str | Rule | None = None, edges: Amount | None = None, classes: int = 10) -> TinyClassifier:
    """Blocks of 32 and 4 × 192 nodes that norm, rectify and convolve before they send, and 100 output nodes."""
    blocks = [INPUTS, BLOCK, BLOCK, BLOCK, BLOCK, OUTPUTS]
    return TinyClassifier(StaticGraph(blocks, edges=budget(rule, edges, EDGES), node=ConvNode(), rule=rule), classes)


@register
def tiny_discrete(
    rule: str | Rule | None = None, edges: Amount | None = None, classes: int = 10, steps: int = 5, **settings: Any
) -> TinyClassifier:
    """800 nodes, any edge allowed, 5 steps. Further settings are `DiscreteGraph`'s."""
    graph = DiscreteGraph(
        NODES,
        inputs=INPUTS,
        outputs=OUTPUTS,
        steps=steps,
        edges=budget(rule, edges, EDGES),
        node=_dynamic_node(),
        rule=rule,
        **settings,
    )
    return TinyClassifier(graph, classes)


@register
def tiny_continuous(
    rule: str | Rule | None = None, edges: Amount | None = None, classes: int = 10, **settings: Any
) -> TinyClassifier:
    """800 nodes, any edge allowed, from time 0 to 1. Further settings are `ContinuousGraph`'s."""
    graph = ContinuousGraph(
        NODES,
        inputs=INPUTS,
        outputs=OUTPUTS,
        edges=budget(rule, edges, EDGES),
        node=_dynamic_node(),
        rule=rule,
        **settings,
    )
    return TinyClassifier(graph, classes)
