"""What rules read from the user's optimizer, or change in it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from wirings.errors import WiringError
from wirings.rules.base import Layer


def learning_rates(
    name: str, layers: Sequence[Layer], optimizer: torch.optim.Optimizer | None, off: str
) -> list[tuple[Layer, float | Tensor]]:
    """The layers that are trained, each with its learning rate, which may be a tensor on the device.

    ``name`` is the rule's, ``off`` the setting without which it would need no rate.
    """
    if optimizer is None:
        raise WiringError(
            f"rule {name!r} shrinks weights by the optimizer's learning rate: call wiring.step(optimizer), or give the "
            f"rule {off}."
        )
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    trained = [layer for layer in layers if layer.weight.requires_grad]
    for layer in trained:
        if id(layer.weight) not in rates:
            raise WiringError(
                f"rule {name!r} shrinks weights by their learning rate, but {layer.name} is not among the parameters "
                "of the optimizer that wiring.step was given; pass the one that trains it."
            )
    return [(layer, rates[id(layer.weight)]) for layer in trained]


def states(layer: Layer, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """What the optimizer remembers of each edge of a layer, by name: momentum and the like."""
    held = {} if optimizer is None else optimizer.state.get(layer.weight, {})
    return {name: s for name, s in held.items() if isinstance(s, Tensor) and s.shape == layer.weight.shape}
