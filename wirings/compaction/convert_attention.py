"""Convert PyTorch's attention, of tokens and within windows, to the operation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from wirings.compaction.aten import Arguments, BatchConstant, ProgramTensor, converts_views, view_of
from wirings.compaction.axes import Axes, Factor, merged
from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.operations.arrange import arrange
from wirings.compaction.operations.attention import Attention
from wirings.compaction.operations.reshape import Reshape
from wirings.compaction.operations.torch_operator import InputRef, TorchOperator


@converts_views("scaled_dot_product_attention")
def _attention(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
    mask, scale = a.get("attn_mask"), a.get("scale")
    if isinstance(mask, BatchConstant):
        mask = mask.value
    if a.get("dropout_p") or not (mask is None or isinstance(mask, (Tensor, ProgramTensor))):
        return None
    flags = (False, a.get("keys_turned", False), a.get("values_turned", False))
    given = [_with_heads(builder, a[name], flag) for name, flag in zip(("query", "key", "value"), flags, strict=True)]
    single = isinstance(a["query"], ProgramTensor) and _dims(builder, a["query"]) == 3
    if single and mask is not None:
        mask = mask.unsqueeze(-3) if isinstance(mask, Tensor) else None
        if mask is None:
            return None
    found = [_by_head(builder, x) for x in given]
    windows = None in found
    if windows:
        found = [_by_window(builder, x) for x in given]
    if any(x is None for x in found) or (windows and isinstance(mask, ProgramTensor)):
        return None
    (queries, heads, size, _), (keys, key_heads, _, tokens), (values, _, value_size, _) = found  # type: ignore[misc]
    if heads % key_heads or (heads != key_heads and not a.get("enable_gqa")):
        return None
    extra: tuple[str, ...] = ()
    if isinstance(mask, ProgramTensor):
        if mask.axes is not None or builder.values[mask.name].dim() != 4 or mask.name in builder.loose:
            return None
        extra, mask = (_as_bias(builder, mask),), None
    if mask is not None:
        mask = _as_mask(mask, builder.values[queries].dtype, heads, (builder.values[queries].shape[-1], tokens))
        if mask is None:
            return None
    per_window = a.get("window_mask")
    if per_window is not None:
        shape = 1, builder.values[queries].shape[2], 1, builder.values[queries].shape[-1], tokens
        if not windows or per_window.shape != shape:
            return None
        per_window = per_window[0, :, 0].to(builder.values[queries].dtype)
    causal = bool(a.get("is_causal"))
    if mask is not None and len(mask) == 1 and torch.equal(mask[0], torch.full_like(mask[0], -math.inf).triu(1)):
        causal, mask = True, None
    fields = {"sizes": (size,) * key_heads, "value_sizes": (value_size,) * key_heads, "sharing": heads // key_heads}
    fields |= {"scale": float(scale) if scale is not None else size**-0.5, "causal": causal}
    name = builder.add(Attention, (queries, keys, values, *extra), hint, mask=mask, window_mask=per_window, **fields)
    batch, _, *rows, tokens = builder.values[name].shape
    axes = Axes.plain(tuple(builder.values[name].shape)).reshaped((batch, heads, value_size, *rows, tokens))
    assert axes is not None
    order = (0, 3, 1, 4, 2) if windows else (0, 1, 3, 2)
    together = axes.permuted(order).reshaped((batch * math.prod(rows), heads, tokens, value_size))
    assert together is not None
    if flags[2]:
        together = together.permuted((0, 1, 3, 2))
    if single:
        together = Axes(together.stored, (together.dims[0], *together.dims[2:]))
    return ProgramTensor(name, None if together.is_plain else together)


def _dims(builder: ProgramBuilder, x: ProgramTensor) -> int:
    axes = view_of(builder, x)
    return 0 if axes is None else len(axes.dims)


def _with_heads(builder: ProgramBuilder, x: Any, turned: bool) -> Any:
    """A tensor as (batch, heads, tokens, size): without heads, there is one; ``turned``, it is (…, size, tokens)."""
    axes = view_of(builder, x)
    if axes is None or len(axes.dims) not in (3, 4):
        return x
    dims = axes.dims if len(axes.dims) == 4 else (axes.dims[0], (), *axes.dims[1:])
    dims = (*dims[:2], dims[3], dims[2]) if turned else dims
    made = Axes(axes.stored, dims)
    return ProgramTensor(x.name, None if made.is_plain else made)


def _by_head(builder: ProgramBuilder, x: Any) -> tuple[str, int, int, int] | None:
    """A model's (batch, heads, tokens, size), stored as (batch, heads · size, tokens): its name and these sizes."""
    axes = view_of(builder, x)
    if axes is None or len(axes.dims) != 4 or not axes.batch_first:
        return None
    _, heads, tokens, size = axes.shape
    channels = axes.dims[1] + axes.dims[3]
    whole = axes.permuted((0, 1, 3, 2)).reshaped((axes.shape[0], heads * size, tokens))
    if all(f.dim == 1 for f in channels) and whole is not None and whole.is_channels(1):
        name = x.name
        if len(axes.stored) != 3:  # the tokens are those of an image
            in_order = whole.dims[2] == _all_pixels(axes.stored)
            if not in_order:
                return None
            name = builder.add(Reshape, (name,), "tokens", shape=(tokens,))
        return name, heads, size, tokens
    if whole is None:
        return None
    return arrange(builder, x.name, whole, "heads"), heads, size, tokens


def _by_window(builder: ProgramBuilder, x: Any) -> tuple[str, int, int, int] | None:
    """A model's (batch · windows, heads, tokens, size), stored as (batch, heads · size, windows, tokens)."""
    axes = view_of(builder, x)
    if axes is None or len(axes.dims) != 4:
        return None
    batch = Axes.plain(axes.stored).dims[0]
    windows = axes.dims[0][len(batch) :]
    others = (*windows, *(f for own in axes.dims[1:] for f in own))
    if axes.dims[0][: len(batch)] != batch or not windows or any(f.dim == 0 for f in others):
        return None
    moved = Axes(axes.stored, (batch, merged(axes.dims[1] + axes.dims[3]), windows, axes.dims[2]))
    _, heads, tokens, size = axes.shape
    return arrange(builder, x.name, moved, "windows"), heads, size, tokens


def _as_bias(builder: ProgramBuilder, mask: ProgramTensor) -> str:
    """A mask that depends on the input, as numbers to add."""
    if builder.values[mask.name].dtype != torch.bool:
        return mask.name
    key = (mask.name, "bias")
    if key not in builder.arranged:
        arguments = (InputRef(0), 0.0, -math.inf)
        fields = {"target": "aten::where.Scalar", "arguments": arguments}
        builder.arranged[key] = builder.add(TorchOperator, (mask.name,), "mask", **fields)
    return builder.arranged[key]


def _all_pixels(stored: tuple[int, ...]) -> tuple[Factor, ...]:
    """The factors of all pixels in order."""
    return tuple(Factor(d, n, 1) for d, n in enumerate(stored) if d > 1 and n > 1)


def _as_mask(mask: Any, dtype: torch.dtype, heads: int, tokens: tuple[int, int]) -> Tensor | None:
    """A constant mask as numbers to add, (1 or heads, tokens, tokens); None if it differs between examples."""
    if not isinstance(mask, Tensor) or mask.dim() > 4:
        return None
    mask = mask.reshape(*[1] * (4 - mask.dim()), *mask.shape)
    if mask.shape[0] != 1:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -math.inf)
    return mask[0].to(dtype).expand(heads if mask.shape[1] > 1 else 1, *tokens).clone()
