"""A program: a network as a list of operations, which compaction, engines and exporters work on."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wirings.compaction.operation import IndexRange, Operation
from wirings.compaction.output_structure import restore_outputs
from wirings.errors import WiringError

TORCH_CONSTANTS = {str(x): x for x in (
    *(getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "int32",
                                        "int64", "bool", "strided", "contiguous_format", "preserve_format",
                                        "channels_last")),
)}  # fmt: skip
"""Dtypes, layouts and memory formats by name, which arguments of operators and types of inputs may be."""

LARGE_WORK = 1e9
"""Above this many multiply-adds, roughly, shapes are found on the meta device instead of by running the program."""
LARGE_IMAGE = 2**20
"""Above this many pixels, too: some of PyTorch's convolutions take 16 floats for every pixel of one channel."""


@dataclass(eq=False)
class Program:
    """Operations in an order in which they can be run."""

    inputs: dict[str, tuple[int, ...]]
    """Names and shapes of the inputs, without the batch dimension. Constant maps are valid for these sizes only."""
    operations: list[Operation]
    outputs: tuple[str, ...]
    notes: dict[str, Any] = field(default_factory=dict)
    """Anything that JSON can represent, such as what an engine chose, or where the network came from."""

    def run(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs for inputs, (batch, …) each, in plain PyTorch. This is the reference for engines."""
        values = self.values(*inputs)
        return tuple(values[name] for name in self.outputs)

    def values(self, *inputs: Tensor) -> dict[str, Tensor]:
        """Every tensor by name."""
        values = dict(zip(self.inputs, inputs, strict=True))
        for operation in self.operations:
            values[operation.output] = operation.run(*(values[name] for name in operation.inputs))
        return values

    @torch.no_grad()
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, without the batch dimension, for inputs of the program's sizes."""
        batch = self.notes.get("batch", 1)
        values: dict[str, Tensor] | None = None
        pixels = max(math.prod(shape[1:]) for shape in self.inputs.values())
        if pixels > LARGE_IMAGE or pixels * sum(x.numel() for _, x in self.tensors()) > LARGE_WORK:
            with contextlib.suppress(Exception):  # not every operator supports the meta device
                values = self.to("meta").values(*(x.to("meta") for x in self.zeros(batch)))
        values = self.values(*self.zeros(batch)) if values is None else values
        return {name: tuple(x.shape[1:]) for name, x in values.items() if isinstance(x, Tensor)}

    @property
    def one_size(self) -> bool:
        """Whether it is valid for images of one size only."""
        return bool(self.notes.get("one_size")) or any(o.fixed_size for o in self.operations)

    def zeros(self, batch: int) -> list[Tensor]:
        """A batch of zeros for each input."""
        floating = (x for _, x in self.tensors() if x.is_floating_point())
        like = next(floating, torch.zeros(0))
        types = self.notes.get("types", {})  # of integer inputs
        return [
            like.new_zeros(batch, *shape, dtype=TORCH_CONSTANTS[types[name]] if name in types else None)
            for name, shape in self.inputs.items()
        ]

    def packed(self, results: Sequence[Tensor]) -> Any:
        """The outputs as the model returns them: a tensor, or tuples, lists and dictionaries of tensors."""
        return pack_outputs(self.notes, results)

    def example(self, batch: int) -> list[Tensor]:
        """A reproducible batch of random numbers for each input.

        Integers that are not tokens are within the range of the example that the program was made from, such as ones
        for a mask of ones.

        Args:
            batch: the batch size, unless the program works for one batch size only.
        """
        generator = torch.Generator().manual_seed(0)
        made = []
        limits, ranges = self.index_limits(), self.notes.get("ranges", {})
        for name, x in zip(self.inputs, self.zeros(self.notes.get("batch", batch)), strict=True):
            if x.is_floating_point():
                x = torch.randn(x.shape, generator=generator, dtype=x.dtype)
            elif name in limits:
                x = torch.randint(limits[name], x.shape, generator=generator, dtype=x.dtype)
            elif name in ranges:
                low, high = ranges[name]
                x = torch.randint(low, high + 1, x.shape, generator=generator).to(x.dtype)
            made.append(x)
        return made

    def index_limits(self) -> dict[str, int]:
        """For every input of indices, such as tokens, the lowest limit of those that an operation takes from it."""
        limits: dict[str, int] = {}
        for name, limit, _, _ in self.index_ranges():
            limits[name] = min(limit, limits.get(name, limit))
        return limits

    def index_ranges(self) -> list[IndexRange]:
        """The indices that operations take from its inputs."""
        found = (o.index_range for o in self.operations)
        return list(dict.fromkeys(own for own in found if own is not None and own.name in self.inputs))

    def users(self) -> dict[str, list[Operation]]:
        """The operations that read each tensor; an operation that reads it twice is listed twice."""
        users: dict[str, list[Operation]] = {name: [] for name in self.inputs}
        for operation in self.operations:
            users[operation.output] = []
            for name in operation.inputs:
                users[name].append(operation)
        return users

    def without_unused(self) -> Program:
        """The same program without operations that no output depends on."""
        used, kept = set(self.outputs), []
        for operation in reversed(self.operations):
            if operation.output in used:
                used.update(operation.inputs)
                kept.append(operation)
        return Program(self.inputs, kept[::-1], self.outputs, self.notes)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All weights, named by operation and field."""
        for operation in self.operations:
            for name, tensor in operation.tensors().items():
                if tensor is not None:
                    yield f"{operation.output}.{name}", tensor

    def to(self, *args: Any, **kwargs: Any) -> Program:
        """The same program with its weights converted as by `torch.Tensor.to`; integers keep their type."""

        def moved(x: Tensor) -> Tensor:
            return x.to(*args, **kwargs) if x.is_floating_point() else x.to(x.new_empty(0).to(*args, **kwargs).device)

        made = self.map_tensors(moved)
        dtype = torch.zeros(0, dtype=torch.uint8).to(*args, **kwargs).dtype
        if dtype.is_floating_point:
            made.operations = [o.with_dtype(dtype) for o in made.operations]
        return made

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Program:
        """The same program with ``function`` applied to every weight."""
        operations = [
            o.with_tensors({name: None if x is None else function(x) for name, x in o.tensors().items()})
            for o in self.operations
        ]
        return Program(dict(self.inputs), operations, self.outputs, self.notes)

    def __str__(self) -> str:
        shapes = self.shapes()
        lines = [f"{name} = input {list(shape)}" for name, shape in self.inputs.items()]
        for o in self.operations:
            lines.append(f"{o.output} = {type(o).__name__}({', '.join(o.inputs)}) {list(shapes.get(o.output, ()))}")
        return "\n".join([*lines, f"return {', '.join(self.outputs)}"])

    # ---- files ------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, dtype: str | torch.dtype | None = None) -> None:
        """Write the program to one safetensors file; see `wirings.compaction.file_format.save`."""
        from wirings.compaction.file_format import save

        save(self, path, dtype)

    @classmethod
    def load(cls, path: str | Path, max_bytes: float | None = None) -> Program:
        """Read a program that `save` wrote. Nothing in the file is executed.

        Args:
            path: the file.
            max_bytes: see `wirings.compaction.file_format.load`.
        """
        from wirings.compaction.file_format import load

        return load(path, max_bytes)


def pack_outputs(notes: dict[str, Any], results: Sequence[Tensor]) -> Any:
    """The outputs of a program with these notes, as the model returns them."""
    if "outputs" in notes:
        return restore_outputs(notes["outputs"], results)
    one = notes.get("one_output", len(results) == 1)  # in files of earlier versions
    return results[0] if one else tuple(results)


def bind_inputs(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The inputs of a call in the order of ``names``, whether they were given by position or by keyword."""
    if not kwargs and len(args) == len(names) and all(isinstance(x, Tensor) for x in args):
        return list(args)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if len(args) + len(kwargs) != len(names) or set(given) != set(names):
        got = ", ".join([str(len(args)), *kwargs])
        raise WiringError(f"expected {len(names)} inputs ({', '.join(names)}), got {got}.")
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise WiringError(f"expected a tensor for {name}, got {type(x).__name__}.")
    return [given[name] for name in names]


def check_batch(notes: dict[str, Any], batch: int) -> None:
    """Raise if a program with these notes works for another batch size only."""
    expected = notes.get("batch", batch)
    if batch != expected:
        raise WiringError(
            f"the model could only be traced for a batch size of {expected}, got a batch of {batch}. Compact the model "
            "with an example of this batch size."
        )
