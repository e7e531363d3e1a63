"""Setup of all tests: one thread per process, since tests run in parallel, and a fixed seed."""

import os
import sys
from collections.abc import Iterator
from typing import Any

# OpenMP reads this when PyTorch is imported. More threads than cores would make parallel test workers wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings
from kernels import INTERPRETED
from soak import SOAK

settings.register_profile("wirings", deadline=None, derandomize=True, max_examples=100 if SOAK else 50)
settings.load_profile("wirings")


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _same_path() -> Iterator[None]:
    """Scripts that a test runs may change where Python finds modules; later tests start processes that need them."""
    before = list(sys.path)
    yield
    sys.path[:] = before


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Long modules first, so that parallel workers end together, on short tests. Those that start processes come before
    # all others: a worker that has nothing left takes tests from the other's end, and would start the processes again.
    order = {item.path: 2 for item in items}
    for item in items:
        rank = 0 if "dist" in item.keywords else 1 if "slow" in item.keywords else 2
        order[item.path] = min(order[item.path], rank)
    items.sort(key=lambda item: order[item.path])
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter, with two of its bugs fixed."""
    if not INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1")
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    patch_tensor, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patched(tensor: Any, scope: Any) -> None:  # NumPy no longer converts a one-element array to an int
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def dot_of_floats(self: Any, a: Any, b: Any, *rest: Any) -> Any:  # instead of multiplying bfloat16 as integers
        if a.dtype.scalar == tl.bfloat16:
            a, b = (
                interpreter.TensorHandle((h.data.astype(np.uint32) << 16).view(np.float32), tl.float32) for h in (a, b)
            )
        return dot(self, a, b, *rest)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot_of_floats)
