"""Where a run stands, and what it comes to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from wirings.train.results import Result
from wirings.train.settings import Settings, to_mapping
from wirings.wiring import Wiring


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
    final, count = progress.history[-1], getattr(model, "paper_parameters", None)
    graph: Any = getattr(model, "graph", None)
    dead = usable = None
    if graph is not None:
        dead = graph.dead_nodes()
        alive = torch.ones(graph.nodes, dtype=torch.bool)
        alive[dead] = False
        targets, sources = graph.sparse().indices().cpu()
        usable = int((alive[targets] & alive[sources]).sum())
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
        usable_edges=usable,
        dead_nodes=None if dead is None else len(dead),
        params=sum(p.numel() for p in model.parameters()) if count is None else count()["total"],
        settings=to_mapping(settings),
        overrides=overrides,
        precision=settings.precision,
        started=progress.started,
        train_s=progress.seconds,
        wall_s=progress.wall,
        **more,
    )
