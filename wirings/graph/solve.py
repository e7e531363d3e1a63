"""Explicit Runge-Kutta solvers for dy/dt = f(t, y), where y is one tensor of any shape.

`solve` is differentiated through its steps; `wirings.graph.adjoint` solves a second equation backwards in time instead,
and keeps only the final state. Both take equal steps, or adapt them to an estimate of the error.

On a large state, the cost of a solver is moving memory. So the stages are never stacked, and all sums of stages go
through one function, `combine`. The host waits for the device twice at the start and once per step.
"""

import functools
import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wirings.errors import WiringError, unknown
from wirings.utils.checks import is_finite
from wirings.utils.text import brief
from wirings.utils.transforms import in_transform

Parts = tuple[Tensor, ...]  # a state of several tensors, as in the adjoint equation
Derivative = Callable[[float, Tensor], Tensor]


@dataclass(frozen=True)
class Tableau:
    """A Runge-Kutta method.

    Its first stage is f at the start of the step. A method with an error estimate has one more stage, f at the end of
    the step, which is also the first stage of the next step.
    """

    order: int
    """The order of the method."""
    nodes: tuple[float, ...]
    """The times of the second and later stages, as fractions of the step."""
    rows: tuple[tuple[float, ...], ...]
    """For each of these, the weights of the stages before it."""
    weights: tuple[float, ...]
    """The weights of the stages in the new state."""
    error: tuple[float, ...] = ()
    """``weights`` minus those of the lower-order method, with one more entry for the stage at the end."""


