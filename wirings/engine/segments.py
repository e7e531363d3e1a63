"""Split a program into segments that the compiled kernels compute, and segments that run on PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wirings.compaction.operations import Attention, Operation
from wirings.compaction.program import Program
from wirings.engine.execution_plan import ExecutionPlan, check_indices
from wirings.engine.operations import supports
from wirings.errors import WiringError


def split_program(program: Program, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[bool, list[Operation]]]:
    """The operations of a program in runs, each with whether the kernels support it.

    Operations are moved so that there are few runs: a run has everything of its kind that can be computed by then.
    """
    waiting, made = list(program.operations), set(program.inputs)
    native = not any(not supports(o, shapes) and made.issuperset(o.inputs) for o in waiting)
    while waiting:
        run: list[Operation] = []
        own: set[str] = set()
        left = []
        for o in waiting:
            # The bias of an attention has to be one of the caller's tensors.
            outside = not (isinstance(o, Attention) and own & set(o.inputs[3:]))
            if supports(o, shapes) == native and outside and made.issuperset(o.inputs):
                run.append(o)
                made.add(o.output)
                own.add(o.output)
            else:
                left.append(o)
        waiting = left
        if run:
            yield native, run
        if not run or not any(supports(o, shapes) == native and made.issuperset(o.inputs) for o in waiting):
            native = not native


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
                    check_tokens(operation, values)
                    values[operation.output] = operation.run(*(values[name] for name in operation.inputs))
            return
        types = self.plan.program.notes["types"]
        taken = [
            self._checked(values[name], shape, torch.int64 if name in types else torch.float32)
            for name, shape in self.plan.program.inputs.items()
        ]
        batch = taken[0].shape[0]
        if len(taken) > 1 and any(len(x) != batch for x in taken):
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
    def _checked(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor as the kernels read it. They do not check its size, which an operator of PyTorch may get wrong."""
        if dtype == torch.int64 and not x.is_floating_point():
            x = x.long()
        if x.shape[1:] != shape or x.dtype != dtype:
            expected = ", ".join(map(str, ("batch", *shape)))
            raise WiringError(
                f"a part of this compiled network expects {dtype} ({expected}), got {x.dtype} {tuple(x.shape)}. "
                "Compile the network for this batch size."
            )
        x = x.contiguous()
        return x.resolve_neg() if x.is_neg() else x  # of what PyTorch negates as it reads, such as conj().imag


def run_segments(
    program: Program, segments: Sequence[ProgramSegment], inputs: Sequence[Tensor], threads: int
) -> list[Tensor]:
    """The outputs of a program, in its order, computed by its segments."""
    values: dict[str, Tensor] = dict(zip(program.inputs, inputs, strict=True))
    for segment in segments:
        segment.run(values, threads)
    return [values[name] for name in program.outputs]


def check_tokens(operation: Operation, values: Mapping[str, Tensor]) -> None:
    """Raise if an operation that PyTorch computes gets an index out of range, as for those that the kernels compute."""
    own = operation.index_range
    if own is not None and own.name in values:
        check_indices(own, values[own.name])
