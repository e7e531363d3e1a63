"""What the compiled kernels take; ``source/kernel_step.h`` and ``source/engine.cpp`` have the same fields."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_void_p


class KernelStep(ctypes.Structure):
    """Which kernel runs, in how many tasks, and a pointer to the struct of its kind (`wirings.engine.step`)."""

    _fields_ = [("own", c_void_p), ("kind", c_int32), ("tasks", c_int32)]


class KernelArguments(ctypes.Structure):
    """The steps of a plan, their memory, and the tensors of a call; see ``source/engine.cpp``."""

    _fields_ = [
        *((name, c_void_p) for name in ("steps", "memories", "scratches", "inputs", "input_sizes", "outputs")),
        ("output_sizes", c_void_p),
        *((name, c_int32) for name in ("count", "input_count", "output_count", "apart")),
    ]


class ClampRange(ctypes.Structure):
    """The range that numbers are clamped to; 0 to infinity for a ReLU. See ``source/vectors.h``."""

    _fields_ = [("low", c_float), ("high", c_float)]
