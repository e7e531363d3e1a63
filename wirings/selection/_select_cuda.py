"""Choose k edges on a GPU: a radix selection in a few Triton kernels, without reading anything back to the host.

An edge's key is the bits of its weight without the sign. The cutoff key, that of the weakest real edge, is found digit
by digit from the top: each pass counts the edges by their next eight bits, which gives the next digit of the k-th
largest key. A program gets the same run of edges, in row-major order, in all passes, so that equal keys can be ranked
by position: the last pass stores how many edges of each key a program holds, and the writing pass sums the counts of
the programs before its own. Atomics only add integers, so the result does not depend on the order of execution.

Counting by digits is bound by arithmetic, not by memory traffic. So a large weight is sampled first to guess two keys
that very likely enclose the cutoff; one cheap pass gathers the few keys between them, and only those are counted. If
the guess turns out wrong, all edges are counted. A small weight is handled by a single program, which bisects.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from wirings.utils.triton_launch import KernelLauncher, on_device_of

_RECENT = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 4)  # older versions have no masked histogram
_BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_SMALL = 16384  # the most edges that a single program handles
_GUESS_FROM = 2**19  # from this many edges on, a guess saves more than its two launches cost
_SAMPLE = 1024
GUESSED_BITS = 16  # leading bits of the keys that enclose the guessed range
_BLOCK = 2048  # edges that a program loads at a time
_PROGRAMS = tl.constexpr(1024)  # upper limit: the writing pass sums over all of them at once

# Layout of the board, in int32: 256 counts for each of up to four passes; the number of edges above the guessed range,
# the number within it, its two ends; and for each pass the digits known before it and the cutoff's rank among the keys
# that begin with them.
_ABOVE, _NEAR, _LOW, _STATE = (tl.constexpr(place) for place in (1024, 1025, 1026, 1028))


def supports(weight: Tensor) -> bool:
    """Whether this module can rank ``weight``: float16, bfloat16 or float32 (float64 uses PyTorch's operators)."""
    return _RECENT and weight.dtype in _BITS and weight.numel() <= 2**30


def choose(weight: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor:
    """Mark the ``k`` edges of largest magnitude: a boolean mask laid out as ``torch.empty_like(weight)`` is."""
    return _select(weight, k, allowed, torch.empty_like(weight, dtype=torch.bool))


def real_edges(weight: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor:
    """The ``k`` edges of largest magnitude, zeros elsewhere, laid out as ``torch.empty_like(weight)`` is."""
    return _select(weight, k, allowed, torch.empty_like(weight))


def _select(weight: Tensor, k: Tensor, allowed: Tensor | None, out: Tensor) -> Tensor:
    n, space, channels = weight.numel(), 1, 1
    if not weight.is_contiguous():
        if not weight.is_contiguous(memory_format=_CHANNELS_LAST.get(weight.dim(), torch.contiguous_format)):
            plain = torch.empty(weight.shape, dtype=out.dtype, device=out.device)
            return out.copy_(_select(weight.contiguous(), k, allowed, plain))
        space, channels = weight.shape[2:].numel(), weight.shape[1]
    if allowed is not None:
        if allowed.stride() != weight.stride():
            allowed = torch.empty_like(weight, dtype=torch.bool).copy_(allowed)
        allowed = allowed.view(torch.uint8)
    bits = _BITS[weight.dtype]
    shifts = (23, 15, 7, 0) if bits == torch.int32 else (7, 0)
    edges = (weight.detach().view(bits), allowed, n, channels, space)
    result = out.view(torch.uint8 if out.dtype == torch.bool else bits)
    aligned = [x is None or x.data_ptr() % 16 == 0 for x in (weight, allowed, k)]
    launch = KernelLauncher(
        (weight.device, weight.dtype, out.dtype, allowed is None, n, channels, space, k.dtype, *aligned)
    )
    with on_device_of(weight):
        if n <= _SMALL:  # n = 0 does no harm
            block, warps = (1024, 4) if n <= 1024 else (4096, 16) if n <= 4096 else (_SMALL, 32)
            launch(_select_small, 1, warps, *edges, k, result, shifts[0] + 8, block)
            return out
        guess = n >= _GUESS_FROM
        # Programs that count only the few gathered keys of their run get longer ones: every program costs atomics.
        run = max(2 if guess else 1, triton.cdiv(n, _PROGRAMS.value * _BLOCK)) * _BLOCK
        grid = triton.cdiv(n, run)
        # By program: how many keys were gathered, then how many edges it holds of each key the last pass counts.
        both = (torch.empty if guess else torch.zeros)(2048 + 129 * grid, dtype=torch.int32, device=weight.device)
        board, tally = both[:2048], both[2048:]
        near = result if result.dtype == bits else torch.empty(n if guess else 0, dtype=bits, device=weight.device)
        if guess:
            launch(_guess, 1, 4, *edges, k, board, shifts[0] + 8, min(GUESSED_BITS, shifts[0] + 8), _SAMPLE)
            launch(_gather, grid, 4, *edges, near, tally, board, run, _BLOCK, 128)
        block = _BLOCK // 4 if guess else _BLOCK  # among gathered keys, a large block would be mostly empty
        for turn, shift in enumerate(shifts):
            launch(_count, grid, 4, *edges, k, near, tally, board, run, guess, turn, shift, block)
        launch(_write, grid, 4, *edges, tally, board, run, result, len(shifts), _BLOCK)
    return out


@triton.jit
def _look(weight, allowed, n, channels, SPACE: tl.constexpr, at):
    """The edges at the row-major positions ``at``: place in memory, bits, and key (-1 where there is no edge)."""
    place, real = at, at < n
    if SPACE > 1:  # channels last: (filter, channel, position) lies in memory as (filter, position, channel)
        row, per_filter = at.to(tl.uint32) // SPACE, channels.to(tl.uint32)
        place = row + ((row // per_filter) * (SPACE - 1) + at.to(tl.uint32) % SPACE) * per_filter
    bits = tl.load(weight + place, mask=real, other=0)
    key = bits.to(tl.int32) & ((1 << (weight.dtype.element_ty.primitive_bitwidth - 1)) - 1)
    if allowed is not None:
        real &= tl.load(allowed + place, mask=real, other=0) != 0
    return place, bits, tl.where(real, key, -1)


@triton.jit
def _select_small(weight, allowed, n, channels, SPACE: tl.constexpr, k, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Do everything in one program: find the cutoff, the largest key that at least k keys reach, bit by bit."""
    at = tl.arange(0, BLOCK)
    place, bits, key = _look(weight, allowed, n, channels, SPACE, at)
    count = tl.load(k).to(tl.int32)
    least = 0
    for bit in range(WIDTH):
        trial = least | (1 << (WIDTH - 1 - bit))
        least = tl.where(tl.sum((key >= trial).to(tl.int32)) >= count, trial, least)
    keep = count - tl.sum((key > least).to(tl.int32))
    equal = (key == least) & (tl.cumsum((key == least).to(tl.int32)) <= keep)
    value = 1 if out.dtype.element_ty == tl.uint8 else bits  # write a mask, or the weights of the real edges
    tl.store(out + place, tl.where((key > least) | equal, value, 0), mask=at < n)


@triton.jit
def guessed_range(key, rank, WIDTH: tl.constexpr, BITS: tl.constexpr, SAMPLE: tl.constexpr):
    """Guess from a sample of keys a range that encloses the cutoff, the key of a ``rank`` in the sample, very likely.

    The ends are found bit by bit, up to ``BITS`` of the keys' ``WIDTH`` bits.
    """
    slack = 5 * tl.sqrt(tl.maximum(rank * (1 - rank / SAMPLE), 0.0)) + 5  # five standard deviations, and 5
    low, high = 0, 0
    for bit in range(BITS):
        try_low, try_high = low | (1 << (WIDTH - 1 - bit)), high | (1 << (WIDTH - 1 - bit))
        both = tl.sum((key >= try_low).to(tl.int32) + ((key >= try_high).to(tl.int32) << 16))  # two sums in one
        low = tl.where((both & 0xFFFF) >= rank + slack, try_low, low)
        high = tl.where((both >> 16) >= rank - slack, try_high, high)
    return low, high | ((1 << (WIDTH - BITS)) - 1)


@triton.jit
def _guess(weight, allowed, n, channels, SPACE: tl.constexpr, k, board, WIDTH: tl.constexpr, BITS: tl.constexpr,
           SAMPLE: tl.constexpr):  # fmt: skip
    """Clear the counts, and guess a range of keys from a sample: one edge out of each of many equal stretches."""
    slot = tl.arange(0, 2048)
    tl.store(board + slot, 0, mask=slot < _LOW)
    i, stretch = tl.arange(0, SAMPLE), n // SAMPLE
    jitter = ((i.to(tl.uint32) * 2654435761) >> 5) % stretch.to(tl.uint32)  # avoids sampling a single column
    _, _, key = _look(weight, allowed, n, channels, SPACE, i * stretch + jitter.to(tl.int32))
    low, high = guessed_range(key, tl.load(k).to(tl.float32) / n * SAMPLE, WIDTH, BITS, SAMPLE)
    tl.store(board + _LOW, low)
    tl.store(board + _LOW + 1, high)


@triton.jit
def _gather(weight, allowed, n, channels, SPACE: tl.constexpr, near, tally, board, run,
            BLOCK: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Pack the keys in the guessed range, in any order, at the start of the program's own run of ``near``."""
    start = tl.program_id(0) * run
    low, high = tl.load(board + _LOW), tl.load(board + _LOW + 1)
    above, size = tl.zeros([WIDE], tl.int32), 0
    # One row per thread, so that ranks need only one short scan across threads. Neighbours are not loaded as a vector:
    # for the scattered stores a thread must hold one element at a time, and converting the layout would cost more.
    lanes = tl.arange(0, WIDE)[:, None] + tl.arange(0, BLOCK // WIDE)[None, :] * WIDE
    for base in range(start, tl.minimum(start + run, n), BLOCK):
        _, _, key = _look(weight, allowed, n, channels, SPACE, tl.max_contiguous(base + lanes, [1, 1]))
        above += tl.sum((key > high).to(tl.int32), 1)
        inside = ((key >= low) & (key <= high)).to(tl.int32)
        row = tl.sum(inside, 1)
        order = tl.cumsum(inside, 1) + (tl.cumsum(row) - row)[:, None]
        tl.store(near + (start + size - 1) + order, key.to(near.dtype.element_ty), mask=inside != 0)
        size += tl.sum(row)
    tl.store(tally + tl.program_id(0), size)
    tl.atomic_add(board + _ABOVE, tl.sum(above), sem="relaxed")
    tl.atomic_add(board + _NEAR, size, sem="relaxed")


@triton.jit
def _narrow(board, TURN: tl.constexpr, BINS: tl.constexpr):
    """The result of pass ``TURN``: the cutoff's digits so far, and its rank among the keys that begin with them."""
    digits, rank = tl.arange(0, BINS), tl.load(board + _STATE + 2 * TURN + 1)
    count = tl.load(board + 256 * TURN + digits)
    reach = tl.cumsum(count, reverse=True) >= rank  # true up to the cutoff's digit
    digit = tl.maximum(tl.sum(reach.to(tl.int32)) - 1, 0)
    return tl.load(board + _STATE + 2 * TURN) * BINS + digit, rank - tl.sum(tl.where(digits > digit, count, 0))


@triton.jit
def _count(weight, allowed, n, channels, SPACE: tl.constexpr, k, near, tally, board, run,
           GUESS: tl.constexpr, TURN: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Count the keys that begin with the digits found so far by their next digit, of 8 bits (7 for the last)."""
    DIGIT: tl.constexpr = 8 if SHIFT > 0 else 7
    program, start = tl.program_id(0), tl.program_id(0) * run
    stop = tl.minimum(start + run, n)
    prefix, rank, guessed = 0, tl.load(k).to(tl.int32), False
    if GUESS:  # it was right if the cutoff is among the gathered keys
        above = tl.load(board + _ABOVE)
        guessed = (above < tl.maximum(rank, 1)) & (rank <= above + tl.load(board + _NEAR))
        rank = tl.where(guessed, rank - above, rank)
        stop = tl.where(guessed, start + tl.load(tally + program), stop)
        low, high = tl.load(board + _LOW), tl.load(board + _LOW + 1)
        known = guessed & ((low >> (SHIFT + DIGIT)) == (high >> (SHIFT + DIGIT)))  # all gathered keys begin alike
        if SHIFT > 0:  # digits that they share need not be counted
            stop = tl.where(guessed & ((low >> SHIFT) == (high >> SHIFT)), start, stop)
    if TURN > 0:
        prefix, rank_before = _narrow(board, TURN - 1, 256)
        if GUESS:
            prefix = tl.where(known, low >> (SHIFT + DIGIT), prefix)
            rank = tl.where(known, rank, rank_before)
        else:
            rank = rank_before
    if program == 0:  # for the next pass; no program reads it in this one
        tl.store(board + _STATE + 2 * TURN, prefix)
        tl.store(board + _STATE + 2 * TURN + 1, rank)
    digits, counts = tl.arange(0, 1 << DIGIT), tl.zeros([1 << DIGIT], tl.int32)
    for base in range(start, stop, BLOCK):
        at = base + tl.arange(0, BLOCK)
        if guessed:
            key = tl.where(at < stop, tl.load(near + at, mask=at < n, other=0).to(tl.int32), -1)
        else:
            _, _, key = _look(weight, allowed, n, channels, SPACE, at)
        begins = (key >> (SHIFT + DIGIT)) == prefix  # false where there is no edge: -1 >> n is -1
        counts += tl.histogram((key >> SHIFT) & ((1 << DIGIT) - 1), 1 << DIGIT, mask=begins)
    tl.atomic_add(board + 256 * TURN + digits, counts, mask=counts > 0, sem="relaxed")
    if SHIFT == 0:
        tl.store(tally + (digits + 1) * tl.num_programs(0) + program, counts)


@triton.jit
def _write(weight, allowed, n, channels, SPACE: tl.constexpr, tally, board, run, out,
           TURNS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write the edges above the cutoff, and as many of those equal to it as there is room for."""
    program, other = tl.program_id(0), tl.arange(0, _PROGRAMS)
    least, room = _narrow(board, TURNS - 1, 128)
    equals = tl.load(tally + ((least & 127) + 1) * tl.num_programs(0) + other, mask=other <= program, other=0)
    mine = tl.sum(tl.where(other == program, equals, 0))
    keep = room - (tl.sum(equals) - mine)
    some, split = keep > 0, (keep > 0) & (keep < mine)  # at most one program has to rank its ties
    for base in range(program * run, tl.minimum((program + 1) * run, n), BLOCK):
        at = base + tl.arange(0, BLOCK)
        place, bits, key = _look(weight, allowed, n, channels, SPACE, at)
        equal = (key == least) & some
        if split:
            mine, order = tl.sum(equal.to(tl.int32)), tl.cumsum(equal.to(tl.int32))
            equal, keep = equal & (order <= keep), keep - mine
        value = 1 if out.dtype.element_ty == tl.uint8 else bits
        tl.store(out + place, tl.where((key > least) | equal, value, 0), mask=at < n)
