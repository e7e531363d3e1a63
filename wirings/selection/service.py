"""One object that chooses the edges of all layers wired by one call of `wirings.wire_`.

`Selection` is the only place that knows how layers are chosen together, and the only cache of such choices. It is
asked, through the edges of a layer, for

- `keep`: the weights of the forward pass, as `KeptEdges` describes them, with their gradient;
- `choose`: the mask of a layer's real edges, and `choose_all`: those of all layers;
- `choose_more`: the mask of a larger superset, up to a given density;
- `next_magnitude`: the magnitude of the strongest edge that is not real;
- `choose_by`: masks by other scores than the weights, or with other numbers of edges; `choose_among` of one layer;
- `exchange`: a wiring in which some edges are replaced by others; `count`, `draw`: what depends on groups of edges;
- `kept_weights`: the real weights of several layers, without a gradient.

**In a forward pass of the model on a GPU**, which begins and ends with the model's hooks, the first layer that asks for
its weights has those of all layers made: a few kernels, whether of one layer or of a hundred, and whether layers have
budgets of their own or share one. The other layers take their parts. So does a pass that is recomputed in the backward
pass (activation checkpointing), where the first layer that is recomputed asks for all. Requests elsewhere are served
one by one.

**Layers that share one budget** (``share="global"`` or ``"scaled"``) are ranked together. Outside of a forward pass on
a GPU the ranking is made once and kept until a weight changes, so that a step costs one ranking however many layers
ask. For weights that are sharded over processes, the position at which the ranking is cut off is kept instead.

A cached result is used only while its tensors are the same: the same objects, at the same version and address. Not
every write counts a version (``weight.data``, fused optimizers). So everything is dropped at the beginning of every
forward pass of the model, after every step of an optimizer (`wirings.selection.expiry`) and by the handle. What was
made for a pass is dropped at its end. Outside of a pass, a shared ranking is made again where a layer asks after such a
write to the weights of any layer (see `SharedRanking` for what that costs).
Nothing is cached under `torch.compile`, where the compiler merges equal rankings by itself, under `torch.func`, or for
inference tensors, which have no version.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from wirings.selection import batched, functional, passes, sharded
from wirings.selection.gradient import pass_through
from wirings.selection.kept_edges import KeptEdges
from wirings.selection.passes import ForwardPass, ReadyWeight, more_edges
from wirings.selection.selectable_edges import SelectableEdges
from wirings.selection.shared import SelectedWeight, SharedRanking, original_of, part_of, rank_together
from wirings.utils.layers import parametrizations_of
from wirings.utils.transforms import is_plain

KeptPart = tuple[Tensor, Tensor | None, Tensor | None]
"""The weights of the forward pass of one layer, the mask that its gradient depends on, and the learned threshold."""


class Selection:
    """Chooses the edges of the layers that one call of `wirings.wire_` wired. Also the model's forward pre-hook.

    Args:
        shared: whether all layers share one budget and are ranked together.
        kept: what the forward pass of these layers takes of the ranking, if their rule ranks magnitudes.
    """

    def __init__(self, shared: bool = False, kept: KeptEdges | None = None) -> None:
        self.shared, self.kept = shared, kept
        self.layers: Sequence[SelectedWeight] = []
        self._pass = ForwardPass(shared, kept)
        self._ranking = SharedRanking()
        # A compiler may run the hook outside of the graph it makes of the model, so what is chosen passes through an
        # attribute, which is empty again when the pass ends: a submodule that is compiled by itself would take what is
        # left in it, though weights may have changed. A model that leaves something is not given anything anymore.
        self._traced: list[KeptPart | None] = []
        self._left_over = False

    # ---- members and lifetime ---------------------------------------------------------------------------------

    def set_layers(self, layers: Sequence[SelectedWeight]) -> None:
        """Set the layers whose edges are chosen, and the position of each."""
        self.layers = self._ranking.layers = layers
        self._pass.end()
        self._pass = ForwardPass(self.shared, self.kept)
        self._traced = [None] * len(layers)
        for place, layer in enumerate(layers):
            layer.edges.place = place
        self.forget()

    def drop(self, gone: Collection[Any]) -> None:
        """Remove the layers of these edges, which are no longer wired."""
        self.set_layers([layer for layer in self.layers if layer.edges not in gone])

    def forget(self) -> None:
        """Drop everything cached; edges are chosen again when they are next requested."""
        self._ranking.forget()
        self._pass.end()

    def __call__(self, model: nn.Module, args: Any) -> None:
        """Note that a forward pass of the model begins."""
        if torch.compiler.is_compiling():
            self._traced = self._keep_all_traced()
            return
        if not self.layers:  # a copy, which has layers of its own
            self.set_layers(_members(model, self))
        self.forget()
        self._pass.running = self._ranking.in_pass = True

    def end(self, model: nn.Module, args: Any, output: Any) -> None:
        """Note that a forward pass of the model has ended."""
        if any(part is not None for part in self._traced):
            self._left_over, self._traced = True, [None] * len(self._traced)
        if not torch.compiler.is_compiling():
            self._pass.end()
            self._ranking.in_pass = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep a ranking that was made, or is made meanwhile: for callers who know which writes no version counts."""
        self._ranking.holds += 1
        try:
            yield
        finally:
            self._ranking.holds -= 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Selection:
        memo[id(self)] = replica = type(self)(self.shared, self.kept)
        if self.shared:  # a layer's edges depend on all other layers
            replica.layers = replica._ranking.layers = copy.deepcopy(self.layers, memo)
        return replica  # otherwise it finds its layers when the copied model is first used

    # ---- what rules ask for -----------------------------------------------------------------------------------

    def choose(self, edges: SelectableEdges, weight: Tensor) -> Tensor:
        """The mask of the budget's number of edges of largest magnitude, in this weight or over all layers."""
        if self.shared:
            return self._ranking.mask(edges)
        return functional.choose(weight, edges.k, edges.within())

    def choose_all(self) -> list[Tensor]:
        """The masks of the edges that all layers keep: on a GPU in a few kernels for all of them."""
        edges, weights = [layer.edges for layer in self.layers], [layer.weight for layer in self.layers]
        at_once = weights[0].device.type in passes.DEVICES and all(_alike(weight, weights[0]) for weight in weights)
        if not at_once or sharded.is_sharded(weights[0]):
            return [self._choose_kept(e, w.detach(), self.kept) for e, w in zip(edges, weights, strict=True)]
        number = "k" if self.kept is None else self.kept.number(self.shared)
        ks, within = zip(*[passes.budget_of(one, number) for one in edges], strict=True)
        together = self._together(self.kept)
        factors = passes.factors_of(edges, together)
        return batched.kept_of(weights, ks, within, power=None, shared=together, masked=True, factors=factors)[1]

    def choose_more(self, edges: SelectableEdges, weight: Tensor, density: float) -> Tensor:
        """The mask of the strongest edges up to a larger ``density``, or of the budget's number if that is more."""
        if self.shared:
            possible = [layer.edges.possible for layer in self.layers]
            return self._ranking.mask(edges, more_edges(possible, density, True)[0])
        least = more_edges([edges.possible], density, False)[0]
        return functional.choose(weight, edges.k.clamp(min=least), edges.within())

    def next_magnitude(self, edges: SelectableEdges, weight: Tensor, real: Tensor) -> Tensor:
        """The magnitude of the strongest edge that is not real, 0 if all are: of this weight, or over all layers.

        If layers are ranked by scaled magnitudes, it is the magnitude that an edge of this weight ranks equally with.
        """
        if self.shared:
            found, factor = self._ranking.next_magnitude(), edges.rank_factor
            return found if factor is None else found / factor
        return functional.next_magnitude(weight, real, edges.within())

    def ready(self, edges: Any, weight: Tensor, dtype: torch.dtype | None) -> Tensor | None:
        """The weight of a layer for the forward pass that is running; None if the rule has to be asked.

        Args:
            edges: the edges of the layer.
            weight: its weights.
            dtype: a lower precision in which the forward pass is going to use the weights, if any.
        """
        if torch._C._len_torch_dispatch_stack():  # a mode has to see how weights are made
            return None
        current, ready = self._pass, edges.__dict__["ready"]
        made: ReadyWeight | None = ready.get(dtype)  # another thread may end the pass at any time
        if made is None or not current.lasts():
            if not current.serves(weight) or (self.kept.in_training and not edges.training):  # type: ignore[union-attr]
                return None
            current.prepare(self.layers, weight, dtype)
            made = ready.get(dtype)
            if made is None:
                return None
        if made.fits(weight, edges.training):
            return made.used
        if self.shared:  # so the ranking of all layers is out of date
            current.end()
        return None

    def keep(self, edges: SelectableEdges, weight: Tensor, kept: KeptEdges) -> Tensor:
        """The weights of the forward pass, zeros where edges are not real, with their gradient.

        Args:
            edges: the edges of the layer.
            weight: its weights.
            kept: what to keep, the same for all layers.
        """
        compiling = torch.compiler.is_compiling()
        part = self._take_traced(edges, weight) if compiling and kept is self.kept else None
        used, mask, threshold = self._alone(edges, weight, kept) if part is None else part
        if threshold is None:
            return pass_through(weight, used, kept.gradient(edges, mask))
        assert mask is not None
        learned, (pull,) = kept.learning([edges])
        change = (pull.clone() * learned).sum()  # the rule may change it before the backward pass
        return functional.pass_shrunk(weight, used, mask, threshold, change)

    def _alone(self, edges: SelectableEdges, weight: Tensor, kept: KeptEdges) -> KeptPart:
        """The weights of the forward pass of one layer, and what its gradient depends on: a mask, a threshold."""
        weight, hard = weight.detach(), kept.power == math.inf
        if kept.mask is not None:
            return torch.where(getattr(edges, kept.mask), weight, 0.0), None, None
        by_itself = not kept.masked and not self.shared and not sharded.is_sharded(weight)
        if by_itself and (hard or is_plain(weight)):
            return batched.kept_edges(weight, edges.k, edges.within(), kept.power), None, None
        return self._ranked(edges, weight, kept)

    def _ranked(self, edges: SelectableEdges, weight: Tensor, kept: KeptEdges) -> KeptPart:
        """What `_alone` returns for edges that are ranked, and not in one kernel."""
        return self._made_of(edges, weight, kept, self._choose_kept(edges, weight, kept))

    def _made_of(self, edges: SelectableEdges, weight: Tensor, kept: KeptEdges, real: Tensor) -> KeptPart:
        """What `_alone` returns, given the edges that are kept."""
        if kept.learned is not None:
            threshold = functional.next_magnitude(weight, real, edges.within())
            return functional.shrunk_edges(weight, real, threshold, kept.power), real, threshold
        if kept.power == math.inf:
            used = torch.where(real, weight, 0.0)
        else:
            used = functional.shrunk_edges(weight, real, self.next_magnitude(edges, weight, real), kept.power)
        if kept.more is not None:
            return used, self.choose_more(edges, weight, kept.more), None
        return used, real if kept.masked else None, None

    def _together(self, kept: KeptEdges | None) -> bool:
        """Whether all layers are ranked together for what they keep."""
        return self.shared if kept is None else kept.together(self.shared)

    def _numbers(self, edges: Sequence[Any]) -> list[Tensor]:
        """How many edges each of several layers keeps; all of them together if they are ranked together."""
        number = "k" if self.kept is None else self.kept.number(self.shared)
        return [getattr(one, number) for one in edges]

    def _choose_kept(self, edges: SelectableEdges, weight: Tensor, kept: KeptEdges | None) -> Tensor:
        """The mask of the edges that a layer keeps, by a number of its own if it has one."""
        if kept is None or kept.together(self.shared) is self.shared:
            return self.choose(edges, weight)
        return functional.choose(weight, getattr(edges, kept.number(self.shared)), edges.within())

    def choose_among(
        self, edges: SelectableEdges, scores: Tensor, count: int | Tensor, within: Tensor | None
    ) -> Tensor:
        """The mask of the ``count`` edges of one weight, among those ``within``, whose scores are largest."""
        return functional.choose(scores, count, within)

    def count(self, edges: SelectableEdges, mask: Tensor) -> Tensor:
        """The number of edges in a mask, in the unit of budgets: with a structure, of groups."""
        return torch.count_nonzero(mask)

    def draw(self, edges: SelectableEdges, shape: Sequence[int], generator: torch.Generator | None) -> Tensor:
        """Uniform random numbers in float32 on the CPU, one for each edge, or for all edges that are real together."""
        return torch.rand(shape, generator=generator)

    def exchange(
        self,
        edges: SelectableEdges,
        weight: Tensor,
        wiring: Tensor,
        others: Tensor,
        rate: float,
        growth: Callable[[], Tensor | None],
    ) -> tuple[Tensor, Tensor]:
        """Remove the weakest edges of one wiring, and let as many others grow.

        Args:
            edges: the edges of the layer.
            weight: what the edges to be removed are ranked by.
            wiring: the wiring.
            others: the edges that may grow.
            rate: the fraction of the real edges to exchange, rounded down.
            growth: returns the scores of the others, of which the largest magnitudes grow, or None to change nothing.

        Returns:
            The edges that stay, and the new wiring.
        """
        count = int(torch.count_nonzero(wiring))
        lost = min(int(rate * count + 1e-6), int(torch.count_nonzero(others)))
        scores = growth() if lost else None
        if scores is None:
            return wiring, wiring
        kept = functional.choose(weight, count - lost, wiring)
        return kept, kept | functional.choose(scores, lost, others)

    def choose_by(
        self,
        layers: Sequence[SelectedWeight],
        scores: Sequence[Tensor],
        counts: Sequence[int | Tensor] | None = None,
        within: Sequence[Tensor | None] | None = None,
        magnitudes: bool = False,
    ) -> list[Tensor]:
        """Masks of the edges whose ``scores`` have the largest magnitude, one for each layer.

        Args:
            layers: layers of this selection; all of them if they share a budget.
            scores: a tensor of the weight's shape for each layer.
            counts: how many edges to choose in each layer; with a shared budget the same number in each entry, for
                all layers together. By default the budget.
            within: the edges to choose among. By default the allowed ones that the rule has left.
            magnitudes: whether the scores are those of weights, which ``share="scaled"`` divides by layers' scales.
        """
        counts = [layer.edges.k for layer in layers] if counts is None else counts
        within = [layer.edges.within() for layer in layers] if within is None else within
        if not self.shared:
            parts = zip(layers, scores, counts, within, strict=True)
            return [self.choose_among(layer.edges, s, k, among) for layer, s, k, among in parts]
        return self._choose_together(layers, scores, counts[0], within, magnitudes)

    def _choose_together(
        self,
        layers: Sequence[SelectedWeight],
        scores: Sequence[Tensor],
        count: int | Tensor,
        within: Sequence[Tensor | None],
        magnitudes: bool,
    ) -> list[Tensor]:
        """`choose_by` for layers that share a budget: ``count`` edges of all of them."""
        if magnitudes:
            pairs = zip(scores, layers, strict=True)
            scores = [functional.rank_scores(score, layer.edges.rank_factor) for score, layer in pairs]
        ranking = rank_together(scores, count, within)
        return [part_of(ranking, i, s, among) for i, (s, among) in enumerate(zip(scores, within, strict=True))]

    def kept_weights(self, layers: Sequence[SelectedWeight], density: float | None = None) -> list[Tensor]:
        """The real weights of several layers, zeros elsewhere, without a gradient.

        Args:
            layers: layers of this selection.
            density: where given, the strongest edges up to this density are kept (see `choose_more`).
        """
        weights, all_edges = [layer.weight.detach() for layer in layers], [layer.edges for layer in layers]
        alike = len({(w.device, w.dtype) for w in weights}) == 1
        if not alike or any(sharded.is_sharded(w) for w in weights):
            return [
                torch.where(self.choose(e, w) if density is None else self.choose_more(e, w, density), w, 0.0)
                for e, w in zip(all_edges, weights, strict=True)
            ]
        if self.shared and len(layers) < len(self.layers):
            kept = self.kept_weights(self.layers, density)
            return [kept[edges.place] for edges in all_edges]
        ks = [e.k for e in all_edges]
        if density is not None:
            least = more_edges([e.possible for e in all_edges], density, self.shared)
            ks = [k.clamp(min=n) for k, n in zip(ks, least * len(ks), strict=False)]
        factors = passes.factors_of(all_edges, self.shared)
        return batched.kept_of(weights, ks, [e.within() for e in all_edges], shared=self.shared, factors=factors)[0]

    # ---- all layers at once, under a compiler -----------------------------------------------------------------

    def _take_traced(self, edges: SelectableEdges, weight: Tensor) -> KeptPart | None:
        """A layer's part of what was made for all layers; None if it has to choose by itself."""
        place = edges.place
        if place >= len(self._traced):
            return None
        layer = self.layers[place]
        if layer.edges is not edges or original_of(layer) is not weight:
            return None
        part, self._traced[place] = self._traced[place], None
        return part

    def _keep_all_traced(self) -> list[KeptPart | None]:
        """What `keep` takes, for all layers; None for each if making them at once is impossible or does not pay."""
        weights = [original_of(layer) for layer in self.layers]
        ranks = self.kept is not None and self.kept.mask is None and not self._left_over
        pays = ranks and len(weights) > 1 and weights[0].device.type in passes.DEVICES
        if not pays or not all(_alike(weight, weights[0]) for weight in weights):
            return [None] * len(weights)
        edges = [layer.edges for layer in self.layers]
        ks, within, together = self._numbers(edges), [e.within() for e in edges], self._together(self.kept)
        made, masks, thresholds = passes.kept_of(self.kept, together, edges, weights, ks, within)  # type: ignore[arg-type]
        each = [None] * len(made) if thresholds is None else thresholds.unbind()
        return [(used, masks[i] if masks else None, each[i]) for i, used in enumerate(made)]


def _members(model: nn.Module, selection: Selection) -> list[SelectedWeight]:
    """The weights of a model whose edges belong to a selection, tied ones once."""
    found: dict[Any, SelectedWeight] = {}
    for module in model.modules():
        for attribute, holder in parametrizations_of(module).items():
            if getattr(holder[0], "selection", None) is selection:
                found[holder[0]] = SelectedWeight(attribute, module, attribute, holder[0])
    return list(found.values())


def _alike(weight: Tensor, other: Tensor) -> bool:
    """Whether the edges of a weight can be chosen together with those of ``other``, which is not sharded."""
    return not sharded.is_sharded(weight) and weight.device == other.device and weight.dtype == other.dtype
