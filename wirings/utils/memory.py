"""Errors that say that memory could not be allocated."""

from __future__ import annotations

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
