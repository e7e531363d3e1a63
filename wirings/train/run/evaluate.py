"""Evaluate a model on a whole test set."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from wirings.train.data.base import Loader
from wirings.train.distributed import ProcessContext


@torch.no_grad()
def evaluate(
    model: nn.Module, loader: Loader, autocast: Callable[[], AbstractContextManager[Any]], context: ProcessContext
) -> tuple[float, float, float]:
    """Evaluate a model on all examples of a loader, over all processes.

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
    for x, y in loader.epoch(0):
        with autocast():
            scores = model(x).float()
        best = scores.topk(min(5, scores.shape[1]), dim=1).indices == y[:, None]
        numbers: list[Tensor] = [
            nn.functional.cross_entropy(scores, y, reduction="sum"),
            best[:, 0].sum(),
            best.sum(),
            torch.full((), len(y), device=context.device),
        ]
        totals += torch.stack([n.double() for n in numbers])
    loss, top1, top5, examples = context.all_reduce_sum(totals).tolist()
    return loss / examples, 100 * top1 / examples, 100 * top5 / examples
