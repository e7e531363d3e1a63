"""Choosing the edges of many weights at once on a GPU: as many kernels for a whole model as for one layer.

Edges that are ranked together form a *segment*: those of one weight, or of all weights if they share a budget. For a
segment there are one or two *targets*, numbers of edges to choose: the budget's, and that of a larger set (Top-KAST).
The method is that of `_select_cuda`, for all targets at once:

1. `_guess` takes a sample of each segment and guesses two keys that very likely enclose the least chosen edge.
2. `_gather` reads all weights once, counts the keys above the guessed range and packs those within it.
3. `_count`, once for every eight bits of a key, counts the packed keys by their next digit. Where the guess was wrong,
   or the segment is small, it counts all keys instead.
4. `_finish` notes for every target the least chosen key, how many keys equal to it are chosen, and the largest key that
   is not.
5. `_write` reads all weights a second time and writes the weights of the forward pass, a mask, or both.

A table on the GPU says which weight, and which run of its edges, a program has; it is made once for weights that stay
where they are. The order of equal keys matters only where some of them are chosen and some are not. Only then are edges
read in row-major order; otherwise a program reads its edges as they lie in memory, whatever the memory format.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from wirings.selection._select_cuda import _BITS, _BLOCK, _RECENT, GUESSED_BITS, guessed_range
from wirings.selection.batched import ALIGNED, begins_of, is_dense
from wirings.utils.triton_launch import KernelLauncher, on_device_of

_PROGRAMS = 2048  # wanted, over all weights
_COLUMNS = 16  # of the table
_SAMPLE = 4096
_GUESS_FROM = 2**16  # edges of a segment from which a sample is representative

# The state of a target, in int32.
_ABOVE, _NEAR, _OVERFLOW, _LOW, _HIGH, _UNDER, _BELOW = (tl.constexpr(place) for place in range(7))
# For every pass over digits: those known before it, and the rank among the keys that begin with them.
_DIGITS = tl.constexpr(8)
_LEAST, _ROOM, _SAME, _NEXT = (tl.constexpr(place) for place in range(16, 20))
_STATE = tl.constexpr(32)  # the size of a state


class _Table(NamedTuple):
    """What the kernels have to know about a list of weights, on the GPU."""

    programs: Tensor
    targets: Tensor
    samples: Tensor
    most: int
    """A power of two that no segment's number of programs exceeds."""
    places: list[tuple[torch.Size, tuple[int, ...], int]]
    """The shape of each weight, its strides, and where it begins in a row of all."""
    length: int
    """The length of such a row."""

    def parts_of(self, row: Tensor) -> list[Tensor]:
        """Divide a row into parts laid out like the weights."""
        return [row.as_strided(*place) for place in self.places]


_tables: dict[tuple[Any, ...], _Table] = {}
"""The table of a list of weights, by where these lie."""

_captured: dict[tuple[Any, ...], _Table] = {}
"""Those that a CUDA graph reads at every replay: they are never removed."""


def table_of(
    weights: Sequence[Tensor],
    ks: Sequence[Tensor],
    allowed: Sequence[Tensor | None],
    more: Sequence[int],
    shared: bool,
    factors: Sequence[Tensor] = (),
) -> _Table | None:
    """The table of a list of weights; None if the kernels do not support them. For arguments see `batched.kept_of`."""
    if factors:
        return None
    first = weights[0]
    key: tuple[Any, ...] = (
        first.device, first.dtype, shared, tuple(more),
        *map(Tensor.data_ptr, weights), *map(Tensor.size, weights), *map(Tensor.stride, weights),
        *map(Tensor.data_ptr, ks), *[None if mask is None else (mask.data_ptr(), mask.stride()) for mask in allowed],
    )  # fmt: skip
    table = _tables.get(key)
    if table is None:
        if not _supports(weights, allowed) or (shared and sum(w.numel() for w in weights) > 2**30):
            return None
        if len(_tables) > 64:  # weights that came and went
            _tables.clear()
        table = _tables[key] = _captured.get(key) or _make_table(weights, ks, allowed, more, shared)
    if first.is_cuda and torch.cuda.is_current_stream_capturing():
        _captured[key] = table
    return table


def _supports(weights: Sequence[Tensor], allowed: Sequence[Tensor | None]) -> bool:
    """Whether weights are of one dtype, on one GPU, dense in memory and aligned."""
    first = weights[0]
    return _RECENT and all(
        w.dtype == first.dtype
        and w.device == first.device
        and w.dtype in _BITS
        and 0 < w.numel() <= 2**30
        and is_dense(w)
        and w.data_ptr() % 16 == 0
        and (a is None or (a.stride() == w.stride() and a.data_ptr() % 16 == 0))
        for w, a in zip(weights, allowed, strict=True)
    )


