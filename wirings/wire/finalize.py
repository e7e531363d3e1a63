"""`finalize_` a wired model to plain modules with exact zeros, or `unwire_` it with all its weights.

Both change the model in place, and only after all checks have passed.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from wirings.errors import WiringError
from wirings.selection.sharded import is_sharded, on_shards
from wirings.utils.layers import check_module, original_weight, parametrizations_of
from wirings.wire import fsdp
from wirings.wire.checks import check_finite, check_total
from wirings.wire.edges import Edges
from wirings.wire.layer import Layer
from wirings.wire.parametrization import detach, wired
from wirings.wire.structured import check_whole_groups

_BROKEN = (
    "Either the rule is broken, or a checkpoint of another budget was loaded without the handle's own "
    "(wiring.load_state_dict). The model was not changed."
)


def finalize_(model: nn.Module) -> nn.Module:
    """Turn a wired model into plain modules: original ``state_dict`` keys, exact zeros for hallucinated edges.

    Outputs are those of the wired model in evaluation. Warns if a schedule of the density has not reached its end, so
    that there are more or fewer edges than were asked for, or if a rule that removes edges permanently still trained
    with more.

    Args:
        model: the model that was wired.

    Returns:
        The model.
    """
    layers = checked_layers(model, "finalize")
    with torch.no_grad(), on_shards(any(is_sharded(layer.weight) for layer in layers)), _held_rankings(layers):
        for layer in layers:  # computed again: to keep all of them would take as much memory as the model
            # As data, so that layers that share a budget are not ranked again after each of them.
            layer.weight.data.copy_(final_weight(layer))
        torch.autograd.graph.increment_version([layer.weight for layer in layers])
    _warn_if_unfinished(model, [layer.edges for layer in layers])
    detach(model)
    return model


def unwire_(model: nn.Module) -> nn.Module:
    """Turn a wired model into plain modules, in place, with the weights of all edges, hallucinated ones included.

    For rules that keep hallucinated weights at zero (`set`, `rigl`, `sparse_momentum`), these are zeros.

    Args:
        model: the model that was wired.

    Returns:
        The model.
    """
    _wired_layers(model, "unwire")
    detach(model)
    return model


def checked_layers(model: nn.Module, what: str) -> list[Layer]:
    """The wired weights of a model, tied ones once, after checks that each can be finalized.

    Args:
        model: the model that was wired.
        what: what is about to be done, a verb for messages.

    Raises:
        WiringError: if a weight has NaN, or another number of real edges than its budget.
    """
    places = _wired_layers(model, what)
    if sharding := fsdp.sharded_modules(model):  # not checked before if the handle was never used
        fsdp.check(sharding, places, ranked=False)
    with _held_rankings(places):
        return _checked(places)


def _held_rankings(layers: list[Layer]) -> ExitStack:
    """Rank layers that share a budget once, while they are checked and written."""
    held = ExitStack()
    for selection in {layer.edges.selection for layer in layers}:
        held.enter_context(selection.held())
    return held


def _checked(places: list[Layer]) -> list[Layer]:
    _check_totals(places)
    unique: dict[int, Layer] = {}  # tied weights once
    for layer in places:
        unique.setdefault(id(layer.weight), layer)
    layers = list(unique.values())
    with torch.no_grad(), on_shards(any(is_sharded(layer.weight) for layer in layers)):
        for layer in layers:
            check_finite(layer.name, layer.weight)
            _check_final(layer)
    return layers


def _wired_layers(model: nn.Module, what: str) -> list[Layer]:
    """All wired weights of a model; raises if something was put on top of one, or if a shared budget reaches beyond."""
    check_module(f"{what}_()", model)
    fsdp.reshard(fsdp.sharded_modules(model))
    places = [Layer(*place) for place in wired(model)]
    if not places:
        raise WiringError(
            f"{type(model).__name__} is not wired: there is nothing to {what}. wirings.wire_(model, …) wires it; a "
            "finalized model is already plain."
        )
    fsdp.check_whole((layer.name, original_weight(layer.module, layer.attribute), layer.edges) for layer in places)
    here = {id(layer.edges) for layer in places}
    for layer in places:
        parametrizations = parametrizations_of(layer.module)[layer.attribute]
        if len(parametrizations) > 1:
            raise WiringError(
                f"{layer.name} has another parametrization ({type(parametrizations[1]).__name__}) on top of its edges; "
                "remove that one first."
            )
        if layer.edges.shared:
            for other in layer.edges.selection.layers:
                if id(other.edges) not in here:
                    raise WiringError(
                        f"{layer.name} shares one budget with {other.name}, which is not in this "
                        f"{type(model).__name__}; {what} the whole model that was wired."
                    )
    return places


def _check_totals(places: list[Layer]) -> None:
    """Raise if layers that share one budget do not meet it together. Checks the choice of this moment."""
    for selection, first in {layer.edges.selection: layer for layer in places if layer.edges.shared}.items():
        selection.forget()
        with on_shards(any(is_sharded(layer.weight) for layer in selection.layers)):
            count = sum(int(layer.edges.count(layer.edges.real(layer.weight))) for layer in selection.layers)
        check_total(
            [layer for layer in places if layer.edges.selection is selection], int(first.edges.k), count, _BROKEN
        )


def _warn_if_unfinished(model: nn.Module, all_edges: list[Edges]) -> None:
    """Warn if the number of edges is not the one that a schedule leads to, or that training used last."""
    scheduled = [edges for edges in all_edges if edges.end is not None]
    removing = [edges for edges in all_edges if edges.left is not None and not _are_open(edges)]
    end = sum(edges.end or 0 for edges in _one_per_budget(scheduled))
    left = sum(int(edges.count(edges.left)) for edges in removing if edges.left is not None)
    what = []
    if (now := sum(int(edges.k) for edges in _one_per_budget(scheduled))) != end:
        what.append(f"finalized with {now:,} {scheduled[0].unit}, but its schedule ends with {end:,}")
    if left > (now := sum(int(edges.k) for edges in _one_per_budget(removing))):
        what.append(
            f"finalized with {now:,} {removing[0].unit}, but training still used {left:,}: rule "
            f"{removing[0].rule.name!r} had not removed the others yet"
        )
    for text in what:
        warnings.warn(
            f"{type(model).__name__} was {text}: training stopped before that, or wiring.step() was not called after "
            "every optimizer step.",
            stacklevel=3,
        )


def _are_open(edges: Edges) -> bool:
    """Whether the edges that are left are those of open nodes (`wirings.wire.node_bound`), not those in training."""
    return edges.rule.follows_ranking and not edges.rule.keeps_wiring


def _one_per_budget(all_edges: list[Edges]) -> list[Edges]:
    """One of the edges for each budget: a shared budget is that of all layers."""
    return list({edges.selection if edges.shared else edges: edges for edges in all_edges}.values())


def final_weight(layer: Layer) -> Tensor:
    """The weight that the forward pass uses in evaluation."""
    training = layer.edges.training
    layer.edges.eval()
    try:
        return layer.edges(layer.weight)
    finally:
        layer.edges.train(training)


def _check_final(layer: Layer) -> None:
    value, real, edges = final_weight(layer), layer.edges.real(layer.weight), layer.edges
    check_whole_groups(layer, real)
    count, outside = int(edges.count(real)), int(torch.count_nonzero(value.masked_fill(real, 0.0)))
    if outside or (not edges.shared and count != int(edges.k)):
        raise WiringError(
            f"{layer.name}: rule {edges.rule.name!r} should have {int(edges.k)} real {edges.unit} and zeros elsewhere, "
            f"but it has {count}, and {outside} other nonzero weights. {_BROKEN}"
        )
