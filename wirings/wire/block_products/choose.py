"""How each product of a block-sparse layer is computed: dense, or with which tile. Measured once for each shape."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wirings.wire.block_products.tiles import GRADIENTS, PRODUCTS, GradientTile, ProductTile

MIN_SPEEDUP = 1.02
"""How much faster than the dense product another one must be, which is more than the spread of the timings."""
REPEATS = 10
"""Timings of each way, of which the median is used."""
_WAIT = 500_000  # cycles, about 0.3 ms: longer than the host takes to launch a few kernels


class LayerTiles(NamedTuple):
    """The tiles of the three products of a layer; None for a dense product."""

    forward: ProductTile | None
    inputs: ProductTile | None
    weights: GradientTile | None


class Choice(NamedTuple):
    """What was measured for a product."""

    tile: Any
    """The fastest tile, or None if the dense product is as fast."""
    dense_ms: float
    """Milliseconds of the dense product."""
    tile_ms: float
    """Milliseconds of the fastest tile."""


DENSE = LayerTiles(None, None, None)
_found: dict[tuple[Any, ...], Choice] = {}


def default_products(block: int) -> LayerTiles:
    """The first tile of each product."""
    return LayerTiles(PRODUCTS[block][0], PRODUCTS[block][0], GRADIENTS[block][0])


def measured(
    product: str,
    like: Tensor,
    sizes: tuple[int, ...],
    density: float,
    dense: Callable[[], Any],
    run: Callable[..., Any],
) -> Any:
    """The fastest tile of a product, or None if the dense one is as fast. Measured the first time, then remembered.

    The result holds for layers of the same shape, and about as many tokens and the same density. While a CUDA graph is
    captured, nothing can be measured, and what is not known yet is dense.

    Args:
        product: one of the fields of `LayerTiles`.
        like: the inputs, for their device and precision.
        sizes: tokens, outputs, inputs and the side of a block.
        density: the fraction of the blocks that exist.
        dense: computes the dense product.
        run: computes the product with the tile that it is given.
    """
    key = _key(product, like.device, like.dtype, sizes, density)
    if key not in _found:
        if not like.is_cuda or torch.cuda.is_current_stream_capturing():
            return None
        tiles: Any = (GRADIENTS if product == "weights" else PRODUCTS)[sizes[-1]]
        _found[key] = fastest(dense, {tile: functools.partial(run, tile) for tile in tiles})
    return _found[key].tile


def known(
    product: str, device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...], density: float
) -> Choice | None:
    """What `measured` found, or None if the product has not run yet."""
    return _found.get(_key(product, device, dtype, sizes, density))


def _key(
    product: str, device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...], density: float
) -> tuple[Any, ...]:
    return product, device, dtype, bucket(sizes[0]), *sizes[1:], bucket(density)


def bucket(number: float) -> int:
    """Numbers of tokens, or densities, that are measured together: within a factor of about the square root of two."""
    return round(2 * math.log2(max(number, 1e-6)))


def fastest(dense: Callable[[], Any], tiles: dict[Any, Callable[[], Any]]) -> Choice:
    """Measure the dense product and all tiles."""
    dense_ms, times = milliseconds(dense), {}
    for tile, run in tiles.items():
        try:
            times[tile] = milliseconds(run)
        except Exception as error:  # a tile may need more shared memory than this GPU has
            if type(error).__name__ != "OutOfResources":
                raise
    if not times:
        return Choice(None, dense_ms, math.inf)
    best = min(times, key=times.__getitem__)
    return Choice(best if dense_ms >= MIN_SPEEDUP * times[best] else None, dense_ms, times[best])


def milliseconds(run: Callable[[], Any], repeats: int = REPEATS) -> float:
    """The median time on the GPU, after a warm-up.

    The GPU waits for about 0.3 ms before, so that the host's time to launch a few kernels does not count. What the host
    takes longer than the GPU beyond that counts.
    """
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_WAIT)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)
