"""Evaluate a model on a whole test set."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from wirings.train.data.base import Data, Loader, Measured
from wirings.train.data.metrics import Metric
from wirings.train.distributed import ProcessContext
from wirings.wire.finalize import finalize_


@torch.no_grad()
def evaluate(
    model: nn.Module, loader: Loader, autocast: Callable[[], AbstractContextManager[Any]], context: ProcessContext
) -> tuple[float, float, float]:
    """Evaluate a model on all labels of a loader, over all processes: one for each image, or for each token.

    Args:
        model: the model; it is set to evaluation mode.
        loader: this process's share of the test set.
        autocast: returns the context in which the model is called.
        context: this process.

    Returns:
        The mean loss, the accuracy and the top-5 accuracy, both in percent.
    """
    model.eval()
    totals = torch.zeros(4, dtype=torch.float64, device=context.device)
    for x, labels in loader.epoch(0):
        with autocast():
            scores, y = model(x).float().flatten(0, -2), labels.flatten()
        best = scores.topk(min(5, scores.shape[1]), dim=1).indices == y[:, None]
        numbers: list[Tensor] = [
            nn.functional.cross_entropy(scores, y, reduction="sum"),
            best[:, 0].sum(),
            best.sum(),
            (y >= 0).sum(),  # padding is labelled -100, which the loss ignores
        ]
        totals += torch.stack([n.double() for n in numbers])
    loss, top1, top5, examples = context.all_reduce_sum(totals).tolist()
    return loss / examples, 100 * top1 / examples, 100 * top5 / examples


@dataclass(frozen=True)
class Evaluation:
    """What was measured on a test set."""

    metric: Metric
    value: float
    """The value of the metric."""
    loss: float
    accuracy: float
    """In percent, as is `top5`."""
    top5: float
    files: dict[str, str] = field(default_factory=dict)
    """Texts that belong to the evaluation, such as translations, by file name; empty on all ranks but the first."""


@torch.no_grad()
def evaluate_by_metric(
    model: nn.Module, data: Data, autocast: Callable[[], AbstractContextManager[Any]], context: ProcessContext
) -> Evaluation:
    """Evaluate a model on the test set of some data by its loss, its accuracy and the data's metric.

    Args:
        model: the model; it is set to evaluation mode.
        data: the data.
        autocast: returns the context in which the model is called for the loss; other measures take full precision.
        context: this process.
    """
    loss, accuracy, top5 = evaluate(model, data.test, autocast, context)
    if data.measure is None:
        return Evaluation(data.metric, data.metric.of(loss, accuracy), loss, accuracy, top5)
    found = Measured(0.0)
    if context.first:  # the others wait
        found = data.measure(_plain_copy(model))
    value = data.metric.of(loss, accuracy) if found.value is None else found.value
    mine = torch.tensor(value if context.first else 0.0, dtype=torch.float64, device=context.device)
    return Evaluation(data.metric, context.all_reduce_sum(mine).item(), loss, accuracy, top5, found.files)


def _plain_copy(model: nn.Module) -> nn.Module:
    """A copy that is not wired: a model that translates runs once a token, and would choose its edges every time."""
    plain = copy.deepcopy(model)
    if getattr(plain, "wiring", None) is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a schedule has not ended: training goes on
            finalize_(plain)
    return plain.eval()
