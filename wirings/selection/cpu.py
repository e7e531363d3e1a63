"""Choosing k edges on a CPU with NumPy's vectorized selection. `functional` defines which edges are chosen."""

import numpy as np
import torch
from torch import Tensor

from wirings.errors import WiringError

# The bits of a float without its sign, read as an integer, order like its magnitude.
KEYS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
MAGNITUDE = {key: torch.iinfo(key).max for key in KEYS.values()}  # all bits but the sign
INFINITY = {dtype: torch.tensor(float("inf"), dtype=dtype).view(key).item() for dtype, key in KEYS.items()}


def keys_of(weight: Tensor, allowed: Tensor | None) -> Tensor:
    """Integers that order like the magnitudes, in the memory format of ``weight``; -1 where no edge is allowed."""
    key = KEYS[weight.dtype]
    keys = torch.bitwise_and(weight.view(key), MAGNITUDE[key])
    return keys if allowed is None else keys.masked_fill_(~allowed, -1)


def choose(weight: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor:
    """Mark the ``k`` edges of largest magnitude."""
    count, out = _checked(weight, k), torch.empty_like(weight, dtype=torch.bool)
    if 0 in weight.stride():  # an expanded weight, whose edges share memory
        return out.copy_(choose(weight.contiguous(), k, allowed))
    if count == 0:
        return out.zero_()
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
            raise WiringError(
                f"k = {count} edges were requested, but only {count - missing} are allowed; lower k or allow more."
            )
        real[_first(weight, keys == next_out, missing)] = True
    return out


def real_edges(weight: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor:
    """The ``k`` edges of largest magnitude, zeros elsewhere."""
    count, out = _checked(weight, k), torch.empty_like(weight)
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
    torch.ops.aten.hardshrink.out(weight, _value(next_out, weight.dtype), out=out)  # zero up to there
    if missing and next_out:
        row = _row(weight.clone(), key)
        places = _first(weight, row & MAGNITUDE[key] == next_out, missing)
        _row(out, key)[places] = row[places]
    return out


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


def _value(key: int, dtype: torch.dtype) -> float:
    return torch.tensor(key, dtype=KEYS[dtype]).view(dtype).item()
