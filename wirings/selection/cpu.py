"""Choosing k edges on a CPU: with the compiled kernel where there is one, otherwise with NumPy's vectorized selection.

`functional` defines which edges are chosen. Both ways give the same bits.
"""

import math
import struct
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from wirings.errors import WiringError
from wirings.selection import compiled
from wirings.selection.shrink import shrunk

# The bits of a float without its sign, read as an integer, order like its magnitude.
KEYS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
MAGNITUDE = {key: torch.iinfo(key).max for key in KEYS.values()}  # all bits but the sign
INFINITY = {dtype: torch.tensor(float("inf"), dtype=dtype).view(key).item() for dtype, key in KEYS.items()}

_INT32, _FLOAT32 = struct.Struct("i"), struct.Struct("f")


def keys_of(weight: Tensor, allowed: Tensor | None) -> Tensor:
    """Integers that order like the magnitudes, in the memory format of ``weight``; -1 where no edge is allowed."""
    key = KEYS[weight.dtype]
    keys = torch.bitwise_and(weight.view(key), MAGNITUDE[key])
    return keys if allowed is None else keys.masked_fill_(~allowed, -1)


def choose(weight: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor:
    """Mark the ``k`` edges of largest magnitude."""
    count, out = _checked(weight, k), torch.empty_like(weight, dtype=torch.bool)
    if (found := compiled.select(weight, count, allowed, mask=out)) is not None:
        return out if found[0] == count else _raise_too_few(count, found[0])
    if 0 in weight.stride():  # an expanded weight, whose edges share memory
        return out.copy_(choose(weight.contiguous(), k, allowed))
    if count == 0:
        return out.zero_()
    _mark(weight, count, allowed, out)
    return out


def _mark(weight: Tensor, count: int, allowed: Tensor | None, out: Tensor) -> int:
    """Mark the ``count`` edges of largest magnitude in ``out``; return the key of the next one, -1 if there is none."""
    key = KEYS[weight.dtype]
    keys = _row(torch.bitwise_and(weight.view(key), MAGNITUDE[key]))
    if allowed is not None:
        keys[~_row(out.copy_(allowed))] = -1
    next_out = _next_out(keys.copy(), count) if count < keys.size else -1
    real = _row(out)
    np.greater(keys, next_out, out=real)
    missing = count - int(np.count_nonzero(real))
    if missing:
        if next_out < 0:
            _raise_too_few(count, count - missing)
        real[_first(weight, keys == next_out, missing)] = True
    return next_out


def real_edges(weight: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor:
    """The ``k`` edges of largest magnitude, zeros elsewhere."""
    count, out = _checked(weight, k), torch.empty_like(weight)
    if (found := compiled.select(weight, count, allowed, kept=out)) is not None:
        return out if found[0] == count else _raise_too_few(count, found[0])
    if count == 0:
        return out.zero_()
    if allowed is not None or 0 in weight.stride():
        return torch.where(choose(weight, k, allowed), weight, 0.0)
    if count == weight.numel():
        return out.copy_(weight)
    # One buffer serves twice: for the keys to be reordered, then for the result.
    key = KEYS[weight.dtype]
    torch.bitwise_and(weight.view(key), MAGNITUDE[key], out=out.view(key))
    keys = _row(out, key)
    next_out = _next_out(keys, count)
    if next_out > INFINITY[weight.dtype]:  # more than k are NaN
        return torch.where(choose(weight, k, None), weight, 0.0)
    missing = int(np.count_nonzero(keys[-count:] == next_out))  # of the k largest: ties at the boundary
    torch.ops.aten.hardshrink.out(weight, _number(next_out, weight.dtype), out=out)  # zero up to there
    if missing:
        row = _row(weight.clone(), key)
        places = _first(weight, row & MAGNITUDE[key] == next_out, missing)
        _row(out, key)[places] = row[places]
    return out


def next_magnitude(weight: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor:
    """The magnitude of the strongest allowed edge that is not among the ``k`` strongest; 0 if there is none."""
    count = _checked(weight, k)
    found = compiled.select(weight, count, allowed)
    if found is None:
        return _strongest_but(weight, choose(weight, k, allowed), allowed)
    return _value(found[1], weight.dtype) if found[0] == count else _raise_too_few(count, found[0])


def shrunk_edges(weight: Tensor, k: Tensor, allowed: Tensor | None, power: float) -> Tensor:
    """The ``k`` edges of largest magnitude, shrunk by the magnitude of the next one, and zeros elsewhere.

    An edge w weighs sign(w) · (|w|ᵖ − tᵖ)^(1/p), with t from `next_magnitude` and p = ``power``; see `shrunk`. It is
    computed in float32 at least: in half precision the difference of two powers has no digits left.

    The powers are PyTorch's, on a row of the k edges in memory order: a compiled power would round differently.
    (PyTorch's own may differ in the last bit with the place in the row and the number of threads.)
    """
    if power == math.inf:
        return real_edges(weight, k, allowed)
    count, out = _checked(weight, k), torch.zeros_like(weight)
    order = compiled.memory_order(weight)
    if order is None:  # make the weight fill its memory
        weight = torch.empty_like(weight).copy_(weight)
        order = compiled.memory_order(weight)
    places, values, threshold = _compact(weight, count, k, allowed)
    size = values.abs().to(torch.promote_types(weight.dtype, torch.float32))
    used = shrunk(size, threshold.to(size.dtype), power).to(weight.dtype).copysign(values)
    (out.permute(order) if order else out).view(-1).scatter_(0, places, used)
    return out


def _compact(weight: Tensor, count: int, k: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The places in memory of the ``k`` strongest edges, their weights, and the magnitude of the next one."""
    places, values = torch.empty(count, dtype=torch.int64), weight.new_empty(count)
    found = compiled.select(weight, count, allowed, places=places, values=values)
    if found is None:
        real, order = torch.empty_like(weight, dtype=torch.bool), compiled.memory_order(weight)
        next_out = _mark(weight, count, allowed, real)
        row = weight.permute(order) if order else weight
        places = torch.from_numpy(np.flatnonzero(_row(real)))
        return places, row.reshape(-1).index_select(0, places), _value(max(next_out, 0), weight.dtype)
    if found[0] < count:
        _raise_too_few(count, found[0])
    return places, values, _value(found[1], weight.dtype)


def _strongest_but(weight: Tensor, real: Tensor, allowed: Tensor | None) -> Tensor:
    size = weight.abs().masked_fill_(real, 0.0)
    return (size if allowed is None else size.masked_fill_(~allowed, 0.0)).amax()


def _row(tensor: Tensor, dtype: torch.dtype | None = None) -> np.ndarray:
    """All entries as one row in memory order, without a copy if they fill their memory, as in any usual layout.

    Not for parameters: memory that NumPy has a view of cannot be freed and reallocated, as FSDP does.
    """
    if not tensor.is_contiguous():
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    row = tensor.reshape(-1)
    return (row if dtype is None else row.view(dtype)).numpy()


def _next_out(keys: np.ndarray, k: int) -> int:
    """The largest key that is not among the ``k`` largest, for k < n. Reorders ``keys``: the k largest come last.

    NumPy's selection is vectorized for integers, and several times faster than `torch.kthvalue` or `torch.topk`.
    """
    place = keys.size - k - 1
    keys.partition(place)
    return int(keys[place])


def _first(weight: Tensor, marked: np.ndarray, count: int) -> np.ndarray:
    """The memory positions of the first ``count`` marked edges in row-major order, whatever the memory format."""
    places = np.flatnonzero(marked)
    if not weight.is_contiguous():
        rows = torch.arange(weight.numel()).view(weight.shape)
        places = places[np.argsort(_row(torch.empty_like(weight, dtype=torch.int64).copy_(rows))[places])]
    return places[:count]


def _checked(weight: Tensor, k: Tensor) -> int:
    count = int(k)
    if not 0 <= count <= weight.numel():
        raise out_of_range(weight, count)
    return count


def out_of_range(weight: Tensor, k: int) -> WiringError:
    return WiringError(
        f"k must be between 0 and the {weight.numel()} edges of a weight of shape {tuple(weight.shape)}, got {k}."
    )


def _raise_too_few(count: int, possible: int) -> NoReturn:
    raise WiringError(f"k = {count} edges were requested, but only {possible} are allowed; lower k or allow more.")


def _value(key: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor(key, dtype=KEYS[dtype]).view(dtype)


def _number(key: int, dtype: torch.dtype) -> float:
    if dtype is torch.float32:  # the usual one, several times faster than with a tensor
        return float(_FLOAT32.unpack(_INT32.pack(key))[0])
    return float(_value(key, dtype))
