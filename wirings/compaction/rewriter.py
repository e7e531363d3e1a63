"""Rewrite a program in place: rules change its operations until none of them applies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from wirings.compaction.operation import Operation
from wirings.compaction.program import Program


class ProgramRewriter:
    """A program that is being rewritten: its operations by name, in order."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.shapes = program.shapes()
        self.outputs = list(program.outputs)
        self.operations: dict[str, Operation] = {o.output: o for o in program.operations}
        self._readers: dict[str, list[str]] = {}

    def run(self, rules: Sequence[RewriteRule]) -> Program:
        """Apply rules, each of which returns whether it changed something, until none of them does."""
        changed = True
        while changed:
            changed = False
            for rule in rules:
                for name in list(self.operations):
                    self._find_readers()
                    operation = self.operations.get(name)
                    changed = (operation is not None and rule(self, operation)) or changed
        self._remove_unused()
        operations = list(self.operations.values())
        return Program(dict(self.program.inputs), operations, tuple(self.outputs), self.program.notes)

    def _find_readers(self) -> None:
        if self._readers:
            return
        self._readers = {name: [] for name in (*self.program.inputs, *self.operations)}
        for operation in self.operations.values():
            for name in operation.inputs:
                self._readers[name].append(operation.output)

    def sole_producer(self, name: str) -> Operation | None:
        """The operation that computes a tensor, if exactly one operation and no output reads it."""
        if len(self._readers[name]) != 1 or name in self.outputs:
            return None
        return self.operations.get(name)

    def is_tied(self, operation: Operation) -> bool:
        """Whether its weights are also an embedding's, so that changing them would take another copy."""
        weight = operation.tensors().get("weight")
        tables = [o.tensors().get("weight") for o in self.operations.values() if o.index_range is not None]
        return weight is not None and any(x is not None and torch.equal(x, weight.flatten(1)) for x in tables)

    def readers(self, name: str) -> list[Operation]:
        """The operations that read a tensor; none if it is an output, too."""
        return (
            [] if name in self.outputs else [self.operations[reader] for reader in dict.fromkeys(self._readers[name])]
        )

    def replace(self, operation: Operation) -> None:
        """Replace the operation that computes a tensor of this name and shape."""
        self.operations[operation.output] = operation
        self._readers = {}

    def insert(self, before: str, operation: Operation) -> None:
        """Insert a new operation right before another one."""
        self.shapes[operation.output] = self.shapes[operation.inputs[0]]
        operations: dict[str, Operation] = {}
        for name, other in self.operations.items():
            if name == before:
                operations[operation.output] = operation
            operations[name] = other
        self.operations, self._readers = operations, {}

    def remove(self, name: str, instead: str) -> None:
        """Remove an operation; whatever read its result reads ``instead``."""
        del self.operations[name]
        self.outputs = [instead if output == name else output for output in self.outputs]
        for other in list(self.operations.values()):
            if name in other.inputs:
                inputs = tuple(instead if x == name else x for x in other.inputs)
                self.operations[other.output] = dataclasses.replace(other, inputs=inputs)
        self._readers = {}

    def swap(self, first: Operation, second: Operation, changes: dict[str, Any]) -> None:
        """Move ``second``, the only reader of ``first``, before it; ``changes`` are new fields of ``first``."""
        moved = dataclasses.replace(second, output=first.output, inputs=first.inputs)
        self.shapes[first.output] = self.shapes[second.output]
        follows = dataclasses.replace(first, output=second.output, inputs=(first.output,), **changes)
        self.replace(moved)
        self.replace(follows)

    def new_name(self, hint: str) -> str:
        """A name that is not in use yet."""
        name, number = hint, 0
        while name in self.operations or name in self.program.inputs:
            number += 1
            name = f"{hint}_{number}"
        return name

    def _remove_unused(self) -> None:
        used = set(self.outputs)
        for operation in reversed(list(self.operations.values())):
            if operation.output in used:
                used.update(operation.inputs)
            else:
                del self.operations[operation.output]


RewriteRule = Callable[[ProgramRewriter, Any], bool]