METHODS = {
    "euler": Tableau(1, (), (), (1.0,)),
    "midpoint": Tableau(2, (1 / 2,), ((1 / 2,),), (0.0, 1.0)),
    "rk4": Tableau(4, (1 / 2, 1 / 2, 1.0), ((1 / 2,), (0.0, 1 / 2), (0.0, 0.0, 1.0)), (1 / 6, 1 / 3, 1 / 3, 1 / 6)),
    "bosh3": Tableau(
        3, (1 / 2, 3 / 4), ((1 / 2,), (0.0, 3 / 4)), (2 / 9, 1 / 3, 4 / 9), (-5 / 72, 1 / 12, 1 / 9, -1 / 8)
    ),
    "dopri5": Tableau(
        5,
        (1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0),
        (
            (1 / 5,),
            (3 / 40, 9 / 40),
            (44 / 45, -56 / 15, 32 / 9),
            (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
            (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
        ),
        (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
        # Shampine's formula of order 4 (1986), as in torchdiffeq: 2/3 of the error by Dormand and Prince's own formula.
        (71 / 86400, 0.0, -142 / 50085, 71 / 2880, -5751 / 169600, 44 / 1575, -1 / 60),
    ),
}


@dataclass(frozen=True)
class Solution:
    """The final state, and what it took to compute it."""

    y: Tensor
    """The final state."""
    evaluations: int
    """Evaluations of f, including those of rejected steps."""
    accepted: int
    """Accepted steps."""
    rejected: int
    """Rejected steps."""


def solve(
    f: Derivative,
    y: Tensor,
    t0: float,
    t1: float,
    *,
    method: str = "dopri5",
    rtol: float = 1e-3,
    atol: float = 1e-3,
    steps: int | None = None,
    max_steps: int = 1000,
    where: str = "the solver",
) -> Solution:
    """Solve dy/dt = f(t, y) from y at ``t0`` to ``t1``, which may be earlier than ``t0``. The last step ends at ``t1``.

    The gradient is that of the steps that were taken (discretise, then differentiate): step sizes are constants.

    Args:
        f: the derivative, called with a Python float and a tensor of y's shape; returns a tensor of that shape, whose
            dtype may differ.
        y: the state at ``t0``, of any floating-point dtype, which it keeps.
        t0: the initial time.
        t1: the final time.
        method: one of `METHODS`. Only dopri5 and bosh3 adapt their steps.
        rtol: the relative tolerance. A step is accepted if the root mean square of error / (atol + rtol |y|) is at most
            1.
        atol: the absolute tolerance.
        steps: the number of equal steps to take instead, whatever the error; required by the other methods.
        max_steps: the number of steps, accepted or rejected, after which an adaptive method raises an error.
        where: what error messages start with.

    Raises:
        WiringError: if an argument is invalid, or the solution diverges.

    >>> solution = solve(lambda t, y: -y, torch.ones(1, dtype=torch.float64), 0.0, 1.0, rtol=1e-6, atol=1e-6)
    >>> f"{solution.y.item():.5f}"  # 1 / e
    '0.36788'
    """
    options = SolverOptions(t0, t1, method, rtol, atol, steps, max_steps, where)
    options.check(y)
    if t0 == t1:
        return Solution(y, 0, 0, 0)
    (y,), *counts = integrate(lambda t, state: (f(t, state[0]),), (y,), options)
    return Solution(y, *counts)


# ---- steps ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SolverOptions:
    """The arguments of `solve`, apart from the derivative and the state."""

    t0: float
    t1: float
    method: str
    rtol: float
    atol: float
    steps: int | None
    max_steps: int
    where: str

    def check(self, y: Tensor) -> None:
        """Raise a `WiringError` if an option is invalid, or does not fit the state ``y``."""
        if self.method not in METHODS:
            raise unknown("solver", self.method, METHODS)
        if not y.is_floating_point():
            raise WiringError(f"{self.where}: the state must have a real floating-point dtype, got {y.dtype}.")
        most = torch.finfo(y.dtype).max / 4  # differences of times are multiplied with the state
        if not all(_number(t) and is_finite(t, most) for t in (self.t0, self.t1)):
            raise WiringError(
                f"{self.where}: the times must be finite, got {brief(self.t0)} to {brief(self.t1)} for a state in "
                f"{y.dtype}."
            )
        for name in ("rtol", "atol"):
            if not _number(getattr(self, name)) or not 0 < getattr(self, name) <= most:
                raise WiringError(
                    f"{self.where}: {name} must be positive and finite, got {brief(getattr(self, name))}."
                )
        for name in ("steps", "max_steps"):
            number = getattr(self, name)
            if number is not None and (not _number(number, numbers.Integral) or number < 1):
                raise WiringError(f"{self.where}: {name} must be a whole number, at least 1, got {brief(number)}.")
        if self.steps is None and not METHODS[self.method].error:
            adaptive = " or ".join(repr(name) for name, tableau in METHODS.items() if tableau.error)
            raise WiringError(
                f"{self.where}: {self.method!r} has no error estimate to adapt its steps to. Set steps=, the number of "
                f"equal steps, or use {adaptive}."
            )

    def failed(self, what: str, t: float, h: float, accepted: int, rejected: int) -> WiringError:
        """The error for a solver that failed at time ``t`` with step size ``h``."""
        chosen = self.steps is None
        tolerance = f" with rtol={self.rtol:g} and atol={self.atol:g}" if chosen else ""
        remedies = "a looser tolerance, a larger max_steps" if chosen else "more steps"
        return WiringError(
            f"{self.where}: {what}. {self.method} got from t = {self.t0:g} to t = {t:g}, on the way to {self.t1:g}, "
            f"in {accepted} steps{tolerance}; {rejected} more were rejected, and the step size is {abs(h):.3g}. "
            f"Try {remedies}, a norm in the node function, or smaller weights."
        )


def _number(value: Any, kind: Any = numbers.Real) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


class _Counted:
    """A derivative that counts its calls and checks what it returns."""

    def __init__(self, f: Callable[[float, Parts], Parts], where: str) -> None:
        self.f, self.where, self.calls = f, where, 0

    def __call__(self, t: float, y: Parts) -> Parts:
        self.calls += 1
        dy = self.f(t, y)
        if dy[0].shape != y[0].shape:
            raise WiringError(
                f"{self.where}: dy/dt must have the state's shape {tuple(y[0].shape)}, got {tuple(dy[0].shape)}."
            )
        # A narrower dtype is kept, since it costs less to move; a wider one would widen the state.
        pairs = zip(dy, y, strict=True)
        return tuple(k if torch.promote_types(k.dtype, x.dtype) == x.dtype else k.to(x.dtype) for k, x in pairs)


def integrate(f: Callable[[float, Parts], Parts], y: Parts, options: SolverOptions) -> tuple[Parts, int, int, int]:
    """The final state, and the numbers of evaluations, accepted steps and rejected steps."""
    counted = _Counted(f, options.where)
    if options.steps is None:
        y, accepted, rejected = _choose_steps(counted, y, options)
    else:
        y, accepted, rejected = _equal_steps(counted, y, options, options.steps), options.steps, 0
    return y, counted.calls, accepted, rejected


def _equal_steps(f: _Counted, y: Parts, options: SolverOptions, steps: int) -> Parts:
    tableau, h = METHODS[options.method], (options.t1 - options.t0) / steps
    for i in range(steps):
        t, end = options.t0 + i * h, options.t1 if i == steps - 1 else options.t0 + (i + 1) * h
        y = _step(f, tableau, t, end, y, f(t, y))[0]
    if not _unreadable(y[0]) and not math.isfinite(_peak(y).item()):
        raise options.failed("the state is not finite at the end", options.t1, h, steps, 0)
    return y


def _choose_steps(f: _Counted, y: Parts, options: SolverOptions) -> tuple[Parts, int, int]:
    tableau, t = METHODS[options.method], options.t0
    first = f(t, y)
    h = _first_step(f, tableau, y, first, options)
    least = 10 * torch.finfo(torch.float64).eps * max(abs(options.t0), abs(options.t1), abs(options.t1 - options.t0))
    accepted = rejected = 0
    error, grow = 0.0, 10.0
    while t != options.t1:
        left = options.t1 - t
        last = 1.01 * abs(h) >= abs(left)  # leaves no tiny step for the end
        if last:
            h = left
        elif abs(h) < least:
            why = "" if math.isfinite(error) else ", since the state or dy/dt is not finite beyond"
            raise options.failed(f"the step size became too small{why}", t, h, accepted, rejected)
        if accepted + rejected == options.max_steps:
            raise options.failed(f"not done after max_steps={options.max_steps} steps", t, h, accepted, rejected)
        end = options.t1 if last else t + h
        new, stages = _step(f, tableau, t, end, y, first)
        stages.append(f(end, new))
        with torch.no_grad():
            ratio = _error_ratio(y, new, stages, [(end - t) * e for e in tableau.error], options)
            if last:  # an infinite state has a ratio of 0, but must not be accepted as the final one
                ratio = ratio + 0 * _peak(new)
        error = ratio.item()
        if error <= 1:
            t, y, first, accepted = end, new, stages[-1], accepted + 1
            h *= min(grow, max(0.2, 0.9 * error ** (-1 / tableau.order))) if error else grow
            grow = 10.0
        else:  # also NaN or infinity: f may have overflowed
            rejected, grow = rejected + 1, 1.0
            h *= max(0.2, 0.9 * error ** (-1 / tableau.order)) if math.isfinite(error) else 0.2
        del new, stages  # and with them the autograd graph of a rejected step
    return y, accepted, rejected


def _step(f: _Counted, tableau: Tableau, t: float, end: float, y: Parts, first: Parts) -> tuple[Parts, list[Parts]]:
    """Take one step from ``t`` to ``end``; return the new state and the stages."""
    h = end - t
    stages = [first]
    for node, row in zip(tableau.nodes, tableau.rows, strict=True):
        stages.append(f(end if node == 1 else t + node * h, _sum(y, stages, [h * a for a in row])))
    return _sum(y, stages, [h * b for b in tableau.weights]), stages


def _first_step(f: _Counted, tableau: Tableau, y: Parts, first: Parts, options: SolverOptions) -> float:
    """The first step size, with its sign: so small that an Euler step changes the state and f only a little.

    (Hairer, Nørsett and Wanner, Solving Ordinary Differential Equations I, section II.4.)
    """
    span = options.t1 - options.t0
    with torch.no_grad():
        scale = [x.abs().mul_(options.rtol).add_(options.atol) for x in y]
        sizes = [_rms([x / s for x, s in zip(parts, scale, strict=True)]) for parts in (y, first)]
        size, slope = torch.stack(sizes).tolist()
        if not math.isfinite(size + slope):
            raise _not_finite(y, first, options)
        h = 1e-6 if min(size, slope) < 1e-5 else 0.01 * size / slope
        h = math.copysign(min(h, abs(span)), span)
        second = f(options.t0 + h, _sum(y, [first], [h]))
        change = [b.sub(a).div_(s) for a, b, s in zip(first, second, scale, strict=True)]
        bend = _rms(change).item() / abs(h)
    if not math.isfinite(bend):
        return h
    steepest = max(slope, bend)
    long = max(1e-6, abs(h) * 1e-3) if steepest <= 1e-15 else (0.01 / steepest) ** (1 / tableau.order)
    return math.copysign(min(100 * abs(h), long, abs(span)), span)


def _not_finite(y: Parts, first: Parts, options: SolverOptions) -> WiringError:
    if not math.isfinite(_peak(y).item()):
        return WiringError(f"{options.where}: the initial state, at t = {options.t0:g}, is not finite.")
    what = "too large to take a step" if math.isfinite(_peak(first).item()) else "not finite"
    return WiringError(
        f"{options.where}: the first dy/dt, at t = {options.t0:g}, is {what}, although the state is finite. "
        "Try a norm in the node function or smaller weights."
    )


# ---- sums and norms -------------------------------------------------------------------------------------------------


def combine(y: Tensor | None, ks: Sequence[Tensor], coefficients: Sequence[float]) -> Tensor:
    """``y + sum_j coefficients[j] * ks[j]`` in y's dtype, or the sum alone if y is None.

    Coefficients of 0 are skipped; if y is None, at least one must be nonzero. No k may have a wider dtype than y.

    >>> combine(torch.ones(2), [torch.ones(2), torch.tensor([1.0, 2.0])], [0.5, -1.0])
    tensor([ 0.5000, -0.5000])
    """
    used = [(k, c) for k, c in zip(ks, coefficients, strict=True) if c]
    if y is not None and not used:
        return y
    kernels = None if torch.compiler.is_compiling() or not ks[0].is_cuda else _kernels()
    if kernels is not None:
        return kernels.combine(y, [k for k, _ in used], [c for _, c in used])
    (k, c), *rest = used
    if y is None:
        total = k.to(functools.reduce(torch.promote_types, (k.dtype for k in ks), torch.float32)) * c
    else:
        total = torch.add(y, k, alpha=c)
    for k, c in rest:
        total.add_(k, alpha=c)  # in place is safe: no backward pass needs the partial sums
    return total


@functools.cache
def _kernels() -> Any:
    """The CUDA kernel, or None if Triton is not installed."""
    try:
        from wirings.graph import _combine_cuda
    except ImportError:
        return None
    return _combine_cuda


def _sum(y: Parts | None, stages: Sequence[Parts], coefficients: Sequence[float]) -> Parts:
    """Apply `combine` to each part."""
    start = (None,) * len(stages[0]) if y is None else y
    return tuple(combine(x, [k[i] for k in stages], coefficients) for i, x in enumerate(start))


def _error_ratio(
    y: Parts, new: Parts, stages: Sequence[Parts], coefficients: Sequence[float], options: SolverOptions
) -> Tensor:
    """The error of a step relative to the tolerance: the largest over the parts, at most 1 for an accepted step."""
    errors = _sum(None, stages, coefficients)
    for error, old, x in zip(errors, y, new, strict=True):
        scale = old.abs()
        torch.maximum(scale, x.abs(), out=scale)
        error.div_(scale.mul_(options.rtol).add_(options.atol))
    return _rms(errors)


def _rms(parts: Sequence[Tensor]) -> Tensor:
    """The largest root mean square over the parts, as a tensor on the device."""
    sizes = [
        torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)) / math.sqrt(max(x.numel(), 1))
        for x in parts
    ]
    return sizes[0] if len(sizes) == 1 else torch.stack(sizes).amax()


def _peak(parts: Parts) -> Tensor:
    """The largest magnitude, as a tensor on the device; not finite if any entry is not."""
    return torch.stack(
        [torch.linalg.vector_norm(x.detach(), math.inf) if x.numel() else x.new_zeros(()) for x in parts]
    ).amax()


def _unreadable(y: Tensor) -> bool:
    """Whether values cannot be read by the host now: in a compiled, captured or transformed program."""
    return torch.compiler.is_compiling() or in_transform(y) or (y.is_cuda and torch.cuda.is_current_stream_capturing())
