"""Products with a matrix of which only some blocks are not zero, on tensor cores. `tiles` says what limits their speed.

Two kernels are enough. ``_multiply`` computes a run of tokens times a row of blocks; with the other strides of the
weight, and the lists by column, that is the gradient of the inputs. ``_correlate`` computes the gradient of a few
blocks of one row as a sum over tokens. In both, a tile for the tensor cores consists of blocks from different places,
and only these are read. Blocks are read from the dense weight, where they are while training, so that nothing has to be
packed: a line of a block is at least 32 bytes, the unit in which memory is read. Sums are float32, in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from wirings.utils.triton_launch import KernelLauncher, on_device_of
from wirings.wire.block_products.layout import packed_length, unpack
from wirings.wire.block_products.tiles import GradientTile, ProductTile

_ACTIVATIONS = {"none": 0, "gelu": 1, "gelu_tanh": 2}
_LINES = 8  # lines of a mask that are counted at a time


def list_blocks(mask: Tensor, blocks: int) -> Tensor:
    """`layout.list_blocks` in one kernel."""
    mask, (rows, columns) = mask.contiguous(), mask.shape
    lists = torch.full((packed_length(rows, columns, blocks),), -1, dtype=torch.int32, device=mask.device)
    parts = unpack(lists, rows, columns)
    width = triton.next_power_of_2(max(rows, columns))
    _launch(_list, rows + columns, 4, None, (mask.view(torch.uint8), *parts), (rows, columns, blocks), (width, _LINES))
    return lists


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lists: Tensor,
    block: int,
    tile: ProductTile,
    transposed: bool = False,
    activation: str = "none",
    keep: bool = False,
) -> tuple[Tensor, Tensor]:
    """``activation(x @ weight.T + bias)``, or ``x @ weight`` if ``transposed``; also the sum before the activation.

    ``x``: of shape (tokens, inputs). ``weight``: of shape (outputs, inputs), zero outside of its blocks.
    ``lists``: the blocks (`layout.list_blocks`).
    ``keep``: whether to return the sum before the activation, which is otherwise empty.
    """
    x, weight = x.contiguous(), weight.contiguous()
    out = x.new_empty((len(x), weight.shape[1 if transposed else 0]))
    before = x.new_empty(out.shape if keep else 0)
    parts = unpack(lists, weight.shape[0] // block, weight.shape[1] // block)
    offsets, indices = parts[3:] if transposed else parts[:2]
    by_output, by_input = (1, weight.shape[1]) if transposed else (weight.shape[1], 1)
    lines = len(offsets) - 1
    rest = (lines, len(x), x.shape[1], out.shape[1], by_output, by_input)
    constants = (block, tile.step, tile.tokens, _ACTIVATIONS[activation])
    tensors = (x, weight, bias, out, before if keep else None, offsets, indices)
    _launch(_multiply, lines * -(-len(x) // tile.tokens), tile.warps, tile.stages, tensors, rest, constants)
    return out, before


def weight_gradient(grad: Tensor, x: Tensor, lists: Tensor, block: int, tile: GradientTile) -> Tensor:
    """``grad.T @ x`` in the blocks that exist, zero elsewhere: of shape (outputs, inputs).

    ``grad``: of shape (tokens, outputs). ``x``: of shape (tokens, inputs). ``lists``: the blocks.
    """
    grad, x = grad.contiguous(), x.contiguous()
    out = x.new_zeros((grad.shape[1], x.shape[1]))
    rows, columns = grad.shape[1] // block, x.shape[1] // block
    offsets, indices, of_rows, _, _ = unpack(lists, rows, columns)
    blocks = len(indices)
    split = max(1, min(tile.split, -(-len(x) // tile.tokens)))
    share = -(-len(x) // (split * tile.tokens)) * tile.tokens
    size = blocks * block**2
    # A single share is the gradient itself.
    parts = out if split == 1 else torch.empty((split, size), dtype=torch.float32, device=x.device)
    runs = -(-min(columns, blocks) // tile.blocks)  # the most that a row can have
    rest = (rows, len(x), grad.shape[1], x.shape[1], share, blocks)
    constants = (block, tile.blocks, tile.tokens, split)
    _launch(_correlate, rows * runs * split, tile.warps, tile.stages, (grad, x, parts, offsets, indices), rest,
            constants)  # fmt: skip
    if split > 1:
        _launch(_add_parts, blocks, 4, None, (parts, out, of_rows, indices), (x.shape[1], size), (block, split))
    return out


def _launch(kernel, programs, warps, stages, tensors, rest, constants):
    """Launch one kernel, whose compiled form depends on everything but the values of the tensors."""
    if programs == 0:
        return
    like = [t if t is None else (t.dtype, t.data_ptr() % 16 == 0) for t in tensors]
    launch = KernelLauncher((tensors[0].device, kernel.fn.__name__, *like, rest, constants, warps, stages))
    with on_device_of(tensors[0]):
        launch(kernel, programs, warps, *tensors, *rest, *constants, stages=stages)


# ---- the kernels ----------------------------------------------------------------------------------------------


@triton.jit
def _list(mask, row_offsets, columns_of, rows_of, column_offsets, column_rows, rows, columns, blocks,
          WIDTH: tl.constexpr, LINES: tl.constexpr):  # fmt: skip
    """The list of one row of blocks, or of one column. It begins where all lines before it end."""
    by_column = tl.program_id(0) >= rows
    line = tl.program_id(0)
    width, by_line, by_place = columns, columns, 1
    if by_column:
        line -= rows
        width, by_line, by_place = rows, 1, columns
    place = tl.arange(0, WIDTH)
    before = 0
    for first in range(0, line, LINES):
        lines = first + tl.arange(0, LINES)
        there = (lines < line)[:, None] & (place < width)[None, :]
        found = tl.load(mask + lines[:, None] * by_line + place[None, :] * by_place, mask=there, other=0)
        before += tl.sum(tl.sum(found.to(tl.int32), 1), 0)
    real = tl.load(mask + line * by_line + place * by_place, mask=place < width, other=0).to(tl.int32)
    at = before + tl.cumsum(real, 0) - 1
    end = tl.minimum(before + tl.sum(real, 0), blocks)
    listed = (real != 0) & (at < blocks)
    if by_column:
        tl.store(column_offsets + line + 1, end)
        tl.store(column_rows + at, place, mask=listed)
        if line == 0:
            tl.store(column_offsets, 0)
    else:
        tl.store(row_offsets + line + 1, end)
        tl.store(columns_of + at, place, mask=listed)
        tl.store(rows_of + at, tl.zeros([WIDTH], tl.int32) + line, mask=listed)
        if line == 0:
            tl.store(row_offsets, 0)


@triton.jit
def _places(indices, first, end, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """The inputs of ``STEP`` blocks, one after the other: a scalar load for each, as a tensor's would be repeated."""
    place = tl.arange(0, STEP * BLOCK)
    found = tl.load(indices + first, mask=first < end, other=0) * BLOCK + place % BLOCK
    for other in tl.static_range(1, STEP):
        index = tl.load(indices + first + other, mask=first + other < end, other=0)
        found = tl.where(place // BLOCK == other, index * BLOCK + place % BLOCK, found)
    return found


@triton.jit
def _erf(x):
    """The error function to within 1.5e-7 (Abramowitz and Stegun, 7.1.26), in half the instructions of CUDA's own.

    A program has few blocks to multiply, so that what follows them counts.
    """
    t = 1 / (1 + 0.3275911 * tl.abs(x))
    sums = ((1.061405429 * t - 1.453152027) * t + 1.421413741) * t
    sums = ((sums - 0.284496736) * t + 0.254829592) * t
    beyond = sums * tl.exp(-x * x)
    return tl.where(x < 0, beyond - 1, 1 - beyond)


@triton.jit
def _multiply(x, weight, bias, out, before, offsets, indices, lines, tokens, x_width, out_width, by_output, by_input,
              BLOCK: tl.constexpr, STEP: tl.constexpr, TOKENS: tl.constexpr, ACTIVATION: tl.constexpr):  # fmt: skip
    """A run of tokens at the outputs of one row of blocks, ``STEP`` columns of blocks at a time.

    Programs of the same tokens follow each other, so that these are in the level-2 cache for all of them.
    """
    line, begin_token = tl.program_id(0) % lines, tl.program_id(0) // lines * TOKENS
    token = begin_token + tl.arange(0, TOKENS)
    output = line * BLOCK + tl.arange(0, BLOCK)
    begin, end = tl.load(offsets + line), tl.load(offsets + line + 1)
    # Beyond the last token, the last one is computed again and not stored: loads need no mask for it.
    rows = x + tl.minimum(token, tokens - 1)[:, None] * x_width
    sums = tl.zeros([TOKENS, BLOCK], tl.float32)
    # The places of the next blocks are read a step ahead: otherwise, the compiler would spend half its stages on them.
    input = _places(indices, begin, end, BLOCK, STEP)
    for first in range(begin, end, STEP):
        input = tl.max_contiguous(tl.multiple_of(input, BLOCK), BLOCK)
        at = output[None, :] * by_output + input[:, None] * by_input
        if STEP == 1:
            values, weights = tl.load(rows + input[None, :]), tl.load(weight + at)
        else:
            real = first + tl.arange(0, STEP * BLOCK) // BLOCK < end
            values = tl.load(rows + input[None, :], mask=real[None, :], other=0)
            weights = tl.load(weight + at, mask=real[:, None], other=0)
        input = _places(indices, first + STEP, end, BLOCK, STEP)
        sums = tl.dot(values, weights, sums, input_precision="ieee")
    at = token[:, None] * out_width + output[None, :]
    real = (token < tokens)[:, None]
    if bias is not None:
        sums += tl.load(bias + output).to(tl.float32)[None, :]
    if before is not None:
        tl.store(before + at, sums.to(out.dtype.element_ty), mask=real)
        sums = sums.to(out.dtype.element_ty).to(tl.float32)  # what the backward pass will see
    if ACTIVATION == 1:
        sums = 0.5 * sums * (1 + _erf(sums * 0.7071067811865476))
    elif ACTIVATION == 2:
        # 0.5 (1 + tanh(u)) is the sigmoid of 2 u.
        sums = sums * tl.sigmoid(1.5957691216057308 * (sums + 0.044715 * sums * sums * sums))
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=real)


