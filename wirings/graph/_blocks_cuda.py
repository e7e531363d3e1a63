"""A static graph of blocks on a GPU as one operation: sums over edges, and nodes with a batch norm between them.

What all blocks send lies in one tensor, into which the kernels of the nodes write, so that what a block receives is one
matrix product with the first rows of that tensor. In the backward pass, the products add the gradients of what was sent
in place, likewise in one tensor, and write those of the weights into one vector. Recorded operation by operation, the
messages of earlier blocks would be copied for every block, and their gradients filled with zeros, copied and added up.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from wirings.graph import _batch_cuda


class BlockFunction(NamedTuple):
    """What the nodes of a block apply to what they receive before they send it."""

    gamma: Tensor
    beta: Tensor
    kernel: Tensor
    mean: Tensor | None
    """The statistics of the norm; None for the batch's own."""
    var: Tensor | None
    eps: float
    relu: bool
    stride: int


class BlockTile(NamedTuple):
    """The edges of all sources of a block, whose weights are a matrix of shape (nodes, sources)."""

    start: int
    """Position of the first in the weights of the graph."""
    nodes: int
    sources: int
    first: int
    """The first of the sources, which end where the block begins."""

    def of(self, weight: Tensor) -> Tensor:
        """The matrix in a vector of the weights of all edges."""
        return weight[self.start : self.start + self.nodes * self.sources].view(self.nodes, self.sources)


def run(
    x: Tensor, weight: Tensor, tiles: Sequence[BlockTile], functions: Sequence[BlockFunction], dtype: torch.dtype
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """What the last block receives, (nodes, batch, height, width), and the mean and variance at every other block.

    Args:
        x: the states of the input nodes, (nodes, batch, height, width).
        weight: the weights of all edges, a vector.
        tiles: the edges of every block but the first, which together are all edges.
        functions: the functions of all blocks but the last; only the first may have a stride.
        dtype: the dtype of messages and sums.
    """
    parameters = [t for f in functions for t in (f.gamma, f.beta, f.kernel)]
    received, *statistics = _Blocks.apply(x, weight, tiles, functions, dtype, *parameters)
    return received, list(zip(statistics[::2], statistics[1::2], strict=True))


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, tiles: Any, functions: Any, dtype: torch.dtype, *parameters: Tensor
    ) -> Any:
        x, lowered = x.contiguous(), weight.to(dtype)  # all weights at once, and once for both passes
        sizes = [len(x), *(tile.nodes for tile in tiles)]
        shape = _batch_cuda.out_shape(x, functions[0].stride)[1:]
        messages = torch.empty((sum(sizes[:-1]), *shape), dtype=dtype, device=x.device)
        flat = messages.flatten(1)
        states, statistics, begin = [x], [], 0
        for i, (function, tile) in enumerate(zip(functions, tiles, strict=True)):
            out = messages[begin : begin + sizes[i]]
            settings = (function.eps, function.relu, function.stride, dtype)
            parts = (function.gamma, function.beta, function.mean, function.var, function.kernel)
            _, *found = _batch_cuda.forward(states[-1], *parts, *settings, out)
            statistics += found
            begin += sizes[i]
            received = torch.mm(tile.of(lowered), flat[tile.first : begin])
            states.append(received.view(-1, *shape))
        ctx.tiles, ctx.sizes, ctx.dtype = tiles, sizes, weight.dtype
        ctx.settings = [(f.eps, f.relu, f.stride, f.mean is None) for f in functions]
        ctx.save_for_backward(messages, lowered, *states[:-1], *statistics, *parameters)
        ctx.mark_non_differentiable(*statistics)
        ctx.set_materialize_grads(False)  # the statistics have none, which would each be filled with zeros
        return states[-1], *statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        count = len(ctx.tiles)
        messages, lowered, *saved = ctx.saved_tensors
        states, statistics, parameters = saved[:count], saved[count : 3 * count], saved[3 * count :]
        flat = messages.flatten(1)
        everything = all(tile.first == 0 for tile in ctx.tiles)  # then the last product writes all rows
        sent = torch.empty_like(flat) if everything else torch.zeros_like(flat)
        of_weight = torch.empty_like(lowered)  # the products write every part of it
        of_parameters: list[Tensor] = []
        end = len(flat)
        for i in reversed(range(count)):
            tile = ctx.tiles[i]
            rows = slice(tile.first, end)
            received = grad.to(lowered.dtype).reshape(tile.nodes, -1)
            matrix = tile.of(lowered)
            torch.mm(received, flat[rows].t(), out=tile.of(of_weight))
            if everything and i == count - 1:
                torch.mm(matrix.t(), received, out=sent[rows])
            else:
                sent[rows].addmm_(matrix.t(), received)
            begin = end - ctx.sizes[i]
            own = sent[begin:end].view(-1, *messages.shape[1:])
            gamma, beta, kernel = parameters[3 * i : 3 * i + 3]
            mean, var = statistics[2 * i : 2 * i + 2]
            grad, *rest = _batch_cuda.backward(own, states[i], gamma, beta, mean, var, kernel, *ctx.settings[i])
            of_parameters[:0] = rest
            end = begin
        return grad, of_weight.to(ctx.dtype), None, None, None, *of_parameters
