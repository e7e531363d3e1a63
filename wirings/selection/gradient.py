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
    if not _in_one_node(weights):
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


def pass_all_shrunk(
    weights: Sequence[Tensor],
    used: Sequence[Tensor],
    reaches: Sequence[GradientReach | None],
    thresholds: Tensor,
    learned: Tensor,
    pulls: Sequence[Tensor],
) -> Sequence[Tensor]:
    """`pass_all` for edges that are shrunk by thresholds that are learned: they get a gradient, too.

    Args:
        weights: the weights that get the gradients.
        used: the real edges of each, shrunk (see `functional.pass_shrunk`).
        reaches: where the gradients go, each with a mask of the real edges.
        thresholds: the threshold of each weight, in one tensor.
        learned: the parameter that the logarithms of the thresholds depend on, a vector.
        pulls: for each threshold, the derivatives of its logarithm by the entries of ``learned``.
    """
    if not torch.is_grad_enabled() or not learned.requires_grad:
        return pass_all(weights, used, reaches)
    masks: list[Any] = [reach.mask for reach in reaches]  # type: ignore[union-attr]
    rows = torch.stack(list(pulls))  # copied: the rule may change them before the backward pass
    if _in_one_node(weights):
        return _AllShrunk.apply(used, masks, thresholds, rows, learned, *weights)
    each = [slice(i, i + 1) for i in range(len(weights))]
    return [_AllShrunk.apply(used[i], masks[i], thresholds[i], rows[i], learned, *weights[i])[0] for i in each]


def _in_one_node(weights: Sequence[Tensor]) -> bool:
    """Whether nobody follows the gradients of single weights during the backward pass; see `pass_all`."""
    alone = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not alone and not any(getattr(w, "_post_accumulate_grad_hooks", None) for w in weights)


class _AllShrunk(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        used: Sequence[Tensor],
        masks: Sequence[Tensor],
        thresholds: Tensor,
        pulls: Tensor,
        learned: Tensor,
        *weights: Tensor,
    ) -> Any:
        ctx.set_materialize_grads(False)  # layers that were not used get no gradient
        # Not saved by autograd: with checkpoints, it would be recomputed with one of the layers, or freed for all.
        ctx.used = [tensor.detach() for tensor in used]
        ctx.masks, ctx.thresholds, ctx.pulls, ctx.dtype = masks, thresholds, pulls, weights[0].dtype
        ctx.learned = learned  # for its place in the graph: its value, which an optimizer may change, is not used
        return tuple(used)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(grad is None for grad in grads):
            return (None,) * (5 + len(grads))
        thresholds, pulls, learned = ctx.thresholds, ctx.pulls, ctx.learned
        if torch.is_grad_enabled():
            thresholds = functional.grow(thresholds, (pulls * learned).sum(1))
        passed, pulled = batched.through_shrunk(grads, ctx.masks, ctx.used, thresholds, pulls, ctx.dtype)
        return (None, None, None, None, pulled.to(learned.dtype), *passed)


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
