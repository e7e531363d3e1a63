"""Solvers whose gradient comes from the adjoint equation, solved backwards in time; see `wirings.graph.solve`."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from wirings.graph.solve import Derivative, Parts, Solution, SolverOptions, integrate


def solve_adjoint(
    f: Derivative,
    y: Tensor,
    t0: float,
    t1: float,
    parameters: Sequence[Tensor],
    *,
    method: str = "dopri5",
    rtol: float = 1e-3,
    atol: float = 1e-3,
    steps: int | None = None,
    max_steps: int = 1000,
    where: str = "the solver",
    report: Callable[[Solution], None] | None = None,
) -> Solution:
    """Like `solve`, but compute the gradient by solving the adjoint equation from ``t1`` back to ``t0``.

    Memory does not grow with the number of steps. The gradient is that of the exact solution up to the tolerance (the
    state is recomputed backwards), not that of the steps. It cannot be differentiated again.

    The backward pass uses the same options; its error is the largest of three root mean squares: that of the state, of
    its gradient, and of all parameters' gradients.

    Args:
        f: the derivative, as in `solve`. It must recompute whatever it derives from ``parameters`` in each call.
        y: the state at ``t0``.
        t0: the initial time.
        t1: the final time.
        parameters: the tensors other than y, leaves or not, that f uses and that get a gradient. No others get one.
        method: as in `solve`, and so are the other options.
        rtol: the relative tolerance.
        atol: the absolute tolerance.
        steps: the number of equal steps to take instead of adaptive ones.
        max_steps: the number of steps after which an adaptive method raises an error.
        where: what error messages start with.
        report: called after each backward pass with its own `Solution`, whose y is the state recomputed at ``t0``.
    """
    options = SolverOptions(t0, t1, method, rtol, atol, steps, max_steps, where)
    options.check(y)
    if t0 == t1:
        return Solution(y, 0, 0, 0)
    parameters = list({id(p): p for p in parameters}.values())  # a tensor that is named twice has one gradient
    counts: list[int] = []
    y = _Adjoint.apply(f, options, counts, report, y, *parameters)
    return Solution(y, *counts)


class _Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, f: Derivative, options: SolverOptions, counts: list[int], report: Any, y: Tensor, *parameters: Tensor
    ) -> Tensor:
        (y,), *numbers = integrate(lambda t, state: (f(t, state[0]),), (y,), options)
        counts.extend(numbers)
        ctx.f, ctx.options, ctx.report = f, options, report
        ctx.autocast = _autocast_now(y.device.type)
        ctx.save_for_backward(y, *parameters)
        # Casts of weights that autocast cached in here have no gradient; some versions would reuse them outside.
        torch.clear_autocast_cache()
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        y, *parameters = ctx.saved_tensors
        f, options = ctx.f, ctx.options
        needed = ctx.needs_input_grad[5:]
        wanted = [p for p, need in zip(parameters, needed, strict=True) if need]

        def back(t: float, state: Parts) -> Parts:
            with torch.enable_grad(), ctx.autocast():
                here = state[0].detach().requires_grad_()
                dy = f(t, here)
            inputs = (here, *wanted)
            grads: Sequence[Tensor | None] = [None] * len(inputs)
            if dy.requires_grad and dy.shape == here.shape:  # the caller reports a wrong shape
                grads = torch.autograd.grad(dy, inputs, -state[1].to(dy.dtype), allow_unused=True)
            filled = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs, strict=True)]
            return (dy.detach(), filled[0], *_flat(filled[1:], y))

        state = (y, grad.to(y.dtype), *_flat([torch.zeros_like(p) for p in wanted], y))
        where = f"{options.where} (the gradient, by the adjoint equation)"
        back_options = replace(options, t0=options.t1, t1=options.t0, where=where)
        (y, grad, *rest), *counts = integrate(back, state, back_options)
        if ctx.report is not None:
            ctx.report(Solution(y, *counts))
        pieces = iter(rest[0].split([p.numel() for p in wanted]) if rest else ())
        grads = (next(pieces).view_as(p).to(p) if need else None for p, need in zip(parameters, needed, strict=True))
        return (None, None, None, None, grad, *grads)


def _flat(tensors: Sequence[Tensor], like: Tensor) -> Parts:
    """All tensors in one vector of ``like``'s dtype and device, as one part of a state; no part without tensors."""
    return (torch.cat([x.reshape(-1).to(like) for x in tensors]),) if tensors else ()


def _autocast_now(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """A function that restores the current autocast setting."""
    if not torch.amp.is_autocast_available(device):
        return nullcontext
    dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    return functools.partial(torch.autocast, device, dtype, enabled)
