"""Round the weights of layers to bfloat16 where the kernels then read half as many bytes.

What gains are linear layers on single numbers, whose weights are read once for every number: heads, perceptrons, and
all linear layers of a language model that generates one token at a time. The weights of convolutions stay in caches
while they are applied to all pixels, so nothing would be gained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from wirings.compaction.operation import Operation
from wirings.compaction.operations import Conv, Linear
from wirings.compaction.program import Program
from wirings.engine.bfloat16_steps import SUFFIX
from wirings.engine.generation import one_token_program
from wirings.engine.segments import ProgramSegment
from wirings.errors import WiringError


@dataclass(frozen=True, eq=False)
class RoundedWeights:
    """A program in which the weights of some layers are rounded to bfloat16."""

    program: Program
    layers: frozenset[str]
    """Their outputs' names."""
    floats: Mapping[str, str] = field(default_factory=dict)
    """The layers that stay in float32, and why."""


def round_weights(
    program: Program, shapes: Mapping[str, tuple[int, ...]], supports: Callable[[Operation], bool]
) -> RoundedWeights:
    """Round the weights of the layers that may gain from it.

    Args:
        program: the network.
        shapes: the shapes of all of its tensors, without the batch dimension.
        supports: whether the kernels compute an operation.
    """
    generates, made, layers = can_generate(program), list[Operation](), set[str]()
    floats: dict[str, str] = {}
    for o in program.operations:
        if not isinstance(o, (Conv, Linear)):
            made.append(o)
            continue
        rounded = o.weight.to(torch.bfloat16).to(o.weight.dtype)
        one_number = isinstance(o, Linear) and len(shapes[o.inputs[0]]) == 1
        if not supports(o):
            floats[o.output] = "computed by PyTorch"
        elif not one_number and not (generates and isinstance(o, Conv) and o.pointwise):
            floats[o.output] = "its weights stay in caches"
        elif not torch.isfinite(rounded).all():
            floats[o.output] = "weights that are not finite"
        else:
            layers.add(o.output)
            o = dataclasses.replace(o, weight=rounded)
        made.append(o)
    return RoundedWeights(Program(program.inputs, made, program.outputs, program.notes), frozenset(layers), floats)


def restore_slower(rounded: RoundedWeights, program: Program, segments: list[ProgramSegment]) -> RoundedWeights:
    """Leave layers in float32 that the kernels compute faster with weights in float32.

    Args:
        rounded: what `round_weights` returned.
        program: the network before that.
        segments: the compiled network, with the ways that were measured to be the fastest.
    """
    if can_generate(program):  # its layers read their weights one token at a time, which is measured there
        return rounded
    fast = set[str]()
    for segment in segments:
        if segment.plan is not None:
            pairs = zip(segment.plan.steps, segment.plan.choices, strict=True)
            fast |= {step.name for step, choice in pairs if choice.way.endswith(SUFFIX)}
    # A step has the name of the last operation that is fused with it.
    after = {o.inputs[0]: o.output for o in program.operations if len(o.inputs) == 1}
    slower = set[str]()
    for name in rounded.layers:
        last = name
        while last not in fast and last in after:
            last = after[last]
        if last not in fast:
            slower.add(name)
    if not slower:
        return rounded
    originals = {o.output: o for o in program.operations}
    made = [originals[o.output] if o.output in slower else o for o in rounded.program.operations]
    floats = {**rounded.floats, **dict.fromkeys(sorted(slower), "not faster in bfloat16")}
    kept = Program(program.inputs, made, program.outputs, program.notes)
    return RoundedWeights(kept, rounded.layers - slower, floats)


def can_generate(program: Program) -> bool:
    """Whether a network can generate tokens one at a time."""
    try:
        one_token_program(program)
    except WiringError:
        return False
    return True
