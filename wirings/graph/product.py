"""Sums over edges: what every node receives, from the weights of a tile and from what the nodes send.

States are stored as (nodes, batch, …): a range of nodes is then contiguous in memory, and the sums of a tile are one
matrix product over all images and pixels. Node functions see the same memory as (batch, nodes, …).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wirings.graph.topology import EdgeTile

DENSE_FROM = 1 / 16
"""Tiles with at least this fraction of allowed edges are multiplied as dense matrices, all others as sparse ones."""
CHUNK = {"cpu": 1 << 19, "cuda": 1 << 25}
"""By device, how many products the gradient of a sparse tile holds at a time; on a CPU they must fit its cache."""


class Product(nn.Module):
    """Multiply by one tile. Where its edges are is in buffers that are not saved, since the topology determines it."""

    places: Tensor
    turned: Tensor

    def __init__(self, tile: EdgeTile, dense: bool = False) -> None:
        super().__init__()
        self.shape = len(tile.targets), len(tile.sources)
        self.start, self.count = tile.start, tile.count
        self.full = tile.places is None
        self.sparse = not (self.full or dense) and tile.count < DENSE_FROM * self.shape[0] * self.shape[1]
        if tile.places is not None:
            rows, columns = (torch.from_numpy(index).long() for index in tile.places)
            places = torch.stack([rows, columns]) if self.sparse else rows * self.shape[1] + columns
            self.register_buffer("places", places, persistent=False)
            if self.sparse:  # the same edges ordered by source, for products with the transpose
                self.register_buffer("turned", torch.argsort(columns, stable=True), persistent=False)

    def matrix(self, own: Tensor) -> Tensor:
        """The tile's weights as a matrix, (targets, sources); for a sparse tile, the weights themselves."""
        if self.full:
            return own.view(self.shape)
        if self.sparse:
            return own
        return own.new_zeros(self.shape[0] * self.shape[1]).index_copy(0, self.places, own).view(self.shape)

    def forward(self, matrix: Tensor, messages: Tensor) -> Tensor:
        """What the targets receive, (targets, batch, …), when the sources send ``messages``, (sources, batch, …)."""
        if not self.sparse:
            return through(matrix, messages)
        sums = _SparseProduct.apply(matrix, messages.flatten(1), self.places, self.turned, self.shape[0])
        return sums.view(self.shape[0], *messages.shape[1:])


def split(weight: Tensor, products: Sequence[Product]) -> list[Tensor]:
    """Split a graph's weights into the part of each product.

    One split instead of slices, whose gradients would each be as large as all weights and almost everywhere zero. Under
    autocast, the weights are also rounded all at once, unless they already are.
    """
    kind = weight.device.type
    if torch.is_autocast_enabled(kind) and not any(product.sparse for product in products):
        weight = weight.to(torch.get_autocast_dtype(kind))
    order = sorted(range(len(products)), key=lambda i: products[i].start)
    parts = weight.split([products[i].count for i in order])
    return [part for _, part in sorted(zip(order, parts, strict=True), key=lambda pair: pair[0])]


def through(matrix: Tensor, messages: Tensor) -> Tensor:
    """Multiply messages by a dense matrix of edges, in the precision of autocast or of the messages."""
    flat = messages.flatten(1)
    if not torch.is_autocast_enabled(flat.device.type):
        matrix = matrix.to(flat.dtype)
    return torch.mm(matrix, flat).view(matrix.shape[0], *messages.shape[1:])


class _SparseProduct(torch.autograd.Function):
    """A sparse matrix times a dense one, in memory proportional to the edges instead of nodes squared."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dense: Tensor, places: Tensor, turned: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(weight, dense, places, turned)
        return _times(weight, places, count, dense)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, dense, places, turned = ctx.saved_tensors
        grad_weight = grad_dense = None
        if ctx.needs_input_grad[1]:
            grad_dense = _times(weight[turned], places[:, turned].flip(0), dense.shape[0], grad)
        if ctx.needs_input_grad[0]:
            parts = places.split(max(1, CHUNK.get(dense.device.type, 1 << 22) // max(1, dense.shape[1])), dim=1)
            wide = torch.promote_types(dense.dtype, torch.float32)
            sums = [(grad[rows].to(wide) * dense[columns].to(wide)).sum(1) for rows, columns in parts]
            grad_weight = torch.cat(sums).to(weight.dtype)
        return grad_weight, grad_dense, None, None, None


def _times(weight: Tensor, places: Tensor, count: int, dense: Tensor) -> Tensor:
    # Not every device multiplies sparse matrices in half precision.
    wide = torch.promote_types(dense.dtype, torch.float32)
    with torch.sparse.check_sparse_tensor_invariants(False):  # skipped: the positions come from a mask, in order
        matrix = torch.sparse_coo_tensor(places, weight.to(wide), (count, dense.shape[0]), is_coalesced=True)
        return torch.sparse.mm(matrix, dense.to(wide)).to(dense.dtype)


class Sums(nn.Module):
    """The sums of a dynamic graph: what every node receives from all others, over all tiles."""

    def __init__(self, tiles: list[EdgeTile], nodes: int) -> None:
        super().__init__()
        self.nodes = nodes
        self.products = nn.ModuleList(Product(tile) for tile in tiles)
        # Whether all edges are one dense matrix, so that some of its rows and columns can be used alone.
        self.one_matrix = len(tiles) == 1 and not self.all()[0].sparse and len(tiles[0].targets) == nodes
        self.places = [(tile.targets, tile.sources) for tile in tiles]

    def matrices(self, weight: Tensor) -> list[Tensor]:
        """The weights of each tile, computed once for all steps."""
        products = self.all()
        return [product.matrix(own) for product, own in zip(products, split(weight, products), strict=True)]

    def all(self) -> list[Product]:
        """The products of all tiles."""
        return list(self.products)  # type: ignore[arg-type]

    def forward(self, matrices: list[Tensor], messages: Tensor) -> Tensor:
        if self.one_matrix:
            return self.all()[0](matrices[0], messages)
        received: dict[int, Tensor] = {}
        for product, matrix, (targets, sources) in zip(self.products, matrices, self.places, strict=True):
            sums = product(matrix, messages[sources[0] : sources[-1] + 1])
            first = int(targets[0])
            received[first] = received[first] + sums if first in received else sums
        pieces, at = [], 0
        for first, sums in sorted(received.items()):  # nodes to which no edge may lead receive zeros
            if first > at:
                pieces.append(sums.new_zeros(first - at, *sums.shape[1:]))
            pieces.append(sums)
            at = first + len(sums)
        return torch.cat(pieces)
