"""What the callbacks for all training loops do with a handle."""

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
    """Raise unless ``wiring`` is a handle that is still in use and, if a model is given, wires a part of that model."""
    if not isinstance(wiring, Wiring):
        raise WiringError(
            f"The callback expects the handle returned by wirings.wire_(model, …), got {type(wiring).__name__}."
        )
    if model is not None and not any(part is wiring.model for part in model.modules()):
        raise WiringError(
            f"the handle wires a {type(wiring.model).__name__} that is not part of the {type(model).__name__} being "
            "trained. Wire that model, or a part of it, and pass its handle to the callback."
        )
    if wiring.ended:
        raise WiringError(
            f"the handle's {type(wiring.model).__name__} is no longer wired: it was unwired or finalized (as "
            "finalize=True does at the end of training). Wire it again and pass the new handle to a new callback."
        )


def plan_steps(wiring: Wiring, steps: float | None) -> None:
    """Pass the number of optimizer steps to the handle, if the training loop knows it."""
    if steps is not None and math.isfinite(steps) and steps >= 1:
        wiring.plan(int(steps))


def optimizer_of(wiring: Wiring, optimizers: Iterable[Optimizer]) -> Optimizer | None:
    """The optimizer that trains the wired weights, or None. Only the first weight is looked up."""
    weight = wiring.layers[0].weight
    for optimizer in optimizers:
        if any(p is weight for group in optimizer.param_groups for p in group["params"]):
            return optimizer
    return None


def checkpoint_key(wiring: Wiring, name: str | None) -> str:
    """The key of a handle's state in checkpoints; the same every time the program runs."""
    return f"wirings[{name or wiring.layers[0].name}]"


class FinalizedLayer(NamedTuple):
    """A layer that was finalized, and its number of edges."""

    name: str
    module: nn.Module
    attribute: str
    edges: int


def finalize(wiring: Wiring) -> list[FinalizedLayer]:
    """Finalize the handle's model, unless the callback of another handle has already done so."""
    if wiring.ended:
        return []
    reports = {report.name: report.edges for report in wiring.look()}
    finalize_(wiring.model)
    return [FinalizedLayer(layer.name, layer.module, layer.attribute, reports[layer.name]) for layer in wiring.layers]


def check_sparse(layers: Iterable[FinalizedLayer]) -> None:
    """Raise if layers have more nonzero weights than they were finalized with."""
    for layer in layers:
        weights = int(torch.count_nonzero(getattr(layer.module, layer.attribute)))
        if weights > layer.edges:
            raise WiringError(
                f"{layer.name} was finalized with {layer.edges:,} edges but now has {weights:,} nonzero weights. A "
                "checkpoint of the wired model was loaded, which includes hallucinated edges. Give the callback "
                "finalize=False, load and test such checkpoints in the wired model, and call wirings.finalize_() at "
                "the end."
            )


def metrics(wiring: Wiring) -> dict[str, float]:
    """Values to log: edges swapped since the last call, real edges, and density."""
    reports = wiring.look()
    edges = sum(report.edges for report in reports)
    return {
        "wiring/swapped": float(sum(report.swapped for report in reports)),
        "wiring/edges": float(edges),
        "wiring/density": edges / max(sum(report.possible for report in reports), 1),
    }
