"""Choosing the edges of many weights at once: one operator for all that a forward pass takes of the ranked edges.

`kept_of` gives the weights of the forward pass of several weights, unchanged or shrunk, and a mask of the edges that a
gradient reaches. Weights are ranked one by one, or all together. On a GPU it takes a handful of kernels, however many
weights there are and whatever is asked (`_select_many_cuda`); elsewhere the weights are served one by one.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wirings.selection import cpu, functional
from wirings.utils.transforms import is_plain

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
ALIGNED = 64  # the edges of a weight begin at a multiple of this in a row of several


def kept_of(
    weights: Sequence[Tensor],
    ks: Sequence[Tensor],
    allowed: Sequence[Tensor | None],
    *,
    power: float | None = math.inf,
    more: Sequence[int] = (),
    shared: bool = False,
    masked: bool = False,
    dtype: torch.dtype | None = None,
    factors: Sequence[Tensor] = (),
) -> tuple[list[Tensor], list[Tensor]]:
    """The ``k`` edges of largest magnitude of several weights, zeros elsewhere, without a gradient.

    Args:
        weights: weights on one device.
        ks: the number of edges of each weight, as scalar tensors on that device; with ``shared`` the first counts.
        allowed: for each weight the edges that may be chosen, or None for all.
        power: how chosen edges are shrunk (see `shrink.shrunk`): ``inf`` for not at all, None if only masks are
            wanted.
        more: where given, the masks have at least so many edges, for each weight; with ``shared`` one number for all.
        shared: rank the edges of all weights together.
        masked: return masks, too: of the edges chosen, or of those that ``more`` adds as well.
        dtype: the dtype of the result. By default that of the weights.
        factors: with ``shared``, scalar float32 tensors that the weights are multiplied by to be ranked; none for 1.

    Returns:
        The kept weights and the masks, each a list with one entry for each weight; an empty list for what is not
        wanted. All entries are views of one tensor, laid out in memory as the weights are.
    """
    kind = weights[0].dtype if dtype is None else dtype
    if (table := _table(weights, ks, allowed, more, shared, factors)) is not None:
        flat, mask = _kernels().kept_of(weights[0], table, bool(more), power, masked, kind)
        divide = table.parts_of
    else:
        arguments = (list(ks), list(allowed), list(more), power, shared, masked, kind, list(factors), False)
        flat, mask, _ = torch.ops.wirings.kept_of([weight.detach() for weight in weights], *arguments)
        divide = functools.partial(parts_of, weights=weights)
    return divide(flat) if power is not None else [], divide(mask) if masked else []


def shrunk_of(
    weights: Sequence[Tensor],
    ks: Sequence[Tensor],
    allowed: Sequence[Tensor | None],
    power: float,
    dtype: torch.dtype | None = None,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """The ``k`` edges of largest magnitude of each weight, shrunk by the magnitude of its next one.

    Arguments as for `kept_of`.

    Returns:
        The shrunk weights, the masks of their real edges, and the magnitudes by which they are shrunk: one tensor with
        an entry for each weight, in float32 at least.
    """
    kind = weights[0].dtype if dtype is None else dtype
    if (table := _table(weights, ks, allowed, (), False)) is not None:
        flat, mask, thresholds = _kernels().shrunk_of(weights[0], table, power, kind)
        return table.parts_of(flat), table.parts_of(mask), thresholds
    arguments: Any = (list(ks), list(allowed), [], power, False, True, kind, [], True)
    flat, mask, thresholds = torch.ops.wirings.kept_of([weight.detach() for weight in weights], *arguments)
    return parts_of(flat, weights), parts_of(mask, weights), thresholds


def masked_of(
    weights: Sequence[Tensor], ks: Sequence[Tensor], masks: Sequence[Tensor], dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Several weights where their masks are true, zeros elsewhere, without a gradient. Arguments as for `kept_of`."""
    kind = weights[0].dtype if dtype is None else dtype
    if (table := _table(weights, ks, masks, (), False)) is not None:
        return table.parts_of(_kernels().masked_of(weights[0], table, kind))
    pairs = zip(weights, masks, strict=True)
    return [torch.where(mask, weight.detach(), 0.0).to(kind) for weight, mask in pairs]


def masked_each(tensors: Sequence[Tensor], masks: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor]:
    """Several tensors in another precision, with zeros where their masks are false: one kernel on a GPU.

    Unlike the weights of `masked_of`, the tensors may lie elsewhere every time, as gradients do.

    Args:
        tensors: tensors of one dtype on one device.
        masks: for each a mask, or None to take all of it.
        dtype: the dtype of the result.
    """
    first = tensors[0]
    if first.is_cuda and is_plain(first) and not torch.is_grad_enabled() and _kernels() is not None:
        made: list[Tensor] | None = _kernels().masked_each(tensors, masks, dtype)
        if made is not None:
            return made
    pairs = zip(tensors, masks, strict=True)
    return [(tensor if mask is None else torch.where(mask, tensor, 0.0)).to(dtype) for tensor, mask in pairs]


