"""Put edges on the weight of a module, and remove them again without a trace.

A wired weight is a parametrization (`torch.nn.utils.parametrize`): the optimizer's parameter stays the same object
and holds all edges; ``module.weight`` gives what the forward pass uses. The ``state_dict`` of a wired model has the
plain model's keys, with all weights under them; what a rule remembers is saved beside them as
``<weight>.wiring.<name>``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from wirings.selection import sharded
from wirings.utils.layers import is_transposed_linear, parametrizations_of
from wirings.wire import fsdp
from wirings.wire.edges import Edges


def attach(module: nn.Module, attribute: str, edges: Edges, model: nn.Module) -> None:
    """Put edges on one weight of a module of ``model``."""
    module.__dict__.setdefault("_wirings_order", list(module._parameters))
    with fsdp.below(module):
        if parametrize.is_parametrized(module):
            _own_class(module)
        parametrize.register_parametrization(module, attribute, edges, unsafe=True)
        _shorten(module, attribute)
        if isinstance(module, nn.RNNBase):
            _compute_flat_weights(module)
    fsdp.move(model, (module, attribute), (parametrizations_of(module)[attribute], "original"))
    if _keep_names not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(_keep_names)
        module.register_load_state_dict_pre_hook(_take_names)


def detach(model: nn.Module, only: Collection[Edges] | None = None) -> None:
    """Restore plain modules with all their weights, in the whole model or where ``only`` these edges are."""
    before = wired(model)
    for _, module, attribute, edges in before:
        if only is None or edges in only:
            holder = parametrizations_of(module)[attribute]
            with fsdp.below(module):
                _own_class(module)
                parametrize.remove_parametrizations(module, attribute, leave_parametrized=False)
            fsdp.move(model, (holder, "original"), (module, attribute))
    left = wired(model)
    still = {id(module) for _, module, _, _ in left}
    for module in model.modules():
        if "_wirings_order" not in module.__dict__ or id(module) in still:
            continue
        order, parameters = module.__dict__.pop("_wirings_order"), module._parameters
        module._parameters = {name: parameters[name] for name in order if name in parameters} | parameters
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()
        _drop(module._state_dict_hooks, _keep_names)
        _drop(module._load_state_dict_pre_hooks, _take_names)
    here = {edges for _, _, _, edges in left}
    gone = {edges for _, _, _, edges in before} - here
    for selection in {edges.selection for edges in gone}:
        selection.drop(gone)
    ended = {edges.selection for edges in gone} - {edges.selection for edges in here}
    for module in model.modules():
        for selection in ended:
            _drop(module._forward_pre_hooks, selection)
            _drop(module._forward_hooks, selection.end)


def _drop(hooks: dict[int, Any], ours: Any) -> None:
    for key in [key for key, hook in hooks.items() if getattr(hook, "hook", hook) == ours]:
        del hooks[key]


def _own_class(module: nn.Module) -> None:
    """Give a parametrized module a class that no copy of it shares.

    PyTorch creates one class for each parametrized module, shares it with deep copies, and removes properties from it
    when a parametrization is removed: finalizing a copy would break the original.
    """
    cls = type(module)
    module.__class__ = type(cls.__name__, cls.__bases__, {k: v for k, v in vars(cls).items() if k != "__weakref__"})


def _shorten(module: nn.Module, attribute: str) -> None:
    """Let a parametrized weight be read, and its layer run, in few Python calls.

    PyTorch's property calls two modules to read a weight, which costs the host more than the weight's kernels. While a
    layer runs whose only use of the weight is an operation that autocast converts, the edges know it: they can write
    the weight in the lower precision at once.
    """
    cls: Any = type(module)
    read = getattr(cls, attribute)

    def shortened(self: nn.Module) -> Any:
        holder: Any = self._modules["parametrizations"]._modules[attribute]  # type: ignore[union-attr]
        weight = holder._parameters.get("original")
        if (
            len(holder._modules) > 1
            or weight is None
            or parametrize._cache_enabled
            or torch.compiler.is_compiling()
            or torch._C._get_tracing_state() is not None
        ):
            return read.fget(self)
        return holder._modules["0"].forward(weight)

    setattr(cls, attribute, property(shortened, read.fset))
    run = cls.forward
    converted = is_transposed_linear(module) or any(run is kind.forward for kind in CONVERTED)
    if attribute != "weight" or not converted:
        return

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        edges = self._modules["parametrizations"]._modules["weight"]._modules["0"]  # type: ignore[union-attr]
        if torch.compiler.is_compiling():
            return run(self, *args, **kwargs)
        edges.__dict__["in_layer"] = True  # read by the edges of this weight, if they are the first parametrization
        try:
            return run(self, *args, **kwargs)
        finally:
            edges.__dict__["in_layer"] = False

    cls.forward = forward


CONVERTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers that use their weight in one operation, which autocast converts to a lower precision."""


