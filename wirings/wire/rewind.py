"""Back to earlier weights with the wiring that there is now, as for lottery tickets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wirings.errors import WiringError
from wirings.selection.sharded import laid_out_as, same_memory
from wirings.wire.parametrization import wired


def rewind_(model: nn.Module, state: Mapping[str, Any]) -> nn.Module:
    """Give a model the parameters and buffers that it had earlier, in place; its wiring stays as it is.

    An optimizer that has trained the model remembers where it was going: make a new one.

    Args:
        model: a wired model; or a plain one, for which this is a checked ``load_state_dict``.
        state: what ``state_dict()`` gave earlier, copied (``copy.deepcopy(model.state_dict())``); of the plain model or
            of the wired one, whose memory of a wiring is passed over.

    Returns:
        The model.
    """
    ours = tuple(f"{name}.wiring." for name, _, _, _ in wired(model))
    now = {name: value for name, value in model.state_dict().items() if not name.startswith(ours)}
    then = {name: value for name, value in state.items() if not name.startswith(ours)}
    _check_names(model, now, then)
    for name, value in then.items():
        if not isinstance(value, Tensor) or not isinstance(now[name], Tensor):
            continue  # what a module of the user's own keeps beside its tensors
        if value.shape != now[name].shape:
            raise WiringError(
                f"rewind_: {name} is {tuple(now[name].shape)} in the model, but {tuple(value.shape)} in the state; it "
                "must be one of the same model."
            )
        if same_memory(value, now[name]):
            raise WiringError(
                f"rewind_: {name} of the state is the model's own tensor, which has changed with it. Copy the state "
                "before training: copy.deepcopy(model.state_dict())."
            )
        then[name] = laid_out_as(value, now[name])  # the model may have been sharded since
    with torch.no_grad():
        model.load_state_dict(then)
    return model


def _check_names(model: nn.Module, now: Mapping[str, Any], then: Mapping[str, Any]) -> None:
    missing, more = now.keys() - then.keys(), then.keys() - now.keys()
    if missing or more:
        came = [f"{min(missing)} is missing"] if missing else []
        came += [f"{min(more)} is of no use"] if more else []
        raise WiringError(
            f"rewind_ brings back all of a model, but the state is not one of this {type(model).__name__}: "
            f"{', '.join(came)} ({len(missing)} missing, {len(more)} too many)."
        )
