"""Classify digits row by row with a discrete-time graph, and compare a learned wiring with a random one.

The graph sees one row of 8 pixels per step. It must remember earlier rows, along cycles that it finds by itself. Its
128 nodes have 400 of 16,384 possible edges.

    python examples/digits_sequence.py [--seeds 5]
"""

from torch import nn

from wirings import DiscreteGraph, Wiring
from wirings.cli.comparison import ComparisonSettings, command
from wirings.graph import ActivationNode

# Sums over few edges are small, and there is no norm to scale them up, so the gain of the initial weights is tuned too.
SETTINGS = ComparisonSettings(epochs=25, learning_rates=(0.03, 0.1, 0.3), gains=(4.0, 8.0, 16.0), clip=1.0)


def network(rule: str, settings: ComparisonSettings) -> tuple[nn.Sequential, Wiring]:
    graph = DiscreteGraph(
        nodes=128,
        inputs=8,
        outputs=10,
        steps=10,  # 8 rows, and two more steps for the last rows to reach the outputs
        edges=400,
        node=ActivationNode("tanh", bias=True),
        rule=rule,
        inflow="every",
    )
    assert graph.wiring is not None
    return nn.Sequential(nn.Unflatten(1, (8, 8)), graph), graph.wiring


if __name__ == "__main__":
    command(__doc__, SETTINGS, network)
