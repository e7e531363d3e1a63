"""What is dropped after every step of any optimizer: fused optimizers change weights without counting a version."""

from __future__ import annotations

import functools
from typing import Any, Protocol
from weakref import WeakSet

from torch.optim.optimizer import register_optimizer_step_post_hook


class Expiring(Protocol):
    """Something that was made of weights."""

    def expire(self) -> None:
        """Drop what was made: the weights may have changed."""


_made: WeakSet[Expiring] = WeakSet()


def expires_after_step(one: Expiring) -> None:
    """Have ``one`` expire after the next step of any optimizer."""
    _made.add(one)
    _watch_optimizers()


def expired(one: Expiring) -> None:
    """Note that ``one`` has expired already."""
    _made.discard(one)


def _expire_all(*_: Any) -> None:
    for one in list(_made):
        one.expire()
    _made.clear()


@functools.cache
def _watch_optimizers() -> None:
    """Registered when the first one is made."""
    register_optimizer_step_post_hook(_expire_all)
