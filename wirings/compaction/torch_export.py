"""Trace a module with `torch.export`: functional PyTorch operators, for any batch size where possible.

Modules that are not traced into, which are neural graphs, appear in the trace as one custom operator each.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from wirings.errors import WiringError
from wirings.utils.text import brief

ADVICE = (
    "Compaction supports feed-forward models whose control flow and shapes do not depend on the values of tensors: "
    "rewrite that line with torch.where or fixed sizes, or compact the part of the model that can be traced."
)
OPERATOR = "wirings::untraced"
"""The operator that stands for a module that is not traced into."""

_LOGGERS = ("export._trace", "_export.non_strict_utils", "fx.experimental.symbolic_shapes")
"""PyTorch's loggers that print during a trace."""

_untraced: list[Callable[[tuple[int, ...]], tuple[int, ...]]] = []
"""For each module that the current trace does not enter: which shape it returns for a shape, without the batch."""


@torch.library.custom_op(OPERATOR, mutates_args=())
def untraced(x: Tensor, number: int) -> Tensor:
    """Stand for the module of this number in a trace."""
    raise NotImplementedError("this operator only appears in traces, which are not run")


@untraced.register_fake
def _(x: Tensor, number: int) -> Tensor:
    return x.new_empty([x.shape[0], *_untraced[number](tuple(x.shape[1:]))])


def export_module(
    module: nn.Module, example: tuple[Tensor, ...], leaves: list[nn.Module]
) -> torch.export.ExportedProgram:
    """Trace a module.

    Args:
        module: a module in evaluation mode. The ``forward`` of its ``leaves`` is replaced while it is traced.
        example: its inputs.
        leaves: modules inside it that are not traced into.

    Raises:
        WiringError: if it cannot be traced; the message names the line of code.
    """
    _check_names(module)
    seen = _leaf_shapes(module, example, leaves)
    before = list(_untraced)
    _untraced[:] = [shapes.__getitem__ for shapes in seen]
    try:
        for number, leaf in enumerate(leaves):
            leaf.forward = lambda x, number=number: untraced(x, number)
        with _quiet():
            traced = _export(module, example)
            try:
                return traced.run_decompositions({})
            except Exception as error:  # of names that no code can have, for instance
                raise _untraceable(module, error) from error
    finally:
        _untraced[:] = before
        for leaf in leaves:
            del leaf.forward


def _check_names(module: nn.Module) -> None:
    """Raise if a name could end a string: PyTorch writes names between quotes into code that it then compiles."""
    kinds = ((part._modules, part._parameters, part._buffers) for part in module.modules())
    names = (name for parts in kinds for part in parts for name in part.keys())  # noqa: SIM118 - a scripted module's
    if (odd := next((name for name in names if not name.isprintable() or re.search(r'["\\]', name)), None)) is not None:
        raise WiringError(
            f"{type(module).__name__} cannot be traced by torch.export: the name {brief(odd)} has quotes, backslashes "
            "or control characters. Rename that layer."
        )


def _leaf_shapes(
    module: nn.Module, example: tuple[Tensor, ...], leaves: list[nn.Module]
) -> list[dict[tuple[int, ...], tuple[int, ...]]]:
    """For each leaf, the shape it returns for each shape it is called with, without the batch dimension."""
    seen: list[dict[tuple[int, ...], tuple[int, ...]]] = [{} for _ in leaves]
    hooks = []
    for leaf, shapes in zip(leaves, seen, strict=True):

        def hook(_: nn.Module, args: Any, out: Any, shapes: dict[tuple[int, ...], tuple[int, ...]] = shapes) -> None:
            shapes[tuple(args[0].shape[1:])] = tuple(out.shape[1:])

        hooks.append(leaf.register_forward_hook(hook))
    try:
        if leaves:
            with torch.no_grad():
                module(*example)
    finally:
        for handle in hooks:
            handle.remove()
    return seen


def _export(module: nn.Module, example: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    """A trace for any batch size or, if the module does not allow that, for the example's."""
    inside = _Inside(module)
    batches = tuple({0: torch.export.Dim.AUTO} for _ in example)
    try:
        return torch.export.export(inside, example, dynamic_shapes=(batches,), strict=False)
    except Exception:
        try:
            return torch.export.export(inside, example, strict=False)
        except Exception as error:
            raise _untraceable(module, error) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence PyTorch, which warns about its internals and prints whole traces on failure."""
    loggers = [logging.getLogger(f"torch.{name}") for name in _LOGGERS]
    before = [logger.disabled for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


class _Inside(nn.Module):
    """A wrapper, since the attributes of PyTorch's traces might clash with those of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Any:
        return self.model(*inputs)


def _untraceable(module: nn.Module, error: Exception) -> WiringError:
    """The error for a failed trace: in which line of whose code, at which operator, and why."""
    libraries = Path(__file__).parent, Path(torch.__file__).parent
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.line and not any(Path(frame.filename).is_relative_to(library) for library in libraries)
    ]
    where = f" at {own[-1].filename}:{own[-1].lineno}, `{own[-1].line}`" if own else ""
    if "DataDependent" in type(error).__name__:  # the last operator of the trace converts a tensor to a number
        operators = re.findall(r"torch\.ops\.([\w.]+)\(", str(getattr(error, "partial_fx_graph", "")))
        where += f" (operator {operators[-1]})" if operators else ""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return WiringError(
        f"{type(module).__name__} cannot be traced by torch.export{where}: {type(error).__name__}: "
        f"{' '.join(lines[:2])[:400]} {ADVICE}"
    )


# ---- operators of a trace ------------------------------------------------------------------------------------------


def is_random(target: Any, arguments: list[Any], options: dict[str, Any]) -> bool:
    """Whether an operator draws random numbers; attention and recurrent layers only do with dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    names = [argument.name for argument in target._schema.arguments]
    given = dict(zip(names, arguments, strict=False)) | options
    if {"dropout", "train"} <= set(names):  # recurrent layers
        return bool(given["dropout"] and given["train"])
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0.0


def check_sizes(node: fx.Node, name: str) -> None:
    """Raise if the size of an operator's result depends on the values of tensors."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # imports SymPy, which takes 0.3 s

    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    if not any(isinstance(x, Tensor) and free_unbacked_symbols(x) for x in values):
        return
    frames = re.findall(r'File "(.+)", line (\d+)', node.meta.get("stack_trace") or "")
    where = f" at {frames[-1][0]}:{frames[-1][1]}" if frames else ""
    raise WiringError(f"the operator {name}{where} returns a tensor whose size depends on values. {ADVICE}")
