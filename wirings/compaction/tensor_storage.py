"""How weights are stored in a file: dense, as the edges alone, or without repeated rows.

Edges and rounded weights are stored by `wirings.utils.encoded_tensors`. Files of schema 3 have the places of edges as
32-bit integers instead.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from wirings.compaction.operation import expect
from wirings.compaction.program import TORCH_CONSTANTS
from wirings.utils.encoded_tensors import (
    Description,
    check_description,
    decode,
    decoded_bytes,
    describe_plain,
    encode,
    part_names,
)

SPARSE_BELOW = 1 / 3
"""Maps are stored without repeated rows and columns if they have a smaller share of the entries, and fewer zeros."""
MAX_INDEX = 2**31
"""Of evenly spaced indices, the first, the step and the number are below it."""
FEW_INDICES = 8
"""Fewer indices are stored as they are."""
MAX_SHARED = 2**21
"""The most numbers of maps whose pixels are compared."""
FEW_ENTRIES = 64
"""Smaller tensors are stored as they are."""
_DTYPES = frozenset(x for x in TORCH_CONSTANTS.values() if isinstance(x, torch.dtype))


def stored_parts(
    x: Tensor, dtype: str | None = None, constant: bool = False
) -> tuple[dict[str, Tensor], Description | None]:
    """The tensors that a tensor is stored as, by the suffix of their name, and its description if it is encoded.

    - ``""``: the tensor itself;
    - ``values``, ``places`` and ``scales``: an encoded tensor;
    - ``few`` and ``along1``, ``along2``, …: maps without repeated rows and columns, and which row or column of them
      each one of the tensor is; ``along0``, too, if whole maps are repeated;
    - ``table`` and ``codes``: constants with few different numbers, and which of them each entry is; a table with two
      dimensions has the numbers of all maps, whose pixels share their codes;
    - ``small``: indices in a smaller type. Those that are evenly spaced have no tensor: their description has a
      ``range``, the first and the step.

    Args:
        x: the tensor.
        dtype: the type that weights are rounded to, as for `wirings.utils.encoded_tensors.encode`.
        constant: whether it is a map or mask, which models make from a few numbers, such as positions.
    """
    if x.dtype == torch.int64 and x.dim() == 1 and len(x) >= FEW_INDICES:
        return _stored_indices(x)
    if int(torch.count_nonzero(x)) >= SPARSE_BELOW * x.numel():
        few, along = _without_repeated_maps(x) if constant else (x, {})
        for dim in range(1, x.dim() if x.dim() < 4 and x.is_floating_point() else 0):
            few, inverse = torch.unique_consecutive(few, dim=dim, return_inverse=True)
            along[f"along{dim}"] = inverse.to(torch.int32)
        if few.numel() < SPARSE_BELOW * x.numel():
            return {"few": few.contiguous(), **along}, None
        if constant and dtype is None and (coded := _coded(x)) is not None:
            return coded, None
    return encode(x, dtype)


def _stored_indices(x: Tensor) -> tuple[dict[str, Tensor], Description | None]:
    """Indices, such as the channels that are selected, in few bytes."""
    first, step = int(x[0]), int(x[1] - x[0])
    even = torch.equal(x, first + step * torch.arange(len(x), device=x.device))
    if even and max(abs(first), abs(step)) < MAX_INDEX:
        return {}, {**describe_plain(x), "range": [first, step]}
    low, high = int(x.min()), int(x.max())
    for dtype in (torch.uint8, torch.int16, torch.int32):
        limits = torch.iinfo(dtype)
        if limits.min <= low and high <= limits.max:
            return {"small": x.to(dtype)}, None
    return {"": x.clone()}, None


def _without_repeated_maps(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Maps without those that are equal, bit for bit, to another one, such as the same positions for every head."""
    integers = {4: torch.int32, 8: torch.int64}.get(x.element_size())
    if integers is None or x.dim() not in (2, 3) or not x.is_floating_point() or not x.numel():
        return x, {}
    rows, inverse = torch.unique(x.contiguous().view(integers), dim=0, return_inverse=True)
    if len(rows) > len(x) // 2:
        return x, {}
    return rows.view(x.dtype), {"along0": inverse.to(torch.int32)}


