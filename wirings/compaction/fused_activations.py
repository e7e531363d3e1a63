"""Which GELUs can be computed with the linear layer before them: those that can be given nothing but its output."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


def fusable_activations(model: nn.Module, call: Callable[[], Any]) -> dict[nn.Module, nn.GELU]:
    """The linear layers whose output an ``nn.GELU`` is given, and nothing else, with that module.

    Fusing them takes the GELU away from everyone who uses it, for any input. One call shows too little of that: other
    inputs may take other branches. So the code must say it: they follow each other in an ``nn.Sequential``, or in a
    class with an attribute ``activation_of``; and the model has each of them in that place only. A call must agree, as
    layers of an ``nn.Sequential`` can be called one by one.

    Args:
        model: the model.
        call: calls it.
    """
    places = Counter(id(child) for module in model.modules() for child in module._modules.values())
    pairs = [
        (layer, gelu)
        for layer, gelu in _neighbours(model)
        if places[id(layer)] == places[id(gelu)] == 1 and not has_hooks(layer) and not has_hooks(gelu)
    ]
    if not pairs:
        return {}
    before = {gelu: layer for layer, gelu in pairs}
    made: dict[int, tuple[nn.Module, Any]] = {}
    together: Counter[nn.Module] = Counter()
    runs: Counter[nn.Module] = Counter()

    def note(module: nn.Module, args: Any, output: Any) -> None:
        runs[module] += 1
        if module not in before:
            made[id(output)] = module, output  # kept alive, so that no other tensor gets its id
        elif args and made.get(id(args[0]), (None, None))[0] is before[module]:
            together[module] += 1

    hooks = [module.register_forward_hook(note) for pair in pairs for module in pair]
    try:
        call()
    finally:
        for hook in hooks:
            hook.remove()
    return {layer: gelu for layer, gelu in pairs if 0 < together[gelu] == runs[layer] == runs[gelu]}


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks, or a function of its own in place of ``forward``."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(hooks) or "forward" in vars(module)


def _neighbours(model: nn.Module) -> Iterator[tuple[nn.Linear, nn.GELU]]:
    """Linear layers and GELUs that follow each other in the code of a module."""
    for module in model.modules():
        if "forward" in vars(module):
            continue
        children = list(module._modules.values())
        pairs = list(itertools.pairwise(children)) if type(module) is nn.Sequential else []
        # Of the class itself: a subclass may have another forward.
        for activation, layer in vars(type(module)).get("activation_of", {}).items():
            pairs.append((module._modules.get(layer), module._modules.get(activation)))
        for first, second in pairs:
            if type(first) is nn.Linear and type(second) is nn.GELU:
                yield first, second
