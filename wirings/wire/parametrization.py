"""Put edges on the weight of a module, and remove them again without a trace.

A wired weight is a parametrization (`torch.nn.utils.parametrize`): the optimizer's parameter stays the same object
and holds all edges; ``module.weight`` gives what the forward pass uses. The ``state_dict`` of a wired model has the
plain model's keys, with all weights under them; what a rule remembers is saved beside them as
``<weight>.wiring.<name>``.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from wirings.errors import WiringError
from wirings.selection import sharded
from wirings.utils.layers import expert_weights, is_transposed_linear, parametrizations_of
from wirings.wire import fsdp
from wirings.wire.adapter_guard import guard_adapters
from wirings.wire.block_layers import linear_in_blocks, runs_in_blocks
from wirings.wire.edges import Edges

BY_CHANCE = 0.01
"""The fraction of a weight's edges that may be zero in a state without a warning: they became zero in training."""
HANDLES = "_wirings_handles"
"""The attribute of a wired model that holds the handles of its wirings, which are copied and saved with it."""


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
    guard_adapters()


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
        if HANDLES in module.__dict__ and all(handle.ended for handle in module.__dict__[HANDLES]):
            del module.__dict__[HANDLES]
        if not any(edges.rule.keeps_zeros for edges in here):
            _drop(module._load_state_dict_pre_hooks, _check_all_zeros)
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
    of_experts = attribute in expert_weights(module)

    def shortened(self: nn.Module) -> Any:
        holder: Any = self._modules["parametrizations"]._modules[attribute]  # type: ignore[union-attr]
        weight = holder._parameters.get("original")
        if weight is None or _is_followed(holder):
            return read.fget(self)
        return holder._modules["0"].forward(weight)

    def once(self: nn.Module) -> Any:
        if torch.compiler.is_compiling() or (made := _made.weights) is None:
            return shortened(self)
        if (key := (self, attribute)) not in made:
            made[key] = shortened(self)
        return made[key]

    setattr(cls, attribute, property(once if of_experts else shortened, read.fset))
    run = cls.forward
    if of_experts:
        if "forward" not in vars(cls):  # the first of its weights
            cls.forward = _computed_once(run)
        return
    operation = CONVERTED.get(run)
    if attribute != "weight" or not (operation is not None or is_transposed_linear(module)):
        return

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        holder: Any = self._modules["parametrizations"]._modules["weight"]  # type: ignore[union-attr]
        edges = holder._modules["0"]
        alone = operation is _linear and len(args) == 1 and not kwargs
        if edges.blocks is not None and alone and runs_in_blocks(holder, args[0]):
            return linear_in_blocks(edges, holder.original, self.bias, args[0])  # type: ignore[arg-type]
        if _is_followed(holder):
            return run(self, *args, **kwargs)
        if operation is not None and len(args) == 1 and not kwargs:
            weight = holder._parameters.get("original")
            if weight is not None:
                return operation(self, args[0], edges.for_layer(weight))
        edges.__dict__["in_layer"] = True
        try:
            return run(self, *args, **kwargs)
        finally:
            edges.__dict__["in_layer"] = False

    cls.forward = forward


def read_converted(module: nn.Module, attribute: str) -> Tensor:
    """Read a weight for operations that autocast converts: written in the lower precision at once, if it is wired.

    For modules that are not layers of PyTorch. The caller converts what it gets: it may be of the weight's own dtype.
    """
    parametrized = module._modules.get("parametrizations")
    holder: Any = None if parametrized is None else parametrized._modules.get(attribute)
    edges = None if holder is None else holder._modules["0"]
    if not isinstance(edges, Edges) or _is_followed(holder):
        return getattr(module, attribute)
    edges.__dict__["in_layer"] = True
    try:
        return getattr(module, attribute)
    finally:
        edges.__dict__["in_layer"] = False


def _computed_once(run: Any) -> Any:
    """A forward method in which weights are computed once, though it reads them anew for every expert."""

    @functools.wraps(run)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return run(self, *args, **kwargs)
        outer, _made.weights = _made.weights, {}
        try:
            return run(self, *args, **kwargs)
        finally:
            _made.weights = outer

    return forward


class _Made(threading.local):
    """The weights of the experts that run in this thread. `parametrize.cached` would hold those of all threads."""

    weights: dict[tuple[nn.Module, str], Tensor] | None = None


_made = _Made()


def _is_followed(holder: Any) -> bool:
    """Whether a weight has to be read as PyTorch does: it is parametrized otherwise too, or a tracer is looking."""
    return (
        len(holder._modules) > 1
        or parametrize._cache_enabled != 0
        or torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
    )


def _linear(module: Any, x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight, module.bias)


def _convolution(module: Any, x: Tensor, weight: Tensor) -> Tensor:
    return module._conv_forward(x, weight, module.bias)


CONVERTED = {
    nn.Linear.forward: _linear,
    nn.Conv1d.forward: _convolution,
    nn.Conv2d.forward: _convolution,
    nn.Conv3d.forward: _convolution,
}
"""The forward functions of layers that use their weight in one operation, which autocast converts to a lower precision;
and how to run that operation with a given weight."""


def wired(model: nn.Module) -> list[tuple[str, nn.Module, str, Edges]]:
    """All wired weights of a model: name, module, attribute and edges. Tied weights appear at every place."""
    return [
        (f"{prefix}.{attribute}" if prefix else attribute, module, attribute, edges)
        for prefix, module in model.named_modules()
        for attribute, edges in wired_here(module)
    ]


