"""`compact`: a copy of a model without dead and constant nodes, with the same outputs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.compact_model import CompactModel
from wirings.compaction.compare import TOLERANCE, check_outputs, largest_magnitude, relative_difference
from wirings.compaction.fold import fold
from wirings.compaction.lower_graphs import can_lower, lower_discrete, lower_static
from wirings.compaction.operations.weighted_sum import WeightedSum
from wirings.compaction.output_structure import flatten_outputs
from wirings.compaction.program import LARGE_IMAGE, Program
from wirings.compaction.prune import prune
from wirings.compaction.report import CompactionReport, model_size, program_size, uncounted_operators
from wirings.compaction.trace import LowerModule, trace
from wirings.errors import WiringError
from wirings.graph import ContinuousGraph, DiscreteGraph
from wirings.selection.sharded import is_sharded
from wirings.utils.example_input import CallArguments, ExampleInput, call_error, example_arguments
from wirings.wire.finalize import finalize_
from wirings.wire.parametrization import wired

FEW_BYTES = 2**14
"""What a file may grow by if constant channels are replaced by maps."""


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
    arguments = check_arguments(model, example_input)
    named = [*(("input", x) for x in arguments.args), *arguments.kwargs.items()]
    tensors = [(name, x.detach().cpu()) for name, x in named if isinstance(x, Tensor)]
    device = next(x.device for _, x in named if isinstance(x, Tensor))
    inputs = [x for _, x in tensors]
    plain = plain_copy(model)
    try:
        with torch.no_grad():
            outputs = FlatModel(plain, arguments).call(*(x.clone() for x in inputs))  # it may change them in place
    except WiringError:
        raise
    except Exception as error:
        raise call_error(model, example_input, arguments, error, "compact") from error
    expected, structure, left_out = flatten_outputs(outputs)
    if any(y.numel() and not torch.isfinite(y).any() for y in expected):
        raise WiringError(
            "the model returns no finite number for the example, so the outputs cannot be compared. Use an example "
            "like those the model was trained on, or check whether training diverged."
        )
    if not isinstance(outputs, Tensor) or len(inputs) < len(named) or arguments.kwargs:
        plain = FlatModel(plain, arguments)
    program = lower(plain, inputs, [name for name, _ in tensors])
    program.notes["outputs"] = structure
    if left_out:
        program.notes["left_out"] = left_out
    program = program.without_unused()
    for o in program.operations:
        if isinstance(o, WeightedSum) and o.weight.numel() == 0:
            raise WiringError(
                f"the weight of {o.output} has shape {tuple(o.weight.shape)}, so it is empty, and nothing passes "
                "through the layer. Remove the layer, or use the model as it is."
            )
    small = shrink(program)
    if program_size(small).bytes > program_size(program).bytes + FEW_BYTES:
        # The maps in place of constant channels are larger than the weights that they replace.
        small = Program(program.inputs, program.operations, program.outputs, dict(program.notes))
    exact = functools.partial(_exact_outputs, plain, program, inputs)
    difference = check_outputs(program, small.run(*inputs), inputs, expected, "the compact model", exact_outputs=exact)
    sizes = model_size(program, plain), program_size(small)
    report = CompactionReport(*sizes, difference, uncounted_operators(program))
    small.notes["report"] = report.as_mapping()
    if not _works_for_any_size(plain, small, inputs):
        small.notes["one_size"] = True
    return CompactModel(small, report).to(device).eval()


@torch.no_grad()
def _exact_outputs(model: nn.Module, program: Program, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The model's outputs in double precision; those of its program if the model only runs in single precision."""
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    try:
        return flatten_outputs(copy.deepcopy(model).double()(*wide))[0]
    except Exception:  # a model may make constants in single precision
        return list(program.to(torch.float64).run(*wide))


def plain_copy(model: nn.Module) -> nn.Module:
    """A copy of a model on the CPU, in evaluation, finalized if it is wired."""
    try:
        plain = copy.deepcopy(model).cpu()
    except Exception as error:  # locks, open files, or tensors with a history among its attributes
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200].rstrip(".")
        raise WiringError(f"{type(model).__name__} cannot be copied, and so not be compacted: {reason}.") from error
    if wired(plain):
        finalize_(plain)
    return plain.eval()


def flat_copy(model: nn.Module, example_input: ExampleInput | None) -> tuple[nn.Module, list[Tensor]]:
    """A copy of a model as a program calls it, on the CPU and in single precision, and the inputs of an example."""
    arguments = check_arguments(model, example_input)
    given = [*arguments.args, *arguments.kwargs.values()]
    tensors = [x.detach().cpu() for x in given if isinstance(x, Tensor)]
    single = [x.float() if x.is_floating_point() else x for x in tensors]
    return FlatModel(plain_copy(model).float(), arguments), single


