"""The threads of the compiled kernels: shared by networks, freed with the last of them, and made anew after a fork."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from typing import Protocol

_lock = threading.Lock()


class ThreadPool:
    """Threads of the compiled kernels, which sleep while no network runs.

    Args:
        library: the compiled kernels.
        threads: the number of threads, including the caller's.
    """

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.library = library
        self.pointer: int | None = library.wirings_pool(threads)
        if not self.pointer:
            raise MemoryError(f"not enough memory for {threads:,} threads")

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            self.library.wirings_free_pool(self.pointer)


_pools: weakref.WeakValueDictionary[tuple[ctypes.CDLL, int], ThreadPool] = weakref.WeakValueDictionary()


def shared_pool(library: ctypes.CDLL, threads: int) -> ThreadPool:
    """The thread pool that all networks with this number of threads share; it is freed once nobody refers to it."""
    with _lock:
        found = _pools.get((library, threads))
        if found is None:
            found = _pools[library, threads] = ThreadPool(library, threads)
        return found


class _Resettable(Protocol):
    def reset_after_fork(self) -> None: ...


_resettable: weakref.WeakSet[_Resettable] = weakref.WeakSet()


def reset_in_children(thing: _Resettable) -> None:
    """Have ``thing.reset_after_fork()`` called in every process that is forked from this one, while it is alive."""
    _resettable.add(thing)


def _after_fork() -> None:
    """A forked process has none of the threads, but copies of the locks that they held."""
    global _lock
    _lock = threading.Lock()
    for pool in list(_pools.values()):
        pool.pointer = None  # there is nobody to stop
    _pools.clear()
    for thing in list(_resettable):
        thing.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
