"""Whether a program that comes from a file can be run: every operation's fields, and every tensor's shape.

Shapes are found on the meta device, which has no memory, so that nothing is computed and nothing is taken before it is
known to fit. What holds here is what the engine's kernels and PyTorch's operators count on.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any

import torch
from torch import Tensor

from wirings.compaction.allowed import ALLOWED, LARGEST, PYTHON, WINDOW
from wirings.compaction.operations import (
    _POOLS,
    ACTIVATIONS,
    KINDS,
    Activation,
    Add,
    AddMap,
    Affine,
    Concat,
    Conv,
    Crop,
    Held,
    InstanceNorm,
    Linear,
    Mean,
    Multiply,
    Opaque,
    Operation,
    Pad,
    Place,
    Pool,
    Reshape,
    Select,
    Taken,
    operator,
)
from wirings.compaction.program import NAMED, Program
from wirings.errors import WiringError

MOST_IMAGES = 2**16
"""The largest number of images that a program may be fixed to."""
DIMENSIONS = 16
_VALUES = {"clamp": (2, 2), "leaky_relu": (0, 1), "elu": (0, 1), "softplus": (0, 2)}
"""How many parameters functions of single numbers take, at least and at most; the others take none."""


def expect(right: bool, what: str) -> None:
    """Raise unless it is right; ``what`` was expected."""
    if not right:
        raise WiringError(f"expected {what}")


def checked(program: Program, limit: float) -> Program:
    """The program, if it can be run on one image and its maps take at most ``limit`` bytes in all.

    Raises:
        WiringError: says which operation is wrong, and how.
    """
    _check_notes(program)
    batch = program.notes.get("batch", 1)
    types_ = program.notes.get("types", {})
    taken = 0
    values: dict[str, Any] = {}
    floating = next((x.dtype for _, x in program.tensors() if x.is_floating_point()), torch.float32)
    for name, shape in program.inputs.items():
        expect(bool(name) and len(shape) < DIMENSIONS, "an input with a name and at most 16 dimensions")
        dtype = NAMED[types_[name]] if name in types_ else floating
        expect(math.prod((batch, *shape)) * 8 < LARGEST, f"an input {name} that fits into memory")
        values[name] = torch.empty(batch, *shape, dtype=dtype, device="meta")
        taken += _bytes(values[name])
    for o in program.operations:
        try:
            expect(bool(o.output) and o.output not in values, "a name of its own for its output")
            expect(all(name in values for name in o.inputs), "inputs that were computed before")
            inputs = [values[name] for name in o.inputs]
            made = _opaque(o, inputs) if isinstance(o, Opaque) else _known(o, inputs)
        except Exception as error:  # whatever PyTorch raises for sizes that do not go together
            text = " ".join(str(error).split())[:200] or type(error).__name__
            raise WiringError(f"{type(o).__name__} {o.output[:60]!r}: {text}") from error
        values[o.output] = made
        taken += sum(_bytes(x) for x in (made if isinstance(made, (tuple, list)) else [made]))
        expect(taken <= limit, f"maps of at most {limit:,} bytes for one image; give max_bytes to allow more")
    expect(len(program.outputs) > 0, "an output")
    for name in program.outputs:
        expect(isinstance(values.get(name), Tensor), f"the output {name[:60]!r} among the tensors that are computed")
    return program


def _bytes(x: Any) -> int:
    return x.numel() * x.element_size() if isinstance(x, Tensor) else 0


def _check_notes(program: Program) -> None:
    notes = program.notes
    batch = notes.get("batch", 1)
    expect(type(batch) is int and 1 <= batch <= MOST_IMAGES, f"a number of images from 1 to {MOST_IMAGES}")
    for name in ("one_output", "one_size"):
        expect(type(notes.get(name, True)) is bool, f"{name} to be true or false")
    found = notes.get("types", {})
    expect(isinstance(found, dict) and set(found) <= set(program.inputs), "types of inputs")
    expect(all(isinstance(NAMED.get(x), torch.dtype) for x in found.values()), "types of inputs that PyTorch has")
    one = notes.get("one_output", len(program.outputs) == 1)
    expect(not one or len(program.outputs) == 1, "one output")


# ---- fields ---------------------------------------------------------------------------------------------------------


def fields_of(kind: str) -> dict[str, Any]:
    """The fields of an operation that are no tensors, with their types."""
    own = KINDS[kind]
    hints = typing.get_type_hints(own)
    names = [f.name for f in dataclasses.fields(own) if f.name not in (*own.weights, "held")]
    return {name: hints[name] for name in names}


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a field's type, and numbers are within bounds."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return _plain(value)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if inner[-1] is Ellipsis:
            return all(fits(x, inner[0]) for x in value)
        return len(value) == len(inner) and all(fits(x, one) for x, one in zip(value, inner, strict=True))
    if origin is types.UnionType:
        return any(fits(value, one) for one in inner)
    if hint is float:
        return type(value) in (int, float) and value == value and (math.isinf(value) or abs(value) <= 1e308)
    if hint is int:
        return type(value) is int and abs(value) <= LARGEST
    return type(value) is hint


def _plain(value: Any) -> bool:
    """Whether a value may be an argument of an operator."""
    if isinstance(value, tuple):
        return all(_plain(x) for x in value)
    if type(value) is int:
        return abs(value) <= LARGEST
    named = (torch.dtype, torch.layout, torch.memory_format, torch.device)
    return value is None or isinstance(value, (bool, float, str, Taken, Held, *named))


# ---- operations -----------------------------------------------------------------------------------------------------


def _known(o: Operation, inputs: list[Any]) -> Tensor:
    """What an operation of our own gives, if all is as it should be."""
    for x in inputs:
        expect(isinstance(x, Tensor) and 2 <= x.dim() <= DIMENSIONS, "tensors with images and channels")
        expect(x.is_floating_point(), "floating-point tensors")
    count = {Multiply: 2, Add: None, Concat: None}.get(type(o), 1)
    expect(len(inputs) == count if count else len(inputs) >= 1, f"{count or 'some'} inputs")
    for name, weight in o.tensors().items():
        expect(weight is None or name == "index" or weight.is_floating_point(), f"a floating-point {name}")
    x = inputs[0]
    maps, channels = x.dim() - 2, x.shape[1]
    match o:
        case Conv():
            dims = len(o.stride)
            expect(1 <= dims <= 3 and dims == maps == len(o.padding) == len(o.dilation), "sizes for every dimension")
            expect(all(1 <= n <= WINDOW for n in (*o.stride, *o.dilation)), "a stride and a dilation of 1 or more")
            expect(all(0 <= n <= WINDOW for n in o.padding), "a padding of 0 or more")
            expect(o.weight.dim() == dims + 2 and 1 <= o.groups <= LARGEST, "a weight for every dimension")
            expect(channels == o.weight.shape[1] * o.groups, "as many channels as its weight has")
            expect(o.weight.shape[0] % o.groups == 0, "groups of one size")
            _check_size(o.bias, (o.weight.shape[0],))
        case Linear():
            expect(o.weight.dim() == 2 and maps == 0, "a matrix, and single numbers as inputs")
            expect(channels == o.weight.shape[1], "as many inputs as its weight has")
            _check_size(o.bias, (o.weight.shape[0],))
        case Affine() | InstanceNorm():
            expect(maps > 0 or isinstance(o, Affine), "maps")
            _check_size(o.scale, (channels,))
            _check_size(o.shift, (channels,))
        case Activation():
            expect(o.kind in ACTIVATIONS, f"one of {', '.join(ACTIVATIONS)}")
            least, most = _VALUES.get(o.kind, (0, 0))
            expect(least <= len(o.values) <= most, f"{least} to {most} parameters of {o.kind}")
        case Add():
            expect(all(y.shape == x.shape for y in inputs), "tensors of one shape")
        case Multiply():
            expect(x.dim() == inputs[1].dim() and x.shape[:2] == inputs[1].shape[:2], "tensors with the same channels")
        case AddMap():
            expect(torch.broadcast_shapes(o.map.shape, x.shape[1:]) == x.shape[1:], "a map of its input's size")
        case Select() | Place():
            _check_index(o, channels)
        case Pool():
            _check_pool(o, maps)
        case Mean():
            expect(maps > 0, "maps")
        case Crop():
            expect(len(o.starts) == len(o.stops) == len(o.steps) == maps, "a start, a stop and a step a dimension")
            expect(all(n >= 1 for n in o.steps), "steps of 1 or more")
        case Pad():
            expect(len(o.before) == len(o.after) == maps, "a padding on both sides of each dimension")
            expect(all(abs(n) <= WINDOW for n in (*o.before, *o.after)), f"a padding of at most {WINDOW}")
        case Reshape():
            expect(len(o.shape) < DIMENSIONS and all(n >= 0 for n in o.shape), "sizes of 0 or more")
    own = {name: None if w is None else torch.empty_like(w, device="meta") for name, w in o.tensors().items()}
    return o.compute(inputs, own)


def _check_size(x: Tensor | None, size: tuple[int, ...]) -> None:
    expect(x is None or tuple(x.shape) == size, f"a tensor of the size {size}")


def _check_index(o: Select | Place, channels: int) -> None:
    index = o.index
    expect(index.dtype == torch.int64 and index.dim() == 1, "an index of whole numbers")
    most = channels
    if isinstance(o, Place):
        expect(len(index) == channels and len(index.unique()) == channels, "one place for each channel")
        expect(0 <= o.channels < 2**31, "a number of channels")
        most = o.channels
    expect(not len(index) or 0 <= int(index.min()) <= int(index.max()) < most, f"an index from 0 to {most - 1}")


def _check_pool(o: Pool, maps: int) -> None:
    expect((o.kind, len(o.kernel)) in _POOLS and len(o.kernel) == maps, "a kind of pool, and maps that fit its kernel")
    expect(all(1 <= n <= WINDOW for n in o.kernel), f"a kernel from 1 to {WINDOW}")
    if not o.kind.startswith("adaptive"):
        expect(len(o.stride) == len(o.padding) == len(o.dilation) == maps, "sizes for every dimension")
        expect(all(1 <= n <= WINDOW for n in (*o.stride, *o.dilation)), "a stride and a dilation of 1 or more")
        right = all(0 <= 2 * pad <= kernel for pad, kernel in zip(o.padding, o.kernel, strict=True))
        expect(right, "a padding of at most half the kernel")


def _opaque(o: Opaque, inputs: list[Any]) -> Any:
    """What an operator of PyTorch's or Python's gives."""
    check_target(o.target)
    _check_numbers((o.arguments, o.options), len(inputs), len(o.held))
    options = dict(_on_meta(o.options))
    if o.target not in PYTHON:
        names = [argument.name for argument in operator(o.target)._schema.arguments]
        expect(set(options) <= set(names), "arguments that the operator has")
        if "device" in names[len(o.arguments) :]:
            options["device"] = torch.device("meta")
    own = {f"held{i}": torch.empty_like(x, device="meta") for i, x in enumerate(o.held)}
    meta = dataclasses.replace(o, arguments=_on_meta(o.arguments), options=tuple(options.items()))
    made: Any = meta.compute(inputs, own)
    several = made if isinstance(made, (tuple, list)) else (made,)
    expect(all(isinstance(x, (Tensor, int, float)) for x in several), "tensors or numbers")
    expect(all(not isinstance(x, Tensor) or x.is_meta for x in several), "tensors that depend on its arguments alone")
    return made


def check_target(target: str) -> None:
    """Raise unless a file may name an operator."""
    if target not in ALLOWED and target not in PYTHON:
        raise WiringError(
            f"the operator {target[:60]!r} is not among those that a file may name (wirings/compaction/allowed.py)"
        )


def _check_numbers(x: Any, inputs: int, held: int) -> None:
    if isinstance(x, tuple):
        for item in x:
            _check_numbers(item, inputs, held)
    elif isinstance(x, (Taken, Held)):
        most = inputs if isinstance(x, Taken) else held
        expect(type(x.number) is int and 0 <= x.number < most, f"an argument's number from 0 to {most - 1}")


def _on_meta(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(_on_meta(item) for item in x)
    return torch.device("meta") if isinstance(x, torch.device) else x
