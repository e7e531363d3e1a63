"""The result of a finished run."""

from __future__ import annotations

from typing import Any

from torch import nn

from wirings.graph import Graph
from wirings.profiling import Profile, ProfileRow, profile
from wirings.train.data.metrics import ACCURACY, Metric
from wirings.train.results import Result
from wirings.train.run.progress import Progress
from wirings.train.settings import Settings, to_mapping
from wirings.wire.handle import Wiring


def summarize_run(
    name: str,
    settings: Settings,
    model: nn.Module,
    wiring: Wiring | None,
    progress: Progress,
    metric: Metric = ACCURACY,
    **more: Any,
) -> Result:
    """Count a trained network and collect what its run reached.

    Args:
        name: the recipe's name.
        settings: the run's settings.
        model: the trained model.
        wiring: its handle, or None if nothing is wired.
        progress: the progress of the finished run.
        metric: what the run was measured by.
        more: further fields of the `Result`.
    """
    final, counted = progress.history[-1], None
    measured = {
        "metric": metric.name,
        "higher_is_better": metric.higher_is_better,
        "value": final[metric.name],
        "best_value": progress.best,
    }
    if getattr(model, "input_shape", None) is not None:  # otherwise there is nothing to count it on
        counted = profile(model)
    wired = None if counted is None else _wired_rows(counted, model, wiring)
    count = getattr(model, "paper_parameters", None)
    params = sum(p.numel() for p in model.parameters()) if counted is None else counted.params
    return Result(
        recipe=name,
        seed=settings.seed,
        accuracy=final["accuracy"],
        top5=final["top5"],
        best_accuracy=progress.best if metric == ACCURACY else None,
        test_loss=final["loss"],
        epochs=progress.epoch,
        steps=progress.steps,
        edges=None if wiring is None else sum(report.edges for report in wiring.look()),
        usable_edges=None if wired is None else sum(row.live_edges or 0 for row in wired),
        dead_nodes=None if wired is None else sum(row.dead_nodes or 0 for row in wired),
        params=params if count is None else count()["total"],
        mult_adds=None if counted is None else counted.mult_adds,
        live_params=None if counted is None else counted.live_params,
        live_mult_adds=None if counted is None else counted.live_mult_adds,
        settings=to_mapping(settings),
        precision=settings.precision,
        started=progress.started,
        train_s=progress.seconds,
        wall_s=progress.wall,
        **({} if metric == ACCURACY else measured),
        **more,
    )


def _wired_rows(counted: Profile, model: nn.Module, wiring: Wiring | None) -> list[ProfileRow] | None:
    """The rows of graphs and wired layers, or None if the model has neither."""
    wired = {id(layer.module) for layer in wiring.layers} if wiring is not None else set()
    named = dict(model.named_modules())
    modules = [(row, named.get(row.name)) for row in counted.rows]
    return [row for row, module in modules if id(module) in wired or isinstance(module, Graph)] or None
