"""Choose the edges of many weights at once on a GPU, with as many kernel launches for a whole model as for one layer.

It is the radix selection of `_select_cuda` without the guess: each pass over all weights counts keys by their next
eight bits, separately for every weight, until the cutoff key of each is known. A table on the GPU tells each program
which weight, and which run of its edges, to process; it is made once and reused while the weights stay in place.

The order of equal keys matters only if some of them are real and others are not. Only then does a program read its
edges in row-major order; otherwise it reads them as they lie in memory, whatever the memory format.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from wirings.selection._select_cuda import _BITS, _BLOCK, _RECENT
from wirings.selection.functional import _dense
from wirings.utils.triton_launch import KernelLauncher, on_device_of

_PROGRAMS = 2048  # approximate number, over all weights
_COLUMNS = 16  # per row of the table

_tables: dict[tuple[Any, ...], tuple[Tensor, int]] = {}
"""Tables by the addresses of their weights, each with the largest number of programs of a single weight."""

_captured: dict[tuple[Any, ...], tuple[Tensor, int]] = {}
"""Tables that a CUDA graph reads at every replay. They are never dropped."""


def supports(weights: Sequence[Tensor], allowed: Sequence[Tensor | None]) -> bool:
    """Whether `real_edges` supports these weights: of one dtype, on one GPU, without gaps in memory, aligned."""
    first = weights[0]
    return _RECENT and all(
        w.dtype == first.dtype
        and w.device == first.device
        and w.dtype in _BITS
        and 0 < w.numel() <= 2**30
        and _dense(w)
        and w.data_ptr() % 16 == 0
        and (a is None or a.stride() == w.stride())
        for w, a in zip(weights, allowed, strict=True)
    )


def real_edges(
    weights: Sequence[Tensor], ks: Sequence[Tensor], allowed: Sequence[Tensor | None], begins: Sequence[int]
) -> Tensor:
    """The ``k`` edges of largest magnitude of each weight, zeros elsewhere.

    The result is one flat tensor. The edges of weight i start at ``begins[i]``, a multiple of 16, in the memory order
    of the weight; the last entry of ``begins`` is the length of the result.
    """
    first = weights[0]
    key = tuple((w.data_ptr(), w.shape, w.stride(), k.data_ptr(), None if a is None else a.data_ptr())
                for w, k, a in zip(weights, ks, allowed, strict=True))  # fmt: skip
    key = (first.device, first.dtype, key)
    if key not in _tables:
        if len(_tables) > 64:  # most of them for weights that no longer exist
            _tables.clear()
        _tables[key] = _captured.get(key) or _make_table(weights, ks, allowed, begins)
    if first.is_cuda and torch.cuda.is_current_stream_capturing():
        _captured[key] = _tables[key]
    table, most = _tables[key]
    bits, programs, segments = _BITS[first.dtype], len(table), len(weights)
    shifts = (23, 15, 7, 0) if bits == torch.int32 else (7, 0)
    out = torch.empty(begins[-1], dtype=first.dtype, device=first.device)
    board = torch.zeros(len(shifts) * segments * 256 + programs, dtype=torch.int32, device=first.device)
    ties = board[len(shifts) * segments * 256 :]
    launch = KernelLauncher((first.device, first.dtype, "many", programs, segments, most))
    result, turns = out.view(bits), len(shifts)
    with on_device_of(first):
        for turn, shift in enumerate(shifts):
            launch(_count, programs, 4, table, board, result, segments, turn, turns, shift, _BLOCK, _COLUMNS)
        launch(_count_ties, programs, 4, table, board, ties, result, segments, turns, _BLOCK, _COLUMNS)
        launch(_write, programs, 4, table, board, ties, result, segments, turns, most, _BLOCK, _COLUMNS)
    return out


def _make_table(
    weights: Sequence[Tensor], ks: Sequence[Tensor], allowed: Sequence[Tensor | None], begins: Sequence[int]
) -> tuple[Tensor, int]:
    total = sum(w.numel() for w in weights)
    run = max(4, triton.cdiv(total, _PROGRAMS * _BLOCK)) * _BLOCK
    rows: list[list[int]] = []
    most = 1
    for segment, (weight, k, mask) in enumerate(zip(weights, ks, allowed, strict=True)):
        space = 1 if weight.is_contiguous() else weight.shape[2:].numel()
        channels = 1 if space == 1 else weight.shape[1]
        first, n = len(rows), weight.numel()
        for start in range(0, n, run):
            place = (begins[segment], start, min(start + run, n), segment, first, space, channels)
            rows.append([weight.data_ptr(), 0 if mask is None else mask.data_ptr(), k.data_ptr(), *place])
        most = max(most, len(rows) - first)
    table = torch.zeros(len(rows), _COLUMNS, dtype=torch.int64)
    table[:, : len(rows[0])] = torch.tensor(rows)
    return table.to(weights[0].device), triton.next_power_of_2(most)


# ---- the kernels ----------------------------------------------------------------------------------------------


@triton.jit
def _key(weight, allowed, place, real, WIDTH: tl.constexpr):
    """The bits of edges, and their keys: -1 where there is no edge or it is not allowed."""
    bits = tl.load(weight + place, mask=real, other=0)
    key = bits.to(tl.int32) & ((1 << (WIDTH - 1)) - 1)
    if allowed.to(tl.int64) != 0:
        real &= tl.load(allowed + place, mask=real, other=0) != 0
    return bits, tl.where(real, key, -1)


@triton.jit
def _rows_of(row, kind):
    """A program's weight and mask as pointers, and its run of edges."""
    weight = tl.load(row).to(tl.pointer_type(kind.dtype.element_ty))
    allowed = tl.load(row + 1).to(tl.pointer_type(tl.uint8))
    return tl.multiple_of(weight, 16), allowed, tl.load(row + 4).to(tl.int32), tl.load(row + 5).to(tl.int32)


