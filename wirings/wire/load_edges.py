"""Load weights into a wired model and make their edges its wiring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn

from wirings.errors import WiringError
from wirings.wire.finalize import final_weight
from wirings.wire.layer import Layer
from wirings.wire.parametrization import wired
from wirings.wire.start import setup_from
from wirings.wire.transaction import restored_on_error


@torch.no_grad()
def load_edges(
    model: nn.Module, path: str | Path, state: Mapping[str, Tensor], places: Mapping[str, Tensor | None]
) -> None:
    """Load a plain state into a wired model and let its rules start from the edges in it.

    Args:
        model: the wired model, or one that contains it.
        path: the file that the state comes from, for messages.
        state: all tensors of the plain model, in the model's shapes.
        places: the places of the edges in flat weights, those that weigh zero included; None for all that are not zero.

    Raises:
        WiringError: if a rule cannot take this wiring. The model is left unchanged.
    """
    own: dict[int, Layer] = {}
    for place in wired(model):
        own.setdefault(id(place[3]), Layer(*place))
    groups = []
    try:
        for selection in {layer.edges.selection for layer in own.values()}:
            if other := next((layer.name for layer in selection.layers if id(layer.edges) not in own), None):
                raise WiringError(f"{other} was wired together with its layers. Load the whole model.")
            groups.append([own[id(layer.edges)] for layer in selection.layers])
        with ExitStack() as undo:
            for layers in groups:
                undo.enter_context(restored_on_error(layers[0].edges.rule, layers))
            final = [layer for layer in own.values() if layer.edges.rule.keeps_zeros]
            wirings = {layer.name: _mask(layer, state[layer.name], places.get(layer.name)) for layer in final}
            # With the edges of the file, so that loading checks that they are those of a final wiring.
            model.load_state_dict({**state, **{f"{name}.wiring.wiring": mask for name, mask in wirings.items()}})
            for layers in groups:
                masks = [_mask(layer, state[layer.name], places.get(layer.name)) for layer in layers]
                _start_from(layers, masks)
                for layer, mask in zip(layers, masks, strict=True):
                    _check_loaded(layer, state[layer.name], int(mask.sum()))
    except WiringError as error:
        raise WiringError(f"{path} cannot be loaded into this wired {type(model).__name__}: {error}") from error


def _mask(layer: Layer, weight: Tensor, places: Tensor | None) -> Tensor:
    edges, device = layer.edges, layer.weight.device
    if places is None:
        mask = weight.to(device) != 0
    else:
        mask = torch.zeros(weight.numel(), dtype=torch.bool)
        mask = mask.index_fill_(0, places, True).view(weight.shape).to(device)
    return mask if edges.groups is None else edges.groups.complete(mask, edges.k, edges.allowed)


def _start_from(layers: Sequence[Layer], masks: Sequence[Tensor]) -> None:
    """Set up the rule again, from these edges."""
    rule = layers[0].edges.rule
    if rule.keeps_zeros:  # its wiring is final; loading has checked that it has these edges
        return
    counts = [int(layer.edges.count(mask)) for layer, mask in zip(layers, masks, strict=True)]
    if rule.moves_budget and not layers[0].edges.shared and sum(counts) == sum(int(x.edges.k) for x in layers):
        for layer, count in zip(layers, counts, strict=True):
            layer.edges.k.fill_(count)
    setup_from(rule, layers, masks)


def _check_loaded(layer: Layer, weight: Tensor, count: int) -> None:
    """Raise unless the forward pass uses the weight that was loaded, with as many edges."""
    rule = layer.edges.rule
    used = int(layer.edges.real(layer.weight, fresh=True).sum())
    same = torch.equal(final_weight(layer), weight.to(layer.weight))
    if not same or (used != count and not rule.keeps_zeros):
        others = ", others than these" if used == count else ""
        raise WiringError(
            f"{layer.name} has {count:,} edges in the file, but rule {rule.name!r} chooses {used:,}{others}. Wire the "
            'model with this number of edges; or load the file into a plain model and wire it with start="weights".'
        )
