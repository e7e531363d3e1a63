"""Clipping gradients by their norm over the edges in use, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from wirings.selection.batched import masked_each
from wirings.selection.service import Selection
from wirings.selection.sharded import is_sharded, on_shards
from wirings.utils.layers import original_weight
from wirings.wire.edges import Edges
from wirings.wire.parametrization import wired_here


@torch.no_grad()
def clip_by_used(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients of a model so that their norm over the edges in use is at most ``max_norm``.

    Args:
        model: the model, with one wiring or several: every rule says which of its edges are used.
        max_norm: the largest norm allowed.
        norm_type: the order of the norm.

    Returns:
        The norm before clipping.
    """
    parameters, places = _parts_of(model)
    used = _used_edges(places)
    norm = _norm([(p.grad, used.get(id(p))) for p in parameters if p.grad is not None], norm_type)
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _norm(grads: list[tuple[Tensor, Tensor | None]], norm_type: float) -> Tensor:
    """The norm of gradients, each of which counts where its mask is true, or everywhere without one."""
    if grads and norm_type > 0 and all(grad.device.type == "cpu" and not is_sharded(grad) for grad, _ in grads):
        # On a CPU, a product takes half the time of `torch.where`, and one layer after the other reuses its memory.
        norms = [torch.linalg.vector_norm(grad if mask is None else grad * mask, norm_type) for grad, mask in grads]
        norm = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        if norm.isfinite():
            return norm  # otherwise NaN may be that of an unused edge: infinity times zero
    counted = [grad for grad, mask in grads if mask is None]
    masked, masks = [grad for grad, mask in grads if mask is not None], [mask for _, mask in grads if mask is not None]
    if len({(grad.dtype, grad.device) for grad in masked}) == 1 and not any(map(is_sharded, masked)):
        counted += masked_each(masked, masks, masked[0].dtype)  # one kernel instead of one for each layer
    else:
        counted += [torch.where(mask, grad, 0.0) for grad, mask in zip(masked, masks, strict=True)]
    return nn.utils.get_total_norm(counted, norm_type)


def _parts_of(model: nn.Module) -> tuple[list[nn.Parameter], list[tuple[nn.Module, str, Edges]]]:
    """The parameters of a model that have gradients, in its order, and its wired weights.

    One walk over the modules, since the generators of PyTorch take longer than everything else together.
    """
    parameters: dict[int, nn.Parameter] = {}  # tied ones are found several times
    places: list[tuple[nn.Module, str, Edges]] = []
    seen: set[nn.Module] = set()
    left = [model]
    while left:
        module = left.pop()
        if module in seen:
            continue
        seen.add(module)
        for parameter in module._parameters.values():
            if parameter is not None and parameter.grad is not None:
                parameters[id(parameter)] = parameter
        children = module._modules
        if children:
            left += [child for child in reversed(children.values()) if child is not None]
        if "parametrizations" in children:
            places += [(module, attribute, edges) for attribute, edges in wired_here(module)]
    return list(parameters.values()), places


def _used_edges(places: Sequence[tuple[nn.Module, str, Edges]]) -> dict[int, Tensor | None]:
    """The edges in use of every wired weight, by the weight's id; None for all."""
    used: dict[int, Tensor | None] = {}
    ranked: set[Selection] = set()
    for module, attribute, edges in places:
        selection = edges.selection
        if selection in ranked:
            continue
        kept, weight = edges.rule.kept_at_once, original_weight(module, attribute)
        with on_shards(is_sharded(weight)), selection.held():  # gradients belong to what the forward pass has ranked
            if kept is not None and kept.mask is None and selection.layers:  # all layers at once, as the forward pass
                ranked.add(selection)
                used |= {id(x.weight): mask for x, mask in zip(selection.layers, selection.choose_all(), strict=True)}
            elif id(weight) not in used:  # a tied weight is found twice
                used[id(weight)] = edges.rule.used(weight.detach(), edges)
    return used
