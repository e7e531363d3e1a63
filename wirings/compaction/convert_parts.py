"""Convert PyTorch's operators that take parts of tensors and join them, for tensors with any `Axes`.

The functions are registered in `wirings.compaction.aten`, like those of `wirings.compaction.convert_views`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wirings.compaction.aten import Arguments, BatchConstant, ProgramTensor, converts_views, view_of, viewed
from wirings.compaction.axes import Axes, Factor
from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.convert_views import changed_axes
from wirings.compaction.operations.add import Add
from wirings.compaction.operations.add_map import AddMap
from wirings.compaction.operations.arrange import stored_with_channels
from wirings.compaction.operations.concat import Concat
from wirings.compaction.operations.crop import Crop
from wirings.compaction.operations.pad import Pad
from wirings.compaction.operations.reshape import Reshape
from wirings.compaction.operations.select_channels import SelectChannels


def take(builder: ProgramBuilder, hint: str, x: ProgramTensor, dim: int, first: int, last: int, step: int) -> Any:
    """Some entries of a dimension: of channels, or of the pixels along one dimension of maps."""
    axes = view_of(builder, x)
    if axes is None:
        return None
    dim %= len(axes.dims)
    size, count = axes.shape[dim], len(range(first, last, step))
    if count == size:
        return x
    if len(axes.dims[dim]) != 1 or count < 1:
        return None
    ((which, _, _),) = axes.dims[dim]
    if which == 1:
        index = axes.channels_of_part(dim, torch.arange(first, last, step))
        made = builder.add(SelectChannels, (x.name,), hint, index=index)
        return viewed(builder, made, axes.without_part(dim, count))
    whole = axes.whole(dim)
    if whole is None or whole < 2:
        return None
    limits = [(0, int(n), 1) for n in axes.stored[2:]]
    limits[whole - 2] = (first, max(first, last), step)
    starts, stops, steps = zip(*limits, strict=True)
    made = builder.add(Crop, (x.name,), hint, starts=starts, stops=stops, steps=steps)
    return viewed(builder, made, axes.without_part(dim, count))


def _without_dim(builder: ProgramBuilder, x: Any, dim: int) -> Any:
    """A tensor without a dimension of size 1."""
    axes = view_of(builder, x)
    if axes is None:
        return None
    dims = tuple(own for d, own in enumerate(axes.dims) if d != dim % len(axes.dims))
    return changed_axes(x, dataclasses.replace(axes, dims=dims))


@converts_views("slice", "narrow")
def _slice(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
    x: Any = a["self"]
    axes = view_of(builder, x)
    if axes is None:
        return None
    dim, start, end, step = a.get("dim", 0) % len(axes.dims), a.get("start"), a.get("end"), a.get("step", 1)
    if "length" in a:
        end = start + a["length"] if isinstance(start, int) and isinstance(a["length"], int) else start
    if any(limit is not None and not isinstance(limit, int) for limit in (start, end, step)):
        return None
    if any(f.dim == 0 for f in axes.dims[dim]):
        return x if start in (None, 0) and (end is None or end >= 2**62) and step == 1 else None
    return take(builder, hint, x, dim, *slice(start, end, step).indices(axes.shape[dim]))


@converts_views("select")
def _select(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
    x, dim, index = a["self"], a["dim"], a["index"]
    axes = view_of(builder, x)
    if axes is None or not isinstance(index, int) or any(f.dim == 0 for f in axes.dims[dim]):
        return None
    index %= axes.shape[dim]
    part = take(builder, hint, x, dim, index, index + 1, 1)
    return None if part is None else _without_dim(builder, part, dim)


@converts_views("split", "split_with_sizes", "chunk")
@converts_views("unbind", single=True)
def _split(builder: ProgramBuilder, hint: str, a: Arguments, single: bool = False) -> Any:
    """Parts of a dimension; ``single`` ones have a size of 1 there, and lose it."""
    x, dim = a["self"], a.get("dim", 0)
    axes = view_of(builder, x)
    if axes is None or any(f.dim == 0 for f in axes.dims[dim]):
        return None
    count = axes.shape[dim]
    sizes: Any = 1 if single else a.get("split_size", a.get("split_sizes"))
    if "chunks" in a:
        sizes = -(-count // a["chunks"])
    if isinstance(sizes, Sequence) and not all(isinstance(size, int) for size in sizes):
        return None
    parts = torch.arange(count).split(list(sizes) if isinstance(sizes, Sequence) else sizes)
    if not all(len(part) for part in parts):
        return None
    made = [take(builder, hint, x, dim, int(part[0]), int(part[-1]) + 1, 1) for part in parts]
    if single:
        made = [None if part is None else _without_dim(builder, part, dim) for part in made]
    return None if any(part is None for part in made) else tuple(made)


@converts_views("cat")
def _cat(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
    parts, dim = [x for x in a["tensors"] if not (isinstance(x, Tensor) and not x.numel())], a.get("dim", 0)
    if len(parts) == 1:
        return parts[0]
    first = next((x for x in parts if isinstance(x, ProgramTensor) and x.axes is not None), None)
    first = first or next(x for x in parts if isinstance(x, ProgramTensor))
    axes = view_of(builder, first)
    if axes is None or not axes.batch_first:
        return None
    dim %= len(axes.dims)
    if dim == 0:
        return None
    if len(axes.dims[dim]) == 1 and axes.dims[dim][0].dim == 1:
        return _cat_channels(builder, hint, parts, axes, dim)
    return _cat_pixels(builder, hint, parts, axes, dim)


def _cat_channels(builder: ProgramBuilder, hint: str, parts: list[Any], axes: Axes, dim: int) -> Any:
    """Concatenate along a factor of the channels; further out factors make the parts alternate."""
    own = [view_of(builder, x) for x in parts]
    index, names, start, total = [], [], 0, 0
    for x, found in zip(parts, own, strict=True):
        if found is None or len(found.dims) != len(axes.dims) or len(found.dims[dim]) != 1:
            return None
        size = found.shape[dim]
        if found.dims[dim][0].dim != 1 or axes.without_part(dim, size) != found:
            return None
        index.append((start + torch.arange(found.stored[1])).view(-1, size, found.dims[dim][0].stride))
        names.append(x.name)
        start, total = start + found.stored[1], total + size
    made = builder.add(Concat, names, hint)
    order = torch.cat(index, 1).flatten()
    if not torch.equal(order, torch.arange(len(order))):
        made = builder.add(SelectChannels, (made,), hint, index=order)
    return viewed(builder, made, axes.without_part(dim, total))


def _cat_pixels(builder: ProgramBuilder, hint: str, parts: list[Any], axes: Axes, dim: int) -> Any:
    """Concatenate tokens: each part with zeros for the others, all of them added."""
    channels = next((d for d in range(len(axes.dims)) if d and axes.is_channels(d)), None)
    if channels is None or len(axes.dims) != 3:
        return None
    sizes = [(x.value if isinstance(x, BatchConstant) else x).shape[dim] if not isinstance(x, ProgramTensor)
             else view_of(builder, x).shape[dim] for x in parts]  # type: ignore[union-attr]  # fmt: skip
    tokens, features = sum(sizes), axes.shape[channels]
    names: list[str] = []
    shape = [1, features, features]
    shape[dim] = tokens
    constant = torch.zeros(
        shape, dtype=builder.values[next(x for x in parts if isinstance(x, ProgramTensor)).name].dtype
    )
    start = 0
    for x, size in zip(parts, sizes, strict=True):
        if isinstance(x, ProgramTensor):
            own = view_of(builder, x)
            found = None if own is None else stored_with_channels(builder, x.name, own, channels, hint)
            if found is None:
                return None
            name = found[0]
            if len(found[1].stored) != 3:
                if found[1].dims[dim] != tuple(
                    Factor(d, n, 1) for d, n in enumerate(found[1].stored) if d > 1 and n > 1
                ):
                    return None
                name = builder.add(Reshape, (name,), hint, shape=(size,))
            names.append(builder.add(Pad, (name,), hint, before=(start,), after=(tokens - start - size,)))
        else:
            value = x.value if isinstance(x, BatchConstant) else x
            if value.shape[0] != 1:
                return None
            constant.narrow(dim, start, size).copy_(value)
        start += size
    made = names[0] if len(names) == 1 else builder.add(Add, names, hint)
    order = (0, 2, 1) if channels == 2 else (0, 1, 2)
    if constant.any():
        made = builder.add(AddMap, (made,), hint, map=constant[0].permute(1, 0) if channels == 2 else constant[0])
    return viewed(builder, made, Axes.plain(tuple(builder.values[made].shape)).permuted(order))
