"""Which operations the compiled kernels can do."""

from __future__ import annotations

from collections.abc import Iterator

from wirings.compaction import operations as ops
from wirings.compaction.program import Program

LARGEST_STRIDE = 16  # as in source/phases.h


def supported(operation: ops.Operation, shapes: dict[str, tuple[int, ...]]) -> bool:
    """Whether the kernels can do an operation. The others run on PyTorch."""
    if any(name not in shapes for name in (*operation.inputs, operation.output)):
        return False
    taken = [shapes[name] for name in operation.inputs]
    if any(0 in shape for shape in (*taken, shapes[operation.output])):
        return False
    maps = all(len(shape) == 3 for shape in taken)
    match operation:
        case ops.Conv():
            return maps and len(operation.stride) == 2 and max(operation.stride) <= LARGEST_STRIDE
        case ops.Linear():
            return len(taken[0]) == 1
        case ops.Concat() | ops.SelectChannels() | ops.ScatterChannels():
            return all(len(shape) in (1, 3) for shape in taken)
        case ops.Activation():
            return len(taken[0]) in (1, 3) and _plain(operation)
        case ops.Flatten():
            return len(taken[0]) in (1, 3)
        case ops.Mean() | ops.InstanceNorm() | ops.Affine() | ops.Add():
            return maps
        case ops.AddMap():
            return maps and tuple(operation.map.shape) == taken[0]
        case ops.Constant():
            return operation.map.dim() == 3
        case ops.Multiply():
            return maps and (taken[0] == taken[1] or taken[1][1:] == (1, 1))
        case ops.Reshape():
            return maps and taken[0][1:] == (1, 1) and operation.shape in ((), (1, 1))
        case ops.Pooling():
            return maps and len(operation.kernel) == 2
        case ops.Crop():
            return maps and set(operation.steps) == {1} and len(operation.steps) == 2
        case ops.Pad():
            return maps and min(*operation.before, *operation.after) >= 0 and len(operation.before) == 2
    return False


def _plain(o: ops.Activation) -> bool:
    """Whether a function's parameters are those that its kernel has."""
    if o.kind == "softplus":
        return o.values in ((), (1.0,), (1.0, 20.0))
    return len(o.values) == {"clamp": 2, "leaky_relu": 1, "elu": 1}.get(o.kind, 0)


def runs(program: Program, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[bool, list[ops.Operation]]]:
    """A program's operations in runs that the kernels can do, and runs that PyTorch does."""
    run: list[ops.Operation] = []
    native = True
    for operation in program.operations:
        if supported(operation, shapes) != native:
            if run:
                yield native, run
            run, native = [], not native
        run.append(operation)
    if run:
        yield native, run
