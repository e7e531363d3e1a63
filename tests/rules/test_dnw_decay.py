"""`dnw` with the decay of hallucinated weights of SR-STE."""

from typing import Any

import pytest
import torch
from torch import nn

import wirings
from wirings import WiringError
from wirings.rules import DNW


def one_layer(weights: list[list[float]], **options: Any) -> tuple[nn.Linear, Any, Any]:
    layer = nn.Linear(len(weights[0]), len(weights), bias=False)
    layer.weight.data = torch.tensor(weights)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    return layer, wirings.wire_(layer, DNW(decay=0.4), **options), optimizer


def test_hallucinated_weights_decay() -> None:
    _, wiring, optimizer = one_layer([[4.0, -1.0, 2.0, 3.0], [1.0, 5.0, -6.0, 0.0]], structure="2:4")
    wiring.step(optimizer)  # they lose 0.5 × 0.4 = 0.2 of their magnitude
    expected = torch.tensor([[4.0, -0.8, 1.6, 3.0], [0.8, 5.0, -6.0, 0.0]])
    torch.testing.assert_close(wiring.layers[0].weight.detach(), expected)


def test_edges_that_are_not_allowed_stay() -> None:
    allowed = torch.tensor([[True, True, False]])
    _, wiring, optimizer = one_layer([[1.0, 2.0, 5.0]], k=1, allowed={"*": allowed})
    wiring.step(optimizer)
    assert wiring.layers[0].weight.tolist() == [pytest.approx([0.8, 2.0, 5.0])]


@pytest.mark.parametrize("share", ["uniform", "global"])
def test_real_weights_stay(share: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    wiring = wirings.wire_(model, DNW(decay=1.0), density=0.25, share=share)
    before, masks = [layer.weight.detach().clone() for layer in wiring.layers], wiring.masks()
    wiring.step(torch.optim.SGD(model.parameters(), lr=0.1))
    for layer, old in zip(wiring.layers, before, strict=True):
        torch.testing.assert_close(layer.weight.detach(), torch.where(masks[layer.name], old, 0.9 * old))


def test_needs_an_optimizer() -> None:
    _, wiring, _ = one_layer([[1.0, 2.0]], k=1)
    with pytest.raises(WiringError, match=r"call wiring.step\(optimizer\), or make the rule with decay=0"):
        wiring.step()
    plain = wirings.wire_(nn.Linear(2, 2), "dnw", k=2)
    plain.step()
    assert not plain.acts_between_steps
    with pytest.raises(WiringError, match="decay must be"):
        DNW(decay=-1)
