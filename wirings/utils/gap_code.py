"""Places of real edges in few bits: Rice codes of the gaps between them.

The places of n edges among ``size`` weights, in ascending order, are written as gaps: the number of weights between an
edge and the one before it (before the first edge: from the beginning). With ``bits`` = b, a gap g has a remainder,
g mod 2ᵇ, and a quotient, ⌊g / 2ᵇ⌋. The code is

1. the remainders, b bits each, lowest bit first, padded with zero bits to whole bytes;
2. the quotients in unary, each as that many zero bits and a one, padded in the same way.

Bits fill bytes from the lowest. With b = 0 the code is a bit mask of the weights up to the last edge, so that one
scheme covers all densities; the b with the shortest code is chosen. Random places take 0.60 bytes an edge at a density
of 10 % and 0.89 at 2 %, within 2 % of their entropy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from wirings.errors import WiringError

MAX_BITS = 30

Places = NDArray[np.int64]
Code = NDArray[np.uint8]


def pack_places(places: Places) -> tuple[int, Code]:
    """The code of ascending places: the number of bits of a remainder, and the bytes."""
    if not len(places):
        return 0, np.zeros(0, np.uint8)
    gaps = np.diff(places, prepend=-1) - 1
    bits, quotients = 0, gaps
    while bits < MAX_BITS:  # the length is convex in the number of bits: the first minimum is the only one
        fewer = quotients >> 1
        if int(quotients.sum()) - int(fewer.sum()) <= len(gaps):
            break
        bits, quotients = bits + 1, fewer
    ends = np.cumsum(quotients + 1) - 1
    unary = np.zeros(int(ends[-1]) + 1, np.uint8)
    unary[ends] = 1
    remainders = np.empty((len(gaps), bits), np.uint8)
    for bit in range(bits):
        remainders[:, bit] = (gaps >> bit) & 1
    return bits, np.concatenate([_packed(remainders.reshape(-1)), _packed(unary)])


def unpack_places(code: Code, bits: int, count: int, size: int) -> Places:
    """The places from `pack_places`, checked: ``count`` of them, ascending, below ``size``.

    Memory is taken in proportion to the length of the code, whatever ``size`` is.

    Raises:
        WiringError: if this is not the code of such places.
    """
    split = (count * bits + 7) // 8
    if not (0 <= bits <= MAX_BITS and 0 <= count <= size and 8 * (len(code) - split) >= count):
        raise _invalid(count, size)
    ends = np.flatnonzero(np.unpackbits(code[split:], bitorder="little"))
    used = int(ends[-1]) + 1 if len(ends) else 0
    if len(ends) != count or len(code) != split + (used + 7) // 8 or (used - count) << bits >= max(size, 1):
        raise _invalid(count, size)
    gaps = np.diff(ends, prepend=-1) - 1 << bits
    remainders = np.unpackbits(code[:split], count=count * bits, bitorder="little").reshape(count, bits)
    for bit in range(bits):
        gaps |= remainders[:, bit].astype(np.int64) << bit
    places: Places = np.cumsum(gaps + 1) - 1
    if count and int(places[-1]) >= size:
        raise _invalid(count, size)
    return places


def _packed(flags: Any) -> Code:
    return np.packbits(flags, bitorder="little")


def _invalid(count: int, size: int) -> WiringError:
    return WiringError(f"expected places of {count:,} edges among {size:,} weights")
