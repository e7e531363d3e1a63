"""How files store tensors in few bytes: only their real edges, and on request with less precision.

An encoded tensor is described in JSON by its ``shape``, its ``dtype`` in memory, and ``bits`` if only its edges are
stored. It consists of up to three tensors, whose names in a file are the tensor's name and a suffix:

- ``values``: the weights of the edges in the order of their places, or of all entries of a dense tensor;
- ``places``, with ``bits``: where the edges are, by `wirings.utils.gap_code`;
- ``scales``, if values are rounded to int8: a float32 for every row (index of the first dimension), or one for a
  vector. A weight is its int8 times the scale of its row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wirings.errors import WiringError, unknown
from wirings.utils.gap_code import pack_places, unpack_places

ROUNDED = ("float32", "float16", "bfloat16", "int8")
"""The types that weights can be rounded to in a file."""
OVERHEAD = 256
"""What the description of an encoded tensor takes in a file, roughly, in bytes. It has to save more."""
PARTS = ("values", "places", "scales")

Description = dict[str, Any]
_TYPES = {
    str(x).removeprefix("torch."): x
    for x in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16,
              torch.int32, torch.int64, torch.bool)
}  # fmt: skip
_MAX_DIMENSIONS = 16


def rounding_type(dtype: str | torch.dtype | None) -> str | None:
    """The name of a type that weights can be rounded to; raises for others."""
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    if name is not None and name not in ROUNDED:
        raise unknown("dtype", name, ROUNDED)
    return name


def encode(
    x: Tensor, dtype: str | None = None, edges: Tensor | None = None
) -> tuple[dict[str, Tensor], Description | None]:
    """Store a tensor in as few bytes as possible.

    Zeros are not edges: -0.0 becomes 0.0 where only edges are stored. All other values are kept bit for bit, infinities
    and NaN included, unless they are rounded.

    Args:
        x: any tensor of one of PyTorch's plain types.
        dtype: one of `ROUNDED`, to which floating-point weights are rounded if it is smaller than their own. Vectors
            are not rounded, except for those with ``edges``, and neither are tensors with values beyond its range.
            A weight that is not zero does not become zero.
        edges: a mask of the edges to store, those that weigh zero included; by default, all that are not zero.

    Returns:
        The stored tensors by suffix and the description of ``x``; ``x`` itself as ``""`` and None if it is stored as it
        is.
    """
    name = str(x.dtype).removeprefix("torch.")
    if x.layout != torch.strided or name not in _TYPES:
        raise WiringError(f"expected a dense tensor of type {', '.join(_TYPES)}, got {x.layout}, {x.dtype}.")
    flat = x.detach().cpu().contiguous().view(-1)
    real = flat != 0 if edges is None else edges.detach().cpu().reshape(-1)
    count = int(torch.count_nonzero(real))
    rounds = dtype is not None and x.is_floating_point() and len(flat) > 0 and (x.dim() > 1 or edges is not None)
    size = min(_TYPES[dtype].itemsize, x.element_size()) if rounds and dtype else x.element_size()
    description = describe_plain(x)
    places, parts = None, {}
    # Without places, the edges are all that is not zero: those that weigh zero need places also where all are real.
    given = edges is not None and (count < len(flat) or bool((flat == 0).any()))
    if given or (count < len(flat) and edges is None and (len(flat) - count) * size > OVERHEAD):
        found = np.flatnonzero(real.numpy())
        bits, code = pack_places(found)
        if given or len(code) + count * size + OVERHEAD < len(flat) * size:
            places, description["bits"], parts["places"] = torch.from_numpy(found), bits, torch.from_numpy(code)
    values = flat if places is None else flat[places]
    rounded = _rounded(values, places, x.shape, str(dtype)) if rounds and size < x.element_size() else None
    if rounded is None and places is None:
        return {"": flat.view(x.shape).clone()}, None
    return {**(rounded or {"values": values}), **parts}, description


def _rounded(values: Tensor, places: Tensor | None, shape: torch.Size, dtype: str) -> dict[str, Tensor] | None:
    """The values in a smaller type; None if that cannot represent them."""
    if dtype == "int8":
        rows = _rows(len(values) if places is None else places, shape)
        largest = torch.zeros(shape[0] if len(shape) > 1 else 1).scatter_reduce(0, rows, values.abs().float(), "amax")
        scales = (largest / 127).clamp_min(torch.finfo(torch.float32).tiny)
        made = (values.float() / scales[rows]).round_().clamp_(-127, 127)
        made = torch.where(made == 0, values.sign().float(), made)
        fits = bool(torch.isfinite(largest).all() and torch.isfinite(127 * scales).all())
        return {"values": made.to(torch.int8), "scales": scales} if fits and not values.isnan().any() else None
    made = values.to(_TYPES[dtype])
    limits = torch.finfo(made.dtype)
    least = torch.full_like(made, limits.smallest_normal * limits.eps)  # the smallest subnormal number
    made = torch.where((made == 0) & (values != 0), least.copysign(values.sign().to(made.dtype)), made)
    return {"values": made} if torch.equal(made.isfinite(), values.isfinite()) else None


def _rows(places: Tensor | int, shape: torch.Size | list[int]) -> Tensor:
    """The row of every place; of all entries if only their number is given."""
    places = torch.arange(places) if isinstance(places, int) else places
    return places // max(math.prod(shape[1:]), 1) if len(shape) > 1 else torch.zeros_like(places)


# ---- reading --------------------------------------------------------------------------------------------------------


def check_description(about: Any) -> None:
    """Raise unless this describes an encoded tensor. Nothing is known about its parts yet."""
    keys = set(about) if isinstance(about, dict) else set()
    shape = about["shape"] if {"shape", "dtype"} <= keys <= {"shape", "dtype", "bits"} else None
    valid = isinstance(shape, list) and len(shape) <= _MAX_DIMENSIONS and about["dtype"] in list(_TYPES)
    valid = valid and all(type(n) is int and 0 <= n < 2**31 for n in shape or ()) and math.prod(shape or ()) < 2**48
    if not valid or type(about.get("bits", 0)) is not int:
        raise WiringError("expected tensors with a shape, a type and bits")


def describe_plain(x: Tensor) -> Description:
    """The shape and type of a tensor, as in the description of an encoded one."""
    return {"shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch.")}


def decoded_bytes(about: Mapping[str, Any]) -> int:
    """The memory that a tensor takes once it is decoded."""
    return math.prod(about["shape"]) * _TYPES[about["dtype"]].itemsize


def part_names(name: str, about: Mapping[str, Any], stored: Mapping[str, Tensor]) -> dict[str, str]:
    """The names of a tensor's parts in a file, by suffix. Whether there are scales is up to the file."""
    needed = ["values", *(["places"] if "bits" in about else [])]
    if f"{name}.scales" in stored:
        needed.append("scales")
    if missing := [part for part in needed if f"{name}.{part}" not in stored]:
        raise WiringError(f"expected a tensor {name[:60]}.{missing[0]}")
    return {part: f"{name}.{part}" for part in needed}


