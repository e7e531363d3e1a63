"""Build a program operation by operation, with the value of every tensor for an example input."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from wirings.compaction.operation import Operation
from wirings.compaction.program import Program

OperationT = TypeVar("OperationT", bound=Operation)


class ProgramBuilder:
    """Collects operations and, given an example, runs each of them on it, so that all shapes are known.

    Args:
        example: the inputs, (batch, …) each.
        names: the names of the inputs. By default they are called ``input``, ``input_1``, and so on. Without an
            example, nothing is run.
    """

    def __init__(self, example: Sequence[Tensor] = (), names: Sequence[str] = ()) -> None:
        self.values: dict[str, Any] = {}
        """Every tensor of the program by name; None if there is no example."""
        self.operations: list[Operation] = []
        self.batch: int | None = None
        """The batch size, if the program works for one only."""
        self.loose: set[str] = set()
        """Tensors whose dimension 0 is not the batch."""
        self.arranged: dict[Any, str] = {}
        """Tensors in another order of dimensions, by name and axes (`wirings.compaction.operations.arrange`)."""
        self._runs = bool(example) or not names
        if not example:
            self.values = dict.fromkeys(names)
        for i, x in enumerate(example):
            self.values[self.name(names[i] if names else "input")] = x
        self.inputs = list(self.values)

    def name(self, hint: str) -> str:
        """A name that is not in use yet."""
        hint = re.sub(r"[^\w.]+", "_", hint).strip("_.") or "x"
        if hint not in self.values:
            return hint
        number = 1
        while f"{hint}_{number}" in self.values:
            number += 1
        return f"{hint}_{number}"

    def add(self, operation: type[OperationT], inputs: Sequence[str], hint: str, /, **fields: Any) -> str:
        """Add an operation; returns the name of its result."""
        made = operation(self.name(hint), tuple(inputs), **fields)
        self.operations.append(made)
        with torch.no_grad():
            self.values[made.output] = made.run(*(self.values[name] for name in inputs)) if self._runs else None
        return made.output

    def channels(self, name: str) -> int:
        """The number of channels of a tensor."""
        return int(self.values[name].shape[1])

    def maps(self, name: str) -> tuple[int, ...]:
        """The size of a tensor's maps; () if it has single numbers."""
        return tuple(self.values[name].shape[2:])

    def ones(self, name: str) -> Tensor:
        """A one for each channel of a tensor, for the scale of an affine operation."""
        x = self.values[name]
        return torch.ones(x.shape[1], dtype=x.dtype)

    def program(self, outputs: Sequence[str]) -> Program:
        """The program with these outputs."""
        shapes = {name: tuple(self.values[name].shape[1:]) for name in self.inputs}
        notes: dict[str, Any] = {} if self.batch is None else {"batch": self.batch}
        integers = {name: x for name in self.inputs if not (x := self.values[name]).is_floating_point()}
        if integers:
            notes["types"] = {name: str(x.dtype) for name, x in integers.items()}
            notes["ranges"] = {name: [int(x.min()), int(x.max())] for name, x in integers.items() if x.numel()}
        return Program(shapes, self.operations, tuple(outputs), notes)

    def rename(self, name: str, hint: str) -> str:
        """Rename the result of the last operation, before anything uses it; returns the new name."""
        last = self.operations[-1]
        assert last.output == name
        value = self.values.pop(name)
        new = self.name(hint)
        self.operations[-1] = dataclasses.replace(last, output=new)
        self.values[new] = value
        return new
