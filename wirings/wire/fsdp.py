"""Everything that depends on `torch.distributed.fsdp.fully_shard` (FSDP2), in particular on its private interface.

FSDP2 turns every parameter into a DTensor whose rows are distributed over processes, and puts the whole parameter in
its place while its module runs. It remembers which module holds a parameter, and `wire_` and `finalize_` move a weight:
below a parametrization, and back. FSDP also puts a class of its own on top of a module's class, as parametrizations do;
the one on top must be removed first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from wirings.errors import WiringError
from wirings.selection.sharded import check_alike, is_sharded, layout_of
from wirings.wire.edges import Edges
from wirings.wire.layer import Layer


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules of a model that `fully_shard` was called on."""
    kind = _kind()
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def check_kind(model: nn.Module) -> None:
    """Raise if a model is, or contains, one wrapped in the older `FullyShardedDataParallel`."""
    older = _kind("FullyShardedDataParallel")
    if older is not None and any(isinstance(module, older) for module in model.modules()):
        raise WiringError(f"{type(model).__name__} is wrapped in {_OLDER}.")


def check_whole(layers: Iterable[tuple[str, Tensor, Edges]]) -> None:
    """Raise if a wired weight was put into the flat parameter of the older `FullyShardedDataParallel`."""
    if not (dist.is_available() and dist.is_initialized()):  # no processes, no FSDP; this is called after every step
        return
    for name, weight, edges in layers:
        if not isinstance(weight, nn.Parameter) or weight.numel() < edges.possible_edges:
            raise WiringError(f"{name} is no longer a parameter of its own: the model was wrapped in {_OLDER}.")


_OLDER = (
    "FullyShardedDataParallel, which flattens all weights into one and so leaves no edges to rank; use "
    "torch.distributed.fsdp.fully_shard instead"
)


def reshard(modules: list[Any]) -> None:
    """Put sharded parameters back where whole ones are still in place, as after a forward pass without backward."""
    for module in modules:
        module.reshard()


def move(model: nn.Module, old: tuple[nn.Module, str], new: tuple[nn.Module, str]) -> None:
    """Tell FSDP that a parameter has moved to another module, under another name."""
    for module in sharded_modules(model):
        for group, parameter in _parameters(module):
            info = parameter._module_info
            if info.module is old[0] and info.param_name == old[1]:
                info.module, info.param_name = new
                _renew_hooks(group, parameter, new[0])
            for i, shared in enumerate(zip(info.shared_modules, info.shared_param_names, strict=True)):
                if shared[0] is old[0] and shared[1] == old[1]:
                    info.shared_modules[i], info.shared_param_names[i] = new


def check(modules: list[Any], layers: Sequence[Layer], ranked: bool) -> None:
    """Raise if the wiring would not be the same on all processes, or not that of one process.

    Args:
        modules: the modules that `fully_shard` was called on.
        layers: the wired layers.
        ranked: whether the budget is shared out by a ranking of all layers, which takes place in one process.
    """
    if ranked:
        raise WiringError(
            "a global budget of multiply-adds is ranked in one process, but the model is sharded; use share='uniform' "
            "or 'erk', or a budget of edges or parameters."
        )
    reshard(modules)
    names = {id(layer.weight): layer.name for layer in layers}
    for module in modules:
        for _, parameter in _parameters(module):
            name, kept = names.get(id(parameter.sharded_param)), parameter.sharded_param.dtype
            used = parameter.mp_policy.param_dtype
            if name is not None and used not in (None, kept):
                raise WiringError(
                    f"{name} is kept in {kept}, but the MixedPrecisionPolicy of fully_shard casts it to {used} for the "
                    "forward pass, where other edges may be the strongest. Leave out param_dtype for modules with "
                    "wired layers, and compute in half precision with torch.autocast, as without FSDP."
                )
    for layer in layers:
        if layer.edges._parameters:
            raise WiringError(
                f"rule {layer.edges.rule.name!r} has parameters of its own beside the weights ({layer.name}), which "
                "fully_shard does not keep equal on all processes; train in one process or with "
                "DistributedDataParallel, or use another rule."
            )
        if is_sharded(layer.weight):
            layout_of(layer.weight, layer.name)
            check_alike(layer.weight, layer.edges.memory(), layer.name, layer.edges.rule.name)


@contextmanager
def below(module: nn.Module) -> Iterator[None]:
    """Remove FSDP's class from a module for a while, then put it on top of the class that the module has by then."""
    kind, cls = _kind(), type(module)
    if kind is None or kind not in cls.__bases__:
        yield
        return
    module.__class__ = cls.__bases__[1]
    try:
        yield
    finally:
        now = type(module)
        name = f"FSDP{now.__name__}"
        module.__class__ = type(name, (kind, now), {k: v for k, v in vars(cls).items() if k != "__weakref__"})


def _kind(name: str = "FSDPModule") -> Any:
    """A class of FSDP, or None if it was never imported, so that no module can be an instance."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), name, None)


def _parameters(module: Any) -> list[tuple[Any, Any]]:
    """The parameters of a sharded module, each with its group, as FSDP represents them."""
    try:
        state = module._get_fsdp_state()
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        found = [(group, one) for group in groups if group is not None for one in group.fsdp_params]
        assert all(hasattr(one, "_module_info") and hasattr(one, "sharded_param") for _, one in found)
    except (AttributeError, AssertionError) as error:
        raise WiringError(
            "this version of PyTorch represents the parameters of fully_shard in a way that wirings does not know: "
            "call wirings.wire_ before fully_shard, and finalize the model after loading it in one process."
        ) from error
    return found


def _renew_hooks(group: Any, parameter: Any, module: nn.Module) -> None:
    """Move the hooks that FSDP put on the module that held a parameter to the one that holds it now."""
    parameter._post_load_hook_handle.remove()
    parameter._post_load_hook_handle = module.register_load_state_dict_post_hook(
        lambda *args, **kwargs: parameter.reset_sharded_param()
    )
    handles = group._module_to_pre_save_state_dict_hook_handle
    if handles and module not in handles:
        handles[module] = module.register_state_dict_pre_hook(lambda *args, **kwargs: group._to_sharded())
        group._module_to_pre_load_state_dict_hook_handle[module] = module._register_load_state_dict_pre_hook(
            lambda *args, **kwargs: group._to_sharded()
        )


def manages(module: nn.Module) -> bool:
    """Whether FSDP manages the parameters of a module."""
    return "_is_fsdp_managed_module" in vars(module)


def check_within(model: nn.Module, weight: nn.Parameter, name: str) -> None:
    """Raise unless a sharded weight is managed by `fully_shard`, called on the model or a part of it."""
    if not any(one.sharded_param is weight for module in sharded_modules(model) for _, one in _parameters(module)):
        raise WiringError(
            f"{name} is sharded, but not by fully_shard on this {type(model).__name__} or a module in it. Wire the "
            "whole model that fully_shard was called on (select layers with include=), or wire it before sharding it."
        )
