"""How the compiled kernels compute each kind of operation: one function pair for each class of operation.

`supports` says whether the kernels can compute an operation, `lower` adds it to the steps of a `Lowering`. Operations
without an entry run on PyTorch. To add a kernel: write it in ``source/``, and register a pair here with `kernel_for`.
"""

from wirings.engine.operations import channels, conv, elementwise, linear, maps, tokens  # noqa: F401 - they register kernels
from wirings.engine.operations.registry import KERNELS, kernel_for, lower, supports

__all__ = ["KERNELS", "kernel_for", "lower", "supports"]
