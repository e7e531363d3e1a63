"""Which channels of a program must be computed: those that vary and on which an output depends."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wirings.compaction.constants import Known, feeding
from wirings.compaction.operations import (
    Concat,
    Constant,
    Conv,
    Flatten,
    Linear,
    Opaque,
    Operation,
    Place,
    Select,
)
from wirings.compaction.program import Program


def needed(program: Program, known: dict[str, Known | None]) -> dict[str, Tensor]:
    """For every tensor with channels which of them are to be computed; constant ones are not.

    A dead channel is one that is not here: it cannot reach an output, or nothing reaches it.
    """
    live = {name: torch.zeros_like(x.constant) for name, x in known.items() if x is not None}
    used = set(program.outputs)  # tensors of no channels have no mask: whether anything takes them
    for name in program.outputs:
        _mark(live, known, name, None)
    for operation in reversed(program.operations):
        out, whole = operation.output, live.get(operation.output)
        if whole is None:
            if out in used:
                used.update(operation.inputs)
                for name in operation.inputs:
                    _mark(live, known, name, None)
            continue
        if isinstance(operation, Flatten):  # a channel's pixels come all together
            x = live[operation.inputs[0]]
            x |= whole.view(len(x), -1).any(1)
            live[out] = x.repeat_interleave(len(whole) // len(x)) & ~_of(known, out).constant
            continue
        if isinstance(operation, Opaque) and not operation.channelwise:
            if whole.any() or out in used:
                used.update(operation.inputs)
                for name in operation.inputs:
                    _mark(live, known, name, None)
                live[out] = ~_of(known, out).constant
            continue
        if isinstance(operation, Constant):
            continue  # it takes an input only to count the images
        for number, name in enumerate(operation.inputs):
            if name in live:
                _mark(live, known, name, _wanted(operation, number, whole, live, known))
    return live


def _of(known: dict[str, Known | None], name: str) -> Known:
    found = known[name]
    assert found is not None
    return found


def _mark(live: dict[str, Tensor], known: dict[str, Known | None], name: str, wanted: Tensor | None) -> None:
    """Add channels to those to be computed, all for None, less the constant ones."""
    if name in live:
        varies = ~_of(known, name).constant
        live[name] |= varies if wanted is None else wanted & varies


def _wanted(
    operation: Operation, number: int, whole: Tensor, live: dict[str, Tensor], known: dict[str, Known | None]
) -> Tensor:
    """Which channels of an input are wanted for the wanted channels of the result."""
    if isinstance(operation, (Conv, Linear)):
        return feeding(operation, whole)
    if isinstance(operation, Concat):
        sizes = [len(live[name]) for name in operation.inputs]
        return whole.split(sizes)[number]
    if isinstance(operation, Select):
        wanted: Any = torch.zeros_like(live[operation.inputs[0]])
        wanted[operation.index[whole]] = True
        return wanted
    if isinstance(operation, Place):
        return whole[operation.index]
    return whole
