"""What the tests of Triton kernels share."""

from typing import Any

import pytest
from helpers import INTERPRETED


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter, with two of its faults mended."""
    if not INTERPRETED:
        pytest.skip("runs only where TRITON_INTERPRET=1 is set")
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    patch_tensor, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patched(tensor: Any, scope: Any) -> None:  # NumPy no longer turns an array of one element into an int
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def dot_of_floats(self: Any, a: Any, b: Any, *rest: Any) -> Any:  # it would multiply bfloat16 bits as integers
        if a.dtype.scalar == tl.bfloat16:
            a, b = (
                interpreter.TensorHandle((h.data.astype(np.uint32) << 16).view(np.float32), tl.float32) for h in (a, b)
            )
        return dot(self, a, b, *rest)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot_of_floats)
