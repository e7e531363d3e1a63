"""The products of a block-sparse layer as PyTorch operators, which compilers keep as they are.

Each decides when it runs whether it skips zero blocks or is dense (`choose`). A ``tile`` says so instead: empty to
decide, ``[0]`` for dense, or the fields of a tile. They return new tensors and need no gradient; `linear` has that.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wirings.wire.block_products import layout
from wirings.wire.block_products.choose import measured
from wirings.wire.block_products.tiles import GradientTile, ProductTile

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run in Triton's interpreter, on a CPU."""
_DENSE = [0]
_library = torch.library.Library("wirings", "FRAGMENT")
_library.define("block_lists(Tensor mask, int blocks) -> Tensor")
_library.define(
    "block_forward(Tensor x, Tensor weight, Tensor? bias, Tensor lists, int block, float density, int[] tile, "
    "str activation, bool keep) -> (Tensor, Tensor)"
)
_library.define(
    "block_inputs(Tensor grad, Tensor weight, Tensor lists, int block, float density, int[] tile) -> Tensor"
)
_library.define("block_weights(Tensor grad, Tensor x, Tensor lists, int block, float density, int[] tile) -> Tensor")


def block_lists(mask: Tensor, blocks: int) -> Tensor:
    """The lists of a mask of blocks (`layout.list_blocks`)."""
    fast = (mask.is_cuda or INTERPRETED) and kernels() is not None and blocks > 0
    return (kernels() if fast else layout).list_blocks(mask, blocks)


def block_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lists: Tensor,
    block: int,
    density: float,
    tile: list[int],
    activation: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """``activation(x @ weight.T + bias)`` and, if ``keep``, the sum before an activation, which is otherwise empty."""

    def sparse(tile: ProductTile, keep: bool = keep) -> Any:
        return kernels().multiply(x, weight, bias, lists, block, tile, False, activation, keep)

    def dense(keep: bool = keep) -> tuple[Tensor, Tensor]:
        before = F.linear(x, weight, bias)
        out = before if activation == "none" else F.gelu(before, approximate=approximate(activation))
        return out, before if keep else before.new_empty(0)

    sizes = (len(x), *weight.shape, block)
    found = ProductTile(*tile) if len(tile) > 1 else None
    if not tile:
        product = f"forward {activation}"
        found = measured(product, x, sizes, density, lambda: dense(False), lambda tile: sparse(tile, False))
    return dense() if found is None else sparse(found)


def block_inputs(grad: Tensor, weight: Tensor, lists: Tensor, block: int, density: float, tile: list[int]) -> Tensor:
    """``grad @ weight``, the gradient of the inputs."""

    def sparse(tile: ProductTile) -> Tensor:
        return kernels().multiply(grad, weight, None, lists, block, tile, True)[0]

    found = ProductTile(*tile) if len(tile) > 1 else None
    if not tile:
        found = measured("inputs", grad, (len(grad), *weight.shape, block), density, lambda: grad @ weight, sparse)
    return grad @ weight if found is None else sparse(found)


def block_weights(grad: Tensor, x: Tensor, lists: Tensor, block: int, density: float, tile: list[int]) -> Tensor:
    """``grad.T @ x`` in the blocks that exist, zero elsewhere: the gradient of their weights."""

    def dense() -> Tensor:
        return torch.where(mask_of(lists, grad.shape[1], x.shape[1], block), grad.T @ x, 0)

    def sparse(tile: GradientTile) -> Tensor:
        return kernels().weight_gradient(grad, x, lists, block, tile)

    found = GradientTile(*tile) if len(tile) > 1 else None
    if not tile:
        found = measured("weights", x, (len(x), grad.shape[1], x.shape[1], block), density, dense, sparse)
    return dense() if found is None else sparse(found)


for _name, _function in (
    ("block_lists", block_lists),
    ("block_forward", block_forward),
    ("block_inputs", block_inputs),
    ("block_weights", block_weights),
):
    for _key in ("CUDA", "CPU"):
        _library.impl(_name, _function, _key)


@torch.library.register_fake("wirings::block_lists", lib=_library)
def _(mask, blocks):  # type: ignore[no-untyped-def]
    return mask.new_empty(layout.packed_length(mask.shape[0], mask.shape[1], blocks), dtype=torch.int32)


@torch.library.register_fake("wirings::block_forward", lib=_library)
def _(x, weight, bias, lists, block, density, tile, activation, keep):  # type: ignore[no-untyped-def]
    out = x.new_empty((x.shape[0], weight.shape[0]))
    return out, x.new_empty(out.shape if keep else (0,))


@torch.library.register_fake("wirings::block_inputs", lib=_library)
def _(grad, weight, lists, block, density, tile):  # type: ignore[no-untyped-def]
    return grad.new_empty((grad.shape[0], weight.shape[1]))


@torch.library.register_fake("wirings::block_weights", lib=_library)
def _(grad, x, lists, block, density, tile):  # type: ignore[no-untyped-def]
    return x.new_empty((grad.shape[1], x.shape[1]))


def call(function: Any, *args: Any) -> Any:
    """Call one of these functions, as an operator only if it is compiled: the dispatcher costs the host time."""
    if torch.compiler.is_compiling():
        return getattr(torch.ops.wirings, function.__name__)(*args)
    return function(*args)


def lists_of(blocks: layout.BlockLayout) -> Tensor:
    """The lists of a layout, which are made once."""
    if blocks.lists is None:
        blocks.lists = call(block_lists, blocks.mask, blocks.blocks)
    return blocks.lists


def as_ints(tile: ProductTile | GradientTile | None) -> list[int]:
    """A tile, or None for dense, as an operator takes it."""
    return list(_DENSE if tile is None else tile)


def approximate(activation: str) -> str:
    """What `torch.nn.functional.gelu` calls an activation."""
    return "tanh" if activation == "gelu_tanh" else "none"


def mask_of(lists: Tensor, outputs: int, inputs: int, block: int) -> Tensor:
    """The mask of weights that lists of blocks stand for."""
    rows, columns = outputs // block, inputs // block
    parts = layout.unpack(lists, rows, columns)
    place = torch.where(parts.rows < 0, rows * columns, parts.rows * columns + parts.columns).long()
    mask = torch.zeros(rows * columns + 1, dtype=torch.bool, device=lists.device)
    mask.index_fill_(0, place, True)
    return layout.spread(mask[:-1].view(rows, columns), block)


@functools.cache
def kernels() -> Any:
    """The Triton kernels, or None if Triton is not installed."""
    try:
        from wirings.wire.block_products import _products_cuda
    except ImportError:
        return None
    return _products_cuda
