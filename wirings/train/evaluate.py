"""How good a model is on a whole set of images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wirings.train.data.base import Loader
from wirings.train.distributed import Place


@torch.no_grad()
def evaluate(model: nn.Module, loader: Loader, autocast: Any, place: Place) -> tuple[float, float, float]:
    """Mean loss, accuracy and top-5 accuracy in percent over a whole loader."""
    model.eval()
    totals = torch.zeros(4, dtype=torch.float64, device=place.device)
    for x, y in loader.epoch(0):
        with autocast():
            scores = model(x).float()
        best = scores.topk(min(5, scores.shape[1]), dim=1).indices == y[:, None]
        numbers: list[Tensor] = [
            nn.functional.cross_entropy(scores, y, reduction="sum"),
            best[:, 0].sum(),
            best.sum(),
            torch.full((), len(y), device=place.device),
        ]
        totals += torch.stack([n.double() for n in numbers])
    loss, right, near, examples = place.total(totals).tolist()
    return loss / examples, 100 * right / examples, 100 * near / examples
