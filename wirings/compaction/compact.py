"""`compact`: a copy of a model without dead and constant nodes, with the same outputs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.compact_model import CompactModel
from wirings.compaction.compare import TOLERANCE, check_outputs, largest_magnitude, relative_difference
from wirings.compaction.fold import fold
from wirings.compaction.lower_graphs import can_lower, lower_discrete, lower_static
from wirings.compaction.program import Program
from wirings.compaction.prune import prune
from wirings.compaction.report import CompactionReport, model_size, program_size
from wirings.compaction.trace import LowerModule, trace
from wirings.errors import WiringError
from wirings.graph import ContinuousGraph, DiscreteGraph
from wirings.selection.sharded import is_sharded
from wirings.utils.example_input import CallArguments, ExampleInput, call_error, example_arguments
from wirings.wire.finalize import finalize_
from wirings.wire.parametrization import wired


def compact(model: nn.Module, example_input: ExampleInput | None = None) -> CompactModel:
    """Return a copy of a model without dead nodes, with constant nodes folded in, and with the same outputs.

    Nodes that do not reach the output, or that the input does not reach, are removed, through norms, depthwise and
    grouped convolutions, additions and concatenations. Batch norms are folded into their neighbours. The outputs for
    the example are compared with the model's before anything is returned.

    Args:
        model: any feed-forward model that `torch.export` can trace, neural graphs included. A wired model is finalized
            first. The model is evaluated as in ``model.eval()``, and is not changed.
        example_input: a tensor (batch, …), the shape of one example such as ``(3, 32, 32)``, a tuple of inputs, or a
            dict of keyword inputs, which the compact model then takes by keyword, too. The batch size is not baked in;
            the image size is, if the traced model returns something else for larger images. By default,
            ``model.input_shape``.

    Returns:
        A module of plain PyTorch operators. ``print(small.report)`` shows what was removed.

    Raises:
        WiringError: if the model cannot be traced, or if the outputs differ.

    >>> small = compact(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.zeros(1, 3))
    >>> small(torch.zeros(5, 3)).shape
    torch.Size([5, 2])
    """
    arguments = _check_arguments(model, example_input)
    names = list(arguments.kwargs)
    device = [*arguments.args, *arguments.kwargs.values()][0].device
    plain = plain_copy(model)
    plain = _WithKeywords(plain, names) if names else plain
    inputs = [x.detach().cpu() for x in (*arguments.args, *arguments.kwargs.values())]
    try:
        with torch.no_grad():
            outputs = plain(*(x.clone() for x in inputs))  # the model may change them in place
    except WiringError:
        raise
    except Exception as error:
        raise call_error(model, example_input, arguments, error, "compact") from error
    expected = _as_tuple(outputs)
    if any(y.numel() and not torch.isfinite(y).any() for y in expected):
        raise WiringError(
            "the model returns no finite number for the example, so the outputs cannot be compared. Use an example "
            "like those the model was trained on, or check whether training diverged."
        )
    program = lower(plain, inputs, ["input"] * len(arguments.args) + names)
    program.notes["one_output"] = isinstance(outputs, Tensor)
    small = shrink(program)
    difference = check_outputs(program, small.run(*inputs), inputs, expected, "the compact model")
    report = CompactionReport(model_size(program, plain), program_size(small), difference)
    small.notes["report"] = report.as_mapping()
    if not _works_for_any_size(plain, small, inputs):
        small.notes["one_size"] = True
    return CompactModel(small, report).to(device).eval()


def plain_copy(model: nn.Module) -> nn.Module:
    """A copy of a model on the CPU, in evaluation, finalized if it is wired."""
    plain = copy.deepcopy(model).cpu()
    if wired(plain):
        finalize_(plain)
    return plain.eval()


class _WithKeywords(nn.Module):
    """A model whose last inputs are passed by keyword."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, list(names)

    def forward(self, *inputs: Tensor) -> Any:
        count = len(inputs) - len(self.names)
        return self.model(*inputs[:count], **dict(zip(self.names, inputs[count:], strict=True)))


