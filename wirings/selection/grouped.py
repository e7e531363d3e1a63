"""The selection of layers whose edges have a structure: it ranks groups and marks their edges.

A layer's group scores are one small tensor, ranked by the same functions as weights are. Everything is made of
PyTorch's operators, layer by layer; what a rule remembers as masks is still applied to all layers at once on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from wirings.selection import functional, sharded
from wirings.selection.gradient import GradientReach, pass_through
from wirings.selection.kept_edges import KeptEdges
from wirings.selection.passes import more_edges
from wirings.selection.ranked_groups import RankedGroups
from wirings.selection.selectable_edges import SelectableEdges
from wirings.selection.service import KeptPart, Selection
from wirings.selection.shared import SelectedWeight, SharedRanking, rank_together
from wirings.selection.weight_groups import WeightGroups


class GroupedRanking(SharedRanking):
    """The ranking of the blocks of all layers that share one budget."""

    def _mask(self, edges: Any, least: int | None = None) -> Tensor:
        def rank() -> list[Tensor]:
            k: Tensor = self.layers[0].edges.k
            return self._rank(k if least is None else k.clamp(min=least))

        chosen = self._cached(("ranking", least), self._weights(), rank)[edges.place]
        return edges.groups.spread(chosen, edges.allowed)

    def _find_next_magnitude(self) -> Tensor:
        scores, among = self._scores(), self._among()
        chosen = self._rank(self.layers[0].edges.k)
        parts = [functional.next_magnitude(s, c, a) for s, c, a in zip(scores, chosen, among, strict=True)]
        return torch.stack([part.double() for part in parts]).amax()

    def _rank(self, k: Tensor) -> list[Tensor]:
        return rank_together(self._scores(), k, self._among())  # type: ignore[return-value]

    def _scores(self) -> list[Tensor]:
        return [
            functional.rank_scores(block_scores(layer.edges, weight), layer.edges.rank_factor)
            for layer, weight in zip(self.layers, self._weights(), strict=True)
        ]

    def _among(self) -> list[Tensor | None]:
        return [layer.edges.groups.among(layer.edges.within()) for layer in self.layers]


class GroupedSelection(Selection):
    """A `Selection` of whole groups: the edges of every layer have ``groups``. Budgets count their units."""

    def __init__(self, shared: bool = False, kept: KeptEdges | None = None) -> None:
        # Without a mask, the kernels for all layers at once would rank single edges.
        super().__init__(shared, kept if kept is not None and kept.mask is not None else None)
        self._ranking = GroupedRanking()
        self.gradient_every = 1
        """Optimizer steps from one gradient of hallucinated edges to the next."""
        self.gradient_to_all = True
        """Whether the gradient of this step reaches hallucinated edges, if the rule lets it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupedSelection:
        replica = super().__deepcopy__(memo)
        assert isinstance(replica, GroupedSelection)
        replica.gradient_every, replica.gradient_to_all = self.gradient_every, self.gradient_to_all
        return replica

    def keep(self, edges: Any, weight: Tensor, kept: KeptEdges) -> Tensor:
        if self.gradient_to_all or not reaches_hallucinated(kept):
            return super().keep(edges, weight, kept)
        return self.keep_ranked(edges, weight, kept)[0]

    def keep_ranked(self, edges: Any, weight: Tensor, kept: KeptEdges) -> tuple[Tensor, Tensor, Tensor | None]:
        """`keep` for edges that are ranked; also a mask of the real ones, and of the superset if that is ranked too."""
        real = self._choose_kept(edges, weight.detach(), kept)
        used, mask, _ = self._made_of(edges, weight.detach(), kept, real)
        reach = kept.gradient(edges, mask)
        if not self.gradient_to_all and reaches_hallucinated(kept):
            reach = GradientReach(real)
        return pass_through(weight, used, reach), real, mask if kept.more is not None else None

    def choose(self, edges: Any, weight: Tensor) -> Tensor:
        if self.shared:
            return _like(self._ranking.mask(edges), weight)
        return self.choose_among(edges, weight, edges.k, edges.within())

    def choose_all(self) -> list[Tensor]:
        return [self.choose(layer.edges, layer.weight.detach()) for layer in self.layers]

    def choose_more(self, edges: Any, weight: Tensor, density: float) -> Tensor:
        if self.shared:
            least = more_edges([layer.edges.possible for layer in self.layers], density, True)[0]
            return _like(self._ranking.mask(edges, least), weight)
        least = more_edges([edges.possible], density, False)[0]
        groups: WeightGroups = edges.groups
        args = sharded.whole(weight.detach()), edges.k, least, edges.within(), edges.allowed
        return _like(groups.choose_more(*args), weight)

    def choose_among(self, edges: Any, scores: Tensor, count: int | Tensor, within: Tensor | None) -> Tensor:
        within = None if within is None else sharded.whole(within)
        return _like(edges.groups.choose(sharded.whole(scores.detach()), count, within, edges.allowed), scores)

    def next_magnitude(self, edges: Any, weight: Tensor, real: Tensor) -> Tensor:
        score = None
        if self.shared:
            found, factor = self._ranking.next_magnitude(), edges.rank_factor
            score = found if factor is None else found / factor
        args = sharded.whole(weight.detach()), sharded.whole(real), edges.within(), edges.allowed
        return _like(edges.groups.next_magnitude(*args, score), weight)

    def count(self, edges: Any, mask: Tensor) -> Tensor:
        groups: WeightGroups = edges.groups
        return groups.count(sharded.whole(mask))

    def draw(self, edges: Any, shape: Sequence[int], generator: torch.Generator | None) -> Tensor:
        groups: WeightGroups = edges.groups
        return groups.draw(generator)

    def exchange(
        self,
        edges: Any,
        weight: Tensor,
        wiring: Tensor,
        others: Tensor,
        rate: float,
        growth: Callable[[], Tensor | None],
    ) -> tuple[Tensor, Tensor]:
        def whole_growth() -> Tensor | None:
            scores = growth()
            return None if scores is None else sharded.whole(scores)

        args = (sharded.whole(one) for one in (weight.detach(), wiring, others))
        return edges.groups.exchange(*args, edges.k, rate, whole_growth, edges.allowed)

    def _choose_together(
        self,
        layers: Sequence[SelectedWeight],
        scores: Sequence[Tensor],
        count: int | Tensor,
        within: Sequence[Tensor | None],
        magnitudes: bool,
    ) -> list[Tensor]:
        edges = [layer.edges for layer in layers]
        of_blocks = [block_scores(one, score) for one, score in zip(edges, scores, strict=True)]
        if magnitudes:
            pairs = zip(of_blocks, edges, strict=True)
            of_blocks = [functional.rank_scores(score, one.rank_factor) for score, one in pairs]
        among = [one.groups.among(mask) for one, mask in zip(edges, within, strict=True)]
        chosen = rank_together(of_blocks, count, among)
        masks = [one.groups.spread(real, one.allowed) for one, real in zip(edges, chosen, strict=True)]  # type: ignore[arg-type]
        return [_like(mask, score) for mask, score in zip(masks, scores, strict=True)]

    def kept_weights(self, layers: Sequence[SelectedWeight], density: float | None = None) -> list[Tensor]:
        kept = []
        for layer in layers:
            edges, weight = layer.edges, layer.weight.detach()
            real = self.choose(edges, weight) if density is None else self.choose_more(edges, weight, density)
            kept.append(torch.where(real, weight, 0.0))
        return kept

    def _alone(self, edges: SelectableEdges, weight: Tensor, kept: KeptEdges) -> KeptPart:
        if kept.mask is not None:
            return super()._alone(edges, weight, kept)
        return self._ranked(edges, weight.detach(), kept)


def reaches_hallucinated(kept: KeptEdges) -> bool:
    """Whether the gradient reaches all hallucinated edges, of those that are ranked in every step."""
    return kept.mask is None and kept.reach is None and kept.factor != 0.0 and kept.learned is None


def block_scores(edges: Any, values: Tensor) -> Tensor:
    """What the blocks of a weight are ranked by; the weight may be sharded."""
    groups: RankedGroups = edges.groups
    return groups.scores(sharded.whole(values.detach()), edges.allowed)


def _like(mask: Tensor, weight: Tensor) -> Tensor:
    """A tensor of edges with the layout of a weight: its memory format, and its shards if it has some."""
    if sharded.is_sharded(weight):
        return sharded.rows_like(mask, weight)
    return mask if weight.is_contiguous() else torch.empty_like(weight, dtype=mask.dtype).copy_(mask)
