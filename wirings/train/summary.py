"""Where a run stands, and what it comes to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from wirings.errors import WiringError
from wirings.graph import Graph
from wirings.profiling import Profile, ProfileRow, profile
from wirings.train.checkpoint import is_number
from wirings.train.results import Result
from wirings.train.settings import Settings, to_mapping
from wirings.wire.handle import Wiring


@dataclass
class Progress:
    """Where a run stands. Saved with every checkpoint."""

    epoch: int = 0
    batch: int = 0
    """Batches done in this epoch."""
    steps: int = 0
    best: float = -1.0
    seconds: float = 0.0
    """Spent training, evaluation not included."""
    wall: float = 0.0
    started: str = ""
    totals: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    history: list[dict[str, Any]] = field(default_factory=list)
    records: int = 0
    """Records and notes that the history of the wiring had, by which a resumed run sees whether some are lost."""


LINE = (
    "epoch",
    "steps",
    "lr",
    "train_loss",
    "train_accuracy",
    "loss",
    "accuracy",
    "top5",
    "swapped",
    "seconds",
    "images",
)
"""What is noted of an epoch: numbers, or None for what was not measured."""


def read_progress(saved: dict[str, Any], epochs: int, per_epoch: int) -> Progress:
    """Where a run stood, from what its checkpoint says; raises unless a run of so many epochs can stand there."""
    new = Progress()
    if saved.keys() != vars(new).keys():
        raise WiringError("its progress has other entries")
    for key, value in saved.items():
        usual = type(getattr(new, key))
        if not (is_number(value) if usual is float else type(value) is usual):
            raise WiringError(f"its progress has a wrong {key!r}")
    found = Progress(**saved)
    where = found.epoch * per_epoch + found.batch == found.steps
    if not (
        where and 0 <= found.epoch <= epochs and 0 <= found.batch < per_epoch and found.steps <= epochs * per_epoch
    ):
        raise WiringError(f"its progress is none: epoch {found.epoch}, batch {found.batch}, step {found.steps}")
    lines = [tuple(line) if isinstance(line, dict) else () for line in found.history]
    if lines != [LINE] * found.epoch or not all(
        value is None or is_number(value) for line in found.history for value in line.values()
    ):
        raise WiringError("its progress has other lines than a run's log")
    if len(found.totals) != 3 or not all(map(is_number, found.totals)):
        raise WiringError("its progress has wrong 'totals'")
    return found


def summary(
    name: str,
    settings: Settings,
    model: nn.Module,
    wiring: Wiring | None,
    progress: Progress,
    overrides: dict[str, Any],
    **more: Any,
) -> Result:
    """The result of a run that has come to its end."""
    final, counted = progress.history[-1], None
    if getattr(model, "input_shape", None) is not None:  # else nobody knows what to count it on
        counted = profile(model)
    wired = None if counted is None else _wired_rows(counted, model, wiring)
    count = getattr(model, "paper_parameters", None)
    params = sum(p.numel() for p in model.parameters()) if counted is None else counted.params
    return Result(
        recipe=name,
        seed=settings.seed,
        accuracy=final["accuracy"],
        top5=final["top5"],
        best_accuracy=progress.best,
        test_loss=final["loss"],
        epochs=settings.epochs,
        steps=progress.steps,
        edges=None if wiring is None else sum(report.edges for report in wiring.look()),
        usable_edges=None if wired is None else sum(row.live_edges or 0 for row in wired),
        dead_nodes=None if wired is None else sum(row.dead_nodes or 0 for row in wired),
        params=params if count is None else count()["total"],
        mult_adds=None if counted is None else counted.mult_adds,
        live_params=None if counted is None else counted.live_params,
        live_mult_adds=None if counted is None else counted.live_mult_adds,
        settings=to_mapping(settings),
        overrides=overrides,
        precision=settings.precision,
        started=progress.started,
        train_s=progress.seconds,
        wall_s=progress.wall,
        **more,
    )


def _wired_rows(counted: Profile, model: nn.Module, wiring: Wiring | None) -> list[ProfileRow] | None:
    """The rows of what has a wiring, graphs and wired layers; None if nothing has."""
    wired = {id(layer.module) for layer in wiring.layers} if wiring is not None else set()
    named = dict(model.named_modules())
    modules = [(row, named.get(row.name)) for row in counted.rows]
    return [row for row, module in modules if id(module) in wired or isinstance(module, Graph)] or None
