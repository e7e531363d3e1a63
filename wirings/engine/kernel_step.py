"""One step of a network for the compiled kernels; ``source/kernel_step.h`` has the same fields in the same order."""

from __future__ import annotations

import ctypes
import enum
from ctypes import c_float, c_int32, c_int64, c_void_p


class StepKind(enum.IntEnum):
    """The kinds of steps."""

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
    NORM = 11
    ATTENTION = 12
    EMBEDDING = 13
    GATHER = 14
    CACHED_ATTENTION = 15
    GROUP_NORM = 16
    ADD_NUMBERS = 17


FUNCTIONS = (
    "leaky_relu", "elu", "tanh", "sigmoid", "silu", "gelu", "gelu_tanh", "hardswish", "hardsigmoid", "softplus", "mish",
    "clamp",
)  # fmt: skip
"""Activations, in the order of their numbers in the kernels. ReLU is a clamp."""

MAPS, MEANS, PHASES = range(3)
"""What sums are turned into: maps, means of maps, or maps for a strided convolution."""

POOLS = ("max", "avg", "avg inside", "adaptive_avg", "adaptive_max")


class ClampRange(ctypes.Structure):
    """The range that a sum is clamped to; 0 to infinity for a ReLU."""

    _fields_ = [("low", c_float), ("high", c_float)]


class KernelStep(ctypes.Structure):
    """The arguments of one step; see ``source/kernel_step.h``."""

    _fields_ = [
        *((name, c_void_p) for name in (
            "starts", "records", "bias", "out", "mask", "chunks", "kernels", "kernel_bias", "strip", "kept",
            "in_", "in2", "weights", "weights2", "own",
        )),
        ("activation", ClampRange),
        ("activation2", ClampRange),
        *((name, c_int32) for name in (
            "kind", "block", "tile", "chunk_count", "strips", "length", "height", "width", "pitch", "out_height",
            "out_width", "out_pitch", "stride_y", "stride_x", "kernel_y", "kernel_x", "pad_y", "pad_x", "dilate_y",
            "dilate_x", "channels", "inputs", "flag", "source", "bands",
        )),
        ("scale", c_float),
        ("band_floats", c_int64),
    ]  # fmt: skip
