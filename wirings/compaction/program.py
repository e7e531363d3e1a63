"""A program: a network as a list of operations, for compaction, engines and export to work on."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wirings.compaction.operations import AddMap, Constant, Opaque, Operation
from wirings.errors import WiringError

SPARSE_BELOW = 1 / 3
"""Tensors with a smaller share of numbers that are not zero are saved as places and values."""


@dataclass(eq=False)
class Program:
    """Operations in an order in which they can be run."""

    inputs: dict[str, tuple[int, ...]]
    """The inputs' names and shapes, without the batch. Constant maps hold for these sizes only."""
    operations: list[Operation]
    outputs: tuple[str, ...]
    notes: dict[str, Any] = field(default_factory=dict)
    """Whatever JSON can hold: what an engine chose, where the network came from."""

    def run(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs for inputs, (batch, …) each, in plain PyTorch: the reference."""
        values = self.values(*inputs)
        return tuple(values[name] for name in self.outputs)

    def values(self, *inputs: Tensor) -> dict[str, Tensor]:
        """Every tensor by name, for inputs."""
        values = dict(zip(self.inputs, inputs, strict=True))
        for operation in self.operations:
            values[operation.output] = operation.run(*(values[name] for name in operation.inputs))
        return values

    @torch.no_grad()
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor without the batch, for inputs of the sizes that the program has."""
        zeros = self.zeros(self.notes.get("batch", 1))
        values: dict[str, Tensor] | None = None
        work = sum(x.numel() for _, x in self.tensors()) * max(math.prod(shape[1:]) for shape in self.inputs.values())
        if work > 1e9:  # of large networks shapes alone, nothing computed
            with contextlib.suppress(Exception):  # an operator that was passed on need not have that
                values = self.to("meta").values(*(x.to("meta") for x in zeros))
        values = self.values(*zeros) if values is None else values
        return {name: tuple(x.shape[1:]) for name, x in values.items() if isinstance(x, Tensor)}

    @property
    def one_size(self) -> bool:
        """Whether it holds for images of one size only: maps, operators as they were traced, or what was found out."""
        maps = (o.map for o in self.operations if isinstance(o, (AddMap, Constant)))
        traced = any(isinstance(o, Opaque) for o in self.operations)
        return bool(self.notes.get("one_size")) or traced or any(x.dim() > 1 for x in maps)

    def zeros(self, batch: int) -> list[Tensor]:
        """Inputs of zeros, so many images."""
        floating = (x for _, x in self.tensors() if x.is_floating_point())
        like = next(floating, torch.zeros(0))
        types = self.notes.get("types", {})  # of inputs that are whole numbers
        return [
            like.new_zeros(batch, *shape, dtype=NAMED[types[name]] if name in types else None)
            for name, shape in self.inputs.items()
        ]

    def example(self, batch: int) -> list[Tensor]:
        """Inputs of noise, always the same, so many images or as many as it takes; whole numbers are zeros."""
        generator = torch.Generator().manual_seed(0)
        images = self.zeros(self.notes.get("batch", batch))
        return [
            torch.randn(x.shape, generator=generator, dtype=x.dtype) if x.is_floating_point() else x for x in images
        ]

    def users(self) -> dict[str, list[Operation]]:
        """The operations that take each tensor; an operation that takes it twice stands twice."""
        users: dict[str, list[Operation]] = {name: [] for name in self.inputs}
        for operation in self.operations:
            users[operation.output] = []
            for name in operation.inputs:
                users[name].append(operation)
        return users

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All weights, by operation and field."""
        for operation in self.operations:
            for name, tensor in operation.tensors().items():
                if tensor is not None:
                    yield f"{operation.output}.{name}", tensor

    def to(self, *args: Any, **kwargs: Any) -> Program:
        """The same program with its weights in another type or on another device; whole numbers keep their type."""

        def moved(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            return x.to(*args, **kwargs) if x.is_floating_point() else x.to(x.new_empty(0).to(*args, **kwargs).device)

        made = self.changed(moved)
        asked = torch.zeros(0, dtype=torch.uint8).to(*args, **kwargs).dtype
        if asked.is_floating_point:  # operators that name a type of their own follow
            made.operations = [_retyped(o, asked) if isinstance(o, Opaque) else o for o in made.operations]
        return made

    def changed(self, change: Any) -> Program:
        """The same program with ``change`` done to every weight."""
        operations = []
        for o in self.operations:
            new = {name: change(x) for name, x in o.tensors().items()}
            fields: dict[str, Any] = {"held": tuple(new.values())} if isinstance(o, Opaque) else new
            operations.append(dataclasses.replace(o, **fields))
        return Program(dict(self.inputs), operations, self.outputs, self.notes)

    def __str__(self) -> str:
        shapes = self.shapes()
        lines = [f"{name} = input {list(shape)}" for name, shape in self.inputs.items()]
        for o in self.operations:
            taken = ", ".join(o.inputs)
            lines.append(f"{o.output} = {type(o).__name__}({taken}) {list(shapes.get(o.output, ()))}")
        return "\n".join([*lines, f"return {', '.join(self.outputs)}"])

    # ---- files ------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write it as one safetensors file, whose header describes the operations in JSON; see `files`."""
        from wirings.compaction.files import save

        save(self, path)

    @classmethod
    def load(cls, path: str | Path, max_bytes: float | None = None) -> Program:
        """Read what `save` wrote. Nothing in the file can execute; ``max_bytes`` is as in `files.load`."""
        from wirings.compaction.files import load

        return load(path, max_bytes)


def check_batch(notes: dict[str, Any], images: int) -> None:
    """Raise if a program whose notes these are takes another number of images."""
    batch = notes.get("batch", images)
    if images != batch:
        raise WiringError(
            f"the model could be traced for one number of images only, {batch}, but {images} came; compact it with an "
            "example of that many."
        )


def stored(x: Tensor) -> dict[str, Tensor]:
    """The tensors that one is saved as: itself; places and values; or, of maps that repeat themselves, what differs."""
    flat = x.reshape(-1)
    places = flat.nonzero().squeeze(1)
    if len(places) < SPARSE_BELOW * len(flat):
        return {"places": places.to(torch.int32), "values": flat[places].clone()}
    few, along = x, {}
    for dim in range(1, x.dim() if x.dim() < 4 and x.is_floating_point() else 0):
        few, inverse = torch.unique_consecutive(few, dim=dim, return_inverse=True)
        along[f"along{dim}"] = inverse.to(torch.int32)
    if few.numel() < SPARSE_BELOW * x.numel():
        return {"few": few.contiguous(), **along}
    return {"": x.contiguous().clone()}


def _retyped(o: Opaque, dtype: torch.dtype) -> Opaque:
    """The same operator where it names single or double precision, in another one."""

    def changed(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(changed(item) for item in x)
        return dtype if x in (torch.float32, torch.float64) else x

    return dataclasses.replace(o, arguments=changed(o.arguments), options=changed(o.options))


NAMED = {str(x): x for x in (
    *(getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "int32",
                                        "int64", "bool", "strided", "contiguous_format", "preserve_format",
                                        "channels_last")),
)}  # fmt: skip
"""What else an operator's arguments may be: types, layouts and memory formats."""
