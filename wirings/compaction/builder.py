"""Making a program step by step, with every tensor's value for the example at hand."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from wirings.compaction.operations import Operation
from wirings.compaction.program import Program

Kind = TypeVar("Kind", bound=Operation)


class Builder:
    """Takes operations one after the other and, with an example, runs each on it, so that shapes are known.

    Args:
        example: (batch, …) each.
        inputs: without an example the inputs' names.
    """

    def __init__(self, example: Sequence[Tensor] = (), inputs: Sequence[str] = ()) -> None:
        self.values: dict[str, Any] = dict.fromkeys(inputs)
        self.runs = not inputs
        self.operations: list[Operation] = []
        self.batch: int | None = None
        """The number of images that the program takes, if it is not any."""
        for x in example:
            self.values[self.name("input")] = x
        self.inputs = list(self.values)

    def name(self, hint: str) -> str:
        """A name that is not taken."""
        hint = re.sub(r"[^\w.]+", "_", hint).strip("_.") or "x"
        if hint not in self.values:
            return hint
        number = 1
        while f"{hint}_{number}" in self.values:
            number += 1
        return f"{hint}_{number}"

    def add(self, operation: type[Kind], inputs: Sequence[str], hint: str, /, **fields: Any) -> str:
        """Add an operation; the name of what it gives."""
        made = operation(self.name(hint), tuple(inputs), **fields)
        self.operations.append(made)
        with torch.no_grad():
            self.values[made.output] = made.run(*(self.values[name] for name in inputs)) if self.runs else None
        return made.output

    def channels(self, name: str) -> int:
        """How many channels a tensor has."""
        return int(self.values[name].shape[1])

    def maps(self, name: str) -> tuple[int, ...]:
        """The size of a tensor's maps; () if it has none."""
        return tuple(self.values[name].shape[2:])

    def ones(self, name: str) -> Tensor:
        """A one for each channel, to make an affine operation of."""
        x = self.values[name]
        return torch.ones(x.shape[1], dtype=x.dtype)

    def program(self, outputs: Sequence[str]) -> Program:
        """What was made."""
        shapes = {name: tuple(self.values[name].shape[1:]) for name in self.inputs}
        notes: dict[str, Any] = {} if self.batch is None else {"batch": self.batch}
        whole = {name: str(x.dtype) for name in self.inputs if not (x := self.values[name]).is_floating_point()}
        if whole:
            notes["types"] = whole
        return Program(shapes, self.operations, tuple(outputs), notes)

    def rename(self, name: str, hint: str) -> str:
        """Call the last operation's result something else, before anything takes it."""
        last = self.operations[-1]
        assert last.output == name
        value = self.values.pop(name)
        new = self.name(hint)
        self.operations[-1] = dataclasses.replace(last, output=new)
        self.values[new] = value
        return new