def wired(model: nn.Module) -> list[tuple[str, nn.Module, str, Edges]]:
    """All wired weights of a model: name, module, attribute and edges. Tied weights appear at every place."""
    return [
        (f"{prefix}.{attribute}" if prefix else attribute, module, attribute, edges)
        for prefix, module in model.named_modules()
        for attribute, edges in _wired_here(module)
    ]


def _wired_here(module: nn.Module) -> list[tuple[str, Edges]]:
    """The wired attributes of one module, with their edges."""
    return [
        (attribute, lists[0]) for attribute, lists in parametrizations_of(module).items() if isinstance(lists[0], Edges)
    ]


def _keep_names(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """After state_dict(): rename to the plain model's keys, in its order; what rules remember comes last."""
    for attribute, _ in _wired_here(module):
        inner, plain = f"{prefix}parametrizations.{attribute}", prefix + attribute
        state[plain] = state.pop(f"{inner}.original")
        _rename(state, f"{inner}.0.", f"{plain}.wiring.")
    own = [prefix + name for name in module.__dict__["_wirings_order"] if prefix + name in state]
    rest = [key for key in state if key.startswith(prefix) and key not in own]
    for key in own + rest:
        state[key] = state.pop(key)


def _take_names(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    """Before load_state_dict(): accept a plain or a wired model's keys. A plain one leaves rules' memory unchanged."""
    for attribute, edges in _wired_here(module):
        inner, plain = f"{prefix}parametrizations.{attribute}", prefix + attribute
        if plain in state:
            state[f"{inner}.original"] = state.pop(plain)
        _rename(state, f"{plain}.wiring.", f"{inner}.0.")
        if not any(key.startswith(f"{inner}.0.") for key in state):
            state.update({f"{inner}.0.{name}": value for name, value in edges.memory().items()})
        ours = {
            "original": parametrizations_of(module)[attribute].original,
            **{f"0.{name}": b for name, b in edges.memory().items()},
        }
        for name, value in ours.items():  # a whole state for a sharded model: every process takes its rows
            if (given := state.get(f"{inner}.{name}")) is not None and sharded.is_sharded(value):
                state[f"{inner}.{name}"] = sharded.rows_like(given, value)


def _rename(state: dict[str, Any], old: str, new: str) -> None:
    for key in [key for key in state if key.startswith(old)]:
        state[new + key.removeprefix(old)] = state.pop(key)


def _compute_flat_weights(module: nn.RNNBase) -> None:
    """Let a recurrent layer read its weights from the parametrizations, once a forward pass.

    It keeps a list of them, which would go stale. Since it was parametrized its class is its own, so the list can be
    replaced by a property.
    """
    module.__dict__.pop("_flat_weights", None)
    cls: Any = type(module)
    cls._flat_weights = property(
        lambda self: [getattr(self, name, None) for name in self._flat_weights_names], lambda self, value: None
    )
    cls._weights_have_changed = lambda self: False
