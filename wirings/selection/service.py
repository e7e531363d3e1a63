"""One object that chooses the edges of all layers wired by one call of `wirings.wire_`.

`Selection` is the only place that knows how layers are chosen together, and the only cache of such choices. It is
asked, through the edges of a layer, for

- `choose`: the mask of a layer's real edges;
- `keep`: the weights of the forward pass, whose gradient is passed straight through;
- `choose_more`: the mask of a larger superset, up to a given density;
- `next_magnitude`: the magnitude of the strongest edge that is not real;
- `choose_by`: masks by other scores than the weights, or with other numbers of edges;
- `kept_weights`: the real weights of several layers, without a gradient.

**Layers with a budget of their own** are ranked separately, so the result does not depend on the order of requests. On
a GPU a selection takes several kernels, whether for one layer or for a hundred. So the first layer that asks for its
weights in a forward pass of the model has the edges of all layers chosen, and every layer takes its part once. Further
requests (a layer that is used twice, a pass that is recomputed in the backward pass), and those outside of a forward
pass, are served one by one.

**Layers that share one budget** (``share="global"``) are ranked together. The ranking is made once and kept until a
weight changes, so that a step costs one ranking however many layers ask. For weights that are sharded over processes,
the position at which the ranking is cut off is kept instead.

A cached result is used only while its tensors are the same: the same objects, at the same version and address. Writes
that no version counts (``weight.data``, fused optimizers) are covered by `Selection.forget`, which is called at the
beginning of every forward pass of the model and by the handle. Nothing is cached under `torch.compile`, where the
compiler merges equal rankings by itself, under `torch.func`, or for inference tensors, which have no version.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from wirings.selection import functional, sharded
from wirings.utils.layers import original_weight, parametrizations_of
from wirings.utils.transforms import in_transform

DEVICES = ("cuda",)
"""Devices on which choosing the edges of all layers at once pays off."""

Stamp = list[tuple[Tensor, int, int]]


class SelectableEdges(Protocol):
    """What a selection needs to know about the edges of one weight."""

    k: Tensor
    """The number of real edges: of this weight, or of all weights that share the budget."""
    allowed: Tensor | None
    """The edges that may exist, or None for all."""
    possible: int
    """The number of allowed edges."""
    place: int
    """The position of the weight among those of its selection, which sets it."""
    selection: Selection

    def within(self) -> Tensor | None:
        """The edges that may be chosen, or None for all."""


@dataclass(frozen=True)
class SelectedWeight:
    """One weight of a selection: its module, its attribute there, its edges."""

    name: str
    module: nn.Module
    attribute: str
    edges: Any

    @property
    def weight(self) -> nn.Parameter:
        """The parameter with all weights, hallucinated ones included; the one that the optimizer trains."""
        return original_weight(self.module, self.attribute)


class Selection:
    """Chooses the edges of the layers that one call of `wirings.wire_` wired. Also the model's forward pre-hook.

    Args:
        shared: whether all layers share one budget and are ranked together.
    """

    def __init__(self, shared: bool = False) -> None:
        self.shared = shared
        self.layers: Sequence[SelectedWeight] = []
        self._pending = False  # a forward pass has begun, and no layer has asked yet
        self._cache: dict[Any, Any] = {}
        self._stamp: Stamp = []  # what the cached rankings of a shared budget were made of,
        self._sharded = False  # and whether any of that was sharded
        # A compiler may run the hook outside of the graph it makes of the model, so what is chosen passes through an
        # attribute. Once a pass has not used a layer's part, nothing is passed on anymore: it would be out of date.
        self._traced: list[Tensor | None] = []
        self._left_over = False

    # ---- members and lifetime ---------------------------------------------------------------------------------

    def set_layers(self, layers: Sequence[SelectedWeight]) -> None:
        """Set the layers whose edges are chosen, and the position of each."""
        self.layers = layers
        self._traced = [None] * len(layers)
        for place, layer in enumerate(layers):
            layer.edges.place = place
        self.forget()

    def drop(self, gone: Collection[Any]) -> None:
        """Remove the layers of these edges, which are no longer wired."""
        self.set_layers([layer for layer in self.layers if layer.edges not in gone])

    def forget(self) -> None:
        """Drop everything cached; edges are chosen again when they are next requested."""
        self._cache.clear()
        self._stamp = []
        self._pending = False

    def __call__(self, model: nn.Module, args: Any) -> None:
        """Note that a forward pass of the model begins."""
        if torch.compiler.is_compiling():
            if not self.shared:
                self._left_over |= any(kept is not None for kept in self._traced)
                self._traced = self._keep_all_traced()
            return
        if not self.layers:  # a copy, which has layers of its own
            self.set_layers(_members(model, self))
        self.forget()
        self._pending = not self.shared and len(self.layers) > 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Selection:
        memo[id(self)] = replica = Selection(self.shared)
        if self.shared:  # a layer's edges depend on all other layers
            replica.layers = copy.deepcopy(self.layers, memo)
        return replica  # otherwise it finds its layers when the copied model is first used

    # ---- what rules ask for -----------------------------------------------------------------------------------

    def choose(self, edges: SelectableEdges, weight: Tensor) -> Tensor:
        """The mask of the budget's number of edges of largest magnitude, in this weight or over all layers."""
        if self.shared:
            return self._shared_mask(edges, None)
        return functional.choose(weight, edges.k, edges.within())

    def choose_more(self, edges: SelectableEdges, weight: Tensor, density: float) -> Tensor:
        """The mask of the strongest edges up to a larger ``density``, or of the budget's number if that is more."""
        if self.shared:
            possible = sum(layer.edges.possible for layer in self.layers)
            return self._shared_mask(edges, int(density * possible + 1e-6))
        return functional.choose(weight, more_edges(edges, density), edges.within())

    def next_magnitude(self, edges: SelectableEdges, weight: Tensor, real: Tensor) -> Tensor:
        """The magnitude of the strongest edge that is not real, 0 if all are: of this weight, or over all layers."""
        if self.shared:
            return self._cached("next magnitude", self._weights(), self._shared_next_magnitude)
        return functional.next_magnitude(weight, real, edges.within())

    def keep(self, edges: SelectableEdges, weight: Tensor) -> Tensor:
        """The real edges of a weight, zeros elsewhere; the gradient is passed straight through to all allowed edges."""
        if self.shared:
            return functional.straight_through(weight, self._shared_mask(edges, None), edges.allowed)
        kept = self._take(edges, weight)
        if kept is not None:
            return functional.handed_through(weight, kept, edges.allowed)
        return functional.real_edges(weight, edges.k, edges.allowed)

    def choose_by(
        self,
        layers: Sequence[SelectedWeight],
        scores: Sequence[Tensor],
        counts: Sequence[int | Tensor] | None = None,
        within: Sequence[Tensor | None] | None = None,
    ) -> list[Tensor]:
        """Masks of the edges whose ``scores`` have the largest magnitude, one for each layer.

        Args:
            layers: layers of this selection; all of them if they share a budget.
            scores: a tensor of the weight's shape for each layer.
            counts: how many edges to choose in each layer; with a shared budget the same number in each entry, for
                all layers together. By default the budget.
            within: the edges to choose among. By default the allowed ones that the rule has left.
        """
        counts = [layer.edges.k for layer in layers] if counts is None else counts
        within = [layer.edges.within() for layer in layers] if within is None else within
        if not self.shared:
            return [functional.choose(s, k, among) for s, k, among in zip(scores, counts, within, strict=True)]
        ranking = rank_together(scores, counts[0], within)
        return [_part(ranking, i, s, among) for i, (s, among) in enumerate(zip(scores, within, strict=True))]

    def kept_weights(self, layers: Sequence[SelectedWeight], density: float | None = None) -> list[Tensor]:
        """The real weights of several layers, zeros elsewhere, without a gradient.

        Args:
            layers: layers of this selection.
            density: where given, the strongest edges up to this density are kept (see `choose_more`).
        """
        weights, all_edges = [layer.weight.detach() for layer in layers], [layer.edges for layer in layers]
        alike = len({(w.device, w.dtype) for w in weights}) == 1
        if not alike or self.shared or any(sharded.is_sharded(w) for w in weights):
            return [
                torch.where(self.choose(e, w) if density is None else self.choose_more(e, w, density), w, 0.0)
                for e, w in zip(all_edges, weights, strict=True)
            ]
        ks = [e.k if density is None else more_edges(e, density) for e in all_edges]
        return functional.real_edges_of(weights, ks, [e.within() for e in all_edges])

    # ---- layers with a budget of their own, chosen at once ----------------------------------------------------

    def _take(self, edges: SelectableEdges, weight: Tensor) -> Tensor | None:
        """A layer's part of what was chosen for all layers; None if it has to choose by itself."""
        if torch.compiler.is_compiling():
            return self._take_traced(edges, weight)
        if weight.device.type not in DEVICES or in_transform(weight) or sharded.is_sharded(weight):
            return None
        if self._pending:
            self._pending = False
            members = [(layer.edges, _original(layer)) for layer in self.layers]
            # With FSDP only some weights are whole at this moment; the others are when their own module runs.
            members = [(e, w) for e, w in members if _alike(w, weight)]
            ks, allowed = [e.k for e, _ in members], [e.allowed for e, _ in members]
            kept = functional.real_edges_of([w for _, w in members], ks, allowed)
            for (e, w), part in zip(members, kept, strict=True):
                self._cache[e.place] = _stamp((w, e.k)), part
        found = self._cache.pop(edges.place, None)
        return found[1] if found is not None and _same(found[0], _stamp((weight, edges.k))) else None

    def _take_traced(self, edges: SelectableEdges, weight: Tensor) -> Tensor | None:
        """The same while a compiler traces the model."""
        place = edges.place
        if place >= len(self._traced):
            return None
        layer = self.layers[place]
        if layer.edges is not edges or _original(layer) is not weight:
            return None
        kept, self._traced[place] = self._traced[place], None
        return kept

    def _keep_all_traced(self) -> list[Tensor | None]:
        """The real weights of all layers; None for each if choosing them at once is impossible or does not pay."""
        weights = [_original(layer) for layer in self.layers]
        pays = not self._left_over and len(weights) > 1 and weights[0].device.type in DEVICES
        if not pays or not all(_alike(weight, weights[0]) for weight in weights):
            return [None] * len(weights)
        ks, allowed = [layer.edges.k for layer in self.layers], [layer.edges.allowed for layer in self.layers]
        return [*functional.real_edges_of(weights, ks, allowed)]

    # ---- layers that share one budget -------------------------------------------------------------------------

    def _shared_mask(self, edges: SelectableEdges, least: int | None) -> Tensor:
        """A layer's part of the ranking of all layers: of the budget's number of edges, or of ``least`` if more."""
        weights = self._weights()

        def rank() -> list[Tensor] | sharded.Cut:
            k: Tensor = self.layers[0].edges.k  # the same tensor for all, so that a compiler sees equal rankings
            within = [layer.edges.within() for layer in self.layers]
            return rank_together(weights, k if least is None else k.clamp(min=least), within)

        return _part(self._cached(("ranking", least), weights, rank), edges.place, weights[edges.place], edges.within())

    def _shared_next_magnitude(self) -> Tensor:
        weights, within = self._weights(), [layer.edges.within() for layer in self.layers]
        if torch.compiler.is_compiling():  # few operations to trace: one row, which the compiler makes once for all
            row, among = _in_a_row(weights, within)
            return functional.next_magnitude(row, functional.choose(row, self.layers[0].edges.k, among), among)
        with sharded.on_shards(any(sharded.is_sharded(weight) for weight in weights)):
            parts = [
                functional.next_magnitude(weight, self._shared_mask(layer.edges, None), among)
                for layer, weight, among in zip(self.layers, weights, within, strict=True)
            ]
            return torch.stack([sharded.whole(part).double() for part in parts]).amax()

    def _weights(self) -> list[Tensor]:
        return [_original(layer) for layer in self.layers]

    def _cached(self, what: Any, weights: Sequence[Tensor], find: Callable[[], Any]) -> Any:
        """What follows from the weights of all layers: found once, and kept until one of them changes."""
        if torch.compiler.is_compiling() or any(in_transform(w) or w.is_inference() for w in weights):
            return find()
        left = [layer.edges.left for layer in self.layers if layer.edges.left is not None]
        shards = any(sharded.is_sharded(weight) for weight in weights)
        stamp = _stamp((self.layers[0].edges.k, *weights, *left), shards)
        if shards != self._sharded or not _same(self._stamp, stamp, shards):
            self._cache.clear()
            self._stamp, self._sharded = stamp, shards
        if what not in self._cache:
            self._cache[what] = find()
        return self._cache[what]


