"""Merge the adapters of PEFT (LoRA and its relatives) into a wired model, within its wiring.

A layer with an adapter holds the layer it adapts as ``base_layer`` and adds to its output. PEFT's own ``merge`` writes
to ``base_layer.weight``, which is computed anew whenever it is read if the layer is wired, so what it writes is lost.
Here it writes to the weight of a plain twin of the layer, whose real edges are then copied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wirings.errors import WiringError
from wirings.selection.sharded import is_sharded
from wirings.utils.layers import check_module
from wirings.wire.finalize import final_weight
from wirings.wire.layer import Layer
from wirings.wire.parametrization import wired


def merge_adapters_(model: nn.Module) -> nn.Module:
    """Merge the active adapters of a wired model into its weights, in place, and remove all adapters.

    The sum is taken on real edges alone, so the wiring stays as it is, and the finalized model has the same zeros as it
    would have had without adapters. What an adapter would add to other edges is dropped: evaluate the merged model.
    Hallucinated edges of wired layers weigh zero afterwards, so that no rule swaps them in because of the merge. PEFT's
    own ``merge_and_unload`` does not reach wired weights.

        wiring = wirings.wire_(model, "keep")
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
        train(adapted)
        model = wirings.merge_adapters_(adapted)
        wirings.finalize_(model)

    Args:
        model: a wired model with adapters, a ``PeftModel`` or any other. It may have been wired before or after the
            adapters were added; these stay dense.

    Returns:
        The model without adapters: the base model of a ``PeftModel``, otherwise the same object.

    Raises:
        WiringError: if a layer with an adapter is not wired. The model is left unchanged.
    """
    check_module("merge_adapters_()", model)
    places = {id(place[1]): Layer(*place) for place in wired(model)}
    adapted = [(name, module) for name, module in model.named_modules() if _is_adapted(module)]
    if not adapted:
        raise WiringError(
            f"{type(model).__name__} has no adapters to merge: no module holds a base_layer and a merge() method, as "
            "PEFT's layers do."
        )
    for name, module in adapted:
        _check(name, module, places)
    layers = {id(layer.edges): layer for layer in places.values()}  # tied weights once
    with torch.no_grad():
        # All before the first is written: layers may share a budget.
        reals = {key: layer.edges.real(layer.weight, fresh=True) for key, layer in layers.items()}
        weights = {key: final_weight(layer).clone() for key, layer in layers.items()}
        for _, module in adapted:
            base = _innermost(module)
            if id(base.base_layer) in places:
                key = id(places[id(base.base_layer)].edges)
                weights[key] = _merged(module, base, weights[key])
        for key, layer in layers.items():
            layer.weight.copy_(torch.where(reals[key], weights[key], 0.0))
    return _without_adapters(model, adapted)


def _is_adapted(module: nn.Module) -> bool:
    """Whether this is a layer of PEFT around another one."""
    return isinstance(module._modules.get("base_layer"), nn.Module) and callable(getattr(module, "merge", None))


def _innermost(module: Any) -> Any:
    """The layer that holds the adapted one itself: adapters may lie around one another."""
    while _is_adapted(module.base_layer):
        module = module.base_layer
    return module


def _check(name: str, module: Any, places: dict[int, Layer]) -> None:
    """Raise if an adapter cannot be merged within a wiring."""
    layer, merged = places.get(id(_innermost(module).base_layer)), bool(getattr(module, "merged", False))
    if layer is None and not merged:
        raise WiringError(
            f"{name} has an adapter, but its weight is not wired, so merging would fill its zeros. Wire it as well, or "
            f'call model.get_submodule("{name}").merge() first if it is meant to be dense.'
        )
    if layer is not None and merged:
        raise WiringError(
            f"the adapter of {name} counts as merged, but its own merge() does not reach a wired weight. Call "
            f'model.get_submodule("{name}").unmerge() first.'
        )
    if layer is not None and (is_sharded(layer.weight) or layer.attribute != "weight"):
        raise WiringError(
            f"merge_adapters_ merges into the whole weight of a layer, but {layer.name} is sharded or of another name; "
            "gather the model first."
        )


def _merged(module: Any, holder: Any, used: Tensor) -> Tensor:
    """The weight that a layer has once its adapters are merged into the weight ``used``, with all entries."""
    base = holder.base_layer
    twin: Any = object.__new__(type(base).__bases__[0])  # the class before it was parametrized
    twin.__dict__.update(base.__dict__)
    twin._parameters = {**base._parameters, "weight": nn.Parameter(used, requires_grad=False)}
    twin._modules = {name: child for name, child in base._modules.items() if name != "parametrizations"}
    holder.base_layer = twin
    try:
        module.merge()
    finally:
        holder.base_layer = base
    return twin.weight.detach()


def _without_adapters(model: Any, adapted: list[tuple[str, Any]]) -> nn.Module:
    """Put the adapted layers back into the places of those around them."""
    if callable(getattr(model, "unload", None)):  # a PeftModel
        return model.unload()
    for name, module in adapted:
        parent, _, child = name.rpartition(".")
        if not any(name.startswith(f"{outer}.") for outer, _ in adapted):
            model.get_submodule(parent)._modules[child] = _innermost(module).base_layer
    if getattr(model, "_hf_peft_config_loaded", False):  # else transformers would save adapters alone
        model._hf_peft_config_loaded = False
        del model.peft_config
    return model
