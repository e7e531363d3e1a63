"""Restoring earlier weights under the current wiring, as for lottery tickets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wirings.errors import WiringError
from wirings.selection.sharded import laid_out_as, same_memory
from wirings.utils.layers import check_module
from wirings.utils.text import brief
from wirings.wire.parametrization import wired


def rewind_(model: nn.Module, state: Mapping[str, Any]) -> nn.Module:
    """Restore earlier parameters and buffers of a model, in place, and keep its current wiring.

    An optimizer that has trained the model has momentum: create a new one.

    Args:
        model: a wired model, or a plain one, for which this is a checked ``load_state_dict``.
        state: a copy of an earlier ``state_dict()`` (``copy.deepcopy(model.state_dict())``), of the plain model or of
            the wired one; what a rule remembered then is ignored.

    Returns:
        The model.
    """
    check_module("rewind_()", model)
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise WiringError(f"rewind_() expects a state_dict, got {brief(state)}.")
    ours = tuple(f"{name}.wiring." for name, _, _, _ in wired(model))
    now = {name: value for name, value in model.state_dict().items() if not name.startswith(ours)}
    then = {name: value for name, value in state.items() if not name.startswith(ours)}
    _check_names(model, now, then)
    final = {name: edges.memory()["wiring"] for name, _, _, edges in wired(model) if edges.rule.keeps_zeros}
    for name, value in then.items():
        if not isinstance(value, Tensor) or not isinstance(now[name], Tensor):
            continue  # extra state of the user's own modules
        if value.shape != now[name].shape:
            raise WiringError(
                f"rewind_: {name} has shape {tuple(now[name].shape)} in the model, but {tuple(value.shape)} in the "
                "state; pass a state of the same model."
            )
        if same_memory(value, now[name]):
            raise WiringError(
                f"rewind_: {name} of the state is the model's own tensor, which has changed with it. Copy the state "
                "before training: copy.deepcopy(model.state_dict())."
            )
        if name in final:  # this wiring has the only edges there are, whatever the others weighed then
            value = torch.where(final[name].to(value.device), value, 0.0)
        then[name] = laid_out_as(value, now[name])  # the model may have been sharded in the meantime
    with torch.no_grad():
        model.load_state_dict(then)
    return model


def _check_names(model: nn.Module, now: Mapping[str, Any], then: Mapping[str, Any]) -> None:
    missing, more = now.keys() - then.keys(), then.keys() - now.keys()
    if missing or more:
        what = [f"{min(missing)} is missing"] if missing else []
        what += [f"{min(more)} is unexpected"] if more else []
        raise WiringError(
            f"rewind_ restores a whole model, but the state is not one of this {type(model).__name__}: "
            f"{', '.join(what)} ({len(missing)} missing, {len(more)} unexpected)."
        )
