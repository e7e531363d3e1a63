"""Compare outputs with those expected, up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from wirings.compaction.program import Program
from wirings.errors import WiringError

TOLERANCE = 1e-5
"""The largest difference between outputs that rounding explains, as a share of the largest output."""

WORSE = 10
"""Outputs may be so many times as far from exact arithmetic as the model's own."""

PIECE = 2**18
"""How many numbers are compared at a time."""


@torch.no_grad()
def check_outputs(
    program: Program,
    found: Sequence[Tensor],
    inputs: Sequence[Tensor],
    expected: Sequence[Tensor],
    what: str,
    tolerance: float = TOLERANCE,
    exact_outputs: Callable[[], Sequence[Tensor]] | None = None,
) -> float:
    """Compare outputs with those expected.

    The expected outputs themselves may be further from exact arithmetic than the tolerance, as when a model divides by
    almost zero. Running ``program`` in double precision then shows by how much, and ten times that difference is
    allowed, since sums in another order are rounded differently.

    Args:
        program: the model as a program.
        found: the outputs to compare.
        inputs: what they were computed from.
        expected: the model's outputs.
        what: what computed the outputs, for the error message.
        tolerance: the largest difference allowed, as a share of the largest output.
        exact_outputs: computes the model's outputs in double precision; by default, ``program`` does.

    Returns:
        The largest difference, as a share of the largest output.

    Raises:
        WiringError: if the difference is too large.
    """
    worst = 0.0
    exact: Sequence[Tensor] | None = None
    for number, (one, two) in enumerate(zip(found, expected, strict=True)):
        scale = largest_magnitude(two)
        difference = relative_difference(one, two, scale)
        worst = max(worst, difference)
        if difference <= tolerance:
            continue
        if exact is None:
            wide = [x.double() if x.is_floating_point() else x for x in inputs]
            exact = program.to(torch.float64).run(*wide) if exact_outputs is None else exact_outputs()
        own = relative_difference(two, exact[number], scale)
        if not relative_difference(one, exact[number], scale) <= max(tolerance, WORSE * own):
            raise WiringError(
                f"the outputs of {what} differ from the model's by {difference:.1e} of the largest output, which is "
                f"more than {tolerance:.0e}; the model itself is off by {own:.1e} from exact arithmetic. Check that "
                "the model is deterministic in eval(). If it is, this is a bug in wirings: please report it with the "
                "model."
            )
    return worst


def largest_magnitude(x: Tensor) -> float:
    """The largest finite magnitude of a tensor; 1 if it has none, or if all are zero."""
    finite = (piece[torch.isfinite(piece)].double() for piece in _pieces(x))
    return max((float(piece.abs().max()) for piece in finite if piece.numel()), default=0.0) or 1.0


def relative_difference(one: Tensor, two: Tensor, scale: float) -> float:
    """The largest difference between two tensors, divided by ``scale``."""
    if one.shape != two.shape:
        raise WiringError(f"the compact model returns shape {tuple(one.shape)}, the model {tuple(two.shape)}.")
    if not one.numel():
        return 0.0
    found = []
    for a, b in zip(_pieces(one), _pieces(two), strict=True):
        same = torch.isnan(a) & torch.isnan(b) | (a == b)  # infinities are equal, but their difference is NaN
        found.append(torch.where(same, 0.0, (a.double() - b.double()).abs()).max())
    return float(torch.stack(found).max()) / scale


def _pieces(x: Tensor) -> tuple[Tensor, ...]:
    """The numbers of a tensor in pieces: in double precision, all of a large image's would take gigabytes."""
    return x.reshape(-1).split(PIECE)
