"""What all callbacks do with a handle, whatever the loop."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from wirings.errors import WiringError
from wirings.wire.finalize import finalize_
from wirings.wire.handle import Wiring


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
    if wiring.ended:
        raise WiringError(
            f"the handle's {type(wiring.model).__name__} is no longer wired: it was finalized (finalize=True does so "
            "when training ends) or unwired. Wire it again and give the new handle to a new WiringCallback."
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


def key_of(wiring: Wiring, name: str | None) -> str:
    """Under what name a handle's state stands in checkpoints, the same whenever the program runs."""
    return f"wirings[{name or wiring.layers[0].name}]"


class Finalized(NamedTuple):
    """A layer that was finalized, and the edges that it has."""

    name: str
    module: nn.Module
    attribute: str
    edges: int


def finalize(wiring: Wiring) -> list[Finalized]:
    """Finalize the handle's model, unless another handle's callback has done so."""
    if wiring.ended:
        return []
    reports = {report.name: report.edges for report in wiring.look()}
    finalize_(wiring.model)
    return [Finalized(layer.name, layer.module, layer.attribute, reports[layer.name]) for layer in wiring.layers]


def check_sparse(layers: Iterable[Finalized]) -> None:
    """Raise if layers have more weights than they were finalized with."""
    for layer in layers:
        weights = int(torch.count_nonzero(getattr(layer.module, layer.attribute)))
        if weights > layer.edges:
            raise WiringError(
                f"{layer.name} was finalized with {layer.edges:,} edges, but now has {weights:,} weights: a checkpoint "
                "that was saved while it was wired holds hallucinated edges as well. Give WiringCallback finalize="
                "False, load and test such checkpoints in the wired model, and call wirings.finalize_ at the end."
            )


def figures(wiring: Wiring) -> dict[str, float]:
    """What a log is told: edges swapped since it was last told, real edges, and their fraction of all."""
    reports = wiring.look()
    edges = sum(report.edges for report in reports)
    return {
        "wiring/swapped": float(sum(report.swapped for report in reports)),
        "wiring/edges": float(edges),
        "wiring/density": edges / max(sum(report.possible for report in reports), 1),
    }