class FlatModel(nn.Module):
    """A model that takes the tensors of its example by position, and returns all of its tensors in a tuple.

    Args:
        model: the model.
        arguments: what it is called with; everything but tensors is the same in every call.
    """

    def __init__(self, model: nn.Module, arguments: CallArguments) -> None:
        super().__init__()
        self.model = model
        self.fixed = [None if isinstance(x, Tensor) else (x,) for x in (*arguments.args, *arguments.kwargs.values())]
        self.names = list(arguments.kwargs)

    def call(self, *inputs: Tensor) -> Any:
        """What the model returns."""
        waiting = iter(inputs)
        given = [next(waiting) if x is None else x[0] for x in self.fixed]
        count = len(given) - len(self.names)
        return self.model(*given[:count], **dict(zip(self.names, given[count:], strict=True)))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(flatten_outputs(self.call(*inputs))[0])


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
        outputs = trace(model, builder, builder.inputs, leaves)
        ignored = all(len(x) == 1 for x in inputs) and not any(len(builder.values[name]) == 2 for name in outputs)
        if not ignored:  # otherwise, the model has no batch: it takes the first example of one
            return builder.program(outputs)
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
        share = 2 if x.numel() <= LARGE_IMAGE else 16  # more pixels need more memory than the example
        for dim in range(2, x.dim()):
            more = x.shape[dim] // share + 1
            x = torch.cat([x, x.narrow(dim, 0, more)], dim)
        return x

    if small.one_size:
        return False
    images = [enlarge(x) for x in inputs]
    if all(x.dim() <= 2 for x in images):
        return True
    try:
        pairs = list(zip(small.run(*images), flatten_outputs(model(*images))[0], strict=True))
        return all(relative_difference(one, two, largest_magnitude(two)) <= TOLERANCE for one, two in pairs)
    except Exception:  # the model or the program does not support other sizes
        return False


def check_arguments(model: nn.Module, example_input: ExampleInput | None, where: str = "compact") -> CallArguments:
    """What a model is called with. Raises, in the name of ``where``, if it cannot be compacted with that."""
    if not isinstance(model, nn.Module):
        raise WiringError(f"{where} expects a torch.nn.Module, got {type(model).__name__}.")
    arguments = example_arguments(model, example_input, where)
    named = [*((f"input {i}", x) for i, x in enumerate(arguments.args)), *arguments.kwargs.items()]
    for name, x in named:
        if isinstance(x, (bool, int, float, str)) or x is None:
            continue  # the same in every call
        if not isinstance(x, Tensor) or x.dim() == 0:
            got = "a tensor without a batch dimension" if isinstance(x, Tensor) else type(x).__name__
            raise WiringError(
                f"{where} expects tensors (batch, …) as inputs of the model, got {got} for {name}. Wrap the model in a "
                "module that sets all other arguments."
            )
        if x.is_meta or x.layout != torch.strided:
            got = "one on the meta device, without values" if x.is_meta else f"one of layout {x.layout}"
            raise WiringError(f"{where} expects dense tensors as inputs of the model, got {got} for {name}.")
        if x.shape[0] == 0:
            raise WiringError("example_input is an empty batch. Outputs are compared on at least one example.")
    sizes = {name: len(x) for name, x in named if isinstance(x, Tensor)}
    if len(set(sizes.values())) > 1:
        counts = ", ".join(f"{size} for {name}" for name, size in sizes.items())
        raise WiringError(
            f"{where} expects the same batch size, in dimension 0, for all inputs of the model, got {counts}. Wrap the "
            "model in a module that takes inputs with a batch dimension and removes it."
        )
    if not any(isinstance(x, Tensor) for _, x in named):
        raise WiringError(f"{where} expects at least one tensor (batch, …) as an input of the model, got none.")
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        if is_sharded(x):
            raise WiringError(
                f"{name} is sharded over processes. Load the full weights, as from get_model_state_dict with "
                "full_state_dict=True, into a model in one process, and compact that one."
            )
        if x.is_meta:
            raise WiringError(
                f"{name} is on the meta device, without values. Load the weights first, into model.to_empty(device=…)."
            )
        if x.dtype in (torch.float16, torch.bfloat16):
            raise WiringError(
                f"{name} is {x.dtype}, but outputs are compared in single precision. Compact model.float(), and "
                "convert the compact model."
            )
    return arguments