def through_shrunk(
    grads: Sequence[Tensor | None],
    masks: Sequence[Tensor],
    used: Sequence[Tensor],
    thresholds: Tensor,
    pulls: Tensor,
    dtype: torch.dtype,
) -> tuple[list[Tensor | None], Tensor]:
    """The gradients of edges that are shrunk by learned thresholds: two kernels for all weights on a GPU.

    Args:
        grads: the gradients of ``used``, None for weights that have none; of one dtype, on one device.
        masks: the real edges of each weight.
        used: the shrunk edges of each weight, with the signs of its edges.
        thresholds: the threshold of each weight, in one tensor.
        pulls: the derivatives of the logarithm of each threshold by what is learned, in rows.
        dtype: the dtype of the weights.

    Returns:
        The gradients of the weights, and that of what is learned.
    """
    there = [i for i, grad in enumerate(grads) if grad is not None]
    first: Any = grads[there[0]]
    if first.is_cuda and is_plain(first) and not torch.is_grad_enabled() and _kernels() is not None:
        parts = [[values[i] for i in there] for values in (grads, masks, used)]
        made = _kernels().through_shrunk(*parts, there, thresholds, pulls, dtype)
        if made is not None:
            found: list[Tensor | None] = [None] * len(grads)
            for i, one in zip(there, made[0], strict=True):
                found[i] = one
            return found, made[1]
    passed, amounts = list(grads), [thresholds.new_zeros(())] * len(grads)
    for i in there:
        one, amounts[i] = functional.through_shrunk(grads[i], masks[i], used[i])  # type: ignore[arg-type]
        passed[i] = one.to(dtype)
    return passed, (pulls * (torch.stack(amounts) * thresholds).unsqueeze(1)).sum(0)


def _table(
    weights: Sequence[Tensor],
    ks: Sequence[Tensor],
    allowed: Sequence[Tensor | None],
    more: Sequence[int],
    shared: bool,
    factors: Sequence[Tensor] = (),
) -> Any:
    """What the kernels know about ordinary weights on a GPU; None for others, which the dispatcher has to see.

    Without the dispatcher, which costs the host more than the launches.
    """
    if not weights[0].is_cuda or not is_plain(weights[0]) or _kernels() is None:
        return None
    return _kernels().table_of(weights, ks, allowed, more, shared, factors)


