"""A program as a module of plain PyTorch operators, with its weights as parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from wirings.compaction.operation import Operation
from wirings.compaction.program import Program, pack_outputs


class OperationModule(nn.Module):
    """An operation with its weights as parameters, and its indices as buffers."""

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self.operation = operation
        for name, x in operation.tensors().items():
            if x is not None and x.is_floating_point():
                self.register_parameter(name, nn.Parameter(x, requires_grad=False))
            else:
                self.register_buffer(name, x)

    def own_tensors(self) -> dict[str, Tensor | None]:
        """Parameters and buffers by name, in the operation's order."""
        own: dict[str, Any] = {**self._parameters, **self._buffers}
        return {name: own[name] for name in self.operation.tensors()}

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.operation.compute(inputs, self.own_tensors())

    def extra_repr(self) -> str:
        return f"{type(self.operation).__name__}: {', '.join(self.operation.inputs)} → {self.operation.output}"


class ProgramModule(nn.Module):
    """A program as a module. It takes the program's inputs by position."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.steps = nn.ModuleList(OperationModule(operation) for operation in program.operations)
        self._inputs, self._outputs = dict(program.inputs), program.outputs
        self.notes = program.notes
        """Whatever is saved with the program."""

    @property
    def program(self) -> Program:
        """The operations, with the module's current weights."""
        operations = []
        for step in self._steps():
            own = {name: None if x is None else x.detach() for name, x in step.own_tensors().items()}
            operations.append(step.operation.with_tensors(own))
        return Program(dict(self._inputs), operations, self._outputs, self.notes)

    def _steps(self) -> list[OperationModule]:
        return list(self.steps)  # type: ignore[arg-type]

    def forward(self, *inputs: Tensor) -> Any:
        values: dict[str, Tensor] = dict(zip(self._inputs, inputs, strict=True))
        for step in self._steps():
            taken = [values[name] for name in step.operation.inputs]
            values[step.operation.output] = step(*taken)
        return pack_outputs(self.notes, [values[name] for name in self._outputs])