def more_edges(edges: SelectableEdges, density: float) -> Tensor:
    """The number of edges of one weight at a larger ``density``, or the budget's if that is more."""
    return edges.k.clamp(min=int(density * edges.possible + 1e-6))


def rank_together(
    scores: Sequence[Tensor], k: int | Tensor, within: Sequence[Tensor | None]
) -> list[Tensor] | sharded.Cut:
    """Rank the edges of several weights together: the mask of each, or where the ranking is cut if any is sharded."""
    if any(sharded.is_sharded(s) for s in scores):
        return sharded.Cut.find(scores, torch.as_tensor(k), within)
    row, allowed = _in_a_row(scores, within)
    parts = functional.choose(row, k, allowed).split([s.numel() for s in scores])
    return [part.view(s.shape) for part, s in zip(parts, scores, strict=True)]


def _part(ranking: list[Tensor] | sharded.Cut, place: int, weight: Tensor, within: Tensor | None) -> Tensor:
    """The mask of one weight from a ranking of several."""
    return ranking[place] if isinstance(ranking, list) else ranking.mask(place, weight.detach(), within)


def _in_a_row(scores: Sequence[Tensor], within: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """All scores concatenated, and likewise their masks if there are any."""
    dtype = scores[0].dtype
    for score in scores[1:]:
        dtype = torch.promote_types(dtype, score.dtype)
    row = torch.cat([s.detach().reshape(-1).to(dtype) for s in scores])
    if all(among is None for among in within):
        return row, None
    masks = zip(within, scores, strict=True)
    return row, torch.cat([(torch.ones_like(s, dtype=torch.bool) if a is None else a).reshape(-1) for a, s in masks])


def _members(model: nn.Module, selection: Selection) -> list[SelectedWeight]:
    """The weights of a model whose edges belong to a selection, tied ones once."""
    found: dict[Any, SelectedWeight] = {}
    for module in model.modules():
        for attribute, holder in parametrizations_of(module).items():
            if getattr(holder[0], "selection", None) is selection:
                found[holder[0]] = SelectedWeight(attribute, module, attribute, holder[0])
    return list(found.values())


def _original(layer: SelectedWeight) -> Tensor:
    """`SelectedWeight.weight` of a weight that is wired, in few operations: it is traced, and asked for very often."""
    return getattr(layer.module.parametrizations, layer.attribute).original


def _alike(weight: Tensor, other: Tensor) -> bool:
    """Whether the edges of a weight can be chosen together with those of ``other``, which is not sharded."""
    return not sharded.is_sharded(weight) and weight.device == other.device and weight.dtype == other.dtype


def _stamp(tensors: Iterable[Tensor], shards: bool = False) -> Stamp:
    """What changes when one of the tensors does: object, version, address."""
    return [(x, 0 if x.is_inference() else x._version, 0 if shards else x.data_ptr()) for x in tensors]


def _same(then: Stamp, now: Stamp, shards: bool = False) -> bool:
    """Whether tensors are unchanged.

    FSDP puts another tensor in a weight's place while its module runs. With ``shards`` that does not count as a change;
    only the versions of those that are the same objects as before do.
    """
    if len(then) != len(now):
        return False
    return all((one == other if a is b else shards) for (a, *one), (b, *other) in zip(then, now, strict=True))
