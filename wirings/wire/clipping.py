"""Clipping gradients by their norm over the edges in use, without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wirings.selection.batched import masked_each
from wirings.selection.service import Selection
from wirings.selection.sharded import is_sharded, on_shards
from wirings.wire.layer import Layer
from wirings.wire.parametrization import wired


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
    used = _used_edges(model)
    parameters = [p for p in model.parameters() if p.grad is not None]
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


def _used_edges(model: nn.Module) -> dict[int, Tensor | None]:
    """The edges in use of every wired weight, by the weight's id; None for all."""
    used: dict[int, Tensor | None] = {}
    ranked: set[Selection] = set()
    for place in wired(model):
        layer, edges = Layer(*place), place[3]
        kept, selection = edges.rule.kept_at_once, edges.selection
        if selection in ranked:
            continue
        weight = layer.weight
        with on_shards(is_sharded(weight)), selection.held():  # gradients belong to what the forward pass has ranked
            if kept is not None and kept.mask is None and selection.layers:  # all layers at once, as the forward pass
                ranked.add(selection)
                used |= {id(x.weight): mask for x, mask in zip(selection.layers, selection.choose_all(), strict=True)}
            elif id(weight) not in used:  # a tied weight is found twice
                used[id(weight)] = edges.rule.used(weight.detach(), edges)
    return used
