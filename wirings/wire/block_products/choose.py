"""How each product of a block-sparse layer is computed: dense, or with which tile. Measured once for each shape."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wirings.wire.block_products.layout import BlockLayout
from wirings.wire.block_products.tiles import GRADIENTS, PRODUCTS, GradientTile, ProductTile

MIN_SPEEDUP = 1.02
"""How much faster than the dense product a tile must be, which is more than the spread of the timings."""


class LayerTiles(NamedTuple):
    """The tiles of the three products of a layer; None for a dense product."""

    forward: ProductTile | None
    inputs: ProductTile | None
    weights: GradientTile | None


DENSE = LayerTiles(None, None, None)
_found: dict[tuple[Any, ...], LayerTiles] = {}


def usable_products(layout: BlockLayout, *, by_column: bool = False) -> list[ProductTile]:
    """The tiles whose groups divide the rows of blocks."""
    rows = layout.mask.shape[1 if by_column else 0]
    return [tile for tile in PRODUCTS[layout.block] if rows % tile.group == 0]


def default_products(layout: BlockLayout) -> LayerTiles:
    """The tiles that are used where nothing was measured."""
    return LayerTiles(PRODUCTS[layout.block][0], PRODUCTS[layout.block][0], GRADIENTS[layout.block][0])


def chosen(x: Tensor, weight: Tensor, layout: BlockLayout) -> LayerTiles:
    """What `choose_products` found for this shape and density, or else the defaults."""
    return _found.get(_key(x, weight, layout)) or default_products(layout)


@torch.no_grad()
def choose_products(x: Tensor, weight: Tensor, layout: BlockLayout, *, repeats: int = 20) -> LayerTiles:
    """Time the dense product and all tiles with a layer's inputs, and use the fastest from now on.

    This is for a CUDA device, outside of graph capture; other devices stay dense. The result holds for layers of the
    same shape, number of tokens and density, to a percent.

    Args:
        x: inputs of shape (..., inputs).
        weight: of shape (outputs, inputs).
        layout: the blocks of the weight.
        repeats: timings of each way, of which the median is used.
    """
    from wirings.wire.block_products import linear  # it looks up what is chosen here

    x = x.reshape(-1, x.shape[-1])
    if not x.is_cuda or not linear.supports(x, weight, layout):
        return DENSE
    kernels, block, grad = linear._kernels(), layout.block, x.new_ones((len(x), len(weight)))

    def product(tile: ProductTile, by_column: bool) -> Callable[[], Any]:
        lists = layout.lists(by_column=by_column, group=tile.group)
        return lambda: kernels.multiply(grad if by_column else x, weight, None, *lists, block, tile, by_column)

    def gradient(tile: GradientTile) -> Callable[[], Any]:
        runs, places = layout.runs(tile.blocks), layout.places()
        return lambda: kernels.weight_gradient(grad, x, runs, places, block, tile)

    found = LayerTiles(
        _fastest(lambda: x @ weight.T, {t: product(t, False) for t in usable_products(layout)}, repeats),
        _fastest(
            lambda: grad @ weight, {t: product(t, True) for t in usable_products(layout, by_column=True)}, repeats
        ),
        _fastest(lambda: grad.T @ x, {t: gradient(t) for t in GRADIENTS[block]}, repeats),
    )
    _found[_key(x, weight, layout)] = found
    return found


def _key(x: Tensor, weight: Tensor, layout: BlockLayout) -> tuple[Any, ...]:
    density = round(100 * layout.blocks / layout.mask.numel())
    return x.device, x.dtype, len(x), tuple(weight.shape), layout.block, density


def _fastest(dense: Callable[[], Any], tiles: dict[Any, Callable[[], Any]], repeats: int) -> Any:
    """The fastest tile, or None if the dense product is as fast."""
    limit = _milliseconds(dense, repeats) / MIN_SPEEDUP
    times = {}
    for tile, run in tiles.items():
        try:
            times[tile] = _milliseconds(run, repeats)
        except Exception as error:  # a tile may need more shared memory than this GPU has
            if type(error).__name__ != "OutOfResources":
                raise
    best = min(times, key=times.__getitem__, default=None)
    return None if best is None or times[best] > limit else best


def _milliseconds(run: Callable[[], Any], repeats: int) -> float:
    """The median time on the GPU, after a warm-up."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)
