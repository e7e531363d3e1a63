"""A history with a single record: the current wiring of a model, wired or finalized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wirings.errors import WiringError
from wirings.history import file_format
from wirings.history.from_model import WiredWeight, edge_groups_of, kernel_weights, structure_of
from wirings.history.quantize import encode
from wirings.history.replay import History
from wirings.utils.layers import check_module, has_values, original_weight
from wirings.wire.parametrization import wired
from wirings.wire.targets import find


@torch.no_grad()
def snapshot_of(model: nn.Module, about: Mapping[str, Any] | None = None, step: int = 0) -> History:
    """Record the current wiring of a model, as a history with one record.

    Args:
        model: a wired model, or a finalized one, whose missing edges have weight zero.
        about: metadata to store in the history; any JSON value.
        step: the optimizer step to give the record.

    Raises:
        WiringError: the model is neither wired nor sparse.
    """
    check_module("snapshot_of()", model)
    if empty := next((name for name, x in model.named_parameters() if not has_values(x)), None):
        raise WiringError(
            f"{empty} has no values: it is on the meta device, or in a lazy module. Load the weights first."
        )
    found = _wired_weights(model) or _sparse_weights(model)
    if not found:
        raise WiringError(
            f"{type(model).__name__} has no wiring: none of its layers is wired or has weights that are zero. "
            "Wire it with wirings.wire_()."
        )
    weights = [weight for weight, _ in found]
    parts = [encode(one.weight, real) for one, real in found] + [encode(k, None) for k in kernel_weights(weights)]
    history = History(structure_of(weights, model, edge_groups_of(model)), about or {})
    codes = np.concatenate([part.cpu().numpy().reshape(-1) for part in parts])
    history.add(file_format.pack_record(step, np.zeros_like(codes), codes))
    return history


def _wired_weights(model: nn.Module) -> list[tuple[WiredWeight, Tensor]]:
    """The wired weights of a model, each with the mask of its real edges."""
    found, seen = [], set()
    for name, module, attribute, edges in wired(model):
        weight = original_weight(module, attribute)
        if id(weight) not in seen:  # tied weights have one wiring
            seen.add(id(weight))
            found.append((WiredWeight(name, module, attribute, weight), edges.real(weight, fresh=True)))
    return found


def _sparse_weights(model: nn.Module) -> list[tuple[WiredWeight, Tensor]]:
    """The weights of a model's graphs, if it has any; otherwise those of layers with zeros."""
    weights = [WiredWeight(*target.places[0], target.weight) for target in find(model, None, ())]
    found = [(weight, weight.weight != 0) for weight in weights]
    graphs = [pair for pair in found if pair[0].attribute in getattr(pair[0].module, "wired_weights", ())]
    return graphs or [pair for pair in found if not pair[1].all()]
