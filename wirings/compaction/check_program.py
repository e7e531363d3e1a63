"""Check that a program from a file can be run: the fields of every operation and the shape of every tensor.

Shapes are inferred on the meta device, so that nothing is computed and no memory is taken before everything is known to
fit. The engine's kernels and PyTorch's operators rely on these checks. What is valid for one kind of operation is
defined by its ``check`` method.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wirings.compaction.allowed_operators import MAX_INTEGER
from wirings.compaction.operation import MAX_DIMENSIONS, expect
from wirings.compaction.operations import OPERATIONS, InputRef, WeightRef
from wirings.compaction.output_structure import check_structure
from wirings.compaction.program import TORCH_CONSTANTS, Program
from wirings.errors import WiringError

MAX_BATCH = 2**16
"""The largest batch size that a program may be limited to."""
MAX_RANGE = 2**62
"""The largest magnitude in the range of an input of integers."""


def check_program(program: Program, max_bytes: float) -> None:
    """Raise unless a program can be run on one image and all of its tensors take at most ``max_bytes``.

    Raises:
        WiringError: says which operation is invalid, and why.
    """
    _check_notes(program)
    values = _meta_inputs(program)
    taken = sum(_bytes(x) for x in values.values())
    for o in program.operations:
        try:
            expect(bool(o.output) and o.output not in values, "a unique name for its output")
            expect(all(name in values for name in o.inputs), "inputs that were computed before")
            with _NewTensors() as between:
                made = o.infer([values[name] for name in o.inputs])
        except Exception as error:  # PyTorch raises many kinds of errors for sizes that do not match
            text = " ".join(str(error).split())[:200] or type(error).__name__
            raise WiringError(f"{type(o).__name__} {o.output[:60]!r}: {text}") from error
        limit = f"maps of at most {max_bytes:,} bytes for one image; pass max_bytes to allow more"
        expect(taken + between.bytes <= max_bytes, limit)
        values[o.output] = made
        taken += sum(_bytes(x) for x in (made if isinstance(made, (tuple, list)) else [made]))
        expect(taken <= max_bytes, limit)
    expect(len(program.outputs) > 0, "an output")
    for name in program.outputs:
        expect(isinstance(values.get(name), Tensor), f"the output {name[:60]!r} among the computed tensors")


def _meta_inputs(program: Program) -> dict[str, Any]:
    batch, types_ = program.notes.get("batch", 1), program.notes.get("types", {})
    floating = next((x.dtype for _, x in program.tensors() if x.is_floating_point()), torch.float32)
    values = {}
    for name, shape in program.inputs.items():
        expect(
            bool(name) and len(shape) < MAX_DIMENSIONS, f"an input with a name and at most {MAX_DIMENSIONS} dimensions"
        )
        expect(math.prod((batch, *shape)) * 8 < MAX_INTEGER, f"an input {name} that fits into memory")
        dtype = TORCH_CONSTANTS[types_[name]] if name in types_ else floating
        values[name] = torch.empty(batch, *shape, dtype=dtype, device="meta")
    return values


class _NewTensors(TorchDispatchMode):
    """Counts the memory of all tensors that an operation makes on the way to its result, such as those of an einsum."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and (storage := x.untyped_storage())._cdata not in given:  # it is not a view
                self._kept[storage._cdata] = storage
        return result

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._kept.values())


def _bytes(x: Any) -> int:
    return x.numel() * x.element_size() if isinstance(x, Tensor) else 0


def _check_notes(program: Program) -> None:
    notes = program.notes
    batch = notes.get("batch", 1)
    expect(type(batch) is int and 1 <= batch <= MAX_BATCH, f"a batch size from 1 to {MAX_BATCH}")
    for name in ("one_output", "one_size"):
        expect(type(notes.get(name, True)) is bool, f"{name} to be true or false")
    found = notes.get("types", {})
    expect(isinstance(found, dict) and set(found) <= set(program.inputs), "types of inputs")
    expect(all(isinstance(TORCH_CONSTANTS.get(x), torch.dtype) for x in found.values()), "types that PyTorch has")
    ranges = notes.get("ranges", {})
    expect(isinstance(ranges, dict) and set(ranges) <= set(found), "ranges of inputs of integers")
    for pair in ranges.values():
        numbers = isinstance(pair, list) and [type(x) for x in pair] == [int, int]
        expect(numbers and -MAX_RANGE <= pair[0] <= pair[1] <= MAX_RANGE, "a smallest and a largest integer")
    if "outputs" in notes:
        check_structure(notes["outputs"], len(program.outputs))
    one = notes.get("one_output", len(program.outputs) == 1)
    expect("outputs" in notes or not one or len(program.outputs) == 1, "one output")


# ---- fields ---------------------------------------------------------------------------------------------------------


def plain_fields(kind: str) -> dict[str, Any]:
    """The fields of an operation that are not tensors, with their types."""
    own = OPERATIONS[kind]
    hints = typing.get_type_hints(own)
    names = [f.name for f in dataclasses.fields(own) if f.name not in (*own.weights, "held")]
    return {name: hints[name] for name in names}


def has_type(value: Any, hint: Any) -> bool:
    """Whether a value has the type of a field, and its numbers are within bounds."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return _is_argument(value)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if inner[-1] is Ellipsis:
            return all(has_type(x, inner[0]) for x in value)
        return len(value) == len(inner) and all(has_type(x, one) for x, one in zip(value, inner, strict=True))
    if origin is types.UnionType:
        return any(has_type(value, one) for one in inner)
    if hint is float:
        return type(value) in (int, float) and value == value and (math.isinf(value) or abs(value) <= 1e308)
    if hint is int:
        return type(value) is int and abs(value) <= MAX_INTEGER
    return type(value) is hint


def _is_argument(value: Any) -> bool:
    """Whether a value may be an argument of an operator."""
    if isinstance(value, tuple):
        return all(_is_argument(x) for x in value)
    if type(value) is int:
        return abs(value) <= MAX_INTEGER
    constants = (torch.dtype, torch.layout, torch.memory_format, torch.device)
    return value is None or isinstance(value, (bool, float, str, InputRef, WeightRef, *constants))
