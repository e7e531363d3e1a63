"""The gradient of the weights of a forward pass: straight through to all edges, to some, or scaled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wirings.selection import functional
from wirings.utils.transforms import is_plain

_unsafe_view = torch.ops.aten._unsafe_view.default


@dataclass(frozen=True)
class GradientReach:
    """Which edges a gradient reaches, and how much of it."""

    mask: Tensor | None = None
    """Edges outside this mask get the gradient times ``factor``; None if all are inside."""
    factor: float | Tensor = 0.0
    """A tensor may change between two replays of a captured step."""
    allowed: Tensor | None = None
    """Edges outside this mask get no gradient; None for all."""

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
    through: Tensor = _unsafe_view(weight, weight.shape)
    through.data = used
    if reach is not None:
        through.register_hook(reach)
    return through
