"""What the tests of Triton kernels share. They run on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1)."""

import os
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def on_gpu(test: Any) -> Any:
    needs = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.mark.gpu(needs(test))