@triton.jit
def _narrow(counts, prefix, rank, BINS: tl.constexpr):
    """The result of one pass: the cutoff's digits so far, its rank among keys that begin with them, their number."""
    digits = tl.arange(0, BINS)
    count = tl.load(counts + digits)
    reach = tl.cumsum(count, reverse=True) >= rank  # true up to the cutoff's digit
    digit = tl.maximum(tl.sum(reach.to(tl.int32)) - 1, 0)
    same = tl.sum(tl.where(digits == digit, count, 0))
    return prefix * BINS + digit, rank - tl.sum(tl.where(digits > digit, count, 0)), same


@triton.jit
def _so_far(row, board, segments, DONE: tl.constexpr, TURNS: tl.constexpr):
    """The result of the first ``DONE`` passes for a program's weight."""
    counts = board + tl.load(row + 6) * 256
    prefix, same = 0, 0
    rank = tl.load(tl.load(row + 2).to(tl.pointer_type(tl.int64))).to(tl.int32)
    for turn in tl.static_range(DONE):
        if turn == TURNS - 1:
            prefix, rank, same = _narrow(counts + turn * segments * 256, prefix, rank, 128)
        else:
            prefix, rank, same = _narrow(counts + turn * segments * 256, prefix, rank, 256)
    return prefix, rank, same


@triton.jit
def _count(table, board, kind, segments, TURN: tl.constexpr, TURNS: tl.constexpr, SHIFT: tl.constexpr,
           BLOCK: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Count the keys that begin with the digits found so far by their next digit, of 8 bits (7 for the last)."""
    DIGIT: tl.constexpr = 8 if SHIFT > 0 else 7
    row = table + tl.program_id(0) * COLUMNS
    weight, allowed, start, stop = _rows_of(row, kind)
    prefix, _rank, _same = _so_far(row, board, segments, TURN, TURNS)
    digits, counts = tl.arange(0, 1 << DIGIT), tl.zeros([1 << DIGIT], tl.int32)
    for base in range(start, stop, BLOCK):
        at = base + tl.arange(0, BLOCK)
        _bits, key = _key(weight, allowed, at, at < stop, kind.dtype.element_ty.primitive_bitwidth)
        begins = (key >> (SHIFT + DIGIT)) == prefix  # false where there is no edge: -1 >> n is -1
        counts += tl.histogram((key >> SHIFT) & ((1 << DIGIT) - 1), 1 << DIGIT, mask=begins)
    place = board + (TURN * segments + tl.load(row + 6)) * 256
    tl.atomic_add(place + digits, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _row_major(at, space, channels):
    """Memory positions of row-major positions in a channels-last weight, stored as (filter, pixel, channel)."""
    position, wide, deep = at.to(tl.uint32), space.to(tl.uint32), channels.to(tl.uint32)
    line = position // wide
    return (line + ((line // deep) * (wide - 1) + position % wide) * deep).to(tl.int32)


@triton.jit
def _count_ties(table, board, ties, kind, segments, TURNS: tl.constexpr, BLOCK: tl.constexpr,
                COLUMNS: tl.constexpr):  # fmt: skip
    """Count a program's keys that equal the cutoff, if not all of them can be real."""
    row = table + tl.program_id(0) * COLUMNS
    least, room, same = _so_far(row, board, segments, TURNS, TURNS)
    if room < same:
        weight, allowed, start, stop = _rows_of(row, kind)
        space, channels = tl.load(row + 8), tl.load(row + 9)
        found = tl.zeros([BLOCK], tl.int32)
        for base in range(start, stop, BLOCK):
            at = base + tl.arange(0, BLOCK)
            place = _row_major(at, space, channels)
            _bits, key = _key(weight, allowed, place, at < stop, kind.dtype.element_ty.primitive_bitwidth)
            found += (key == least).to(tl.int32)
        tl.store(ties + tl.program_id(0), tl.sum(found))


@triton.jit
def _write(table, board, ties, out, segments, TURNS: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
           COLUMNS: tl.constexpr):  # fmt: skip
    """Write the edges above the cutoff, and as many of those equal to it as there is room for."""
    program = tl.program_id(0)
    row = table + program * COLUMNS
    least, room, same = _so_far(row, board, segments, TURNS, TURNS)
    weight, allowed, start, stop = _rows_of(row, out)
    out += tl.multiple_of(tl.load(row + 3), 16)
    if room == same:
        for base in range(start, stop, BLOCK):
            at = base + tl.arange(0, BLOCK)
            bits, key = _key(weight, allowed, at, at < stop, out.dtype.element_ty.primitive_bitwidth)
            tl.store(out + at, tl.where(key >= least, bits, 0), mask=at < stop)
    else:
        first, other = tl.load(row + 7).to(tl.int32), tl.arange(0, MOST)
        before = tl.load(ties + first + other, mask=first + other < program, other=0)
        keep = room - tl.sum(before)
        space, channels = tl.load(row + 8), tl.load(row + 9)
        for base in range(start, stop, BLOCK):
            at = base + tl.arange(0, BLOCK)
            place = _row_major(at, space, channels)
            bits, key = _key(weight, allowed, place, at < stop, out.dtype.element_ty.primitive_bitwidth)
            equal = (key == least).to(tl.int32)
            real = (key > least) | ((equal != 0) & (tl.cumsum(equal) <= keep))
            keep -= tl.sum(equal)
            tl.store(out + place, tl.where(real, bits, 0), mask=at < stop)
