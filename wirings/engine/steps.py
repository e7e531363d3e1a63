"""One step of a network as the compiled kernels take it; ``source/step.h`` has the same fields in the same order."""

from __future__ import annotations

import ctypes
import enum
from ctypes import c_float, c_int32, c_int64, c_void_p


class Kind(enum.IntEnum):
    """What a step does."""

    SUMS = 0
    NODES = 1
    COPY = 2
    POOL = 3
    MEAN = 4
    LINEAR = 5
    SPARSE_LINEAR = 6
    FUNCTION = 7
    INSTANCE_NORM = 8
    MULTIPLY = 9
    GIVE = 10


FUNCTIONS = (
    "leaky_relu", "elu", "tanh", "sigmoid", "silu", "gelu", "gelu_tanh", "hardswish", "hardsigmoid", "softplus", "mish",
    "clamp",
)  # fmt: skip
"""Functions of single numbers, by the number that they have there. A relu is a clamp."""

MAPS, MEANS, PHASES = range(3)
"""What becomes of sums: maps, means over maps, or maps for a strided convolution."""

POOLS = ("max", "avg", "avg inside", "adaptive_avg", "adaptive_max")


class Range(ctypes.Structure):
    """What a sum is held within: a ReLU is 0 to infinity."""

    _fields_ = [("low", c_float), ("high", c_float)]


class Step(ctypes.Structure):
    """See ``source/step.h``."""

    _fields_ = [
        *((name, c_void_p) for name in (
            "starts", "records", "bias", "out", "mask", "chunks", "kernels", "kernel_bias", "strip", "kept",
            "in_", "in2", "weights", "weights2",
        )),
        ("activation", Range),
        ("activation2", Range),
        *((name, c_int32) for name in (
            "kind", "block", "tile", "chunk_count", "strips", "length", "height", "width", "pitch", "out_height",
            "out_width", "out_pitch", "stride_y", "stride_x", "kernel_y", "kernel_x", "pad_y", "pad_x", "dilate_y",
            "dilate_x", "channels", "inputs", "flag", "source", "bands",
        )),
        ("scale", c_float),
        ("band_floats", c_int64),
    ]  # fmt: skip
