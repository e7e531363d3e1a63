"""Attention that is no layer: the products of queries, keys and values in ``F.scaled_dot_product_attention``."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Products(TorchFunctionMode):
    """While it is on: how many multiply-adds calls of ``scaled_dot_product_attention`` take, masked ones included.

    Those within `torch.nn.MultiheadAttention`, which is a layer and counted as one, are left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.mult_adds = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))  # in here the mode is off, and so it is within MultiheadAttention
        if func is F.scaled_dot_product_attention:
            self._count(out, *args, **(kwargs or {}))
        return out

    def _count(self, out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> None:
        self.calls += 1
        self.mult_adds += math.prod(out.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])
