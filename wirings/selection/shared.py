"""Layers that share one budget, ranked together: one ranking a step, however many layers ask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wirings.selection import batched, functional, sharded
from wirings.selection.expiry import expired, expires_after_step
from wirings.utils.layers import original_weight
from wirings.utils.transforms import in_transform, is_plain

Stamp = list[tuple[Tensor, int, int]]


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


def original_of(layer: SelectedWeight) -> Tensor:
    """`SelectedWeight.weight` of a weight that is wired, in few operations: it is traced, and asked for very often."""
    return getattr(layer.module.parametrizations, layer.attribute).original


class SharedRanking:
    """The ranking of all layers that share one budget, made once and kept until one of their weights changes.

    Not every change counts a version: ``weight.data`` and fused optimizers do not. So a ranking is dropped after every
    step of an optimizer and, outside of a forward pass of the model, whenever a layer asks for its part of it after a
    weight was changed:

    - On a CPU the weights of all layers are compared with a copy of those that were ranked, which takes a fraction of
      the time of ranking them. A method of the model that uses every layer once costs one ranking.
    - On a GPU the host would have to wait for the comparison, which would take about as long as the ranking. Every
      layer that asks has all layers ranked.
    - Weights that are sharded can only be ranked by all processes together, so that none may find a change by itself.
      A ranking is dropped when a layer asks for its part again. Between the requests of two layers, only changes that
      count a version are seen.

    Attributes:
        in_pass: whether a forward pass of the model is running.
        holds: how many callers ask to keep a ranking that was made, or is made meanwhile.
    """

    def __init__(self) -> None:
        self.layers: Sequence[SelectedWeight] = []
        self.in_pass, self.holds = False, 0
        self._cache: dict[Any, Any] = {}
        self._given: set[tuple[int, int | None]] = set()  # the parts that layers have taken
        self._asked_by = 0  # the layer that took the last of them
        self._values: list[Tensor] = []  # copies of the ranked weights, where these may change without a trace
        self._stamp: Stamp = []  # what the cached rankings were made of,
        self._sharded = False  # and whether any of that was sharded

    @property
    def lasts(self) -> bool:
        """Whether layers may ask for the same ranking several times, though weights may change without a trace."""
        return self.in_pass or self.holds > 0

    def forget(self) -> None:
        """Drop the ranking; it is made again when it is next needed."""
        self._clear()
        self._stamp = []

    def expire(self) -> None:
        """Drop the ranking, since an optimizer has changed weights."""
        self.forget()

    def _clear(self) -> None:
        expired(self)
        self._cache.clear()
        self._given.clear()
        self._values = []

    def mask(self, edges: Any, least: int | None = None) -> Tensor:
        """A layer's part of the ranking: of the budget's number of edges, or of ``least`` if that is more."""
        if torch.compiler.is_compiling():
            return self._mask(edges, least)
        part = (edges.place, least)
        if self._cache and not self.lasts and self._may_be_stale(part):
            self.forget()
        found = self._mask(edges, least)
        self._given.add(part)
        self._asked_by = edges.place
        return found

    def _may_be_stale(self, part: tuple[int, int | None]) -> bool:
        """Whether weights may have changed without a trace since they were ranked, outside of a forward pass."""
        if self._sharded:
            return part in self._given
        weights = self._weights()
        if _comparable(weights):
            return not self._values or not all(map(_equal, weights, self._values))
        return part in self._given or part[0] != self._asked_by

    def _mask(self, edges: Any, least: int | None = None) -> Tensor:
        weights = self._weights()

        def rank() -> list[Tensor] | sharded.Cut:
            k: Tensor = self.layers[0].edges.k  # the same tensor for all, so that a compiler sees equal rankings
            within = [layer.edges.within() for layer in self.layers]
            return rank_together(self._scores(), k if least is None else k.clamp(min=least), within)

        ranking = self._cached(("ranking", least), weights, rank)
        return part_of(ranking, edges.place, weights[edges.place], edges.within(), edges.rank_factor)

    def next_magnitude(self) -> Tensor:
        """What the first edge of all layers that is not real is ranked by, its magnitude or score; 0 if all are."""
        return self._cached("next magnitude", self._weights(), self._find_next_magnitude)

    def _find_next_magnitude(self) -> Tensor:
        weights, within = self._scores(), [layer.edges.within() for layer in self.layers]
        if torch.compiler.is_compiling():  # few operations to trace: one row, which the compiler makes once for all
            row, among = batched.in_a_row(weights, within)
            return functional.next_magnitude(row, functional.choose(row, self.layers[0].edges.k, among), among)
        with sharded.on_shards(any(sharded.is_sharded(weight) for weight in weights)):
            parts = [
                functional.next_magnitude(weight, self._mask(layer.edges), among)
                for layer, weight, among in zip(self.layers, weights, within, strict=True)
            ]
            return torch.stack([sharded.whole(part).double() for part in parts]).amax()

    def _weights(self) -> list[Tensor]:
        return [original_of(layer) for layer in self.layers]

    def _scores(self) -> list[Tensor]:
        """What the edges of each layer are ranked by."""
        return [
            functional.rank_scores(weight, layer.edges.rank_factor)
            for weight, layer in zip(self._weights(), self.layers, strict=True)
        ]

    def _cached(self, what: Any, weights: Sequence[Tensor], find: Callable[[], Any]) -> Any:
        """What follows from the weights of all layers: found once, and kept until one of them changes."""
        if torch.compiler.is_compiling() or any(in_transform(w) or w.is_inference() for w in weights):
            return find()
        others = (one for layer in self.layers for one in (layer.edges.left, layer.edges.rank_factor))
        left = [one for one in others if one is not None]
        shards = any(sharded.is_sharded(weight) for weight in weights)
        stamp = _stamp((self.layers[0].edges.k, *weights, *left), shards)
        if shards != self._sharded or not _same(self._stamp, stamp, shards):
            self._clear()
            self._stamp, self._sharded = stamp, shards
        found = self._cache.get(what)  # another thread may clear it at any time
        if found is None:
            if not (self.lasts or self._values or shards) and _comparable(weights):
                self._values = [weight.detach().clone() for weight in weights]
            found = self._cache[what] = find()
            expires_after_step(self)
        return found


def rank_together(
    scores: Sequence[Tensor], k: int | Tensor, within: Sequence[Tensor | None]
) -> list[Tensor] | sharded.Cut:
    """Rank the edges of several weights together: the mask of each, or where the ranking is cut if any is sharded."""
    if any(sharded.is_sharded(s) for s in scores):
        return sharded.Cut.find(scores, torch.as_tensor(k), within)
    row, allowed = batched.in_a_row(scores, within)
    parts = functional.choose(row, k, allowed).split([s.numel() for s in scores])
    return [part.view(s.shape) for part, s in zip(parts, scores, strict=True)]


def part_of(
    ranking: list[Tensor] | sharded.Cut,
    place: int,
    weight: Tensor,
    within: Tensor | None,
    factor: Tensor | None = None,
) -> Tensor:
    """The mask of one weight from a ranking of several, in which it was multiplied by ``factor``, if given."""
    if isinstance(ranking, list):
        return ranking[place]
    return ranking.mask(place, functional.rank_scores(weight.detach(), factor), within)


def _comparable(weights: Sequence[Tensor]) -> bool:
    """Whether the host can compare weights without waiting for anything."""
    return all(weight.device.type == "cpu" and is_plain(weight) for weight in weights)


def _equal(weight: Tensor, other: Tensor) -> bool:
    return weight.dtype == other.dtype and torch.equal(weight, other)


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
