"""The table of operations that the compiled kernels can compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from wirings.compaction.operations import Operation
from wirings.engine.copies import GatherStep
from wirings.engine.fused_steps import FusedStep
from wirings.engine.lowering import Lowering
from wirings.engine.memory_layout import FeatureMaps

Shape = tuple[int, ...]
OperationT = TypeVar("OperationT", bound=Operation)
Supports = Callable[[Any, Sequence[Shape]], bool]
"""Takes an operation and the shapes of its inputs, without the batch dimension."""
Lower = Callable[[Lowering, Any], FusedStep | FeatureMaps | GatherStep]
"""Adds an operation to a lowering; returns where its result is, or a step that following operations may fuse with."""


@dataclass(frozen=True)
class Kernel:
    """How the compiled kernels compute one kind of operation."""

    supports: Supports
    lower: Lower


KERNELS: dict[type[Operation], Kernel] = {}


def kernel_for(kind: type[Operation], supports: Supports) -> Callable[[Lower], Lower]:
    """Register a function that lowers one kind of operation, where ``supports`` says that the kernels can do it."""

    def register(lower: Lower) -> Lower:
        KERNELS[kind] = Kernel(supports, lower)
        return lower

    return register


def is_maps(*shapes: Shape) -> bool:
    """Whether all shapes are those of maps, (channels, height, width), or of tokens, (channels, tokens)."""
    return all(len(shape) in (2, 3) for shape in shapes)


def supports(operation: Operation, shapes: dict[str, Shape]) -> bool:
    """Whether the kernels can compute an operation. Others run on PyTorch.

    Args:
        operation: the operation.
        shapes: the shapes of all tensors, without the batch dimension.
    """
    kernel = KERNELS.get(type(operation))
    names = (*operation.inputs, operation.output)
    if kernel is None or any(name not in shapes or 0 in shapes[name] for name in names):
        return False
    return kernel.supports(operation, [shapes[name] for name in operation.inputs])


def lower(lowering: Lowering, operation: Operation) -> FusedStep | FeatureMaps | GatherStep:
    """Add an operation that the kernels support to a lowering."""
    return KERNELS[type(operation)].lower(lowering, operation)
