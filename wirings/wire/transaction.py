"""Undo what a failing rule has done: to weights, gradients, optimizer state, budgets and what it remembers.

While a rule acts, a copy of every tensor is kept before PyTorch changes it in place; tensors that are only read cost
nothing. Rules that declare themselves `Rule.atomic` compute everything in an update before they change anything, so
that only the budgets, which the handle has changed before it asked the rule, are restored.

Two kinds of changes are not undone: writes that bypass PyTorch's operators (through NumPy), and changes inside objects
that a rule keeps as attributes, such as lists and random generators. Rules keep their state in buffers instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from wirings.rules.rule import Rule
from wirings.wire.layer import Layer


@contextmanager
def undone_on_error(
    rule: Rule, layers: Sequence[Layer], optimizer: Any, budgets: tuple[Sequence[int], Sequence[int]] | None
) -> Iterator[None]:
    """Set new budgets and let the rule act; if it raises, restore everything that was changed.

    Args:
        rule: the rule that is about to act.
        layers: the wired layers.
        optimizer: the optimizer that the rule may change, or None.
        budgets: the number of edges of every layer before and now, or None if they have not changed.
    """
    before: Any = None
    ks = [] if budgets is None else [layer.edges.k for layer in layers]
    if budgets is not None:
        # A rule that moves edges between layers has changed their numbers.
        before = [k.clone() for k in ks] if rule.moves_budget else budgets[0]
    try:
        if budgets is not None:
            _write(ks, budgets[1])
        with nullcontext() if rule.updates_at_once else restored_on_error(rule, layers, optimizer):
            yield
    except BaseException:
        if before is not None:
            _write(ks, [int(number) for number in before])
        raise


@torch.no_grad()
def _write(ks: Sequence[Tensor], numbers: Sequence[int]) -> None:
    """Set scalar tensors: with two kernels on a GPU, however many there are, and without moving data there."""
    if len({k.device for k in ks}) > 1:
        for k, number in zip(ks, numbers, strict=True):
            k.fill_(number)
    else:
        torch._foreach_zero_(list(ks))
        torch._foreach_add_(list(ks), list(numbers))


@contextmanager
def restored_on_error(rule: Rule, layers: Sequence[Layer], optimizer: Any = None) -> Iterator[None]:
    """If this raises, restore the rule, the edges, the optimizer and every tensor that was changed.

    Args:
        rule: the rule that is about to act.
        layers: the wired layers.
        optimizer: the optimizer that the rule may change, or None.
    """
    journal = _Journal(rule, layers, optimizer)
    try:
        with journal:
            yield
    except BaseException:
        journal.restore()
        raise


class _Journal(TorchFunctionMode):
    """Notes how to undo each change of a tensor, and what the rule, edges and optimizer refer to."""

    def __init__(self, rule: Rule, layers: Sequence[Layer], optimizer: Any) -> None:
        super().__init__()
        self._undo: list[Callable[[], Any]] = []
        self._copied: dict[Any, Tensor] = {}  # by id and memory; kept alive, so that no other tensor gets the same
        holders: list[dict[Any, Any]] = [vars(rule)]
        tensors: list[Tensor] = [layer.weight for layer in layers]
        for layer in layers:
            edges = layer.edges
            holders += [edges._buffers, edges._parameters]
        if optimizer is not None:
            holders += [optimizer.state, *optimizer.state.values(), *optimizer.param_groups]
            tensors += [p for group in optimizer.param_groups for p in group["params"]]
        tensors += [x for holder in holders for x in holder.values() if isinstance(x, Tensor)]
        # Not every change of these is seen below: `Tensor.set_` passes no mode, and a backward pass sets gradients.
        self._tensors = [(x, x.data, x.requires_grad, x.grad) for x in tensors if x.is_leaf]
        self._holders = [(holder, dict(holder)) for holder in holders]
        self._unsaved = [(layer.edges, set(layer.edges._non_persistent_buffers_set)) for layer in layers]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__set__", "__delete__"):  # of an attribute, such as data or grad: only the reference changes
            tensor, attribute = args[0], func.__self__
            self._undo.append(partial(attribute.__set__, tensor, attribute.__get__(tensor)))
        written = _written(name, args, kwargs or {})
        if name == "backward":  # adds to the gradients
            written = [x.grad for x, *_ in self._tensors if x.grad is not None]
        for tensor in written:
            key = (id(tensor), _address(tensor), tensor.shape)  # its data may be another tensor's than before
            if key not in self._copied:
                self._copied[key] = tensor
                data = tensor.detach()  # still refers to this memory if the tensor no longer does
                self._undo.append(partial(data.copy_, data.clone()))
        return func(*args, **(kwargs or {}))

    def restore(self) -> None:
        """Undo all changes, the latest first, since tensors may share memory."""
        with torch.no_grad():
            for undo in reversed(self._undo):
                undo()
            for tensor, data, requires_grad, grad in self._tensors:
                if not tensor.is_leaf:  # it was changed while gradients were recorded
                    tensor.detach_()
                tensor.data = data
                tensor.requires_grad, tensor.grad = requires_grad, grad
        for holder, before_ in self._holders:
            holder.clear()
            holder.update(before_)
        for edges, names in self._unsaved:
            edges._non_persistent_buffers_set = names


def _address(tensor: Tensor) -> int:
    """Where a tensor's data is; 0 if it has no memory of its own, as sparse tensors and those inside of vmap."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _written(name: str, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors whose values a call of this name changes: in-place methods, assignment to items, ``out=``."""
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
    found = [kwargs.get("out"), args[0] if in_place and args else None]
    if in_place and name.startswith("_fused_"):  # an optimizer's step, which changes the state as well
        found = [*args, *kwargs.values()]
    return [x for one in found for x in (one if isinstance(one, (list, tuple)) else [one]) if isinstance(x, Tensor)]


_IN_PLACE = {"__setitem__"} | {
    f"__i{operator}__"
    for operator in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
}
