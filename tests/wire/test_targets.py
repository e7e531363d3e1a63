"""Which node each edge leads to."""

import pytest
import torch
from torch import nn

from wirings import Blocks, Dag, StaticGraph
from wirings.graph import ActivationNode
from wirings.utils.layers import joined, receivers

MODULES = {
    "linear": (nn.Linear(3, 4), "weight"),
    "bilinear": (nn.Bilinear(2, 3, 4), "weight"),
    "conv": (nn.Conv2d(2, 3, 2), "weight"),
    "grouped": (nn.Conv1d(4, 6, 2, groups=2), "weight"),
    "transposed": (nn.ConvTranspose2d(4, 3, 2), "weight"),
    "transposed and grouped": (nn.ConvTranspose1d(4, 6, 2, groups=2), "weight"),
    "lstm": (nn.LSTM(3, 2), "weight_ih_l0"),
    "lstm, projected": (nn.LSTM(3, 4, proj_size=2), "weight_hr_l0"),
    "gru cell": (nn.GRUCell(3, 2), "weight_hh"),
    "attention": (nn.MultiheadAttention(4, 2), "in_proj_weight"),
}


@pytest.mark.parametrize("kind", MODULES)
def test_receivers_are_the_nodes_that_reports_count(kind: str) -> None:
    """A single edge leads to the node that `joined` finds."""
    module, attribute = MODULES[kind]
    weight = getattr(module, attribute)
    nodes = receivers(module, attribute, weight)
    assert nodes.numel() <= weight.shape[0] * weight.shape[1], "one number per row or channel, not per edge"
    each = nodes.expand(weight.shape).reshape(-1).tolist()
    for edge, node in enumerate(each):
        real = torch.zeros(weight.numel(), dtype=torch.bool)
        real[edge] = True
        assert joined(module, attribute, real.view(weight.shape))[0].nonzero().tolist() == [[node]]


def test_by_hand() -> None:
    module, attribute = MODULES[
        "transposed and grouped"
    ]  # (4, 3, 2): inputs 0 and 1 feed outputs 0 to 2, others 3 to 5
    nodes = receivers(module, attribute, module.weight)
    assert nodes.squeeze(2).tolist() == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]
    module, attribute = MODULES["lstm"]  # four gates of two units
    assert receivers(module, attribute, module.weight_ih_l0).flatten().tolist() == [0, 1] * 4


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        (Blocks([2, 2, 1]), [2, 2, 3, 3, 4, 4, 4, 4]),
        (Dag(4, inputs=2), [2, 2, 3, 3, 3]),
    ],
    ids=["blocks", "dag"],
)
def test_graphs(topology: Blocks | Dag, expected: list[int]) -> None:
    graph = StaticGraph(topology=topology, outputs=1, node=ActivationNode("tanh"), edges=0.5)
    found = graph.wiring.layers[0].receivers()
    assert found.dtype == torch.int32
    assert found.tolist() == expected
