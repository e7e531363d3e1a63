"""The continuous graph as the authors' code computes it, which is not quite the paper's equation.

The authors' dZ/dt applies ReLU in place to the tensor that the solver passes in. For the initial state, and for the
last stage of every step, that tensor is the solver's own state, so negative states are set to zero whenever a step
ends. The result then depends on which steps the solver takes, so this module reproduces the step control of
torchdiffeq, the solver that they used: steps are not cut short at the end time, where the solution is interpolated
instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from wirings.errors import WiringError
from wirings.graph import ContinuousGraph, Effort
from wirings.graph.solve import METHODS, combine

Change = Callable[[Tensor], Tensor]
DOPRI5 = METHODS["dopri5"]
MIDPOINT = (
    6025192743 / 30085553152 / 2,
    0.0,
    51252292925 / 65400821598 / 2,
    -2691868925 / 45128329728 / 2,
    187940372067 / 1594534317056 / 2,
    -1776094331 / 19743644256 / 2,
    11237099 / 235043384 / 2,
)
"""Weights of the stages for the state at half a step of Dormand-Prince (Shampine, 1986)."""


class InPlaceReluGraph(ContinuousGraph):
    """A `ContinuousGraph` whose negative states are set to zero at the start and after every step of the solver.

    For loading checkpoints that the authors' code trained; see `wirings.models.authors.load`. It takes the arguments of
    `ContinuousGraph`, of which the solver is always dopri5 with chosen steps.
    """

    def forward(self, x: Tensor) -> Tensor:
        matrices = self.sums.matrices(self.weight)

        def change(rows: Tensor) -> Tensor:
            sent = self.function.on_rows("before", rows, 0.0)
            return self.function.on_rows("after", self.sums(matrices, sent), 0.0)

        start = self.initial(x).transpose(0, 1)
        rows, self.effort = solve_in_place(change, start, self.until, self.rtol, self.atol, self.max_steps)
        return self.read(rows.transpose(0, 1))


class _Step(NamedTuple):
    """A step of the solver: the state before and after it, the derivative at all stages, and its length."""

    old: Tensor
    new: Tensor
    stages: list[Tensor]
    length: float

    def error_ratio(self, rtol: float, atol: float) -> float:
        """Return the estimated error, where 1 is as much as the tolerance allows."""
        error = combine(None, self.stages, [self.length * weight for weight in DOPRI5.error])
        return _rms(error / (atol + rtol * torch.maximum(self.old.abs(), self.new.abs())))

    def at(self, x: float) -> Tensor:
        """Interpolate the state at a fraction ``x`` of the step.

        The cubic Hermite polynomial of both ends is corrected by a quartic term to pass through the midpoint.
        """
        first, last, h = self.stages[0], self.stages[-1], self.length
        middle = combine(self.old, self.stages, [h * weight for weight in MIDPOINT])
        miss = middle - (self.old + self.new) / 2 - (first - last) * (h / 8)
        ends = self.old * ((1 - x) ** 2 * (1 + 2 * x)) + self.new * (x**2 * (3 - 2 * x))
        slopes = first * (h * x * (1 - x) ** 2) - last * (h * x**2 * (1 - x))
        return ends + slopes + miss * (16 * x**2 * (1 - x) ** 2)


def solve_in_place(
    change: Change, start: Tensor, until: float, rtol: float, atol: float, max_steps: int = 1000
) -> tuple[Tensor, Effort]:
    """Integrate dy/dt = ``change(y)`` from time 0 with dopri5, where every evaluation sets negative states to zero.

    Args:
        change: The derivative, of a state that is not negative.
        start: The state at time 0.
        until: The time at the end.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        max_steps: Give up after this many steps, accepted or not.

    Returns:
        The state at the end, and what it took to compute it.
    """
    y, time, accepted = start.relu(), 0.0, 0
    first = change(y)
    length = _first_length(change, y, first, rtol, atol)
    for tried in range(1, max_steps + 1):
        step = _take_step(change, y, first, length)
        error = step.error_ratio(rtol, atol)
        if error <= 1:
            end, accepted = time + length, accepted + 1
            if end >= until:
                evaluations = 2 + 6 * tried  # a step evaluates all stages but the first
                return step.at((until - time) / length), Effort(evaluations, accepted, tried - accepted)
            time, y, first = end, step.new, step.stages[-1]
        length *= _growth(error)
    raise WiringError(
        f"InPlaceReluGraph: not done after max_steps = {max_steps} steps, at t = {time:g} of {until:g}. Use a looser "
        "tolerance or a larger max_steps."
    )


def _take_step(change: Change, y: Tensor, first: Tensor, length: float) -> _Step:
    stages = [first]
    for row in DOPRI5.rows:
        stages.append(change(_moved(y, stages, length, row)))
    new = _moved(y, stages, length, DOPRI5.weights)
    return _Step(y, new, [*stages, change(new)], length)


def _moved(y: Tensor, stages: Sequence[Tensor], length: float, weights: Sequence[float]) -> Tensor:
    """Return the state after the weighted derivatives of some stages, as ReLU in place leaves it."""
    return combine(y, stages, [length * weight for weight in weights]).relu()


def _growth(error: float) -> float:
    """Return the factor from one step's length to the next. An accepted step never leads to a shorter one."""
    if error == 0:
        return 10.0
    least = 1.0 if error < 1 else 0.2
    return min(10.0, max(0.9 * error ** (-1 / DOPRI5.order), least)) if math.isfinite(error) else 0.2


def _first_length(change: Change, y: Tensor, first: Tensor, rtol: float, atol: float) -> float:
    """Choose the length of the first step (Hairer, Nørsett and Wanner, section II.4), not limited by the end time."""
    scale = atol + rtol * y.abs()
    size, slope = _rms(y / scale), _rms(first / scale)
    trial = 1e-6 if min(size, slope) < 1e-5 else 0.01 * size / slope
    bend = _rms((change(_moved(y, [first], trial, [1.0])) - first) / scale) / trial
    if max(slope, bend) <= 1e-15:
        return min(100 * trial, max(1e-6, trial * 1e-3))
    return min(100 * trial, (0.01 / max(slope, bend)) ** (1 / DOPRI5.order))


def _rms(x: Tensor) -> float:
    return x.detach().square().mean().sqrt().item()
