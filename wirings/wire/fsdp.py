"""What is to be known of `torch.distributed.fsdp.fully_shard`, and all of it that is not its public interface.

FSDP2 makes every parameter a DTensor whose rows are shared out over processes, and puts the whole parameter in its
place while its module runs. It remembers where a parameter sits, and `wire_` and `finalize_` move a weight to another
place: below a parametrization, and back. It also puts a class of its own on top of a module's class, as a
parametrization does, which must come off before the other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from wirings.errors import WiringError
from wirings.rules.base import Edges, Layer
from wirings.selection.sharded import check_alike, is_sharded, place_of


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules of a model that `fully_shard` was called on."""
    kind = _kind()
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def check_kind(model: nn.Module) -> None:
    """Raise if a model is, or has within it, one in the older `FullyShardedDataParallel`."""
    older = _kind("FullyShardedDataParallel")
    if older is not None and any(isinstance(module, older) for module in model.modules()):
        raise WiringError(f"{type(model).__name__} is in {_OLDER}.")


def check_whole(layers: Iterable[tuple[str, Tensor, Edges]]) -> None:
    """Raise if a wired weight was put into the flat parameter of the older `FullyShardedDataParallel`."""
    if not (dist.is_available() and dist.is_initialized()):  # without processes there is none; asked after every step
        return
    for name, weight, edges in layers:
        if not isinstance(weight, nn.Parameter) or weight.numel() < edges.possible:
            raise WiringError(f"{name} is no parameter of its own any more: the model was put in {_OLDER}.")


_OLDER = (
    "FullyShardedDataParallel, which lays all weights in one row and so leaves no edges to rank; take "
    "torch.distributed.fsdp.fully_shard instead"
)


def reshard(modules: list[Any]) -> None:
    """Put the sharded parameters back where whole ones are still in place, as after a forward pass alone."""
    for module in modules:
        module.reshard()


def move(model: nn.Module, old: tuple[nn.Module, str], new: tuple[nn.Module, str]) -> None:
    """Tell FSDP that a parameter sits elsewhere now: in another module, under another name."""
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
        modules: those that `fully_shard` was called on.
        layers: the wired ones.
        ranked: whether the budget is one that is shared out by a ranking of all layers in one process.
    """
    if ranked:
        raise WiringError(
            "a budget of multiply-adds that is shared out globally is ranked in one process, but the model is sharded; "
            "take share='uniform' or 'erk', or a budget of edges or parameters."
        )
    reshard(modules)
    names = {id(layer.weight): layer.name for layer in layers}
    for module in modules:
        for _, parameter in _parameters(module):
            name, kept = names.get(id(parameter.sharded_param)), parameter.sharded_param.dtype
            used = parameter.mp_policy.param_dtype
            if name is not None and used not in (None, kept):
                raise WiringError(
                    f"{name} is kept in {kept}, but the MixedPrecisionPolicy of fully_shard hands it to the forward "
                    f"pass in {used}, where other edges may be the strongest. Leave param_dtype out for modules with "
                    "wired layers, and compute in half precision with torch.autocast, as without FSDP."
                )
    for layer in layers:
        if layer.edges._parameters:
            raise WiringError(
                f"rule {layer.edges.rule.name!r} trains numbers of its own beside the weights ({layer.name}), which "
                "fully_shard does not keep the same on all processes; train it in one process or with "
                "DistributedDataParallel, or take another rule."
            )
        if is_sharded(layer.weight):
            place_of(layer.weight, layer.name)
            check_alike(layer.weight, layer.edges.memory(), layer.name, layer.edges.rule.name)


@contextmanager
def below(module: nn.Module) -> Iterator[None]:
    """Take FSDP's class off a module for a while, and put it on top of whatever class the module then has."""
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
    """A class of FSDP's, or None where nobody has imported it, so that no module can be one."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), name, None)


def _parameters(module: Any) -> list[tuple[Any, Any]]:
    """The groups of a sharded module, and the parameters in them, as FSDP keeps them."""
    try:
        state = module._get_fsdp_state()
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        found = [(group, one) for group in groups if group is not None for one in group.fsdp_params]
        assert all(hasattr(one, "_module_info") and hasattr(one, "sharded_param") for _, one in found)
    except (AttributeError, AssertionError) as error:
        raise WiringError(
            "this version of PyTorch keeps the parameters of fully_shard otherwise than wirings knows: call "
            "wirings.wire_ before fully_shard, and finalize a model that was loaded in one process."
        ) from error
    return found


def _renew_hooks(group: Any, parameter: Any, module: nn.Module) -> None:
    """The hooks that FSDP has put on the module where a parameter sat: the same on the one where it sits now."""
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
    """Whether FSDP keeps the parameters of a module."""
    return "_is_fsdp_managed_module" in vars(module)


def check_within(model: nn.Module, weight: nn.Parameter, name: str) -> None:
    """Raise unless a sharded weight is one that `fully_shard` keeps, called on the model or on a part of it."""
    if not any(one.sharded_param is weight for module in sharded_modules(model) for _, one in _parameters(module)):
        raise WiringError(
            f"{name} is sharded, but not by fully_shard on this {type(model).__name__} or a module in it. Wire the "
            "whole model that fully_shard was called on (include= chooses layers), or wire it before it is sharded."
        )
