"""One step for the compiled kernels; ``source/kernel_step.h`` has the same fields in the same order."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_void_p


class KernelStep(ctypes.Structure):
    """Which kernel runs, in how many tasks, and a pointer to the struct of its kind (`wirings.engine.step`)."""

    _fields_ = [("own", c_void_p), ("kind", c_int32), ("tasks", c_int32)]


class ClampRange(ctypes.Structure):
    """The range that numbers are clamped to; 0 to infinity for a ReLU. See ``source/vectors.h``."""

    _fields_ = [("low", c_float), ("high", c_float)]
