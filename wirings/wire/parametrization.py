"""Putting edges on a module's weight, and taking them off again so that nothing of ours is left.

A wired weight is a parametrization (`torch.nn.utils.parametrize`): the optimizer's parameter stays the same object
and holds all edges; ``module.weight`` gives what the forward pass uses. A wired model's ``state_dict`` has the plain
model's keys, with all weights under them; what a rule remembers stands beside them as ``<weight>.wiring.<name>``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from wirings.rules.base import Edges
from wirings.selection import sharded
from wirings.utils.layers import parametrizations_of
from wirings.wire import fsdp


def attach(module: nn.Module, attribute: str, edges: Edges, model: nn.Module) -> None:
    """Wire one weight of a module that is in ``model``."""
    module.__dict__.setdefault("_wirings_order", list(module._parameters))
    with fsdp.below(module):
        if parametrize.is_parametrized(module):
            _own_class(module)
        parametrize.register_parametrization(module, attribute, edges, unsafe=True)
        if isinstance(module, nn.RNNBase):
            _compute_flat_weights(module)
    fsdp.move(model, (module, attribute), (parametrizations_of(module)[attribute], "original"))
    if _keep_names not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(_keep_names)
        module.register_load_state_dict_pre_hook(_take_names)


def detach(model: nn.Module, only: Collection[Edges] | None = None) -> None:
    """Give the plain modules back, with all weights: of every wired place in the model, or of ``only`` those edges."""
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
    for together in {edges.together for edges in gone} - {None}:
        together.drop(gone)
    hooks = {edges.together for edges in gone} - {edges.together for edges in here}
    if all(edges.pool is None for _, _, _, edges in left):
        hooks.add(forget_choice)
    for module in model.modules():
        for hook in hooks:
            _drop(module._forward_pre_hooks, hook)


def _drop(hooks: dict[int, Any], ours: Any) -> None:
    for key in [key for key, hook in hooks.items() if getattr(hook, "hook", hook) is ours]:
        del hooks[key]


def _own_class(module: nn.Module) -> None:
    """Give a parametrized module a class that no copy of it shares.

    PyTorch makes one class for each parametrized module, keeps it through `copy.deepcopy`, and takes properties off it
    when a parametrization goes: finalizing a copy would break the original.
    """
    cls = type(module)
    module.__class__ = type(cls.__name__, cls.__bases__, {k: v for k, v in vars(cls).items() if k != "__weakref__"})


def wired(model: nn.Module) -> list[tuple[str, nn.Module, str, Edges]]:
    """Every wired place in the model: the weight's name, its module and attribute, its edges."""
    return [
        (f"{prefix}.{attribute}" if prefix else attribute, module, attribute, edges)
        for prefix, module in model.named_modules()
        for attribute, edges in _wired_here(module)
    ]


def _wired_here(module: nn.Module) -> list[tuple[str, Edges]]:
    """The attributes of one module that are wired, with their edges."""
    return [
        (attribute, lists[0]) for attribute, lists in parametrizations_of(module).items() if isinstance(lists[0], Edges)
    ]


def forget_choice(model: nn.Module, args: Any) -> None:
    """A forward pre-hook: layers that share a budget rank their edges anew."""
    if not torch.compiler.is_compiling():
        for _, _, _, edges in wired(model):
            if edges.pool is not None:
                edges.pool.forget()


def _keep_names(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """After state_dict(): the plain model's keys, in its order; what rules remember comes last."""
    for attribute, _ in _wired_here(module):
        inner, plain = f"{prefix}parametrizations.{attribute}", prefix + attribute
        state[plain] = state.pop(f"{inner}.original")
        _rename(state, f"{inner}.0.", f"{plain}.wiring.")
    own = [prefix + name for name in module.__dict__["_wirings_order"] if prefix + name in state]
    rest = [key for key in state if key.startswith(prefix) and key not in own]
    for key in own + rest:
        state[key] = state.pop(key)


def _take_names(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    """Before load_state_dict(): a plain or a wired model's keys. A plain one leaves the rule's memory as it is."""
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
    """Let a recurrent layer take its weights from the parametrizations, once a forward pass.

    It keeps a list of its own, which would go stale. Its class is its own since it was parametrized, so it can be
    given a list that is computed.
    """
    module.__dict__.pop("_flat_weights", None)
    cls: Any = type(module)
    cls._flat_weights = property(
        lambda self: [getattr(self, name, None) for name in self._flat_weights_names], lambda self, value: None
    )
    cls._weights_have_changed = lambda self: False
