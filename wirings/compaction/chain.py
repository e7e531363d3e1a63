"""A program that is being rewritten: operations by name, in order, which rules change until none applies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from wirings.compaction.operations import Operation
from wirings.compaction.program import Program


class Folder:
    """A program as a chain of operations by name; rules change it in place until none applies."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.shapes = program.shapes()
        self.outputs = list(program.outputs)
        self.chain: dict[str, Operation] = {o.output: o for o in program.operations}
        self.users: dict[str, list[str]] = {}

    def run(self, rules: Sequence[Rule]) -> Program:
        """Apply rules, each of which says whether it changed something, until none does."""
        changed = True
        while changed:
            changed = False
            for rule in rules:
                for name in list(self.chain):
                    self._see()
                    operation = self.chain.get(name)
                    changed = (operation is not None and rule(self, operation)) or changed
        self._drop_unused()
        return Program(dict(self.program.inputs), list(self.chain.values()), tuple(self.outputs), self.program.notes)

    def _see(self) -> None:
        if self.users:
            return
        self.users = {name: [] for name in (*self.program.inputs, *self.chain)}
        for operation in self.chain.values():
            for name in operation.inputs:
                self.users[name].append(operation.output)

    def producer(self, name: str, alone: bool = True) -> Operation | None:
        """What makes a tensor, if (with ``alone``) only one operation takes it."""
        if alone and (len(self.users[name]) != 1 or name in self.outputs):
            return None
        return self.chain.get(name)

    def takers(self, name: str) -> list[Operation] | None:
        """The operations that take a tensor; None if it is an output, too."""
        return None if name in self.outputs else [self.chain[user] for user in dict.fromkeys(self.users[name])]

    def put(self, operation: Operation) -> None:
        """Change an operation that keeps its name and its shape."""
        self.chain[operation.output] = operation
        self.users = {}

    def insert(self, before: str, operation: Operation) -> None:
        """Put a new operation right before another one."""
        self.shapes[operation.output] = self.shapes[operation.inputs[0]]
        chain: dict[str, Operation] = {}
        for name, other in self.chain.items():
            if name == before:
                chain[operation.output] = operation
            chain[name] = other
        self.chain, self.users = chain, {}

    def remove(self, name: str, instead: str) -> None:
        """Take an operation out; what it gave is ``instead`` from now on."""
        del self.chain[name]
        self.outputs = [instead if output == name else output for output in self.outputs]
        for other in list(self.chain.values()):
            if name in other.inputs:
                inputs = tuple(instead if x == name else x for x in other.inputs)
                self.chain[other.output] = dataclasses.replace(other, inputs=inputs)
        self.users = {}

    def fresh(self, hint: str) -> str:
        name, number = hint, 0
        while name in self.chain or name in self.program.inputs:
            number += 1
            name = f"{hint}_{number}"
        return name

    def _drop_unused(self) -> None:
        wanted = set(self.outputs)
        for operation in reversed(list(self.chain.values())):
            if operation.output in wanted:
                wanted.update(operation.inputs)
            else:
                del self.chain[operation.output]

    def swap(self, first: Operation, second: Operation, changes: dict[str, Any]) -> None:
        """Let ``second``, which alone takes what ``first`` gives, come before it; ``changes`` are to ``first``."""
        moved = dataclasses.replace(second, output=first.output, inputs=first.inputs)
        self.shapes[first.output] = self.shapes[second.output]
        follows = dataclasses.replace(first, output=second.output, inputs=(first.output,), **changes)
        self.put(moved)
        self.put(follows)


Rule = Callable[[Folder, Any], bool]
