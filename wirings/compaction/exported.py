"""A module's trace by `torch.export`: PyTorch's operators, functional, for any number of images where that can be.

Modules that stay whole in the trace, neural graphs, stand in it as one operator of ours.
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
from torch import Tensor, nn

from wirings.errors import WiringError

ADVICE = (
    "Compaction takes feed-forward models whose path does not depend on the values of tensors: write that line with "
    "torch.where or fixed sizes, or compact the part of the model that can be traced."
)
_leaves: list[tuple[nn.Module, Callable[[tuple[int, ...]], tuple[int, ...]]]] = []
"""The modules that stay whole in the trace being made, with how the sizes of their maps change."""


@torch.library.custom_op("wirings::whole", mutates_args=())
def whole(x: Tensor, number: int) -> Tensor:
    """In a trace: the module of this number."""
    raise NotImplementedError("a trace is not run")


@whole.register_fake
def _(x: Tensor, number: int) -> Tensor:
    return x.new_empty([x.shape[0], *_leaves[number][1](tuple(x.shape[1:]))])


def exported(module: nn.Module, example: tuple[Tensor, ...], leaves: list[nn.Module]) -> torch.export.ExportedProgram:
    seen = _shapes(module, example, leaves)
    before = list(_leaves)
    _leaves[:] = [(leaf, shapes.__getitem__) for leaf, shapes in zip(leaves, seen, strict=True)]
    try:
        for number, leaf in enumerate(leaves):
            leaf.forward = lambda x, number=number: whole(x, number)
        with _quiet():
            return _export(module, example).run_decompositions({})
    finally:
        _leaves[:] = before
        for leaf in leaves:
            del leaf.forward


def _shapes(
    module: nn.Module, example: tuple[Tensor, ...], leaves: list[nn.Module]
) -> list[dict[tuple[int, ...], tuple[int, ...]]]:
    """For modules that stay whole: which shape comes out, without the batch, for which that goes in."""
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
    """A trace for any number of images, or if the module does not allow that, for those of the example."""
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
    """Nothing from PyTorch about itself: it warns, and prints whole traces where it fails. Our error has the line."""
    loggers = [logging.getLogger(f"torch.{name}") for name in ("export._trace", "fx.experimental.symbolic_shapes")]
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
    """A model one level down: PyTorch's traces have attributes of their own that its names might meet."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Any:
        return self.model(*inputs)


def _untraceable(module: nn.Module, error: Exception) -> WiringError:
    """Which line of whose code the trace stopped at, at which operator, and why."""
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not {"torch", "compaction"} & set(Path(frame.filename).parts)
    ]
    where = f" at {own[-1].filename}:{own[-1].lineno}, `{own[-1].line}`" if own else ""
    if "DataDependent" in type(error).__name__:  # the last operator that it got to made a number of Python's
        operators = re.findall(r"torch\.ops\.([\w.]+)\(", str(getattr(error, "partial_fx_graph", "")))
        where += f" (operator {operators[-1]})" if operators else ""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return WiringError(
        f"{type(module).__name__} cannot be traced by torch.export{where}: {type(error).__name__}: "
        f"{' '.join(lines[:2])[:400]} {ADVICE}"
    )