def kept_of(
    first: Tensor, table: _Table, more: bool, power: float | None, masked: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The weights of the forward pass and a mask, each as one row.

    The edges of each weight lie in a row as they do in the weight.

    Args:
        first: the first of the weights.
        table: that of all of them.
        more: whether the masks are of larger sets.
        power: as for `batched.kept_of`.
        masked: whether masks are wanted.
        dtype: of the weights of the forward pass.
    """
    return _kept_of(first, table, more, power, masked, dtype)[:2]


def shrunk_of(first: Tensor, table: _Table, power: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Shrunk weights and masks as by `kept_of`, and the magnitude by which each weight is shrunk, in float32.

    It is 0 for a weight of which no edges are kept.
    """
    out, mask, board = _kept_of(first, table, False, power, True, dtype)
    targets = len(table.targets)
    begin = len(board) - 2 * len(table.programs) - targets * _STATE.value  # of the targets' states
    where = ((targets,), (_STATE.value,), begin + _NEXT.value)
    if _BITS[first.dtype] == torch.int32:
        return out, mask, board.view(torch.float32).as_strided(*where)
    return out, mask, board.as_strided(*where).to(torch.int16).view(first.dtype).float()


def _kept_of(
    first: Tensor, table: _Table, more: bool, power: float | None, masked: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """What `kept_of` returns, and the board that the kernels share."""
    bits, programs, targets = _BITS[first.dtype], len(table.programs), len(table.targets)
    each = 2 if more else 1
    shifts = (23, 15, 7, 0) if bits == torch.int32 else (7, 0)
    turns, width = len(shifts), shifts[0] + 8
    out = torch.empty(0 if power is None else table.length, dtype=dtype, device=first.device)
    mask = torch.empty(table.length if masked else 0, dtype=torch.bool, device=first.device)
    board = torch.empty(
        targets * (turns * 256 + _STATE.value) + 2 * each * programs, dtype=torch.int32, device=first.device
    )
    row = mask if power is None else out
    near, smaller = row.view(bits), first.element_size() // row.element_size()  # keys are packed where results will be
    shrinks = power is not None and power != math.inf
    launch = KernelLauncher(
        (first.device, first.dtype, dtype, "many", programs, targets, each, table.most, power, masked)
    )
    with on_device_of(first):
        common = (table.programs, table.targets, board, first.detach(), programs, targets, each, turns, _COLUMNS)
        guess = (table.samples, _GUESS_FROM, width, min(GUESSED_BITS, width), _SAMPLE)
        launch(_guess, targets, 16, *common, *guess)
        launch(_gather, programs, 4, *common, near, smaller, _BLOCK, 128)
        for turn, shift in enumerate(shifts):
            launch(_count, programs * each, 4, *common, near, smaller, turn, shift, shrinks, _BLOCK // 2)
        launch(_finish, programs * each, 4, *common, near, smaller, shrinks, _BLOCK)
        launch(_write, programs, 4, *common, out, mask.view(torch.uint8), power is not None, masked,
               power if shrinks else 0.0, table.most, _BLOCK)  # fmt: skip
    return out, mask, board


def masked_of(first: Tensor, table: _Table, dtype: torch.dtype) -> Tensor:
    """All weights where they are allowed, zeros elsewhere, as one row. Arguments as for `kept_of`."""
    out = torch.empty(table.length, dtype=dtype, device=first.device)
    launch = KernelLauncher((first.device, first.dtype, dtype, "masked", len(table.programs)))
    with on_device_of(first):
        launch(_write_allowed, len(table.programs), 4, table.programs, first.detach(), out, _COLUMNS, _BLOCK)
    return out


def masked_each(tensors: Sequence[Tensor], masks: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor] | None:
    """See `batched.masked_each`; None if the kernel does not support the tensors, or while a CUDA graph is captured.

    A graph would read where the tensors lie from the host's memory again, at every replay.
    """
    first = tensors[0]
    if first.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    layouts = tuple(
        [(t.shape, t.stride(), None if m is None else m.stride()) for t, m in zip(tensors, masks, strict=True)]
    )
    addresses = [0 if t is None else t.data_ptr() for pair in zip(tensors, masks, strict=True) for t in pair]
    stream = _stream_of(first)
    runs, places, length = _runs_of(layouts, first.device, stream)
    aligned = not any(map((15).__and__, addresses))
    if runs is None or not aligned or first.dtype not in _BITS or {t.dtype for t in tensors} != {first.dtype}:
        return None
    out = torch.empty(length, dtype=dtype, device=first.device)
    launch = KernelLauncher((first.device, first.dtype, dtype, "masked each", len(runs)))
    with on_device_of(first):
        where = _addresses(tuple(addresses), first.device, stream)
        launch(_write_masked, len(runs), 4, runs, where, first.detach(), out, _BLOCK)
    return [out.as_strided(*place) for place in places]


def _stream_of(tensor: Tensor) -> int:
    """The stream on which kernels read a tensor now. What is copied for them is kept by stream.

    Another stream would not wait for the copy.
    """
    return torch._C._cuda_getCurrentRawStream(tensor.get_device()) if tensor.is_cuda else 0


@functools.lru_cache(16)
def _addresses(addresses: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """Addresses on the GPU. The gradients of a training step mostly lie where they did in the step before."""
    return torch.tensor(addresses).to(device, non_blocking=True)


def through_shrunk(
    grads: Sequence[Tensor],
    masks: Sequence[Tensor],
    used: Sequence[Tensor],
    places: Sequence[int],
    thresholds: Tensor,
    pulls: Tensor,
    dtype: torch.dtype,
) -> tuple[list[Tensor], Tensor] | None:
    """See `batched.through_shrunk`; None where `masked_each` returns None, and in double precision.

    Args:
        grads: gradients of some of the weights.
        masks: their real edges.
        used: their shrunk edges.
        places: the position of each weight among all.
        thresholds: those of all weights.
        pulls: those of all weights, in rows.
        dtype: the dtype of the weights.
    """
    first = grads[0]
    if first.dtype not in _BITS or (first.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    layouts = tuple([(g.shape, g.stride(), m.stride()) for g, m in zip(grads, masks, strict=True)])
    runs, layout, length = _runs_of(layouts, first.device, _stream_of(first))
    pointers = [[*map(Tensor.data_ptr, tensors)] for tensors in (grads, masks, used)]
    aligned = not any(map((15).__and__, itertools.chain(*pointers)))
    alike = [*map(Tensor.stride, used)] == [*map(Tensor.stride, grads)] and len({t.dtype for t in (*grads, *used)}) == 1
    if runs is None or not aligned or not alike:
        return None
    out = torch.empty(length, dtype=dtype, device=first.device)
    entries, count, stride = pulls.shape[1], len(runs), thresholds.stride(0)
    sums = torch.empty(count + entries, dtype=torch.float32, device=first.device)
    pulled = sums[count:]
    parts = [part.data_ptr() % 16 for part in (thresholds, pulls)]
    launch = KernelLauncher((first.device, first.dtype, dtype, pulls.dtype, "through", count, entries, stride, *parts))
    with on_device_of(first):
        where = torch.tensor([*zip(*pointers, places, strict=True)]).to(first.device, non_blocking=True)
        launch(_write_through, count, 4, runs, where, first.detach(), out, sums, _BLOCK)
        launch(_pull, entries, 4, runs, where, sums, thresholds, pulls, pulled, count, entries, stride, _BLOCK // 2)
    return [out.as_strided(*place) for place in layout], pulled


@functools.lru_cache(64)
def _runs_of(
    layouts: tuple[tuple[torch.Size, tuple[int, ...], tuple[int, ...] | None], ...], device: torch.device, stream: int
) -> tuple[Tensor | None, list[tuple[torch.Size, tuple[int, ...], int]], int]:
    """Runs of edges for `_write_masked`, the layout of each tensor in a row of all, and the length of that row.

    There are no runs if a tensor has gaps, or another memory format than its mask.
    """
    rows, places, begin = [], [], 0
    run = max(4, triton.cdiv(sum(shape.numel() for shape, *_ in layouts), _PROGRAMS * _BLOCK)) * _BLOCK
    for place, (shape, stride, masks) in enumerate(layouts):
        size = shape.numel()
        meta = torch.empty_strided(shape, stride, device="meta")
        if not is_dense(meta) or not 0 < size <= 2**30 or masks not in (None, stride):
            return None, [], 0
        rows += [[place, begin, start, min(start + run, size)] for start in range(0, size, run)]
        places.append((shape, stride, begin))
        begin += triton.cdiv(size, ALIGNED) * ALIGNED
    return torch.tensor(rows).to(device, non_blocking=True), places, begin


def _make_table(
    weights: Sequence[Tensor],
    ks: Sequence[Tensor],
    allowed: Sequence[Tensor | None],
    more: Sequence[int],
    shared: bool,
) -> _Table:
    begins = begins_of(weights)
    total = sum(w.numel() for w in weights)
    run = max(4, triton.cdiv(total, _PROGRAMS * _BLOCK)) * _BLOCK
    rows: list[list[int]] = []
    targets: list[list[int]] = []
    most = 1
    for place, (weight, k, mask) in enumerate(zip(weights, ks, allowed, strict=True)):
        space = 1 if weight.is_contiguous() else weight.shape[2:].numel()
        channels = 1 if space == 1 else weight.shape[1]
        segment, first = (0, 0) if shared else (place, len(rows))
        for start in range(0, weight.numel(), run):
            where = (begins[place], start, min(start + run, weight.numel()), segment, first, space, channels)
            rows.append([weight.data_ptr(), 0 if mask is None else mask.data_ptr(), *where])
        most = max(most, len(rows) - first)
        if not shared or place == 0:
            size = total if shared else weight.numel()
            for least in (0, *more[place : place + 1]):
                targets.append([k.data_ptr(), least, size, segment])
    table = torch.zeros(len(rows), _COLUMNS, dtype=torch.int64)
    table[:, : len(rows[0])] = torch.tensor(rows)
    samples = torch.from_numpy(_samples(np.array(rows), shared))
    device = weights[0].device
    places = [(w.shape, w.stride(), begin) for w, begin in zip(weights, begins, strict=False)]
    numbers = [part.to(device) for part in (table, torch.tensor(targets), samples)]
    return _Table(*numbers, triton.next_power_of_2(most), places, begins[-1])


def _samples(rows: np.ndarray, shared: bool) -> np.ndarray:
    """The edges in the sample of each segment: pairs of a program and a position, one out of each of equal stretches.

    The positions are scattered within their stretches: the edges of one column would not be representative.
    """
    sizes, segments = rows[:, 4] - rows[:, 3], rows[:, 5]
    found = []
    scatter = (np.arange(_SAMPLE, dtype=np.uint64) * 2654435761 % 2**32) / 2**32
    for segment in range(1 if shared else int(segments[-1]) + 1):
        mine = np.flatnonzero(segments == segment)
        ends = np.cumsum(sizes[mine])
        position = ((np.arange(_SAMPLE) + scatter) * (ends[-1] / _SAMPLE)).astype(np.int64).clip(max=ends[-1] - 1)
        which = np.searchsorted(ends, position, side="right")
        offset = rows[mine[which], 3] + position - (ends - sizes[mine])[which]
        found.append(np.stack([mine[which], offset], 1))
    return np.stack(found).astype(np.int32)


# ---- the kernels ----------------------------------------------------------------------------------------------


@triton.jit
def _keys(value):
    """The bits of weights without the sign."""
    WIDTH: tl.constexpr = value.dtype.primitive_bitwidth
    bits = value.to(tl.int32, bitcast=True) if WIDTH == 32 else value.to(tl.int16, bitcast=True).to(tl.int32)
    return bits & ((1 << (WIDTH - 1)) - 1)


@triton.jit
def _look(weight, allowed, place, real):
    """Weights and their keys, which are -1 where there is no edge, or none that is allowed."""
    value = tl.load(weight + place, mask=real, other=0.0)
    if allowed.to(tl.int64) != 0:
        real &= tl.load(allowed + place, mask=real, other=0) != 0
    return value, tl.where(real, _keys(value), -1)


@triton.jit
def _look_at_all(weight, allowed, place):
    """The same where there are edges at all places. Without a mask, neighbours are loaded together."""
    value = tl.load(weight + place)
    key = _keys(value)
    if allowed.to(tl.int64) != 0:
        key = tl.where(tl.load(allowed + place) != 0, key, -1)
    return value, key


@triton.jit
def _rows_of(row, kind):
    """A program's weight and mask as pointers, and its run of edges."""
    weight = tl.load(row).to(tl.pointer_type(kind.dtype.element_ty))
    allowed = tl.load(row + 1).to(tl.pointer_type(tl.uint8))
    start, stop = tl.load(row + 3).to(tl.int32), tl.load(row + 4).to(tl.int32)
    return tl.multiple_of(weight, 16), tl.multiple_of(allowed, 16), tl.multiple_of(start, 16), stop


@triton.jit
def _state_of(board, target, targets, TURNS: tl.constexpr):
    return board + TURNS * targets * 256 + target * _STATE


@triton.jit
def _tally_of(board, target, targets, programs, TURNS: tl.constexpr):
    """Where a target's numbers by program lie: here those of packed keys, behind those of all targets those of ties."""
    return board + targets * (TURNS * 256 + _STATE) + target * programs


@triton.jit
def _rank_of(targets_table, target):
    """How many edges of a target are to be chosen."""
    about = targets_table + target * 4
    k = tl.load(tl.load(about).to(tl.pointer_type(tl.int64)))
    return tl.maximum(k, tl.load(about + 1)).to(tl.int32)


@triton.jit
def _packed_at(row, start, stop, TARGET: tl.constexpr, EACH: tl.constexpr, SMALLER: tl.constexpr):
    """Where a program packs the keys of a target, and how many fit there."""
    fits = (stop - start) // (SMALLER * EACH)
    return (tl.load(row + 2) + start) // SMALLER + TARGET * fits, fits


@triton.jit
def _guess(table, targets_table, board, kind, programs, targets, EACH: tl.constexpr, TURNS: tl.constexpr,
           COLUMNS: tl.constexpr, samples, GUESS_FROM: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
           SAMPLE: tl.constexpr):  # fmt: skip
    """Clear a target's part of the board, and guess a range of keys from a sample of its segment."""
    target = tl.program_id(0)
    slot = tl.arange(0, 256)
    for turn in tl.static_range(TURNS):
        tl.store(board + (turn * targets + target) * 256 + slot, 0)
    state, slot = _state_of(board, target, targets, TURNS), tl.arange(0, _STATE)
    empty = (slot == _UNDER) | (slot == _BELOW) | (slot == _HIGH)
    tl.store(state + slot, tl.where(empty, -1, 0), mask=(slot != _LOW) & (slot != _HIGH))
    n = tl.load(targets_table + target * 4 + 2)
    low, high = 0, -1  # no range
    if n >= GUESS_FROM:
        i = tl.arange(0, SAMPLE)
        sample = samples + (tl.load(targets_table + target * 4 + 3) * SAMPLE + i) * 2
        row, place = table + tl.load(sample) * COLUMNS, tl.load(sample + 1)
        key = _keys(tl.load(tl.load(row).to(tl.pointer_type(kind.dtype.element_ty)) + place))
        allowed = tl.load(row + 1)
        real = tl.load(allowed.to(tl.pointer_type(tl.uint8)) + place, mask=allowed != 0, other=1) != 0
        key = tl.where(real, key, -1)
        rank = _rank_of(targets_table, target).to(tl.float32) / n.to(tl.float32) * SAMPLE
        low, high = guessed_range(key, rank, WIDTH, BITS, SAMPLE)
    tl.store(state + _LOW, low)
    tl.store(state + _HIGH, high)


@triton.jit
def _pack(key, low, high, near, at, size, fits):
    """Pack the keys of a range behind the first ``size``; returns how many there are now, and how many are above."""
    above = tl.sum((key > high).to(tl.int32), 1)
    inside = ((key >= low) & (key <= high)).to(tl.int32)
    row = tl.sum(inside, 1)
    order = tl.cumsum(inside, 1) + (tl.cumsum(row) - row)[:, None] + size
    tl.store(near + (at - 1) + order, key.to(near.dtype.element_ty), mask=(inside != 0) & (order <= fits))
    return size + tl.sum(row), above


@triton.jit
def _note(state, tally, size, above, under, fits):
    """Add up what a program has found for a target."""
    tl.store(tally, size)
    tl.atomic_add(state + _ABOVE, tl.sum(above), sem="relaxed")
    tl.atomic_add(state + _NEAR, size, sem="relaxed")
    tl.atomic_max(state + _UNDER, tl.max(under), sem="relaxed")
    if size > fits:
        tl.atomic_max(state + _OVERFLOW, 1, sem="relaxed")


@triton.jit
def _gather(table, targets_table, board, kind, programs, targets, EACH: tl.constexpr, TURNS: tl.constexpr,
            COLUMNS: tl.constexpr, near, SMALLER: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Pack a program's keys of the guessed ranges, in any order."""
    program = tl.program_id(0)
    row = table + program * COLUMNS
    weight, allowed, start, stop = _rows_of(row, kind)
    target = tl.load(row + 5).to(tl.int32) * EACH
    state = _state_of(board, target, targets, TURNS)
    low, high = tl.load(state + _LOW), tl.load(state + _HIGH)
    if high >= low:
        at, fits = _packed_at(row, start, stop, 0, EACH, SMALLER)
        above, size, under = tl.zeros([WIDE], tl.int32), 0, tl.full([WIDE], -1, tl.int32)
        if EACH == 2:
            low2, high2 = tl.load(state + _STATE + _LOW), tl.load(state + _STATE + _HIGH)
            at2, fits2 = _packed_at(row, start, stop, 1, EACH, SMALLER)
            above2, size2 = tl.zeros([WIDE], tl.int32), 0
        # A row to a thread, so that ranks need one short scan across threads. Neighbours are not loaded together: the
        # scattered stores need a thread to hold one at a time, and changing the layout in between costs more.
        lanes = tl.arange(0, WIDE)[:, None] + tl.arange(0, BLOCK // WIDE)[None, :] * WIDE
        for base in range(start, stop, BLOCK):
            place = tl.max_contiguous(base + lanes, [1, 1])
            _value, key = _look(weight, allowed, place, place < stop)
            size, more = _pack(key, low, high, near, at, size, fits)
            above += more
            under = tl.maximum(under, tl.max(tl.where(key < low, key, -1), 1))
            if EACH == 2:
                size2, more = _pack(key, low2, high2, near, at2, size2, fits2)
                above2 += more
        tally = _tally_of(board, 0, targets, programs, TURNS) + program
        _note(state, tally, size, above, under, fits)
        if EACH == 2:
            _note(state + _STATE, tally + programs, size2, above2, under, fits2)


@triton.jit
def _narrow(counts, prefix, rank, BINS: tl.constexpr):
    """By one pass: the digits so far of the least real key, its rank among keys that share them, how many do."""
    digits = tl.arange(0, BINS)
    count = tl.load(counts + digits)
    reach = tl.cumsum(count, reverse=True) >= rank  # true up to the digit sought
    digit = tl.maximum(tl.sum(reach.to(tl.int32)) - 1, 0)
    same = tl.sum(tl.where(digits == digit, count, 0))
    return prefix * BINS + digit, rank - tl.sum(tl.where(digits > digit, count, 0)), same


@triton.jit
def _guessed(state, rank):
    """Whether the least chosen key is among those that were packed, and how many keys are above them."""
    above = tl.load(state + _ABOVE)
    inside = (above < tl.maximum(rank, 1)) & (rank <= above + tl.load(state + _NEAR))
    return inside & (tl.load(state + _OVERFLOW) == 0) & (tl.load(state + _HIGH) >= 0), above


@triton.jit
def _known(state, guessed, SHIFT: tl.constexpr):
    """Whether all packed keys have the same digits above ``SHIFT``, so that these need not be counted."""
    low, high = tl.load(state + _LOW), tl.load(state + _HIGH)
    return guessed & ((low >> SHIFT) == (high >> SHIFT)), low >> SHIFT


@triton.jit
def _count(table, targets_table, board, kind, programs, targets, EACH: tl.constexpr, TURNS: tl.constexpr,
           COLUMNS: tl.constexpr, near, SMALLER: tl.constexpr, TURN: tl.constexpr, SHIFT: tl.constexpr,
           SHRINKS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Count the keys that begin with the digits found so far by their next digit: of 8 bits, the last of 7."""
    DIGIT: tl.constexpr = 8 if SHIFT > 0 else 7
    program, which = tl.program_id(0) // EACH, tl.program_id(0) % EACH
    row = table + program * COLUMNS
    target = tl.load(row + 5).to(tl.int32) * EACH + which
    state = _state_of(board, target, targets, TURNS)
    prefix, rank = 0, _rank_of(targets_table, target)
    guessed, above = _guessed(state, rank)
    rank = tl.where(guessed, rank - above, rank)
    if TURN > 0:
        known, digits_before = _known(state, guessed, SHIFT + DIGIT)
        if known:
            prefix = digits_before
        else:
            before = state + _DIGITS + 2 * (TURN - 1)
            counts = board + ((TURN - 1) * targets + target) * 256
            prefix, rank, _same = _narrow(counts, tl.load(before), tl.load(before + 1), 256)
    if program == tl.load(row + 6):  # for the next pass: nobody reads it in this one
        tl.store(state + _DIGITS + 2 * TURN, prefix)
        tl.store(state + _DIGITS + 2 * TURN + 1, rank)
    skip, _digits = _known(state, guessed, SHIFT)
    if SHIFT == 0 or not skip:
        weight, allowed, start, stop = _rows_of(row, kind)
        at, fits = _packed_at(row, start, stop, 0, EACH, SMALLER)
        at += which * fits
        if guessed:
            stop = start + tl.load(_tally_of(board, which, targets, programs, TURNS) + program)
        digits, counts = tl.arange(0, 1 << DIGIT), tl.zeros([1 << DIGIT], tl.int32)
        below = tl.full([BLOCK], -1, tl.int32)
        for base in range(start, stop, BLOCK):
            place = base + tl.arange(0, BLOCK)
            if guessed:
                key = tl.load(near + at + (place - start), mask=place < stop, other=-1).to(tl.int32)
            else:
                _value, key = _look(weight, allowed, place, place < stop)
            begins = (key >> (SHIFT + DIGIT)) == prefix  # never where there is no edge: -1 stays -1
            counts += tl.histogram((key >> SHIFT) & ((1 << DIGIT) - 1), 1 << DIGIT, mask=begins)
            if SHRINKS and SHIFT == 0:
                below = tl.maximum(below, tl.where((key >> DIGIT) < prefix, key, -1))
        tl.atomic_add(board + (TURN * targets + target) * 256 + digits, counts, mask=counts > 0, sem="relaxed")
        if SHRINKS and SHIFT == 0:
            tl.atomic_max(state + _BELOW, tl.max(below), sem="relaxed")


@triton.jit
def _row_major(at, space, channels):
    """Where edges of row-major positions lie in memory if channels are last, at (filter, pixel, channel)."""
    position, wide, deep = at.to(tl.uint32), space.to(tl.uint32), channels.to(tl.uint32)
    line = position // wide
    return (line + ((line // deep) * (wide - 1) + position % wide) * deep).to(tl.int32)


@triton.jit
def _finish(table, targets_table, board, kind, programs, targets, EACH: tl.constexpr, TURNS: tl.constexpr,
            COLUMNS: tl.constexpr, near, SMALLER: tl.constexpr, SHRINKS: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """Note where a target's choice ends, and how many equal keys a program has if not all of them are chosen."""
    program, which = tl.program_id(0) // EACH, tl.program_id(0) % EACH
    row = table + program * COLUMNS
    target = tl.load(row + 5).to(tl.int32) * EACH + which
    state = _state_of(board, target, targets, TURNS)
    counts, before = board + ((TURNS - 1) * targets + target) * 256, state + _DIGITS + 2 * (TURNS - 1)
    prefix = tl.load(before)
    least, room, same = _narrow(counts, prefix, tl.load(before + 1), 128)
    rank = _rank_of(targets_table, target)
    same = tl.where(rank > 0, same, tl.maximum(same, 1))  # of no edges, none is the least
    guessed, _above = _guessed(state, rank)
    if program == tl.load(row + 6):
        if SHRINKS:
            digits = tl.arange(0, 128)
            lower = (tl.load(counts + digits) > 0) & (digits < least - prefix * 128)
            following = prefix * 128 + tl.max(tl.where(lower, digits, -1))
            under = tl.maximum(tl.load(state + _BELOW), tl.where(guessed, tl.load(state + _UNDER), -1))
            following = tl.where(following >= prefix * 128, following, tl.maximum(under, 0))
            following = tl.where(room < same, least, following)
            tl.store(state + _NEXT, tl.where(rank > 0, following, 0))  # a number, even if it shrinks nothing
        tl.store(state + _LEAST, least)
        tl.store(state + _ROOM, room)
        tl.store(state + _SAME, same)
    if room < same:
        weight, allowed, start, stop = _rows_of(row, kind)
        space, channels = tl.load(row + 7), tl.load(row + 8)
        found = tl.zeros([BLOCK], tl.int32)
        if guessed & (space == 1):  # all of them were packed, by this program
            packed, fits = _packed_at(row, start, stop, 0, EACH, SMALLER)
            packed += which * fits
            size = tl.load(_tally_of(board, which, targets, programs, TURNS) + program)
            for base in range(0, size, BLOCK):
                at = base + tl.arange(0, BLOCK)
                key = tl.load(near + packed + at, mask=at < size, other=-1).to(tl.int32)
                found += (key == least).to(tl.int32)
        else:
            for base in range(start, stop, BLOCK):
                at = base + tl.arange(0, BLOCK)
                _value, key = _look(weight, allowed, _row_major(at, space, channels), at < stop)
                found += (key == least).to(tl.int32)
        tl.store(_tally_of(board, EACH + which, targets, programs, TURNS) + program, tl.sum(found))


@triton.jit
def _shrunk(value, threshold, POWER: tl.constexpr):
    """sign(w) · (|w|^p - t^p)^(1/p), in float32.

    Computed as |w| · (1 - (1 - d)^p)^(1/p) with d = (|w| - t) / |w|: no power goes out of range, and d has all its
    digits close to the threshold, where |w| - t is exact.
    """
    # By its bits: comparing half-precision numbers with themselves to find NaN was miscompiled for full blocks.
    HALF: tl.constexpr = 0x7C00 if value.dtype == tl.float16 else 0x7F80
    nan = _keys(value) > (0x7F800000 if value.dtype == tl.float32 else HALF)
    value = value.to(tl.float32)
    size = tl.abs(value)
    over = tl.where(size > threshold, size - threshold, 0.0)
    if POWER == 1.0:
        used = over
    else:
        part = over / size
        # Rounding may take the quotient, and the power of a number close to 1, above it.
        lost = 1.0 - tl.exp2(tl.log2(tl.maximum(1.0 - part, 0.0)) * POWER)
        raised = part * (3.0 - part * (3.0 - part)) if POWER == 3.0 else tl.maximum(lost, 0.0)
        used = size * tl.exp2(tl.log2(raised) * (1.0 / POWER))
    used = tl.where(size > 0, used, 0.0)
    used = tl.where(size == float("inf"), size, used)
    # The sign is kept of zeros, too: the gradient of the threshold takes it from here.
    sign = value.to(tl.int32, bitcast=True) & -0x80000000
    return tl.where(nan, value, (used.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True))


@triton.jit
def _only(real, value):
    """Weights where there are real edges, zeros elsewhere.

    By their bits: where half-precision numbers were replaced as numbers, NaN that was not real stayed in full blocks.
    """
    INTEGER: tl.constexpr = tl.int32 if value.dtype.primitive_bitwidth == 32 else tl.int16
    return tl.where(real, value.to(INTEGER, bitcast=True), 0).to(INTEGER).to(value.dtype, bitcast=True)


@triton.jit
def _kept(value, real, threshold, out, POWER: tl.constexpr):
    value = _only(real, value)
    if POWER > 0.0:
        value = _shrunk(value, threshold, POWER)
    return value.to(out.dtype.element_ty)


@triton.jit
def _bound(board, state, row, program, programs, targets, WHICH: tl.constexpr, EACH: tl.constexpr, TURNS: tl.constexpr,
           MOST: tl.constexpr):  # fmt: skip
    """The key above which a program chooses all edges, how many of those with the key itself, and if order matters."""
    state += WHICH * _STATE
    least, room, same = tl.load(state + _LEAST), tl.load(state + _ROOM), tl.load(state + _SAME)
    bound, keep, ordered = least - 1, 0, False
    if room < same:
        ties = _tally_of(board, EACH + WHICH, targets, programs, TURNS)
        at = tl.load(row + 6).to(tl.int32) + tl.arange(0, MOST)
        keep, mine = room - tl.sum(tl.load(ties + at, mask=at < program, other=0)), tl.load(ties + program)
        # Programs count equal keys in row-major order. If that is not the order in memory, all have to keep to it.
        ordered = ((keep > 0) & (keep < mine)) | (tl.load(row + 7) > 1)
        all_of_them = (keep >= mine) & (ordered == 0)
        bound = tl.where(all_of_them, least - 1, least)
        keep = tl.where(all_of_them, 0, tl.maximum(keep, 0))
    return bound, keep, ordered


@triton.jit
def _put(out, mask, place, value, real, chosen, threshold, VALUES: tl.constexpr, MASKED: tl.constexpr,
         POWER: tl.constexpr):  # fmt: skip
    if VALUES:
        tl.store(out + place, _kept(value, real, threshold, out, POWER))
    if MASKED:
        tl.store(mask + place, chosen.to(tl.uint8))


@triton.jit
def _put_some(out, mask, place, value, real, chosen, threshold, there, VALUES: tl.constexpr, MASKED: tl.constexpr,
              POWER: tl.constexpr):  # fmt: skip
    if VALUES:
        tl.store(out + place, _kept(value, real, threshold, out, POWER), mask=there)
    if MASKED:
        tl.store(mask + place, chosen.to(tl.uint8), mask=there)


@triton.jit
def _write(table, targets_table, board, kind, programs, targets, EACH: tl.constexpr, TURNS: tl.constexpr,
           COLUMNS: tl.constexpr, out, mask, VALUES: tl.constexpr, MASKED: tl.constexpr, POWER: tl.constexpr,
           MOST: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write what is above the least chosen key, and of the keys equal to it as many as there is room for."""
    program = tl.program_id(0)
    row = table + program * COLUMNS
    weight, allowed, start, stop = _rows_of(row, kind)
    state = _state_of(board, tl.load(row + 5).to(tl.int32) * EACH, targets, TURNS)
    bound, keep, ordered = _bound(board, state, row, program, programs, targets, 0, EACH, TURNS, MOST)
    bound2, keep2 = bound, keep  # of the mask
    if EACH == 2:
        bound2, keep2, order2 = _bound(board, state, row, program, programs, targets, 1, EACH, TURNS, MOST)
        ordered = ordered | order2
    threshold = 0.0
    if POWER > 0.0:
        bits = tl.load(state + _NEXT)
        if kind.dtype.element_ty.primitive_bitwidth == 32:
            threshold = bits.to(tl.float32, bitcast=True)
        else:
            threshold = bits.to(tl.int16).to(kind.dtype.element_ty, bitcast=True).to(tl.float32)
    begin = tl.multiple_of(tl.load(row + 2), 16)
    out += begin
    mask += begin
    if not ordered:
        whole = start + (stop - start) // BLOCK * BLOCK
        for base in range(start, whole, BLOCK):
            at = base + tl.arange(0, BLOCK)
            value, key = _look_at_all(weight, allowed, at)
            _put(out, mask, at, value, key > bound, key > bound2, threshold, VALUES, MASKED, POWER)
        if whole < stop:
            at = whole + tl.arange(0, BLOCK)
            value, key = _look(weight, allowed, at, at < stop)
            _put_some(out, mask, at, value, key > bound, key > bound2, threshold, at < stop, VALUES, MASKED, POWER)
    else:
        space, channels = tl.load(row + 7), tl.load(row + 8)
        for base in range(start, stop, BLOCK):
            at = base + tl.arange(0, BLOCK)
            place = _row_major(at, space, channels)
            value, key = _look(weight, allowed, place, at < stop)
            equal = (key == bound).to(tl.int32)
            real = (key > bound) | ((equal != 0) & (tl.cumsum(equal) <= keep))
            keep = tl.maximum(keep - tl.sum(equal), 0)
            chosen = real
            if EACH == 2:
                equal = (key == bound2).to(tl.int32)
                chosen = (key > bound2) | ((equal != 0) & (tl.cumsum(equal) <= keep2))
                keep2 = tl.maximum(keep2 - tl.sum(equal), 0)
            _put_some(out, mask, place, value, real, chosen, threshold, at < stop, VALUES, MASKED, POWER)


@triton.jit
def _write_allowed(table, kind, out, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the weights of all edges that are allowed."""
    row = table + tl.program_id(0) * COLUMNS
    weight, allowed, start, stop = _rows_of(row, kind)
    out += tl.multiple_of(tl.load(row + 2), 16)
    whole = start + (stop - start) // BLOCK * BLOCK
    for base in range(start, whole, BLOCK):
        at = base + tl.arange(0, BLOCK)
        value, key = _look_at_all(weight, allowed, at)
        tl.store(out + at, _only(key >= 0, value).to(out.dtype.element_ty))
    if whole < stop:
        at = whole + tl.arange(0, BLOCK)
        value, key = _look(weight, allowed, at, at < stop)
        tl.store(out + at, _only(key >= 0, value).to(out.dtype.element_ty), mask=at < stop)


@triton.jit
def _write_masked(runs, where, kind, out, BLOCK: tl.constexpr):
    """Write a run of a tensor where its mask is true; addresses of tensors and masks are read from ``where``."""
    row = runs + tl.program_id(0) * 4
    place, start, stop = tl.load(row), tl.load(row + 2).to(tl.int32), tl.load(row + 3).to(tl.int32)
    tensor = tl.multiple_of(tl.load(where + 2 * place).to(tl.pointer_type(kind.dtype.element_ty)), 16)
    mask = tl.multiple_of(tl.load(where + 2 * place + 1).to(tl.pointer_type(tl.uint8)), 16)
    out += tl.multiple_of(tl.load(row + 1), 16)
    start = tl.multiple_of(start, 16)
    for base in range(start, stop, BLOCK):
        at = base + tl.arange(0, BLOCK)
        value, key = _look(tensor, mask, at, at < stop)
        tl.store(out + at, _only(key >= 0, value).to(out.dtype.element_ty), mask=at < stop)


@triton.jit
def _write_through(runs, where, kind, out, sums, BLOCK: tl.constexpr):
    """Write a run of a gradient at real edges, and note what it amounts to for the threshold that shrinks them all.

    Addresses of gradients, masks and shrunk edges are read from ``where``.
    """
    WIDTH: tl.constexpr = kind.dtype.element_ty.primitive_bitwidth
    row = runs + tl.program_id(0) * 4
    place, start, stop = tl.load(row), tl.load(row + 2).to(tl.int32), tl.load(row + 3).to(tl.int32)
    grads = tl.multiple_of(tl.load(where + 4 * place).to(tl.pointer_type(kind.dtype.element_ty)), 16)
    mask = tl.multiple_of(tl.load(where + 4 * place + 1).to(tl.pointer_type(tl.uint8)), 16)
    used = tl.multiple_of(tl.load(where + 4 * place + 2).to(tl.pointer_type(kind.dtype.element_ty)), 16)
    out += tl.multiple_of(tl.load(row + 1), 16)
    start = tl.multiple_of(start, 16)
    amount = tl.zeros([BLOCK], tl.float32)
    for base in range(start, stop, BLOCK):
        at = base + tl.arange(0, BLOCK)
        there = at < stop
        real = tl.load(mask + at, mask=there, other=0) != 0
        grad = tl.where(real, tl.load(grads + at, mask=there, other=0.0).to(tl.float32), 0.0)
        value = tl.load(used + at, mask=there, other=0.0)
        bits = value.to(tl.int32, bitcast=True) if WIDTH == 32 else value.to(tl.int16, bitcast=True).to(tl.int32)
        amount += tl.where(bits < 0, grad, -grad)
        tl.store(out + at, grad.to(out.dtype.element_ty), mask=there)
    tl.store(sums + tl.program_id(0), tl.sum(amount))


@triton.jit
def _pull(runs, where, sums, thresholds, pulls, out, count, entries, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Add up what all runs amount to for an entry of what is learned, always in the same order."""
    entry = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for base in range(0, count, BLOCK):
        at = base + tl.arange(0, BLOCK)
        there = at < count
        layer = tl.load(where + tl.load(runs + at * 4, mask=there, other=0) * 4 + 3, mask=there, other=0)
        amount = tl.load(sums + at, mask=there, other=0.0) * tl.load(thresholds + layer * STRIDE, mask=there, other=0.0)
        total += amount * tl.load(pulls + layer * entries + entry, mask=there, other=0.0).to(tl.float32)
    tl.store(out + entry, tl.sum(total))
