"""Checks before a step first runs: its numbers fit into 32 bits, and it stays inside its memory.

The compiled kernels check nothing, and NumPy and ctypes silently wrap integers that are too large, so that a bug would
crash the process.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from wirings.engine.kernel_step import MAPS, MEANS, StepKind
from wirings.engine.memory_layout import LINE
from wirings.errors import WiringError

if TYPE_CHECKING:
    from wirings.engine.lowering import Lowering

MAX_INT32 = 2**31 - 1
"""The largest number that the fields and offsets of the kernels can represent."""


def as_int32(values: np.ndarray, name: str) -> np.ndarray:
    """Integers as the kernels take them; raises if one does not fit. ``name`` is that of the step or field."""
    if values.dtype != np.int32 and values.size:
        expect_int32(name, int(values.min()), int(values.max()))
    return np.ascontiguousarray(values, np.int32)


def expect_int32(name: str, *numbers: int) -> None:
    """Raise unless numbers fit into 32 bits."""
    most = max(numbers, key=abs)
    if not -MAX_INT32 <= most <= MAX_INT32:
        raise WiringError(
            f"{name} is too large for the compiled kernels: expected sizes and offsets up to {MAX_INT32:,}, "
            f'got {most:,}. Compile the network for smaller images, or with engine="torch".'
        )


def check(name: str, numbers: dict[str, Any], lanes: int, lowering: Lowering) -> None:
    """Raise unless a step stays inside the memory that all maps share, and inside the caller's tensors.

    Args:
        name: the name of the step.
        numbers: fields of `wirings.engine.kernel_step.KernelStep`, with arrays that are not packed yet.
        lanes: floats per vector; sums are written in whole vectors.
        lowering: the lowering that the step belongs to.
    """
    kind, floats = numbers["kind"], lowering.floats
    if kind == StepKind.NODES:
        return _check_nodes(name, numbers, lanes, lowering)
    taken = _extent(numbers, "")
    if kind == StepKind.SUMS:
        length = _whole(numbers["length"], lanes)
        flag = numbers["flag"]
        given = length if flag == MAPS else 1 if flag == MEANS else _extent(numbers, "out_")
        expect_inside(name, numbers["records"][:, 0], length, floats)
        expect_inside(name, _real(numbers["out"]), given, floats)
    elif kind == StepKind.SPARSE_LINEAR:
        expect_inside(name, numbers["records"].reshape(-1, 2, lanes)[:, 0], 1, floats)
        expect_inside(name, _real(numbers["out"]), 1, floats)
    elif kind == StepKind.LINEAR:
        expect_inside(name, numbers["in_"], 1, floats)
        expect_inside(name, numbers["out"][:1], numbers["channels"], floats)
    elif kind == StepKind.GIVE:
        expect_inside(name, numbers["in_"], taken, floats)
        shape = lowering.shapes[lowering.program.outputs[numbers["source"]]]
        size = len(numbers["in_"]) * numbers["height"] * numbers["width"]
        expect_inside(name, np.zeros(1, int), size, math.prod(shape))
    else:
        source = numbers["source"]
        size = floats if source < 0 else math.prod(list(lowering.program.inputs.values())[source])
        expect_inside(name, numbers["in_"], taken, size)
        if "in2" in numbers:
            expect_inside(name, numbers["in2"], 1 if numbers["flag"] else taken, floats)
        expect_inside(name, numbers["out"], _extent(numbers, "out_"), floats)
    return None


def _check_nodes(name: str, numbers: dict[str, Any], lanes: int, lowering: Lowering) -> None:
    """Check every strip, each of which reads and writes the memory of one band."""
    first, last, band, origin, out_band, out_origin = numbers["strip"].astype(np.int64).T
    stride, pitch, floats = numbers["stride_y"], numbers["pitch"], lowering.floats
    top = np.maximum(first * stride - 1, 0)
    bottom = np.minimum((last - 1) * stride + 2, numbers["height"])
    places = numbers["records"][:, 0]
    if numbers["source"] < 0:
        start = (top - origin) * pitch // LINE * LINE
        size, margin = floats, 0
    else:  # phases in scratch memory, which begin at the first row of the strip
        origin, start = top, np.zeros_like(top)
        phases = numbers["inputs"] * numbers["dilate_y"] * numbers["dilate_x"]
        size, margin = phases * numbers["flag"] + LINE, numbers["length"]
    read = _whole((bottom - 1 - origin) * pitch + numbers["width"] - start, lanes)
    expect_inside(name, places, int((start + read).max()), size, int(start.min()) + margin)
    out = _real(numbers["out"])
    write = (last - 1 - out_origin) * numbers["out_pitch"] + numbers["out_width"]
    expect_inside(name, out, int(write.max()), floats, int(((first - out_origin) * numbers["out_pitch"]).min()))
    expect_inside(name, np.concatenate([band, out_band]), 1, lowering.bands)
    if isinstance(numbers["kept"], np.ndarray):
        rows = int((numbers["kept"][:, 1] - numbers["kept"][:, 0]).max())
        expect_inside(name, out, (rows - 1) * numbers["out_pitch"] + numbers["out_width"], floats)


def _extent(numbers: dict[str, Any], side: str) -> int:
    """Floats from the first to the last pixel of a map; ``side`` is "" for the input and "out_" for the output."""
    if f"{side}height" not in numbers:
        return 0
    width, height = numbers[f"{side}width"], numbers[f"{side}height"]
    return int((height - 1) * numbers.get(f"{side}pitch", width) + width)


def _whole(floats: Any, lanes: int) -> Any:
    return -(-floats // lanes) * lanes


def _real(out: np.ndarray) -> np.ndarray:
    """The offsets without those of rows that only pad a group."""
    return out[out != -1]


def expect_inside(name: str, places: np.ndarray, extent: int, size: int, before: int = 0) -> None:
    """Raise unless ``extent`` floats from every place are within ``size``, and at most ``before`` below 0."""
    if not places.size:
        return
    low, high = int(places.min()) + before, int(places.max()) + extent
    if low < 0 or high > size:
        raise WiringError(
            f"{name}: a compiled step would access floats {low - before:,} to {high:,} of {size:,}. This is a bug in "
            'wirings: please report it with the model, and compile with engine="torch" until it is fixed.'
        )
