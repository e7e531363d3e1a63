"""A history of one record: the wiring that a model has now, wired or finalized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wirings.errors import WiringError
from wirings.history import file_format
from wirings.history.from_model import Place, kernel_weights, structure_of
from wirings.history.quantize import encode
from wirings.history.replay import History
from wirings.utils.layers import original_weight
from wirings.wire.parametrization import wired
from wirings.wire.targets import find


@torch.no_grad()
def still(model: nn.Module, about: Mapping[str, Any] | None = None, step: int = 0) -> History:
    """The wiring of a model as it is now, as a history of one record.

    Args:
        model: a wired model, or a plain one with zeros for the edges that it has not, as `finalize_` leaves it.
        about: what the history is to say of itself.
        step: the record's.
    """
    found = _wired(model) or _plain(model)
    if not found:
        raise WiringError(
            f"{type(model).__name__} has no wiring to look at: no layer of it is wired, and none has zeros for edges "
            "that it has not. Wire it with wirings.wire_."
        )
    places = [place for place, _ in found]
    parts = [encode(place.weight, real) for place, real in found] + [encode(k, None) for k in kernel_weights(places)]
    history = History(structure_of(places), about or {})
    codes = np.concatenate([part.cpu().numpy().reshape(-1) for part in parts])
    history.add(file_format.difference(step, np.zeros_like(codes), codes))
    return history


def _wired(model: nn.Module) -> list[tuple[Place, Tensor]]:
    found, seen = [], set()
    for name, module, attribute, edges in wired(model):
        weight = original_weight(module, attribute)
        if id(weight) not in seen:  # tied weights have one wiring
            seen.add(id(weight))
            found.append((Place(name, module, attribute, weight), edges.real(weight, fresh=True)))
    return found


def _plain(model: nn.Module) -> list[tuple[Place, Tensor]]:
    """Graphs, if there are any; else the layers that have zeros."""
    places = [Place(*target.places[0], target.weight) for target in find(model, None, ())]
    found = [(place, place.weight != 0) for place in places]
    graphs = [pair for pair in found if pair[0].attribute in getattr(pair[0].module, "wired_weights", ())]
    return graphs or [pair for pair in found if not pair[1].all()]
