"""The memory of this machine, and errors that say that none could be allocated."""

from __future__ import annotations

import os

_TEXTS = (
    "can't allocate memory",
    "not enough memory",
    "CUDA out of memory",
    "failed to map segment",
    "bad_alloc",
    "can't start new thread",
    "could not create a primitive",  # oneDNN's
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python, PyTorch or the loader of libraries says that memory could not be allocated."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in _TEXTS)


def installed_memory() -> int:
    """Bytes of this machine's memory. The system kills a process that uses more, instead of refusing the allocation."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not available on every system
        return 2**63
