"""Choosing k edges on a CPU, with NumPy's vectorised selection; see `wirings.edges` for what is chosen."""

import numpy as np
import torch
from torch import Tensor

from wirings.errors import WiringError

# The bits of a float without its sign, read as an integer, order as its magnitude does.
KEYS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
INFINITY = {dtype: torch.tensor(float("inf"), dtype=dtype).view(key).item() for dtype, key in KEYS.items()}


def keys_of(weight: Tensor, allowed: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Integers that order as the magnitudes do, in ``weight``'s own layout; -1 where no edge is allowed."""
    key = KEYS[weight.dtype]
    keys = torch.bitwise_and(weight.view(key), torch.iinfo(key).max, out=out)
    return keys if allowed is None else keys.masked_fill_(~allowed, -1)


def _flat(tensor: Tensor) -> Tensor:
    """All entries as one row in the order of memory, without a copy where they fill their memory."""
    dims = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(dims).reshape(-1)


def _boundary(keys: Tensor, k: int) -> tuple[int, int]:
    """The smallest key among the ``k`` largest and the largest among the rest, 0 < k < n. Reorders ``keys``.

    NumPy's selection is vectorised for integers, several times faster than `torch.kthvalue` or `torch.topk`.
    """
    row = keys.numpy()
    last_out = row.size - k - 1
    row.partition(last_out)
    return int(row[last_out + 1 :].min()), int(row[last_out])


def _surplus(keys: Tensor, least: int, k: int) -> np.ndarray:
    """Row-major positions to drop from ``keys >= least`` to be left with ``k``: the last among the equals."""
    rows = keys.reshape(-1)
    keep = k - int(torch.count_nonzero(rows > least))
    return np.flatnonzero((rows == least).numpy())[keep:]


def choose(weight: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor:
    count = _checked(weight, k)
    keys = keys_of(weight, allowed)
    if count == 0:
        return torch.zeros_like(keys, dtype=torch.bool)
    if count == keys.numel():
        least = next_out = int(keys.min())
    else:
        least, next_out = _boundary(_flat(keys).clone(), count)
    if least < 0:
        most = int(torch.count_nonzero(keys >= 0))
        raise WiringError(f"k = {count} edges were asked for, but only {most} are allowed; lower k or allow more.")
    real = keys >= least
    if least == next_out:
        real[_position(real, _surplus(keys, least, count))] = False
    return real


def real_edges(weight: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor:
    count, out = _checked(weight, k), torch.empty_like(weight)
    if count == 0:
        return out.zero_()
    if allowed is not None:
        return torch.where(choose(weight, k, allowed), weight, 0.0)
    if count == weight.numel():
        return out.copy_(weight)
    # One buffer serves twice: as the keys to be reordered, then as the result.
    least, next_out = _boundary(_flat(keys_of(weight, None, out=out.view(KEYS[weight.dtype]))), count)
    if least > INFINITY[weight.dtype]:  # k NaN or more
        return torch.where(choose(weight, k, None), weight, 0.0)
    if least == 0:  # fewer than k edges differ from zero
        return out.copy_(weight)
    if least > next_out:  # no tie at the boundary: one pass sets all others to zero
        return torch.ops.aten.hardshrink.out(weight, _value(next_out, weight.dtype), out=out)
    torch.ops.aten.hardshrink.out(weight, _value(least - 1, weight.dtype), out=out)
    out[_position(out, _surplus(keys_of(weight, None), least, count))] = 0
    return out


def _checked(weight: Tensor, k: Tensor) -> int:
    count = int(k)
    if not 0 <= count <= weight.numel():
        raise out_of_range(weight, count)
    return count


def out_of_range(weight: Tensor, k: int) -> WiringError:
    return WiringError(
        f"k must lie between 0 and the {weight.numel()} edges of a weight of shape {tuple(weight.shape)}, not be {k}."
    )


def _value(key: int, dtype: torch.dtype) -> float:
    return torch.tensor(key, dtype=KEYS[dtype]).view(dtype).item()


def _position(tensor: Tensor, flat: np.ndarray) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(index) for index in np.unravel_index(flat, tuple(tensor.shape)))