def decode(parts: Mapping[str, Tensor], about: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """A tensor that `encode` has stored, and the places of its edges if only these are stored.

    The caller has checked the description, and that the tensor may take so much memory.

    Raises:
        WiringError: if the parts do not match the description or each other.
    """
    shape, dtype, values = about["shape"], _TYPES[about["dtype"]], parts["values"]
    size, places, scales = math.prod(shape), None, parts.get("scales")
    if "bits" in about:
        code = parts["places"]
        if code.dtype != torch.uint8 or code.dim() != 1:
            raise WiringError("expected places as bytes")
        places = torch.from_numpy(unpack_places(code.numpy(), about["bits"], values.numel(), size))
    if values.dim() != 1 or len(values) != (size if places is None else len(places)):
        raise WiringError(f"expected a value for each of {size if places is None else len(places):,} places")
    _check_types(values, dtype, scales, shape)
    if scales is not None:
        values = values.float() * scales[_rows(len(values) if places is None else places, shape)]
    values = values.to(dtype)
    if places is None:
        return values.view(shape), None
    return values.new_zeros(size).index_copy(0, places, values).view(shape), places


def _check_types(values: Tensor, dtype: torch.dtype, scales: Tensor | None, shape: list[int]) -> None:
    smaller = values.dtype.is_floating_point and values.element_size() < dtype.itemsize
    rounded = dtype.is_floating_point and (values.dtype == torch.int8 if scales is not None else smaller)
    if not rounded and (values.dtype != dtype or scales is not None):
        raise WiringError(f"expected values of type {dtype} or rounded ones, got {values.dtype}")
    rows = shape[0] if len(shape) > 1 else 1
    if scales is not None and (scales.dtype != torch.float32 or list(scales.shape) != [rows]):
        raise WiringError(f"expected {rows:,} scales of type float32")
