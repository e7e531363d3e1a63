"""`compact`: a model without what is dead or constant in it, with the same outputs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wirings.compaction.builder import Builder
from wirings.compaction.fold import folded
from wirings.compaction.graphs import can_lower, lower_discrete, lower_static
from wirings.compaction.module import CompactModel
from wirings.compaction.program import Program
from wirings.compaction.prune import pruned
from wirings.compaction.report import Report, count, count_model
from wirings.compaction.trace import Lower, trace
from wirings.errors import WiringError
from wirings.graph import ContinuousGraph, DiscreteGraph
from wirings.selection.sharded import is_sharded
from wirings.wire.finalize import finalize_
from wirings.wire.parametrization import wired

TOLERANCE = 1e-5
"""The difference allowed between the outputs, as a share of the largest one."""


def compact(model: nn.Module, example_input: Tensor | Sequence[Tensor]) -> CompactModel:
    """A copy of a model without dead nodes, with what is constant folded in, and with the same outputs.

    Nodes that cannot reach the output, or that nothing reaches from the input, are removed, through norms, depthwise
    and grouped convolutions, additions and concatenations. Batch norms go into their neighbours. The outputs for the
    example are compared before anything is returned.

    Args:
        model: any feed-forward model that `torch.export` can trace, neural graphs included; a wired one is finalized
            on a copy. It is taken in evaluation, and left as it is.
        example_input: (batch, …), or a tuple of inputs. The number of images is not baked in; their size is if the
            model on larger images turns out to give something else.

    Returns:
        A module of plain operators; ``print(small.report)`` tells what became of the model.

    >>> small = compact(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.zeros(1, 3))
    >>> small(torch.zeros(5, 3)).shape
    torch.Size([5, 2])
    """
    inputs = _checked(model, example_input)
    device = inputs[0].device
    plain = plain_copy(model)
    inputs = [x.detach().cpu() for x in inputs]
    with torch.no_grad():
        outputs = plain(*(x.clone() for x in inputs))  # it may change them in place
    expected = _as_tuple(outputs)
    if any(y.numel() and not torch.isfinite(y).any() for y in expected):
        raise WiringError(
            "the model gives no finite number for the example, so that nothing can be compared. Give it an example as "
            "it was trained on, or look for what went wrong in training."
        )
    program = lower(plain, inputs)
    program.notes["one_output"] = isinstance(outputs, Tensor)
    small = shrunk(program)
    report = Report(count_model(program, plain), count(small), verify(program, small, inputs, expected))
    small.notes["report"] = report.as_mapping()
    if not _any_size(plain, small, inputs):
        small.notes["one_size"] = True
    return CompactModel(small, report).to(device).eval()


def plain_copy(model: nn.Module) -> nn.Module:
    """A copy of a model on the CPU, in evaluation, finalized if it is wired."""
    plain = copy.deepcopy(model).cpu()
    if wired(plain):
        finalize_(plain)
    return plain.eval()


def lower(model: nn.Module, inputs: Sequence[Tensor]) -> Program:
    """A model as a program; the model must be a plain copy, on the CPU and in evaluation."""
    leaves: dict[nn.Module, Lower] = {}
    for module in model.modules():
        if isinstance(module, ContinuousGraph) and module.steps is None:
            raise WiringError(
                "a ContinuousGraph chooses its steps as it goes, so it is no feed-forward model. Give it equal steps "
                '(solver="rk4", steps=…), or take the finalized model as it is.'
            )
        if can_lower(module):
            leaves[module] = lower_discrete if isinstance(module, DiscreteGraph) else lower_static
    # Two images, so that a trace can tell their number from other sizes.
    builder = Builder([torch.cat([x, x])[:2] for x in inputs])
    if model in leaves:  # a graph alone, nothing to trace
        return builder.program([leaves[model](builder, model, "graph", *builder.inputs)])
    try:
        return builder.program(trace(model, builder, builder.inputs, leaves))
    except Exception:
        if all(len(x) == 2 for x in inputs):
            raise
    builder = Builder(list(inputs))  # perhaps the model takes no other number of images
    return builder.program(trace(model, builder, builder.inputs, leaves))


def shrunk(program: Program) -> Program:
    """The program without dead and constant channels, norms folded; in the precision that it had."""
    dtype = next((x.dtype for _, x in program.tensors() if x.is_floating_point()), torch.float32)
    small = folded(pruned(program.to(torch.float64)))
    small = folded(pruned(small))  # groups that were filled up, and norms moved past them, leave a little more
    return small.to(dtype).changed(lambda x: None if x is None else x.contiguous())


@torch.no_grad()
def verify(program: Program, small: Program, inputs: Sequence[Tensor], expected: tuple[Tensor, ...]) -> float:
    """Compare a model's outputs with its compact program's: see `check_outputs`."""
    return check_outputs(program, small.run(*inputs), inputs, expected, "the compact model")


@torch.no_grad()
def check_outputs(
    program: Program,
    found: Sequence[Tensor],
    inputs: Sequence[Tensor],
    expected: Sequence[Tensor],
    what: str,
    tolerance: float = TOLERANCE,
) -> float:
    """Compare outputs with those expected: the largest difference as a share of the largest; raises if it is large.

    Where the expected ones are themselves further from exact arithmetic than the tolerance (a model may divide by
    almost nothing), ``program`` in double precision tells by how much, and those found may be twice as far off.
    """
    worst = 0.0
    exact: tuple[Tensor, ...] | None = None
    for number, (one, two) in enumerate(zip(found, expected, strict=True)):
        scale = _largest(two)
        off = _off(one, two, scale)
        worst = max(worst, off)
        if off <= tolerance:
            continue
        if exact is None:
            exact = program.to(torch.float64).run(*(x.double() if x.is_floating_point() else x for x in inputs))
        own, here = _off(two, exact[number], scale), _off(one, exact[number], scale)
        if not here <= max(tolerance, 2 * own):
            raise WiringError(
                f"the outputs of {what} differ from the model's by {off:.1e} of the largest, more than "
                f"{tolerance:.0e}; the model itself is off by {own:.1e} from exact arithmetic. Nothing is returned. Is "
                "the model deterministic in eval()? If so this is a mistake of ours: please report it with the model."
            )
    return worst


def _largest(x: Tensor) -> float:
    """The largest number of a tensor, whatever its sign; infinities would hide all differences. 1 if there is none."""
    finite = x[torch.isfinite(x)].double()
    return (float(finite.abs().max()) or 1.0) if finite.numel() else 1.0


@torch.no_grad()
def _any_size(model: nn.Module, small: Program, inputs: Sequence[Tensor]) -> bool:
    """Whether a compact program gives what the model gives for larger images, too: traces have sizes as plain numbers.

    A model divides by a size, say, or cuts the last row off, and the trace holds the example's number.
    """

    def larger(x: Tensor) -> Tensor:
        x = x if "batch" in small.notes else x[:1]
        for dim in range(2, x.dim()):
            x = torch.cat([x, x], dim).narrow(dim, 0, x.shape[dim] + x.shape[dim] // 2 + 1)
        return x

    if small.one_size:
        return False
    images = [larger(x) for x in inputs]
    if all(x.dim() <= 2 for x in images):
        return True
    try:
        pairs = list(zip(small.run(*images), _as_tuple(model(*images)), strict=True))
        return all(_off(one, two, _largest(two)) <= TOLERANCE for one, two in pairs)
    except Exception:  # the model takes no other size, or the program does not
        return False


def _off(one: Tensor, two: Tensor, scale: float) -> float:
    if one.shape != two.shape:
        raise WiringError(f"the compact model gives {tuple(one.shape)} where the model gives {tuple(two.shape)}.")
    difference = (one.double() - two.double()).abs()
    both = torch.isnan(one) & torch.isnan(two) | (one == two)  # infinities are equal, their difference is not a number
    return float(torch.where(both, 0.0, difference).max()) / scale if difference.numel() else 0.0


def _checked(model: nn.Module, example: Any) -> list[Tensor]:
    if not isinstance(model, nn.Module):
        raise WiringError(f"compact takes a torch.nn.Module, not {type(model).__name__}.")
    inputs = [example] if isinstance(example, Tensor) else list(example) if isinstance(example, (tuple, list)) else []
    if not inputs or not all(isinstance(x, Tensor) and x.dim() > 0 for x in inputs):
        raise WiringError(
            f"compact(model, example_input) takes an example of the model's input, a tensor (batch, …) or a tuple of "
            f"them, but {type(example).__name__} came."
        )
    if any(x.shape[0] == 0 for x in inputs):
        raise WiringError("the example has no image in it; outputs can be compared on at least one.")
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        if is_sharded(x):
            raise WiringError(
                f"{name} is sharded over processes: load the whole weights into a model of one process, as "
                "get_model_state_dict with full_state_dict=True gives them, and compact that one."
            )
        if x.dtype in (torch.float16, torch.bfloat16):
            raise WiringError(
                f"{name} is {x.dtype}; outputs are compared in single precision: compact model.float(), and lower the "
                "precision of what comes out."
            )
    return inputs


def _as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    if isinstance(outputs, Tensor):
        return (outputs,)
    if isinstance(outputs, (tuple, list)) and outputs and all(isinstance(x, Tensor) for x in outputs):
        return tuple(outputs)
    what = type(outputs).__name__
    if isinstance(outputs, (tuple, list)):
        what += f" of ({', '.join(type(x).__name__ for x in outputs)})"
    raise WiringError(
        f"compaction takes models that return a tensor or a tuple of tensors, but this one returned {what}. Wrap it in "
        "a module that returns the tensors."
    )
