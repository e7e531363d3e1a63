"""The layers before and after graphs of maps: on a CPU they are called; which of them the kernels replace."""

from typing import Any

import pytest
import torch
from helpers import layers_at_ends, run_ends, stem
from torch import nn

from wirings.graph import ends


@pytest.mark.parametrize(
    "options",
    [{"bias": True}, {"padding": 0}, {"dilation": 2}, {"stride": 3}, {"stride": (1, 2)}, {"padding_mode": "reflect"}],
)
def test_other_convolutions_are_called(options: dict[str, Any]) -> None:
    assert ends._is_usual(stem())
    assert not ends._is_usual(stem(**options))


@pytest.mark.parametrize("options", [{"momentum": None}, {"affine": False}, {"track_running_stats": False}])
def test_other_norms_are_called(options: dict[str, Any]) -> None:
    assert ends._is_usual_norm(nn.BatchNorm2d(4))
    assert not ends._is_usual_norm(nn.BatchNorm2d(4, **options))
    assert not ends._is_usual_norm(nn.BatchNorm2d(4).bfloat16())


def test_layers_on_a_cpu() -> None:
    ours, plain = layers_at_ends(), layers_at_ends()
    images = torch.randn(4, 3, 9, 9)
    results = [run_ends(ours, images)]
    pooled = plain[2](plain[1](plain[0](images))).mean((-2, -1))
    pooled.square().sum().backward()
    results.append([pooled.detach(), *[p.grad for p in plain.parameters()], *plain.buffers()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
