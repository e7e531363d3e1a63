"""Helpers of the graph tests: copy plain layers into a graph, compare outputs and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wirings.graph import ends

DTYPES = {"fp32": (torch.float32, 1e-5), "fp64": (torch.float64, 1e-10)}
both_precisions = pytest.mark.parametrize(("dtype", "tolerance"), DTYPES.values(), ids=DTYPES)


def block_matrix(sizes: list[int], layers: dict[tuple[int, int], Tensor]) -> Tensor:
    """The matrix of a graph of blocks: ``layers[i, j]`` is the weight (out, in) from block i to block j."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    some = next(iter(layers.values()))
    matrix = some.new_zeros(starts[-1], starts[-1])
    for (i, j), weight in layers.items():
        matrix[starts[j] : starts[j + 1], starts[i] : starts[i + 1]] = weight.detach()
    return matrix


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    """Assert equality up to ``tolerance``, relative to the largest value."""
    assert a.shape == b.shape
    scale = max(1.0, b.abs().max().item())
    assert (a - b).abs().max().item() <= tolerance * scale


def same(
    one: Callable[[Tensor], Tensor],
    other: Callable[[Tensor], Tensor],
    x: Tensor,
    pairs: Callable[[], list[tuple[Tensor, Tensor]]],
    tolerance: float,
) -> None:
    """Assert equal outputs and input gradients, and that all ``pairs`` are equal after the backward pass."""
    torch.manual_seed(1)
    x1, x2 = (x.clone().requires_grad_() for _ in range(2))
    y1, y2 = one(x1), other(x2)
    close(y1, y2, tolerance)
    weighting = torch.randn_like(y1)
    (y1 * weighting).sum().backward()
    (y2 * weighting).sum().backward()
    close(x1.grad, x2.grad, tolerance)
    found = pairs()
    assert found
    for a, b in found:
        close(a, b, tolerance)


def stem(**options: Any) -> nn.Conv2d:
    """A first convolution of images."""
    return nn.Conv2d(3, 32, 3, **{"padding": 1, "bias": False, **options})


def layers_at_ends() -> nn.ModuleList:
    """A first convolution, and a norm and an activation for `wirings.graph.ends.pooled_maps`."""
    torch.manual_seed(0)
    layers = nn.ModuleList([stem(stride=2), nn.BatchNorm2d(32), nn.ReLU()])
    nn.init.uniform_(layers[1].weight, 0.5, 1.5)  # type: ignore[arg-type]
    nn.init.uniform_(layers[1].bias, -0.5, 0.5)  # type: ignore[arg-type]
    return layers


def run_ends(layers: nn.ModuleList, images: Tensor) -> list[Tensor]:
    """Compute these layers' output, and return it with all gradients and running statistics."""
    convolution, norm, activation = layers
    pooled = ends.pooled_maps(ends.first_maps(convolution, images), norm, activation)  # type: ignore[arg-type]
    pooled.float().square().sum().backward()
    return [pooled.detach(), *[p.grad for p in layers.parameters()], *layers.buffers()]  # type: ignore[misc]
