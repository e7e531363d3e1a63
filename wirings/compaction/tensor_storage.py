"""How weights are stored in a file: dense, as the entries that are not zero, or without repeated rows."""

from __future__ import annotations

import torch
from torch import Tensor

SPARSE_BELOW = 1 / 3
"""Tensors with a smaller share of nonzero entries are stored as places and values."""


def stored_parts(x: Tensor) -> dict[str, Tensor]:
    """The tensors that a tensor is stored as, by the suffix of their name.

    - ``""``: the tensor itself;
    - ``places`` and ``values``: the entries that are not zero;
    - ``few`` and ``along1``, ``along2``, …: maps without repeated rows and columns, and which row or column of them
      each one of the tensor is.
    """
    flat = x.reshape(-1)
    places = flat.nonzero().squeeze(1)
    if len(places) < SPARSE_BELOW * len(flat):
        return {"places": places.to(torch.int32), "values": flat[places].clone()}
    few, along = x, {}
    for dim in range(1, x.dim() if x.dim() < 4 and x.is_floating_point() else 0):
        few, inverse = torch.unique_consecutive(few, dim=dim, return_inverse=True)
        along[f"along{dim}"] = inverse.to(torch.int32)
    if few.numel() < SPARSE_BELOW * x.numel():
        return {"few": few.contiguous(), **along}
    return {"": x.contiguous().clone()}