def lower(model: nn.Module, inputs: Sequence[Tensor], names: Sequence[str] = ()) -> Program:
    """Convert a model to a program.

    Args:
        model: a plain copy, on the CPU and in evaluation.
        inputs: an example.
        names: the names of the inputs.
    """
    leaves: dict[nn.Module, LowerModule] = {}
    for module in model.modules():
        if isinstance(module, ContinuousGraph) and module.steps is None:
            raise WiringError(
                "a ContinuousGraph with an adaptive solver is not a feed-forward model. Give it a fixed number of "
                'steps (solver="rk4", steps=…), or use the finalized model as it is.'
            )
        if can_lower(module):
            leaves[module] = lower_discrete if isinstance(module, DiscreteGraph) else lower_static
    # Two images, so that the tracer can tell the batch size from other sizes.
    builder = ProgramBuilder([torch.cat([x, x])[:2] for x in inputs], names)
    if model in leaves:  # nothing but a graph
        return builder.program([leaves[model](builder, model, "graph", *builder.inputs)])
    try:
        return builder.program(trace(model, builder, builder.inputs, leaves))
    except Exception:
        if all(len(x) == 2 for x in inputs):
            raise
    builder = ProgramBuilder(list(inputs), names)  # the model may work for the example's batch size only
    return builder.program(trace(model, builder, builder.inputs, leaves))


def shrink(program: Program) -> Program:
    """The program without dead and constant channels, with norms folded, in its original precision."""
    dtype = next((x.dtype for _, x in program.tensors() if x.is_floating_point()), torch.float32)
    small = fold(prune(program.to(torch.float64)))
    small = fold(prune(small))  # padded groups, and norms that moved past them, leave a little more to remove
    return small.to(dtype).map_tensors(lambda x: x.contiguous())


@torch.no_grad()
def _works_for_any_size(model: nn.Module, small: Program, inputs: Sequence[Tensor]) -> bool:
    """Whether a compact program returns what the model does for larger images, too.

    Traces contain sizes as plain numbers. If a model divides by a size, or removes the last row, the trace contains
    the number for the example.
    """

    def enlarge(x: Tensor) -> Tensor:
        x = x if "batch" in small.notes else x[:1]
        for dim in range(2, x.dim()):
            x = torch.cat([x, x], dim).narrow(dim, 0, x.shape[dim] + x.shape[dim] // 2 + 1)
        return x

    if small.one_size:
        return False
    images = [enlarge(x) for x in inputs]
    if all(x.dim() <= 2 for x in images):
        return True
    try:
        pairs = list(zip(small.run(*images), _as_tuple(model(*images)), strict=True))
        return all(relative_difference(one, two, largest_magnitude(two)) <= TOLERANCE for one, two in pairs)
    except Exception:  # the model or the program does not support other sizes
        return False


def _check_arguments(model: nn.Module, example_input: ExampleInput | None) -> CallArguments:
    if not isinstance(model, nn.Module):
        raise WiringError(f"compact expects a torch.nn.Module, got {type(model).__name__}.")
    arguments = example_arguments(model, example_input, "compact")
    named = [*((f"input {i}", x) for i, x in enumerate(arguments.args)), *arguments.kwargs.items()]
    for name, x in named:
        if not isinstance(x, Tensor) or x.dim() == 0:
            got = "a tensor without a batch dimension" if isinstance(x, Tensor) else type(x).__name__
            raise WiringError(
                f"compact expects tensors (batch, …) as inputs of the model, got {got} for {name}. Wrap the model in a "
                "module that sets all other arguments."
            )
        if x.shape[0] == 0:
            raise WiringError("example_input is an empty batch. Outputs are compared on at least one example.")
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        if is_sharded(x):
            raise WiringError(
                f"{name} is sharded over processes. Load the full weights, as from get_model_state_dict with "
                "full_state_dict=True, into a model in one process, and compact that one."
            )
        if x.dtype in (torch.float16, torch.bfloat16):
            raise WiringError(
                f"{name} is {x.dtype}, but outputs are compared in single precision. Compact model.float(), and "
                "convert the compact model."
            )
    return arguments


def _as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    if isinstance(outputs, Tensor):
        return (outputs,)
    if isinstance(outputs, (tuple, list)) and outputs and all(isinstance(x, Tensor) for x in outputs):
        return tuple(outputs)
    what = type(outputs).__name__
    if isinstance(outputs, (tuple, list)):
        what += f" of ({', '.join(type(x).__name__ for x in outputs)})"
    raise WiringError(
        f"compaction expects a model that returns a tensor or a tuple of tensors, got {what}. Wrap the model in a "
        "module that returns the tensors."
    )
