"""What rules read from the user's optimizer, or change in its state."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wirings.errors import WiringError
from wirings.rules.rule import LayerLike


def learning_rates(
    name: str, layers: Sequence[LayerLike], optimizer: torch.optim.Optimizer | None, off: str
) -> list[tuple[LayerLike, float | Tensor]]:
    """The layers that are trained, each with its learning rate, which may be a tensor on the device.

    Args:
        name: the rule's name, for messages.
        layers: the wired layers.
        optimizer: the optimizer that trains them.
        off: the setting with which the rule needs no learning rate, such as ``"coefficient=0"``.
    """
    if optimizer is None:
        raise WiringError(
            f"rule {name!r} shrinks weights by the optimizer's learning rate: call wiring.step(optimizer), or make the "
            f"rule with {off}."
        )
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    trained = [layer for layer in layers if layer.weight.requires_grad]
    for layer in trained:
        if id(layer.weight) not in rates:
            raise WiringError(
                f"rule {name!r} shrinks weights by their learning rate, but {layer.name} is not among the parameters "
                "of the optimizer passed to wiring.step(); pass the one that trains it."
            )
        if rates[id(layer.weight)] is None:
            raise WiringError(
                f"rule {name!r} shrinks weights by the learning rate, but the {type(optimizer).__name__} passed to "
                f"wiring.step() has none for {layer.name} (lr=None); set one, or make the rule with {off}."
            )
    return [(layer, rates[id(layer.weight)]) for layer in trained]


def group_of(name: str, reads: str, layer: LayerLike, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's parameter group of a layer; raises if the optimizer does not train it.

    Args:
        name: the rule's name, for messages.
        reads: what the rule reads there, such as ``"momentum"``, for messages.
        layer: the layer.
        optimizer: the optimizer.
    """
    for group in optimizer.param_groups:
        if any(p is layer.weight for p in group["params"]):
            return group
    raise WiringError(
        f"rule {name!r} reads the {reads} of {layer.name}, which is not among the parameters of the "
        f"{type(optimizer).__name__} passed to wiring.step(); pass the optimizer that trains it."
    )


def has_both_moments(layer: LayerLike, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer keeps running means of the gradient and of its square for every edge, as Adam does."""
    memory = optimizer.state.get(layer.weight, {})
    return all(isinstance(memory.get(name), Tensor) for name in ("exp_avg", "exp_avg_sq"))


def gradient_of(
    name: str, layer: LayerLike, among: Tensor, optimizer: torch.optim.Optimizer, several: bool = False
) -> Tensor | None:
    """Scores that rank edges by the magnitude of the gradient; None if there was no gradient.

    Args:
        name: the rule's name, for messages.
        layer: the layer.
        among: the edges to be ranked, which weighed zero before the step and had no state in the optimizer before the
            gradient reached them.
        optimizer: the optimizer that made the step.
        several: whether the gradient has reached them in more than one step. If the optimizer knows the mean square of
            the gradient, its mean is then divided by the root of that.
    """
    group, memory = group_of(name, "gradient", layer, optimizer), optimizer.state.get(layer.weight, {})
    # Running means of gradients, or of their squares. Momentum comes last: RMSprop's is of gradients divided by their
    # own magnitude. So is the mean of an Adafactor that has one.
    means = () if "exp_avg_sq_row" in memory else ("exp_avg", "square_avg", "momentum_buffer")
    found = next((memory[mean] for mean in means if isinstance(memory.get(mean), Tensor)), None)
    moved = layer.weight.detach() if found is None else found
    come = bool(moved.masked_fill(~among, 0.0).any())
    # Without state, SGD (and ASGD) move an edge in proportion to its gradient; for other optimizers that is unknown.
    if found is None and (memory or come) and not ("dampening" in group or "t0" in group):
        names = f" ({', '.join(memory)})" if memory else ""
        raise WiringError(
            f"rule {name!r} grows edges by their gradient, which cannot be read from the state that "
            f"{type(optimizer).__name__} keeps for {layer.name}{names}: use SGD, Adam, AdamW or RMSprop, or rule "
            "'set', which grows edges at random."
        )
    if several and has_both_moments(layer, optimizer):
        precise = torch.promote_types(moved.dtype, torch.float32)
        square = memory["exp_avg_sq"].to(precise)
        moved = torch.where(square > 0, moved.to(precise) / square.sqrt(), 0.0)
    return moved if come else None


def bring_to_rest(parameter: Tensor, where: Tensor, optimizer: torch.optim.Optimizer | None) -> None:
    """Reset the optimizer's momentum of a parameter where ``where`` is true."""
    held = {} if optimizer is None else optimizer.state.get(parameter, {})
    for name in ("momentum_buffer", "exp_avg"):
        if isinstance(held.get(name), Tensor):
            held[name].masked_fill_(where, 0.0)


def states(layer: LayerLike, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """The optimizer's state of each edge of a layer, by name: momentum and the like."""
    held = {} if optimizer is None else optimizer.state.get(layer.weight, {})
    return {name: s for name, s in held.items() if isinstance(s, Tensor) and s.shape == layer.weight.shape}