def wired_here(module: nn.Module) -> list[tuple[str, Edges]]:
    """The wired attributes of one module, with their edges."""
    found = [(attribute, lists._modules.get("0")) for attribute, lists in parametrizations_of(module).items()]
    return [(attribute, edges) for attribute, edges in found if isinstance(edges, Edges)]


def _keep_names(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """After state_dict(): rename to the plain model's keys, in its order; what rules remember comes last."""
    for attribute, edges in wired_here(module):
        inner, plain = f"{prefix}parametrizations.{attribute}", prefix + attribute
        state[plain] = state.pop(f"{inner}.original")
        for name in edges._parameters:  # one of all layers is saved with the first: safetensors rejects shared memory
            mine, ending = f"{inner}.0.{name}", f".wiring.{name}"
            if any(key.endswith(ending) and sharded.same_memory(state[key], state[mine]) for key in state):
                del state[mine]
        _rename(state, f"{inner}.0.", f"{plain}.wiring.")
    own = [prefix + name for name in module.__dict__["_wirings_order"] if prefix + name in state]
    rest = [key for key in state if key.startswith(prefix) and key not in own]
    for key in own + rest:
        state[key] = state.pop(key)


def _take_names(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    """Before load_state_dict(): accept a plain or a wired model's keys. A plain one leaves rules' memory unchanged."""
    for attribute, edges in wired_here(module):
        inner, plain = f"{prefix}parametrizations.{attribute}", prefix + attribute
        state.pop(f"{plain}.wiring.allowed", None)
        if (everything := state.pop(f"{plain}.wiring.all_edges", None)) is not None:  # of `save_pretrained`
            state[plain] = everything
        if edges.rule.keeps_zeros:
            _check_zeros(state, plain, edges)
        if plain in state:
            state[f"{inner}.original"] = state.pop(plain)
        _rename(state, f"{plain}.wiring.", f"{inner}.0.")
        absent = not any(key.startswith(f"{inner}.0.") for key in state)
        for name, value in edges.memory().items():
            if absent or (edges.place and name in edges._parameters):  # stored with the first layer
                state.setdefault(f"{inner}.0.{name}", value)
        ours = {
            "original": parametrizations_of(module)[attribute].original,
            **{f"0.{name}": b for name, b in edges.memory().items()},
        }
        for name, value in ours.items():  # a whole state for a sharded model: every process takes its rows
            if (given := state.get(f"{inner}.{name}")) is not None and sharded.is_sharded(value):
                state[f"{inner}.{name}"] = sharded.rows_like(given, value)


def check_before_loading(model: nn.Module) -> None:
    """Have the zeros in a state checked in all layers before the first is loaded, if a rule keeps them."""
    if _check_all_zeros not in model._load_state_dict_pre_hooks.values():
        model.register_load_state_dict_pre_hook(_check_all_zeros)


def _check_all_zeros(model: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    kept = {prefix + name: edges for name, _, _, edges in wired(model) if edges.rule.keeps_zeros}
    for name, edges in kept.items():
        _check_zeros(state, name, edges)
    _warn_if_sparser(state, kept)


def _warn_if_sparser(state: dict[str, Any], kept: dict[str, Edges]) -> None:
    """Warn if weights of another program have many zeros that are edges here: it was wired before it was loaded."""
    lost, first = 0, ""
    for name, edges in kept.items():
        weight, ours = state.get(name), edges.memory()["wiring"]
        if isinstance(weight, Tensor) and weight.shape == ours.shape and f"{name}.wiring.wiring" not in state:
            zeros = ours.numel() - int(torch.count_nonzero(sharded.whole(weight != 0)))
            more = zeros - int(torch.count_nonzero(~ours))
            if more > BY_CHANCE * int(torch.count_nonzero(ours)):
                lost, first = lost + more, first or name
    if lost:
        warnings.warn(
            f"{lost:,} zeros in the state to load, the first in {first}, are edges of this wiring, which will be "
            "trained: rule 'keep' keeps the zeros that were there when the model was wired. To keep these, load the "
            "weights before wiring.",
            stacklevel=4,
        )


def _check_zeros(state: dict[str, Any], name: str, edges: Edges) -> None:
    """Raise if a state to be loaded has edges that the final wiring of a weight does not have."""
    ours, theirs = edges.memory()["wiring"], state.get(f"{name}.wiring.wiring")
    weight = state.get(f"{name}.wiring.all_edges", state.get(name))  # the former of `save_pretrained`
    hint = (
        "Load weights with these zeros; or wire a plain model that has the saved weights, or restore one with "
        "wirings.rewire_."
    )
    if isinstance(theirs, Tensor):
        if theirs.shape == ours.shape and not torch.equal(theirs.to(ours.device), ours):
            raise WiringError(
                f"rule {edges.rule.name!r} keeps the zeros of {name}, {int(torch.count_nonzero(~ours)):,} of "
                f"{ours.numel():,} weights, but the state to load was saved with other zeros, "
                f"{int(torch.count_nonzero(~theirs)):,}. {hint}"
            )
    elif isinstance(weight, Tensor) and weight.shape == ours.shape:
        there = sharded.whole(weight != 0).to(ours.device)
        if outside := int(torch.count_nonzero(there & ~ours)):
            raise WiringError(
                f"rule {edges.rule.name!r} keeps the zeros of {name}, {int(torch.count_nonzero(~ours)):,} of "
                f"{ours.numel():,} weights, but {outside:,} of them are not zero in the state to load. {hint}"
            )


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
