"""Limits on what a network from a stranger may take while it is built: a few lines of JSON can name any size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wirings.errors import WiringError
from wirings.train.memory_limit import bytes_of, bytes_to_make
from wirings.utils.text import printable, shortened

CONFIG_BYTES = 16 * 2**20
"""The largest description of a network that is read. Those of the largest models take a few hundred kilobytes."""
MIN_BYTES, MAX_RATIO = 64 * 2**20, 8
"""What any network may take while it is built, and what it may take as a multiple of its weights in the file. Networks
of the library take at most 2.2 times their weights."""
SPARSE_RATIO = 256
"""What weights that are stored by their edges may take in memory, as a multiple of what they take in the file, if that
is more than `MIN_BYTES`: a file without edges may claim any size. As for compact models, this leaves room for weights
of which one in 128 is not zero."""
MIN_CALLS, CALLS_PER_TENSOR = 10_000, 200
"""How many operators of PyTorch may be called. Networks of the library call at most 26 for each of their tensors."""
SMALL = 4096
"""Sizes up to this one are allowed for any network; a larger one cannot exceed the number of weights."""


def may_decode(stored: int, decoded: int) -> bool:
    """Whether weights that take ``stored`` bytes in a file may take ``decoded`` bytes in memory."""
    return decoded <= max(MIN_BYTES, SPARSE_RATIO * stored)


def check_decoded(stored: int, decoded: int) -> None:
    """Raise unless `may_decode`."""
    if not may_decode(stored, decoded):
        raise WiringError(f"its weights would take {decoded:,} bytes of memory, but those in the file take {stored:,}")


class BuildLimit(TorchDispatchMode):
    """Raises, in this thread and while active, before a network outgrows the weights that it is built for.

    Args:
        weights: the tensors that the network is going to load.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        stored = sum(x.numel() * x.element_size() for x in weights.values())
        self.bytes, self.calls = MIN_BYTES + MAX_RATIO * stored, MIN_CALLS + CALLS_PER_TENSOR * len(weights)
        self._stored, self._made, self._called = stored, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._called += 1
        if self._called > self.calls:
            raise WiringError(f"the network has many more layers than its weights file, which has {self._stored:,} B")
        self._made += bytes_to_make(func, args, kwargs)
        self._check(self._made)
        result = func(*args, **kwargs)
        self._check(bytes_of(result))
        return result

    def _check(self, size: int) -> None:
        if size > self.bytes:
            raise WiringError(
                f"the network takes more than {self.bytes / 2**20:,.0f} MiB, but its weights take {self._stored:,} "
                "bytes"
            )


def check_sizes(options: Any, weights: Mapping[str, Tensor]) -> None:
    """Raise if a network's options name a size that its weights cannot have, such as a billion nodes.

    A network has a weight for every channel, node, token and layer. Multiply-adds have no such limit.
    """
    largest = max(SMALL, sum(x.numel() for x in weights.values()))
    for name, value in options.items():
        for number in tree_leaves(value):
            if name != "mult_adds" and isinstance(number, (int, float)) and not abs(number) <= largest:
                shown = printable(shortened(f"{name} = {_shown(number)}", 80))
                raise WiringError(f"{shown} is out of proportion to the weights file, which has {largest:,} numbers")


def _shown(number: float) -> str:
    return str(number) if not isinstance(number, int) or number.bit_length() < 200 else f"about 2^{number.bit_length()}"
