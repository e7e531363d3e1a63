"""How the compiled kernels compute each kind of operation: one file for an operation or for a family of them.

`kernel_for` registers a function that lowers an operation, and when the kernels can compute it; other operations run on
PyTorch. A step with a kernel of its own is declared in the same file (`wirings.engine.step.LoweredStep`). To add a
kernel: write it in a file in ``source/`` with a line in ``source/kernel_table.h``, and its step and its lowering in a
file here, which is imported below.
"""

from wirings.engine.operations import (  # noqa: F401 - they register kernels
    activation,
    affine,
    arrange,
    attention,
    cached_attention,
    channels,
    conv,
    crop,
    embedding,
    experts,
    indexed_tokens,
    linear,
    multiply,
    norms,
    pooling,
    recurrent,
)
from wirings.engine.operations.registry import KERNELS, kernel_for, lower, supports

__all__ = ["KERNELS", "kernel_for", "lower", "supports"]
