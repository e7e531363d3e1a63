"""Split a program into segments that the compiled kernels compute, and segments that run on PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from wirings.compaction.operations import Operation
from wirings.compaction.program import Program
from wirings.engine.execution_plan import ExecutionPlan
from wirings.engine.operations import supports
from wirings.errors import WiringError


def split_program(program: Program, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[bool, list[Operation]]]:
    """The operations of a program in runs, each with whether the kernels support it."""
    run: list[Operation] = []
    native = True
    for operation in program.operations:
        if supports(operation, shapes) != native:
            if run:
                yield native, run
            run, native = [], not native
        run.append(operation)
    if run:
        yield native, run


@dataclass(eq=False)
class ProgramSegment:
    """A run of operations, by the kernels or by PyTorch."""

    operations: list[Operation]
    inputs: list[str]
    outputs: list[str]
    plan: ExecutionPlan | None = None
    """For one image at a time, on all threads; None if the segment runs on PyTorch."""
    batch_plan: ExecutionPlan | None = None
    """For many images, each on one thread."""

    def run(self, values: dict[str, Tensor], threads: int) -> None:
        """Add the segment's outputs to the tensors by name."""
        if self.plan is None:
            with torch.no_grad():
                for operation in self.operations:
                    values[operation.output] = operation.run(*(values[name] for name in operation.inputs))
            return
        taken = [self._checked(values[name], shape) for name, shape in self.plan.program.inputs.items()]
        batch = taken[0].shape[0]
        if any(len(x) != batch for x in taken):
            raise WiringError("the kernels expect tensors of one batch size, but this network mixes several.")
        if batch == 1 or self.batch_plan is None:
            values.update(zip(self.outputs, self.plan.run(taken), strict=True))
            return
        many = batch - batch % threads
        given = [self.batch_plan.run([x[:many] for x in taken])] if many else []
        if many < batch or not many:
            given.append(self.plan.run([x[many:] for x in taken]))
        results = given[0] if len(given) == 1 else [torch.cat(both) for both in zip(*given, strict=True)]
        values.update(zip(self.outputs, results, strict=True))

    @staticmethod
    def _checked(x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A tensor as the kernels read it. They do not check its size, which an operator of PyTorch may get wrong."""
        if x.shape[1:] != shape or x.dtype != torch.float32:
            expected = ", ".join(map(str, ("batch", *shape)))
            raise WiringError(
                f"a part of this compiled network expects float32 ({expected}), got {x.dtype} {tuple(x.shape)}. "
                "Compile the network for this batch size."
            )
        return x.contiguous()
