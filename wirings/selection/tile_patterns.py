"""The pattern of every tile of a weight that keeps as many edges of each row as of each column, by all patterns.

A tile is an m × m part of a matrix, and a pattern a mask of it with n edges in every row and in every column. The one
to keep is that of the largest sum of magnitudes (Hubara, Chmiel, Island, Banner, Naor and Soudry, "Accelerated Sparse
Neural Training: A Provable and Efficient Method to Find N:M Transposable Masks", NeurIPS 2021). Small tiles have so few
patterns, 90 for 2:4, that the sums of all are compared. They are added up in double precision and in one order, so that
they are the same on every device, and in every precision that has the same weights. Of equal sums the first pattern in
`patterns` is taken: where two differ first, row by row, it has the edge.

In these sums, an infinity counts more than all finite weights of a tile, and NaN more than all infinities, as they rank
in `functional`. Beside one of them, differences between finite weights are too small to count.

Both functions are operators (``torch.ops.wirings``), which compilers keep as they are.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

LARGEST_TILE = 4
"""The side of the largest tiles. Those of 5 x 5 have up to 2,040 patterns, those of 8 x 8 more than 10^11."""
_LARGE, _INF, _NAN = 2.0**1000, 2.0**1005, 2.0**1010
"""What large magnitudes are cut to, and what infinities and NaN count: 16 of one are less than the next."""
_TILES = {"cpu": 1 << 10}
_MOST_TILES = 1 << 16
"""How many tiles are looked at at once, on CPUs (about what caches hold) and elsewhere. Each takes about 3 KiB."""


def choose_tiles(values: Tensor, k: Tensor, rank: Tensor | None = None) -> Tensor:
    """A mask of the pattern of each tile with the largest sum of magnitudes.

    Args:
        values: weights or scores of shape (tiles, m, m).
        k: the number of edges of each row and column, an integer scalar tensor.
        rank: small integers of the same shape, whose largest sum a pattern must have before magnitudes count.

    >>> choose_tiles(torch.tensor([[[4.0, 3.0], [3.0, 1.0]]]), torch.tensor(1))
    tensor([[[False,  True],
             [ True, False]]])
    """
    return torch.ops.wirings.choose_tiles(values, k, rank)


def tile_thresholds(values: Tensor, k: Tensor, rank: Tensor | None = None) -> Tensor:
    """For every edge of the chosen patterns, the magnitude below which its tile would have another pattern.

    That is its own magnitude less what the best pattern without it lacks; 0 if that is negative, or there is none. For
    other edges it is their own magnitude. Arguments as for `choose_tiles`; in float64.

    >>> tile_thresholds(torch.tensor([[[4.0, 3.0], [3.0, 1.0]]]), torch.tensor(1))
    tensor([[[4., 2.],
             [2., 1.]]], dtype=torch.float64)
    """
    return torch.ops.wirings.tile_thresholds(values, k, rank)


@functools.cache
def patterns(n: int, m: int) -> list[tuple[int, ...]]:
    """All masks of m rows with n of m bits each, and n rows with each bit, ordered by their first edges.

    >>> patterns(1, 2), len(patterns(2, 4))
    ([(1, 2), (2, 1)], 90)
    """
    rows = [sum(1 << column for column in columns) for columns in itertools.combinations(range(m), n)]
    together = itertools.product(rows, repeat=m)
    return [one for one in together if all(sum(row >> column & 1 for row in one) == n for column in range(m))]


@functools.cache
def _tables(m: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The patterns of m × m tiles for every n: bits of each row, and masks. A shorter list repeats its first one.

    On the device, where n can be looked up without the host: shapes (m + 1, patterns, m) and (m + 1, patterns, m²).
    """
    lists = [patterns(n, m) for n in range(m + 1)]
    most = max(map(len, lists))
    bits = torch.tensor([one + one[:1] * (most - len(one)) for one in lists], device="cpu")
    masks = (bits.unsqueeze(-1) >> torch.arange(m, device="cpu")) & 1
    return bits.to(device), masks.flatten(2).bool().to(device)


def _sizes(values: Tensor) -> Tensor:
    """Magnitudes in double precision, of which sums are finite."""
    size = values.double().abs()
    return torch.where(size.isfinite(), size.clamp(max=_LARGE), size.nan_to_num(nan=_NAN, posinf=_INF))


def _sums(values: Tensor, bits: Tensor) -> Tensor:
    """The sum of each pattern in each tile, always added up in the same order: from (m, m, tiles) to (patterns, tiles).

    Tiles come last, since whole rows of memory are then gathered and compared.
    """
    of_rows = torch.zeros_like(values[:, :1])  # of all subsets of a row, by their bits
    for column in values.unbind(1):
        of_rows = torch.cat([of_rows, of_rows + column.unsqueeze(1)], 1)
    total = of_rows[0].index_select(0, bits[:, 0])
    for row, one in enumerate(of_rows[1:], 1):
        total += one.index_select(0, bits[:, row])
    return total


def _parts(values: Tensor, k: Tensor, rank: Tensor | None) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Some tiles at a time: which, their magnitudes, the sums of the patterns that may be chosen, and the patterns."""
    bits, masks = (table.index_select(0, k.reshape(1))[0] for table in _tables(values.shape[-1], values.device))
    step = _TILES.get(values.device.type, _MOST_TILES)
    for start in range(0, len(values), step):
        part = slice(start, start + step)
        size = _sizes(values[part])
        sums = _sums(size.movedim(0, 2).contiguous(), bits)
        if rank is not None:
            ranks = _sums(rank[part].movedim(0, 2).int().contiguous(), bits)
            sums.masked_fill_(ranks < ranks.amax(0), -torch.inf)
        yield part, size, sums, masks


def _choose_tiles(values: Tensor, k: Tensor, rank: Tensor | None) -> Tensor:
    real = torch.empty(values.shape, dtype=torch.bool, device=values.device)
    for part, _, sums, masks in _parts(values, k.to(values.device), rank):
        places = torch.arange(len(sums), dtype=torch.int16, device=values.device).unsqueeze(1)
        first = places.expand_as(sums).masked_fill(sums < sums.amax(0), len(sums)).amin(0)  # faster than argmax on CPUs
        real[part] = masks.index_select(0, first.long()).view_as(real[part])
    return real


def _tile_thresholds(values: Tensor, k: Tensor, rank: Tensor | None) -> Tensor:
    found = torch.empty(values.shape, dtype=torch.float64, device=values.device)
    for part, size, sums, masks in _parts(values, k.to(values.device), rank):
        without = [sums.masked_fill(has.unsqueeze(1), -torch.inf).amax(0) for has in masks.unbind(1)]
        lacking = sums.amax(0).unsqueeze(1) - torch.stack(without, 1)
        found[part] = (size - lacking.view_as(size)).clamp(min=0)
    return found


def _like_values(values: Tensor, k: Tensor, rank: Tensor | None) -> Tensor:
    return torch.empty(values.shape, dtype=torch.bool, device=values.device)


def _like_sizes(values: Tensor, k: Tensor, rank: Tensor | None) -> Tensor:
    return torch.empty(values.shape, dtype=torch.float64, device=values.device)


_library = torch.library.Library("wirings", "FRAGMENT")
for _name, _run, _fake in (
    ("choose_tiles", _choose_tiles, _like_values),
    ("tile_thresholds", _tile_thresholds, _like_sizes),
):
    _library.define(f"{_name}(Tensor values, Tensor k, Tensor? rank) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"wirings::{_name}", _fake, lib=_library)
