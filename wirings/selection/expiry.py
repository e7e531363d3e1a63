"""What is dropped after every step of any optimizer: fused optimizers change weights without counting a version.

A step of any optimizer, in any thread: what its parameters share memory with is not known. So a step may drop what
another thread has made of other weights, which is then made again. Whoever drops what was made calls `expired` first
and only then drops it: otherwise what another thread makes meanwhile would be kept, but no longer expire.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import Any, Protocol
from weakref import WeakSet

from torch.optim.optimizer import register_optimizer_step_post_hook


class Expiring(Protocol):
    """Something that was made of weights."""

    def expire(self) -> None:
        """Drop what was made: the weights may have changed. May be called from any thread at any time."""


_made: WeakSet[Expiring] = WeakSet()
_lock = threading.RLock()  # a garbage collection in the middle may run anything


def expires_after_step(one: Expiring) -> None:
    """Have ``one`` expire after the next step of any optimizer."""
    with _lock:
        _made.add(one)
        _watch_optimizers()


def expired(one: Expiring) -> None:
    """Note that ``one`` has expired already."""
    with _lock:
        _made.discard(one)


def _expire_all(*_: Any) -> None:
    with _lock:
        made = list(_made)
    for one in made:
        one.expire()


@functools.cache
def _watch_optimizers() -> None:
    """Registered when the first one is made."""
    register_optimizer_step_post_hook(_expire_all)


def _renew_lock() -> None:
    """In a forked process nobody would release the lock if another thread held it."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
