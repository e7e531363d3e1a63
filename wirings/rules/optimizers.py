"""What rules read from the user's optimizer, or change in it."""

from collections.abc import Sequence
from typing import Any

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
        if rates[id(layer.weight)] is None:
            raise WiringError(
                f"rule {name!r} shrinks weights by the learning rate, but the {type(optimizer).__name__} that "
                f"wiring.step was given has none for {layer.name} (lr=None); give it one, or the rule {off}."
            )
    return [(layer, rates[id(layer.weight)]) for layer in trained]


def group_of(name: str, reads: str, layer: Layer, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's settings for a layer; an error if it does not train it.

    ``name`` is the rule's, ``reads`` what it reads there.
    """
    for group in optimizer.param_groups:
        if any(p is layer.weight for p in group["params"]):
            return group
    raise WiringError(
        f"rule {name!r} reads the {reads} of {layer.name}, which is not among the parameters of the "
        f"{type(optimizer).__name__} that wiring.step was given; pass the optimizer that trains it."
    )


def gradient_of(name: str, layer: Layer, among: Tensor, optimizer: torch.optim.Optimizer) -> Tensor | None:
    """Numbers whose magnitudes order edges as those of the last step's gradient do; None if no gradient has come.

    They do so for edges that weighed zero before the step and that the optimizer remembered nothing of; ``among`` marks
    those. ``name`` is the rule's.
    """
    group, memory = group_of(name, "gradient", layer, optimizer), optimizer.state.get(layer.weight, {})
    # Running means of gradients, or of their squares. Momentum comes last: that of RMSprop is of gradients that were
    # divided by their own size. So is the mean of an Adafactor that has one.
    means = () if "exp_avg_sq_row" in memory else ("exp_avg", "square_avg", "momentum_buffer")
    found = next((memory[mean] for mean in means if isinstance(memory.get(mean), Tensor)), None)
    moved = layer.weight.detach() if found is None else found
    come = bool(moved.masked_fill(~among, 0.0).any())
    # Without memory SGD (and ASGD) carry an edge as far as its gradient is large; of others that is not known.
    if found is None and (memory or come) and not ("dampening" in group or "t0" in group):
        names = f" ({', '.join(memory)})" if memory else ""
        raise WiringError(
            f"rule {name!r} grows edges by their gradient, which cannot be read from what "
            f"{type(optimizer).__name__} remembers of {layer.name}{names}: take SGD, Adam, AdamW or RMSprop, or rule "
            "'set', which grows edges at random."
        )
    return moved if come else None


def bring_to_rest(parameter: Tensor, where: Tensor, optimizer: torch.optim.Optimizer | None) -> None:
    """Forget what the optimizer has gathered of a parameter's gradient, where ``where`` is true."""
    held = {} if optimizer is None else optimizer.state.get(parameter, {})
    for name in ("momentum_buffer", "exp_avg"):
        if isinstance(held.get(name), Tensor):
            held[name].masked_fill_(where, 0.0)


def states(layer: Layer, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """What the optimizer remembers of each edge of a layer, by name: momentum and the like."""
    held = {} if optimizer is None else optimizer.state.get(layer.weight, {})
    return {name: s for name, s in held.items() if isinstance(s, Tensor) and s.shape == layer.weight.shape}
