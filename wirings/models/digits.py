"""A small static graph for the embedded digits. It trains on a laptop in seconds, for a first look and for tests."""

from __future__ import annotations

from torch import Tensor, nn

from wirings.graph import StaticGraph
from wirings.graph.nodes import ConvNode
from wirings.models.option_groups import DEFAULT_GRAPH, GraphWiring
from wirings.models.registry import register
from wirings.wire.handle import Wiring

EDGES = 200


class DigitsClassifier(nn.Module):
    """A convolution, a static graph of nodes that convolve, and a head, without batch norm.

    Takes images, (batch, 1, 8, 8), and returns logits, (batch, classes).

    Args:
        graph: A static graph whose states are maps.
        classes: Number of classes.
    """

    input_shape = (1, 8, 8)

    def __init__(self, graph: StaticGraph, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, len(graph.inputs), 3, padding=1)
        self.graph = graph
        self.head = nn.Linear(len(graph.outputs), classes)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.graph(self.stem(images))
        return self.head(maps[..., 3:5, 3:5].mean((-2, -1)))

    @property
    def wiring(self) -> Wiring | None:
        """The handle of the graph's wiring."""
        return self.graph.wiring


@register
def digits_static(wiring: GraphWiring = DEFAULT_GRAPH, classes: int = 10) -> DigitsClassifier:
    """Three blocks of 32 nodes between 8 inputs and 10 outputs."""
    graph = StaticGraph([8, 32, 32, 32, 10], node=ConvNode(), **wiring.arguments(EDGES))
    return DigitsClassifier(graph, classes)
