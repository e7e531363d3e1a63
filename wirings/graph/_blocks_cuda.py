"""A static graph of blocks on a GPU as one operation: sums over edges, and nodes with a batch norm between them.

What all blocks send lies in one tensor, into which the kernels of the nodes write, so that what a block receives is one
matrix product with the first rows of that tensor. In the backward pass, the products add the gradients of what was sent
in place, likewise in one tensor. Recorded operation by operation, the messages of earlier blocks would be copied for
every block, and their gradients filled with zeros, copied and added up.
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


def run(
    x: Tensor, matrices: Sequence[Tensor], firsts: Sequence[int], functions: Sequence[BlockFunction], dtype: torch.dtype
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """What the last block receives, (nodes, batch, height, width), and the mean and variance at every other block.

    Args:
        x: the states of the input nodes, (nodes, batch, height, width).
        matrices: for every block but the first, the weights of its edges, (nodes, sources).
        firsts: for every block but the first, the first of its sources, which end where the block begins.
        functions: the functions of all blocks but the last; only the first may have a stride.
        dtype: the dtype of messages and sums.
    """
    parameters = [t for f in functions for t in (f.gamma, f.beta, f.kernel)]
    received, *statistics = _Blocks.apply(x, firsts, functions, dtype, *matrices, *parameters)
    return received, list(zip(statistics[::2], statistics[1::2], strict=True))


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, firsts: Any, functions: Any, dtype: torch.dtype, *tensors: Tensor) -> Any:
        matrices = tensors[: len(firsts)]
        x = x.contiguous()
        sizes = [len(x), *(len(matrix) for matrix in matrices)]
        shape = _batch_cuda.out_shape(x, functions[0].stride)[1:]
        messages = torch.empty((sum(sizes[:-1]), *shape), dtype=dtype, device=x.device)
        flat = messages.flatten(1)
        states, statistics, begin = [x], [], 0
        for i, function in enumerate(functions):
            out = messages[begin : begin + sizes[i]]
            settings = (function.eps, function.relu, function.stride, dtype)
            parts = (function.gamma, function.beta, function.mean, function.var, function.kernel)
            _, *found = _batch_cuda.forward(states[-1], *parts, *settings, out)
            statistics += found
            begin += sizes[i]
            received = torch.mm(matrices[i].to(dtype), flat[firsts[i] : begin])
            states.append(received.view(-1, *shape))
        ctx.firsts, ctx.sizes, ctx.dtype = firsts, sizes, dtype
        ctx.settings = [(f.eps, f.relu, f.stride, f.mean is None) for f in functions]
        ctx.save_for_backward(messages, *states[:-1], *statistics, *tensors)
        ctx.mark_non_differentiable(*statistics)
        ctx.set_materialize_grads(False)  # the statistics have none, which would each be filled with zeros
        return states[-1], *statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        count = len(ctx.firsts)
        messages, *saved = ctx.saved_tensors
        states, statistics, tensors = saved[:count], saved[count : 3 * count], saved[3 * count :]
        matrices, parameters = tensors[:count], tensors[count:]
        flat = messages.flatten(1)
        everything = all(first == 0 for first in ctx.firsts)  # then the last product writes all rows
        sent = torch.empty_like(flat) if everything else torch.zeros_like(flat)
        of_matrices: list[Tensor] = []
        of_parameters: list[Tensor] = []
        end = len(flat)
        for i in reversed(range(count)):
            rows = slice(ctx.firsts[i], end)
            received = grad.to(ctx.dtype).reshape(ctx.sizes[i + 1], -1)
            matrix = matrices[i].to(ctx.dtype)
            of_matrices.insert(0, torch.mm(received, flat[rows].t()).to(matrices[i].dtype))
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
        return grad, None, None, None, *of_matrices, *of_parameters
