"""Helpers for GPU tests. Tests of Triton kernels also run in Triton's interpreter (TRITON_INTERPRET=1)."""

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def on_gpu(test: Any) -> Any:
    """Mark a test that needs a CUDA device, not Triton's interpreter."""
    needs = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.mark.gpu(needs(test))


@contextlib.contextmanager
def without_waiting() -> Iterator[None]:
    """Raise an error if the host synchronizes with the GPU inside this context."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
