"""A compact model: a program as a module of plain PyTorch operators."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wirings.compaction.operations import Opaque, Operation
from wirings.compaction.program import Program, check_batch
from wirings.compaction.report import Report
from wirings.errors import WiringError


class _Step(nn.Module):
    """An operation with its weights as parameters."""

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self.operation = operation
        for name, x in operation.tensors().items():
            if x is not None and x.is_floating_point():
                self.register_parameter(name, nn.Parameter(x, requires_grad=False))
            else:
                self.register_buffer(name, x)

    def forward(self, *inputs: Tensor) -> Tensor:
        own = {**self._parameters, **self._buffers}
        return self.operation.compute(inputs, own)

    def extra_repr(self) -> str:
        return f"{type(self.operation).__name__}: {', '.join(self.operation.inputs)} → {self.operation.output}"


class CompactModel(nn.Module):
    """A network without what is dead or constant in it. Takes and gives what the network did, in evaluation.

    ``program`` is the network as a list of operations, ``report`` what compaction did, ``notes`` what is saved with it.
    """

    def __init__(self, program: Program, report: Report | None = None) -> None:
        super().__init__()
        self.steps = nn.ModuleList(_Step(operation) for operation in program.operations)
        self._inputs, self._outputs = dict(program.inputs), program.outputs
        self.notes = program.notes
        self._fixed = program.one_size
        self.report = report

    @property
    def program(self) -> Program:
        """The operations, with the weights that the module has now."""
        operations = []
        for step in self._steps():
            own: dict[str, Any] = {**step._parameters, **step._buffers}
            order = step.operation.tensors()  # parameters come before buffers, whatever their numbers
            own = {name: None if own[name] is None else own[name].detach() for name in order}
            fields = {"held": tuple(own.values())} if isinstance(step.operation, Opaque) else own
            operations.append(dataclasses.replace(step.operation, **fields))
        return Program(dict(self._inputs), operations, self._outputs, self.notes)

    def _steps(self) -> list[_Step]:
        return list(self.steps)  # type: ignore[arg-type]

    def forward(self, *inputs: Tensor) -> Any:
        self._check(inputs)
        values: dict[str, Tensor] = dict(zip(self._inputs, inputs, strict=True))
        for step in self._steps():
            taken = [values[name] for name in step.operation.inputs]
            values[step.operation.output] = step(*taken)
        results = tuple(values[name] for name in self._outputs)
        return results[0] if self.notes.get("one_output", True) else results

    def _check(self, inputs: tuple[Tensor, ...]) -> None:
        if len(inputs) != len(self._inputs):
            raise WiringError(f"this compact model takes {len(self._inputs)} inputs, but {len(inputs)} came.")
        for (name, shape), x in zip(self._inputs.items(), inputs, strict=True):
            same = tuple(x.shape[1:]) == shape
            fits = x.dim() == len(shape) + 1 and x.shape[1:2] == torch.Size(shape[:1])
            if not fits or (self._fixed and not same):
                why = "" if not fits else (
                    " Its constant maps, or numbers and operators that were traced as they are, hold for that size "
                    "only: compact the model again with an example of this size."
                )  # fmt: skip
                raise WiringError(
                    f"{name} of this compact model is (batch, {', '.join(map(str, shape))}), but {tuple(x.shape)} "
                    f"came.{why}"
                )
            check_batch(self.notes, x.shape[0])

    def save(self, path: str | Path) -> Path:
        """Write it to a file: ``.safetensors``, ``.onnx`` or ``.pt2``; see `wirings.compaction.export`."""
        from wirings.compaction.export import export

        return export(self, path)
