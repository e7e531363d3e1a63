"""What all callbacks do with a handle, whatever the loop."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from wirings.errors import WiringError
from wirings.wiring import Wiring


def check_handle(wiring: object, model: nn.Module | None = None) -> None:
    """Raise unless this is a handle, and one of a part of ``model`` or of all of it."""
    if not isinstance(wiring, Wiring):
        raise WiringError(
            f"WiringCallback takes the handle that wirings.wire_(model, …) gave, not {type(wiring).__name__}."
        )
    if model is not None and not any(part is wiring.model for part in model.modules()):
        raise WiringError(
            f"the handle is of a {type(wiring.model).__name__} that is no part of the {type(model).__name__} to be "
            "trained; wire that one, or a part of it, and give its handle to WiringCallback."
        )


def plan(wiring: Wiring, steps: float | None) -> None:
    """Tell rules how long training is, where the loop knows."""
    if steps is not None and math.isfinite(steps) and steps >= 1:
        wiring.plan(int(steps))


def holding(wiring: Wiring, optimizers: Iterable[Optimizer]) -> Optimizer | None:
    """The optimizer that trains the first wired weight; None if there is none."""
    weight = wiring.layers[0].weight
    for optimizer in optimizers:
        if any(p is weight for group in optimizer.param_groups for p in group["params"]):
            return optimizer
    return None


def figures(wiring: Wiring) -> dict[str, float]:
    """What a log is told: edges swapped since it was last told, real edges, and their fraction of all."""
    reports = wiring.look()
    edges = sum(report.edges for report in reports)
    return {
        "wiring/swapped": float(sum(report.swapped for report in reports)),
        "wiring/edges": float(edges),
        "wiring/density": edges / sum(report.possible for report in reports),
    }
