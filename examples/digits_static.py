"""Classify digits with a small static graph of convolution nodes, and compare a learned wiring with a random one.

The graph has 8 input nodes, three blocks of 64 nodes, 10 output nodes and 100 of 15,824 possible edges. The state of
each node is a map of 8 × 8 pixels, as in the tiny classifiers of the paper's Table 1, but small enough for a laptop.

    python examples/digits_static.py [--seeds 5]
"""

from torch import Tensor, nn

from wirings import StaticGraph, Wiring
from wirings.cli.comparison import ComparisonSettings, command
from wirings.graph import ConvNode

SETTINGS = ComparisonSettings(epochs=10, learning_rates=(0.1, 0.3, 1.0), clip=1.0)


class Centre(nn.Module):
    """The mean of the four central pixels."""

    def forward(self, maps: Tensor) -> Tensor:
        return maps[..., 3:5, 3:5].mean((-2, -1))


def network(rule: str, settings: ComparisonSettings) -> tuple[nn.Sequential, Wiring]:
    graph = StaticGraph([8, 64, 64, 64, 10], edges=100, node=ConvNode(norm="instance"), rule=rule)
    assert graph.wiring is not None
    stem = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)]
    return nn.Sequential(*stem, graph, Centre(), nn.Linear(10, 10)), graph.wiring


if __name__ == "__main__":
    command(__doc__, SETTINGS, network)
