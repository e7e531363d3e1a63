"""A limit on the memory that a network takes while it is built: a line of settings can name any size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wirings.errors import WiringError
from wirings.utils.memory import installed_memory

TENSORS_PER_WEIGHT = 2
"""How much is made for each byte of a network while it is built, scores and masks included, at least."""
_META = torch.device("meta")


def bytes_of(result: Any) -> int:
    """The bytes of all tensors that an operator returned."""
    return sum(x.numel() * x.element_size() for x in tree_leaves(result) if isinstance(x, Tensor))


def bytes_to_make(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """The bytes that an operator makes from nothing, as those of weights do; 0 for others. Takes no memory."""
    if any(isinstance(x, Tensor) for x in tree_leaves((args, kwargs))):
        return 0
    if not any(one.name == "device" for one in func._schema.arguments):
        return 0
    generator = {"generator": None} if "generator" in kwargs else {}
    return bytes_of(func(*args, **{**kwargs, "device": _META, **generator}))


class MemoryLimit(TorchDispatchMode):
    """Raises, in this thread and while active, before a network is made that this machine's memory cannot hold.

    Without it, the system would kill the process, or another one, once the weights are written.
    """

    def __init__(self) -> None:
        super().__init__()
        self._installed, self._made = installed_memory(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        size = bytes_to_make(func, args, kwargs)
        self._made += size
        if size > self._installed or self._made > TENSORS_PER_WEIGHT * self._installed:
            raise WiringError(
                f"the model takes more memory than the {self._installed / 2**30:,.0f} GiB of this machine. Make it "
                "smaller: see model.options in the settings."
            )
        return func(*args, **kwargs)
