"""The gradient of the weights of a forward pass: straight through to all edges, to some, or scaled."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wirings.selection import batched, functional
from wirings.utils.transforms import is_plain

_unsafe_view = torch.ops.aten._unsafe_view.default


class GradientReach(NamedTuple):
    """Which edges a gradient reaches, and how much of it. Made anew for every layer and pass, so it is a tuple."""

    mask: Tensor | None = None
    """Edges outside this mask get the gradient times ``factor``; None if all are inside."""
    factor: float | Tensor = 0.0
    """A tensor may change between two replays of a captured step."""
    allowed: Tensor | None = None
    """Edges outside this mask get no gradient; None for all."""

    @property
    def only_mask(self) -> Tensor | None:
        """The mask of the edges that get the gradient, if all others get none; None if it is not so simple."""
        if self.mask is None:
            return self.allowed
        return self.mask if self.allowed is None and isinstance(self.factor, float) and self.factor == 0.0 else None

    def __call__(self, grad: Tensor) -> Tensor:
        return functional.passed_on(grad, self.mask, self.factor, self.allowed)


def pass_through(weight: Tensor, used: Tensor, reach: GradientReach | None) -> Tensor:
    """Return ``used``, which was computed from ``weight`` without a gradient, with a gradient that goes to ``weight``.

    Args:
        weight: the weight that gets the gradient.
        used: may be of a lower precision than the weight; the gradient has the weight's.
        reach: where the gradient goes; None for everywhere.
    """
    if not is_plain(weight):
        reach = reach or GradientReach()
        return functional.scaled_through(weight, used, reach.mask, reach.factor, reach.allowed)
    return pass_plain(weight, used, reach)


def pass_plain(weight: Tensor, used: Tensor, reach: GradientReach | None) -> Tensor:
    """`pass_through` for a weight that is known to be plain (`is_plain`)."""
    if not weight.requires_grad or not torch.is_grad_enabled():
        return used.view_as(used)
    # A view that autograd does not take for one: its node passes the gradient on, in the weight's precision. What the
    # view shows is replaced. A `torch.autograd.Function` would cost the host several times as much.
    through: Any = _unsafe_view(weight, tuple(weight.shape))
    through.data = used
    if reach is not None:  # what `Tensor.register_hook` does, without a handle to remove the hook
        through._backward_hooks = OrderedDict(reach=reach)
        through.grad_fn._register_hook_dict(through)
    return through


def pass_all(
    weights: Sequence[Tensor], used: Sequence[Tensor], reaches: Sequence[GradientReach | None]
) -> Sequence[Tensor]:
    """`pass_plain` for the weights of all layers: one node of the graph, which costs the host a fraction of many.

    The gradients of all weights are passed on when the last of them is there, at the end of the backward pass. That
    would keep data-parallel training from communicating meanwhile, and an optimizer that steps during the backward
    pass from freeing gradients: then every weight has a node of its own.
    """
    alone = torch.distributed.is_available() and torch.distributed.is_initialized()
    if alone or any(getattr(w, "_post_accumulate_grad_hooks", None) for w in weights):
        return [pass_plain(*each) for each in zip(weights, used, reaches, strict=True)]
    if not torch.is_grad_enabled() or not any(w.requires_grad for w in weights):
        return used
    if all(w.requires_grad for w in weights):
        return _AllThrough.apply(used, reaches, *weights)
    trained = [i for i, weight in enumerate(weights) if weight.requires_grad]
    some, reach, all_edges = ([values[i] for i in trained] for values in (used, reaches, weights))
    result = list(used)
    for i, tensor in zip(trained, _AllThrough.apply(some, reach, *all_edges), strict=True):
        result[i] = tensor
    return result


class _AllThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, used: Sequence[Tensor], reaches: Sequence[GradientReach | None], *weights: Tensor) -> Any:
        ctx.set_materialize_grads(False)  # layers that were not used get no gradient
        ctx.reaches, ctx.dtype = reaches, weights[0].dtype
        return tuple(used)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *_passed_on(grads, ctx.reaches, ctx.dtype))


def _passed_on(
    grads: Sequence[Tensor | None], reaches: Sequence[GradientReach | None], dtype: torch.dtype
) -> list[Tensor | None]:
    """The gradients that weights get, in their precision; some edges may get none."""
    passed = list(grads)
    places, tensors, masks = [], [], []
    for i, (grad, reach) in enumerate(zip(grads, reaches, strict=True)):
        if grad is None or (reach is None and grad.dtype is dtype):
            continue
        mask = None if reach is None else reach.only_mask
        if reach is not None and mask is None:
            passed[i] = reach(grad)
        else:
            places.append(i)
            tensors.append(grad)
            masks.append(mask)
    if places:
        for i, made in zip(places, batched.masked_each(tensors, masks, dtype), strict=True):
            passed[i] = made
    return passed