def _coded(x: Tensor) -> dict[str, Tensor] | None:
    """A table of the different numbers of a tensor, bit for bit, and their places in it; None if that saves nothing."""
    integers = {4: torch.int32, 8: torch.int64}.get(x.element_size())
    if integers is None or not x.is_floating_point() or x.numel() < FEW_ENTRIES:
        return None
    bits = x.contiguous().view(integers).flatten()
    sample = bits[:: max(1, len(bits) // 4096)]
    if len(sample.unique()) > len(sample) // 2:  # sorting all of them would take long
        return None
    if x.dim() == 3 and len(x) > 1 and x.numel() <= MAX_SHARED:  # as of a bias for each head by relative position
        table, codes = bits.view(len(x), -1).unique(dim=1, return_inverse=True)
        if table.shape[1] <= codes.numel() // 4:
            small = codes.to(torch.uint8 if table.shape[1] <= 256 else torch.int16)
            return {"table": table.contiguous().view(x.dtype), "codes": small.view(x.shape[1:])}
    table, codes = bits.unique(return_inverse=True)
    if len(table) > min(x.numel() // 4, 2**15):
        return None
    small = codes.to(torch.uint8 if len(table) <= 256 else torch.int16)
    return {"table": table.view(x.dtype), "codes": small.view(x.shape)}


def is_constant(name: str) -> bool:
    """Whether the weight of an operation, named as in `Program.tensors`, may be a constant map or mask."""
    return name.rpartition(".")[2].rstrip("0123456789") in ("map", "mask", "window_mask", "held")


def equal_tensors(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Matrices and maps that are equal to an earlier one, such as tied weights, by name: the name of the first."""
    first: dict[Any, str] = {}
    found = {}
    for name, x in tensors:
        if x.dim() < 2 or x.numel() < FEW_ENTRIES:
            continue
        flat = x.detach().cpu().contiguous().view(-1)
        key = (x.dtype, x.numel(), hashlib.sha256(flat.view(torch.uint8).numpy().data).digest())
        if first.setdefault(key, name) != name:
            found[name] = first[key]
    return found


def rounded(x: Tensor, dtype: str | None) -> Tensor:
    """A tensor as it is after it was stored and loaded."""
    parts, about = stored_parts(x, dtype)
    return x if about is None or "range" in about else decode(parts, about)[0]


# ---- reading --------------------------------------------------------------------------------------------------------


def loaded_tensors(
    tensors: dict[str, Tensor], encoded: dict[str, Any], same: dict[str, Any], claimed: Any, limit: float, schema: str
) -> dict[str, Tensor]:
    """All weights as they are in memory. Their sizes are checked first.

    Args:
        tensors: the tensors in the file.
        encoded: the descriptions of encoded tensors; in schema 3, the shapes of sparse ones.
        same: for tensors that are equal to another one, its name and their shape.
        claimed: the recorded size of all weights in memory, in bytes.
        limit: the largest size that is allowed.
        schema: the schema of the file.
    """
    expect(all(x.dtype in _DTYPES for x in tensors.values()), "tensors of supported types")
    names = {}
    ranges = {name: about for name, about in encoded.items() if isinstance(about, dict) and "range" in about}
    expect(all(map(_is_range, ranges.values())), "the first of some indices, their step and their number")
    encoded = {name: about for name, about in encoded.items() if name not in ranges}
    for name, about in encoded.items():
        check_description({"shape": about, "dtype": "int8"} if schema == "3" else about)
        names[name] = part_names(name, {"bits": 0} if schema == "3" else about, tensors)
    few = [name.removesuffix(".few") for name in tensors if name.endswith(".few")]
    along = {name: [f"{name}.along{dim}" for dim in range(1, tensors[f"{name}.few"].dim())] for name in few}
    parts = {part for one in names.values() for part in one.values()}
    parts |= {f"{name}.few" for name in few} | {part for one in along.values() for part in one}
    coded = [name.removesuffix(".table") for name in tensors if name.endswith(".table")]
    parts |= {f"{name}.{part}" for name in coded for part in ("table", "codes")}
    again = {name: f"{name}.along0" for name in few if f"{name}.along0" in tensors}
    small = [name.removesuffix(".small") for name in tensors if name.endswith(".small")]
    parts |= {*again.values(), *(f"{name}.small" for name in small)}
    expect(parts <= set(tensors), "all the tensors that it names")
    made = {name: x for name, x in tensors.items() if name not in parts}
    sizes = {name: x.numel() * x.element_size() for name, x in made.items()}
    for name, about in encoded.items():
        old = schema == "3"
        sizes[name] = math.prod(about) * tensors[f"{name}.values"].element_size() if old else decoded_bytes(about)
    for name in few:
        x, counts = tensors[f"{name}.few"], [tensors[part].numel() for part in along[name]]
        expect(x.dim() > 0, "maps with repeated rows or columns")
        # Repeating only makes maps larger, so that nothing on the way takes more memory than the result.
        expect(all(count >= size for count, size in zip(counts, x.shape[1:], strict=True)), "every row and column")
        maps = tensors[again[name]].numel() if name in again else x.shape[0]
        expect(maps >= x.shape[0], "every map")
        sizes[name] = math.prod([maps, *counts]) * x.element_size()
    for name in coded:
        table = tensors[f"{name}.table"]
        expect(table.dim() in (1, 2), "a table of numbers")
        sizes[name] = tensors[f"{name}.codes"].numel() * table.element_size() * (len(table) if table.dim() == 2 else 1)
    sizes |= {name: decoded_bytes(about) for name, about in ranges.items()}
    for name in small:
        sizes[name] = 8 * tensors[f"{name}.small"].numel()
    for name, first in same.items():
        expect(isinstance(first, list) and len(first) == 2 and first[0] in sizes, f"a tensor that {name[:60]!r} equals")
    total = sum(sizes.values()) + sum(sizes[first] for first, _ in same.values())
    expect(type(claimed) is int and claimed == total, f"weights of {total:,} bytes, as recorded")
    expect(total <= limit, f"weights of at most {limit:,} bytes, got {total:,}; pass max_bytes to allow more")
    for name, about in encoded.items():
        expect(name not in made, f"one tensor {name[:60]!r}")
        own = {part: tensors[there] for part, there in names[name].items()}
        made[name] = _decoded_schema_3(own, about) if schema == "3" else decode(own, about)[0]
    for name in few:
        value = tensors[f"{name}.few"]
        expect(name not in made, f"one tensor {name[:60]!r}")
        for dim, part in enumerate(along[name], 1):
            value = value.index_select(dim, _indices(tensors[part], value.shape[dim]))
        if name in again:
            value = value.index_select(0, _indices(tensors[again[name]], len(value)))
        made[name] = value
    for name, about in ranges.items():
        expect(name not in made, f"one tensor {name[:60]!r}")
        first, step = about["range"]
        made[name] = first + step * torch.arange(about["shape"][0])
    for name in small:
        x = tensors[f"{name}.small"]
        expect(name not in made, f"one tensor {name[:60]!r}")
        expect(x.dim() == 1 and x.dtype in (torch.uint8, torch.int16, torch.int32), "indices as integers")
        made[name] = x.long()
    for name in coded:
        table, codes = tensors[f"{name}.table"], tensors[f"{name}.codes"]
        expect(name not in made, f"one tensor {name[:60]!r}")
        expect(codes.dtype in (torch.uint8, torch.int16) and codes.numel() > 0, "codes of numbers")
        expect(0 <= int(codes.min()) <= int(codes.max()) < table.shape[-1], f"codes from 0 to {table.shape[-1] - 1}")
        made[name] = table[..., codes.long()]
    for name, (first, shape) in same.items():
        expect(name not in made and first in made and first not in same, f"one tensor {name[:60]!r}")
        made[name] = made[first].reshape(shape)
    return made


def _decoded_schema_3(parts: dict[str, Tensor], shape: list[int]) -> Tensor:
    places, values = _indices(parts["places"], math.prod(shape)), parts["values"]
    expect(values.shape == places.shape and bool((places[1:] > places[:-1]).all()), "a value for each place")
    return values.new_zeros(math.prod(shape)).index_copy(0, places, values).view(shape)


def _is_range(about: dict[str, Any]) -> bool:
    """Whether this describes evenly spaced indices, all of which fit into 64 bits."""
    if set(about) != {"shape", "dtype", "range"} or about["dtype"] != "int64":
        return False
    lists = all(isinstance(x, list) for x in (about["shape"], about["range"]))
    if not lists or (len(about["shape"]), len(about["range"])) != (1, 2):
        return False
    return (
        all(type(n) is int and abs(n) < MAX_INDEX for n in (*about["shape"], *about["range"]))
        and about["shape"][0] >= 0
    )


def _indices(x: Tensor, size: int) -> Tensor:
    expect(x.dtype == torch.int32 and x.dim() == 1, "places as integers")
    expect(not len(x) or 0 <= int(x.min()) <= int(x.max()) < size, f"places from 0 to {size - 1}")
    return x.long()
