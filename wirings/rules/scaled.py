"""A gradient that reaches real edges unchanged and hallucinated ones scaled, shared by several rules."""

from typing import Any

import torch
from torch import Tensor


def scaled_through(
    weight: Tensor, value: Tensor, real: Tensor, factor: float | Tensor, allowed: Tensor | None = None
) -> Tensor:
    """Return ``value``, with its gradient passed to ``weight``: unchanged where ``real``, elsewhere times ``factor``.

    Args:
        weight: the weight that gets the gradient.
        value: anything computed from the weight; no gradient flows through the computation.
        real: a boolean mask of the real edges.
        factor: the factor for other edges. A tensor may change between two replays of a captured step.
        allowed: edges outside this mask get no gradient; None for all.

    >>> w, real = torch.tensor([3.0, -1.0, 2.0], requires_grad=True), torch.tensor([True, False, True])
    >>> scaled_through(w, torch.where(real, 2 * w, 0.0), real, 0.5).sum().backward(); w.grad
    tensor([1.0000, 0.5000, 1.0000])
    """
    return _ScaledThrough.apply(weight, value.detach(), real, factor, allowed)


class _ScaledThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, value: Tensor, real: Tensor, factor: Any, allowed: Tensor | None) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, real, factor, allowed = inputs
        tensor = isinstance(factor, Tensor)
        ctx.save_for_backward(real, allowed, factor if tensor else None)
        ctx.factor = None if tensor else factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        real, allowed, factor = ctx.saved_tensors
        passed = torch.where(real, grad, grad * (ctx.factor if factor is None else factor))
        return passed if allowed is None else torch.where(allowed, passed, 0.0), None, None, None, None