@triton.jit
def _correlate(grad, x, parts, offsets, indices, rows, tokens, grad_width, x_width, share, blocks, BLOCK: tl.constexpr,
               RUN: tl.constexpr, TOKENS: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """The gradient of up to ``RUN`` blocks of one row, summed over a share of the tokens.

    The tile is (inputs, outputs): tensor cores need 64 rows, which the inputs of several blocks have.
    """
    row, split = tl.program_id(0) % rows, tl.program_id(0) // rows % SPLIT
    begin, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    begin += tl.program_id(0) // (rows * SPLIT) * RUN
    if begin < end:
        place = tl.arange(0, RUN * BLOCK)
        number = begin + place // BLOCK
        real = number < end
        column = tl.load(indices + number, mask=real, other=0)
        input = tl.max_contiguous(tl.multiple_of(column * BLOCK + place % BLOCK, BLOCK), BLOCK)
        output = row * BLOCK + tl.arange(0, BLOCK)
        sums = tl.zeros([RUN * BLOCK, BLOCK], tl.float32)
        last = tl.minimum((split + 1) * share, tokens)
        for first in range(split * share, last, TOKENS):
            token = (first + tl.arange(0, TOKENS))[:, None]
            values = tl.load(x + token * x_width + input[None, :], mask=(token < last) & real[None, :], other=0)
            behind = tl.load(grad + token * grad_width + output[None, :], mask=token < last, other=0)
            sums = tl.dot(tl.trans(values), behind, sums, input_precision="ieee")
        if SPLIT == 1:
            at = output[None, :] * x_width + input[:, None]
        else:
            block = split.to(tl.int64) * blocks + number
            at = (block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]) * BLOCK + (place % BLOCK)[:, None]
        tl.store(parts + at, sums.to(parts.dtype.element_ty), mask=real[:, None])


@triton.jit
def _add_parts(parts, out, rows, columns, width, size, BLOCK: tl.constexpr, SPLIT: tl.constexpr):
    """Add the shares of one block's gradient, in order, and write them to their place in the weight's gradient."""
    block = tl.program_id(0)
    row, column = tl.load(rows + block), tl.load(columns + block)
    if row >= 0:
        down, right = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
        at = parts + block * (BLOCK * BLOCK) + down * BLOCK + right
        sums = tl.load(at)
        for split in tl.static_range(1, SPLIT):
            sums += tl.load(at + split * size.to(tl.int64))
        tl.store(out + (row * BLOCK + down) * width + column * BLOCK + right, sums.to(out.dtype.element_ty))
