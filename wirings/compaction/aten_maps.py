"""PyTorch's operators on maps and channels as operations of a program: means, pools, slices, splits, other shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wirings.compaction.aten import Arguments, Value, has_channels, lowers, spread
from wirings.compaction.builder import Builder
from wirings.compaction.operations import Crop, Flatten, Mean, Pad, Pool, Reshape, Select


@lowers("mean")
def _mean(builder: Builder, hint: str, a: Arguments) -> Any:
    x, dims = a["self"], a.get("dim")
    if not has_channels(builder, x) or not dims or a.get("dtype") is not None:
        return None
    count = builder.values[x.name].dim()
    if sorted(d % count for d in dims) != list(range(2, count)):
        return None
    return Value(builder.add(Mean, (x.name,), hint, keep=bool(a.get("keepdim", False))))


@lowers("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d")
def _pool(builder: Builder, hint: str, a: Arguments) -> Any:
    x: Any = a["self"]
    dims = int(hint.split("pool")[1][0])
    if not has_channels(builder, x) or builder.values[x.name].dim() != dims + 2 or a.get("divisor_override"):
        return None
    kernel = spread(a["kernel_size"], dims)
    settings = {
        "kind": hint[:3],
        "kernel": kernel,
        "stride": spread(a.get("stride") or kernel, dims),
        "padding": spread(a.get("padding", 0), dims),
        "dilation": spread(a.get("dilation", 1), dims),
        "ceil": bool(a.get("ceil_mode", False)),
        "count_padding": bool(a.get("count_include_pad", True)),
    }
    return Value(builder.add(Pool, (x.name,), hint, **settings))


@lowers("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def _adaptive_pool(builder: Builder, hint: str, a: Arguments) -> Any:
    x: Any = a["self"]
    dims = int(hint.split("pool")[1][0])
    if not has_channels(builder, x) or builder.values[x.name].dim() != dims + 2:
        return None
    size = spread(a["output_size"], dims)
    if set(size) == {1}:
        return Value(builder.add(Mean, (x.name,), hint, keep=True))
    return Value(builder.add(Pool, (x.name,), hint, kind="adaptive_avg", kernel=size, stride=size))


@lowers("pad", "constant_pad_nd")
def _pad(builder: Builder, hint: str, a: Arguments) -> Any:
    x, sides = a["self"], list(a["pad"])
    if a.get("mode", "constant") != "constant" or a.get("value") not in (None, 0) or not has_channels(builder, x):
        return None
    dims = builder.values[x.name].dim() - 2
    if len(sides) > 2 * dims or min(sides, default=0) < 0:
        return None
    sides += [0] * (2 * dims - len(sides))
    before, after = tuple(sides[::2][::-1]), tuple(sides[1::2][::-1])
    return Value(builder.add(Pad, (x.name,), hint, before=before, after=after))


@lowers("slice")
def _slice(builder: Builder, hint: str, a: Arguments) -> Any:
    x, step = a["self"], a.get("step", 1)
    if not has_channels(builder, x):
        return None
    shape = builder.values[x.name].shape
    dim = a.get("dim", 0) % len(shape)
    start, end = a.get("start"), a.get("end")
    if any(isinstance(limit, Value) for limit in (start, end, step)):
        return None
    if dim == 0:  # the batch: all of it, or not understood
        return x if start in (None, 0) and (end is None or end >= 2**62) and step == 1 else None
    first, last, step = slice(start, end, step).indices(shape[dim])
    if dim == 1:
        return Value(builder.add(Select, (x.name,), hint, index=torch.arange(first, last, step)))
    places = [(0, int(size), 1) for size in shape[2:]]
    places[dim - 2] = (first, max(first, last), step)
    starts, stops, steps = zip(*places, strict=True)
    return Value(builder.add(Crop, (x.name,), hint, starts=starts, stops=stops, steps=steps))


@lowers("copy", "slice_scatter")
def _written(builder: Builder, hint: str, a: Arguments) -> Any:
    """In-place changes of all of a tensor, ``x[:] += y``; of some of it they are not understood."""
    x, source, end = a["self"], a["src"], a.get("end")
    if not has_channels(builder, x) or not has_channels(builder, source):
        return None
    whole = a.get("start") in (None, 0) and (end is None or end >= 2**62) and a.get("step", 1) == 1
    before, after = builder.values[x.name], builder.values[source.name]
    return source if whole and (before.shape, before.dtype) == (after.shape, after.dtype) else None


@lowers("split", "split_with_sizes", "chunk")
def _split(builder: Builder, hint: str, a: Arguments) -> Any:
    x, dim = a["self"], a.get("dim", 0)
    if not has_channels(builder, x) or dim % builder.values[x.name].dim() != 1:
        return None
    count = builder.channels(x.name)
    if "chunks" in a:
        sizes: Any = -(-count // a["chunks"])
    else:
        sizes = a.get("split_size", a.get("split_sizes"))
    if isinstance(sizes, Sequence) and not all(isinstance(size, int) for size in sizes):
        return None
    numbers = torch.arange(count).split(list(sizes) if isinstance(sizes, Sequence) else sizes)
    return tuple(Value(builder.add(Select, (x.name,), hint, index=index.clone())) for index in numbers)


@lowers("index_select")
def _index_select(builder: Builder, hint: str, a: Arguments) -> Any:
    x, index = a["self"], a["index"]
    if not has_channels(builder, x) or not isinstance(index, Tensor) or a["dim"] % builder.values[x.name].dim() != 1:
        return None
    return Value(builder.add(Select, (x.name,), hint, index=index.long()))


@lowers("index")
def _index(builder: Builder, hint: str, a: Arguments) -> Any:
    x, indices = a["self"], list(a["indices"])
    plain = len(indices) == 2 and indices[0] is None and isinstance(indices[1], Tensor) and indices[1].dim() == 1
    if not has_channels(builder, x) or not plain or indices[1].dtype == torch.bool:
        return None
    return Value(builder.add(Select, (x.name,), hint, index=indices[1] % builder.channels(x.name)))


@lowers("view", "reshape", "_unsafe_view", "flatten", "squeeze", "unsqueeze", "unflatten")
def _reshape(builder: Builder, hint: str, a: Arguments) -> Any:
    x, shape = a["self"], a["out"]  # the tracer says which shape comes out, if the batch stays where it was
    if not has_channels(builder, x) or shape is None or len(shape) < 2:
        return None
    channels, *maps = builder.values[x.name].shape[1:]
    if shape[1] == channels and math.prod(shape[2:]) == math.prod(maps):
        return x if list(shape[2:]) == maps else Value(builder.add(Reshape, (x.name,), hint, shape=tuple(shape[2:])))
    if len(shape) == 2 and shape[1] == channels * math.prod(maps):
        return Value(builder.add(Flatten, (x.name,), hint))
    return None


@lowers("clone", "contiguous", "alias", "detach", "dropout", "feature_dropout", "lift_fresh_copy", "_to_copy", "to")
def _same(builder: Builder, hint: str, a: Arguments) -> Any:
    x: Any = next(iter(a.values()))
    if not has_channels(builder, x) or a.get("train") or a.get("dtype") not in (None, builder.values[x.name].dtype):
        return None
    return x
