"""The contract of a rule: how a wiring is chosen, and how it changes. See `Rule`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from wirings.selection.kept_edges import KeptEdges
from wirings.selection.service import Selection

RANKED_EVERY, RANKINGS = 100, 200
"""If a budget of multiply-adds is shared out globally: the fewest optimizer steps from one ranking of all layers to the
next, and about how often they are ranked in a longer training.

In between every layer keeps its number. See `Rule.takes_ranking`.
"""


class EdgesLike(Protocol):
    """The edges of one weight, as a rule sees them. `wirings.wire.edges.Edges` implements it.

    What the rule remembers (`remember`) is an attribute: ``edges.remember("score", …)`` makes ``edges.score``.
    """

    k: Tensor
    """The number of real edges: a scalar tensor; with a shared budget, that of all layers together. With a structure,
    everything that counts edges counts groups instead (`count`); for N:M, the edges of every group."""
    allowed: Tensor | None
    """A boolean mask of the edges that may exist, or None for all."""
    left: Tensor | None
    """The allowed edges that are left, for rules that remove edges permanently and remember ``left``."""
    possible: int
    """The number of allowed edges."""
    start: Tensor | None
    """While `Rule.setup` runs: a mask of the edges to start from (``wire_(…, start="weights")``), or None for any. A
    smaller budget is met within it, a larger one by adding edges."""
    rank_factor: Tensor | None
    """With ``share="scaled"``, one over the layer's first scale: magnitudes times this are compared between layers."""
    training: bool
    place: int
    """The position of the layer among those of its selection."""
    selection: Selection

    @property
    def inputs(self) -> int:
        """The dimension of the weight along which the inputs of a node lie."""

    @property
    def shared(self) -> bool:
        """Whether all layers share one budget (``share="global"`` or ``"scaled"``)."""

    def peers(self) -> Sequence[EdgesLike]:
        """The edges of all layers that share the budget with these, in order; only these with a budget of their own."""

    def density(self) -> Tensor:
        """The fraction of the allowed edges that is real, of all that share the budget."""

    def within(self) -> Tensor | None:
        """The edges that may be chosen: the allowed ones, or ``left``; None for all."""

    def choose(self, weight: Tensor) -> Tensor:
        """A mask of the budget's number of edges of largest magnitude."""

    def choose_more(self, weight: Tensor, density: float) -> Tensor:
        """A mask of the strongest edges up to a larger density."""

    def choose_among(self, scores: Tensor, count: int | Tensor, within: Tensor | None) -> Tensor:
        """A mask of the ``count`` edges of this weight, among those ``within``, whose scores are largest."""

    def count(self, mask: Tensor) -> Tensor:
        """The number of edges in a mask, as budgets count them: with a structure, that of groups."""

    def draw(self, shape: torch.Size, generator: torch.Generator | None = None) -> Tensor:
        """Uniform random numbers for all edges, on the CPU; with a structure, equal ones for edges of a group."""

    def exchange(
        self, weight: Tensor, wiring: Tensor, others: Tensor, rate: float, growth: Callable[[], Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """Remove the weakest of a ``wiring``, a fraction, and let ``others`` grow: those that stay, the new wiring."""

    def next_magnitude(self, weight: Tensor, real: Tensor) -> Tensor:
        """The magnitude of the strongest edge that is not real; 0 if all are.

        With a structure, one for every edge: the magnitude at which its group would rank equally with the strongest
        group that is not real.
        """

    def keep(self, weight: Tensor, kept: KeptEdges = ...) -> Tensor:
        """The chosen edges, zeros elsewhere; by default the gradient is passed straight through to all allowed edges.

        What is kept must be the same for all layers, whose edges are chosen at once.
        """

    def remember(self, name: str, value: Tensor, saved: bool = True) -> None:
        """Keep a tensor with the model: saved, loaded and moved with it."""

    def __getattr__(self, name: str) -> Any: ...


class LayerLike(Protocol):
    """One wired weight, as a rule sees it. `wirings.wire.layer.Layer` implements it."""

    @property
    def name(self) -> str:
        """The name of the weight in the model, such as ``"conv1.weight"``."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def edges(self) -> Any:
        """The edges of the weight, an `EdgesLike`."""

    @property
    def weight(self) -> nn.Parameter:
        """The parameter with all weights, hallucinated ones included; the one that the optimizer trains."""

    def receivers(self) -> Tensor:
        """The node that each edge leads to: int32 numbers of a shape that broadcasts to the weight's."""


@dataclass(frozen=True)
class Training:
    """The state of training after an optimizer step, as passed to `Rule.update`."""

    step: int
    """The number of optimizer steps that were made, at least 1."""
    steps: int | None = None
    """The planned number of optimizer steps (`Wiring.plan`), or None if it is unknown."""
    budget_changed: bool = False
    """Whether a schedule has changed the layers' budgets (``edges.k``) since the last update."""
    steps_before: int | None = None
    """The planned number of steps at the last update, for rules with a schedule: a plan may change half-way."""


class Rule(ABC):
    """How a wiring is chosen, and how it changes.

    A rule sees the weights of layers, their edges (`EdgesLike`), the state of training (`Training`) and the optimizer,
    but never the model. Its callers (`wirings.wire_`, the handle, `wirings.finalize_`, the graphs) rely only on this
    contract:

    - `Rule.setup` is called once, when all layers are wired: the rule chooses and remembers what it needs. What it
      remembers goes into buffers of the edges, and so into checkpoints.
    - `Rule.forward` gives the weight of the forward pass and, through autograd, decides where the gradient goes. It
      may look at ``edges.training`` (targeted dropout), use more than k edges in training (annealing), or shrink
      weights (soft thresholds).
    - `Rule.real` gives the wiring: a mask of exactly k edges, those that remain in evaluation and when the model is
      finalized.
    - `Rule.update` is called after every optimizer step, and is a rule's only source of information: the
      number of the step, the planned length of training, and whether a schedule has just changed the budgets. What
      it does is a function of these and of what was remembered, so that a resumed run continues in the same way.

    Everything else is declared by attributes.
    """

    name: ClassVar[str]
    own_budget: ClassVar[bool] = False
    """Whether the rule fixes the number of edges itself, by `budget`, and takes none from the caller."""
    moves_budget: bool = False
    """Whether the rule moves edges between layers, by writing ``edges.k``; then only their sum is the budget's."""
    free_only: bool = False
    """Whether the rule chooses single edges in a way of its own, so that `wirings.wire_` accepts no ``structure``."""
    removes_permanently: ClassVar[bool] = False
    """Whether removed edges never come back, so that a schedule must not rise."""
    reaches: ClassVar[str] = "real"
    """Whose gradient training needs: ``"real"`` edges, ``"some"`` others too (or in some steps), or ``"all"`` edges."""
    acts_between_steps: ClassVar[bool] = True
    """Whether `update` may do something after any step. Otherwise it is called only when the budget has changed."""
    keeps_wiring: ClassVar[bool] = False
    """Whether the rule remembers its wiring. Then a global budget of multiply-adds is shared out over layers once,
    unless it defines `takes_ranking`; otherwise the layers' numbers of edges follow the weights."""
    chooses_when_ranked: ClassVar[bool] = False
    """For a rule that keeps its wiring: whether it chooses one only after steps for which `takes_ranking` is true."""
    keeps_zeros: ClassVar[bool] = False
    """Whether the wiring that `setup` remembers, as ``edges.wiring``, is final, so that a state with other edges is
    rejected when it is loaded."""
    starts_with_all: ClassVar[bool] = False
    """Whether the first step of training uses all allowed edges, whatever the budget."""
    needs_trained_weights: ClassVar[bool] = False
    """Whether the wiring is chosen from the weights that `setup` sees, which must then be those of a trained network.
    A training run with such a rule has to start from a finished run."""
    atomic: ClassVar[bool] = False
    """Whether `update` changes nothing before everything in it that can fail has succeeded. For other rules the handle
    keeps a copy of every tensor that an update changes, to restore it after an error. A subclass with its own `update`
    has to define it again; rules without an `update` need not."""
    kept: KeptEdges | None = None
    """What the forward pass takes of the edges, for rules that can say so. Then the weights of all layers are made at
    once, and `forward` is not called. A subclass with its own `forward`, `real` or `used` has to define ``kept``
    again."""
    schedule: Any = None
    """How layers decrease to their budgets over training, for any rule: see `wirings.rules.get`."""

    _follows_kept: ClassVar[bool] = True
    updates_at_once: ClassVar[bool] = True
    """Whether an `update` that fails leaves nothing behind: it is ``atomic``, or there is none. Not to be set."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        first = next(one for one in cls.__mro__ if vars(one).keys() & {"kept", "forward", "real", "used"})
        cls._follows_kept = "kept" in vars(first)
        first = next(one for one in cls.__mro__ if vars(one).keys() & {"atomic", "update"})
        cls.updates_at_once = first is Rule or ("atomic" in vars(first) and cls.atomic)

    @property
    def kept_at_once(self) -> KeptEdges | None:
        """What all layers keep, if their weights can be made at once; None if `forward` has to be asked for each."""
        return self.kept if self._follows_kept else None

    @property
    def follows_ranking(self) -> bool:
        """Whether the wiring never uses other nodes than those that were in use when all layers were last ranked.

        Then a bound on multiply-adds can count nodes in use. It holds for rules that rank magnitudes, if nodes that
        were not in use are closed, and for those that choose a wiring only when layers are ranked.
        """
        kept = self.kept_at_once
        ranks = kept is not None and kept.mask is None and kept.more is None and kept.own is None
        return self.chooses_when_ranked or (ranks and not self.keeps_wiring)

    def budget(self, allowed: int, shape: tuple[int, ...]) -> int:
        """The number of edges of a weight, for rules with ``own_budget``.

        Args:
            allowed: the number of allowed edges.
            shape: the shape of the weight.
        """
        raise NotImplementedError

    def setup(self, layers: Sequence[LayerLike]) -> None:  # noqa: B027 - most rules have nothing to prepare
        """Choose and remember what the rule needs. Called once, after all layers were wired."""

    def update(  # noqa: B027 - pure functions of the weights have nothing to do
        self, layers: Sequence[LayerLike], training: Training, optimizer: torch.optim.Optimizer | None
    ) -> None:
        """Act after an optimizer step.

        Args:
            layers: all wired layers.
            training: the state of training.
            optimizer: what the user passed to ``wiring.step()``, or None.
        """

    @abstractmethod
    def real(self, weight: Tensor, edges: EdgesLike) -> Tensor:
        """The wiring: a boolean mask with exactly the budget's number of true entries."""

    def forward(self, weight: Tensor, edges: EdgesLike) -> Tensor:
        """The weight that the forward pass uses: what ``kept`` says, or else real edges, which alone get a gradient."""
        kept = self.kept_at_once
        if kept is not None:
            return edges.keep(weight, kept)
        return torch.where(self.real(weight, edges), weight, 0.0)

    def used(self, weight: Tensor, edges: EdgesLike) -> Tensor | None:
        """The edges used in training, over whose gradients a norm is clipped; None for all that have one."""
        return self.real(weight, edges)

    def takes_ranking(self, training: Training) -> bool:
        """Whether layers are ranked again after this step, to share out a global budget of multiply-adds anew."""
        every = max(RANKED_EVERY, (training.steps or 0) // RANKINGS)
        return not self.keeps_wiring and training.step % every == 0

    def idle(self, steps: int | None) -> str | None:
        """Why a training of ``steps`` optimizer steps ends before the rule's first change; None if it does not.

        For rules that act periodically. `Wiring.plan` warns with this sentence, which follows a colon and says how to
        fix it. ``steps`` is None if the length is unknown.
        """
        return None

    def __repr__(self) -> str:
        settings = ", ".join(
            f"{key}={value!r}" for key, value in sorted(vars(self).items()) if key[0] != "_" and key != "kept"
        )
        return f"{type(self).__name__}({settings})"


def choose_by(
    layers: Sequence[LayerLike],
    scores: Sequence[Tensor],
    counts: Sequence[int | Tensor] | None = None,
    within: Sequence[Tensor | None] | None = None,
    magnitudes: bool = False,
) -> list[Tensor]:
    """Masks of the edges whose ``scores`` have the largest magnitude: `wirings.selection.service.Selection.choose_by`.

    For rules that rank something other than the weights, such as random numbers or momentum, or that choose another
    number of edges than the budget's. ``magnitudes`` says that the scores are magnitudes of weights.
    """
    selection: Selection = layers[0].edges.selection
    return selection.choose_by(layers, scores, counts, within, magnitudes)  # type: ignore[arg-type]
