"""Finds out how much memory a computation takes at a time."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """While active, notes the entries of the largest tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.entries = max(self.entries, *(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor)), 0)
        return result