def parts_of(row: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Divide one row into parts laid out like the weights."""
    begins = begins_of(weights)
    sizes = [stop - start for start, stop in itertools.pairwise(begins)]
    return [_laid_out(part, w) for part, w in zip(row.split(sizes), weights, strict=True)]


def _laid_out(row: Tensor, weight: Tensor) -> Tensor:
    """View the beginning of a row as the edges of a weight, in the memory format of the weight if that is dense.

    Uses views only: compilers have applied `torch.as_strided` of a slice to the beginning of the whole row.
    """
    if len(row) != weight.numel():
        row = row[: weight.numel()]
    part = row.view(weight.shape)
    if part.stride() == weight.stride() or not is_dense(weight):
        return part
    order = list(range(weight.dim()))
    order.sort(key=lambda d: -weight.stride()[d])
    there = {dim: place for place, dim in enumerate(order)}
    return row.view([weight.shape[d] for d in order]).permute([there[d] for d in range(weight.dim())])


def begins_of(weights: Sequence[Tensor]) -> list[int]:
    """Where the edges of each weight begin in one row of all, followed by the length of the row."""
    found = [0]
    for weight in weights:
        found.append(found[-1] + -(-weight.numel() // ALIGNED) * ALIGNED)
    return found


def is_dense(weight: Tensor) -> bool:
    """Whether a weight fills its memory without gaps, contiguous or with channels last."""
    last = _CHANNELS_LAST.get(weight.dim(), torch.contiguous_format)
    return weight.is_contiguous() or weight.is_contiguous(memory_format=last)


def in_a_row(scores: Sequence[Tensor], within: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """All scores concatenated, and likewise their masks if there are any."""
    dtype = scores[0].dtype
    for score in scores[1:]:
        dtype = torch.promote_types(dtype, score.dtype)
    row = torch.cat([s.detach().reshape(-1).to(dtype) for s in scores])
    if all(among is None for among in within):
        return row, None
    masks = zip(within, scores, strict=True)
    return row, torch.cat([(torch.ones_like(s, dtype=torch.bool) if a is None else a).reshape(-1) for a, s in masks])


# ---- the operator ---------------------------------------------------------------------------------------------

_library = torch.library.Library("wirings", "FRAGMENT")
_library.define(
    "kept_of(Tensor[] weights, Tensor[] ks, Tensor?[] allowed, int[] more, float? power, bool shared, bool masked, "
    "ScalarType dtype, Tensor[] factors, bool following) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _kept_of(
    weights: list[Tensor],
    ks: list[Tensor],
    allowed: list[Tensor | None],
    more: list[int],
    power: float | None,
    shared: bool,
    masked: bool,
    dtype: torch.dtype,
    factors: list[Tensor],
    following: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Use the kernels where they support the weights; otherwise serve these one by one, on any device.

    The third result is empty, or with ``following`` (and ``masked``, for weights that are ranked one by one) the
    magnitude of the strongest edge of each weight that is not chosen.
    """
    kernels: Any = _kernels() if weights[0].is_cuda else None
    table = None if kernels is None else kernels.table_of(weights, ks, allowed, more, shared, factors)
    if table is not None and following:
        flat, mask, thresholds = kernels.shrunk_of(weights[0], table, power, dtype)
        return flat, mask, thresholds.clone(memory_format=torch.contiguous_format)
    flat, mask, thresholds = _rows(weights, power, masked, dtype, following)
    if table is not None:
        return *kernels.kept_of(weights[0], table, bool(more), power, masked, dtype), thresholds
    flat.zero_()
    mask.zero_()
    rows, among, counts = list(weights), allowed, ks
    if shared:
        factor: Sequence[Tensor | None] = factors or [None] * len(weights)
        scores = [functional.rank_scores(w, f) for w, f in zip(weights, factor, strict=True)]
        row, everywhere = in_a_row(scores, allowed)
        rows, among, counts = [row], [everywhere], ks[:1]
    found: list[tuple[Tensor | None, Tensor | None]] = []
    for place, (weight, k, within) in enumerate(zip(rows, counts, among, strict=True)):
        kept = chosen = None
        if power is not None:
            kept = (
                _kept_scaled(weights, row, k, within, factors, power)
                if factors
                else kept_edges(weight, k, within, power)
            )
        if masked:
            chosen = functional.choose(weight, k.clamp(min=more[place]) if more else k, within)
        if following:
            thresholds[place] = functional.next_magnitude(weight, chosen, within)  # type: ignore[arg-type]
        found.append((kept, chosen))
    if shared:
        sizes = [weight.numel() for weight in weights]
        parts = [[None] * len(sizes) if one is None else one.split(sizes) for one in found[0]]
        found = list(zip(*parts, strict=True))
    for which, out in enumerate((flat, mask)):
        if len(out):
            for part, (weight, one) in zip(parts_of(out, weights), zip(weights, found, strict=True), strict=True):
                part.copy_(one[which].view(weight.shape) if shared else one[which])  # type: ignore[union-attr, arg-type]
    return flat, mask, thresholds


def kept_edges(weight: Tensor, k: Tensor, within: Tensor | None, power: float) -> Tensor:
    """What `kept_of` keeps of one weight."""
    if power == math.inf:
        if weight.device.type == "cpu" and is_plain(weight):  # the dispatcher would cost a small weight as much again
            return cpu.real_edges(weight, k, within)
        return torch.ops.wirings.real_edges(weight, k, within)
    if weight.device.type == "cpu":
        return cpu.shrunk_edges(weight, k, within, power)
    real = functional.choose(weight, k, within)
    return functional.shrunk_edges(weight, real, functional.next_magnitude(weight, real, within), power)


def _kept_scaled(
    weights: list[Tensor], row: Tensor, k: Tensor, within: Tensor | None, factors: list[Tensor], power: float
) -> Tensor:
    """What `kept_of` keeps of weights that are ranked by a ``row`` of scores: the weights times their factors."""
    real = functional.choose(row, k, within)
    parts = [part.view(w.shape) for part, w in zip(real.split([w.numel() for w in weights]), weights, strict=True)]
    if power == math.inf:
        kept = [torch.where(part, w, 0.0) for part, w in zip(parts, weights, strict=True)]
    else:
        score = functional.next_magnitude(row, real, within)
        triples = zip(weights, parts, factors, strict=True)
        kept = [functional.shrunk_edges(w, part, score / factor, power) for w, part, factor in triples]
    return torch.cat([one.reshape(-1) for one in kept])


def _rows(
    weights: list[Tensor], power: float | None, masked: bool, dtype: torch.dtype, following: bool
) -> tuple[Tensor, Tensor, Tensor]:
    length, first = begins_of(weights)[-1], weights[0]
    flat = first.new_empty(0 if power is None else length, dtype=dtype)
    precise = torch.promote_types(first.dtype, torch.float32)
    thresholds = first.new_empty(len(weights) if following else 0, dtype=precise)
    return flat, first.new_empty(length if masked else 0, dtype=torch.bool), thresholds


@functools.cache
def _kernels() -> Any:
    """The Triton kernels for CUDA, or None if Triton is not installed."""
    try:
        from wirings.selection import _select_many_cuda
    except ImportError:
        return None
    return _select_many_cuda


_library.impl("kept_of", _kept_of, "CompositeExplicitAutograd")


@torch.library.register_fake("wirings::kept_of", lib=_library)
def _(weights, ks, allowed, more, power, shared, masked, dtype, factors, following):  # type: ignore[no-untyped-def]
    return _rows(weights, power, masked, dtype, following)
