"""The contract of a rule, the edges that it acts on, and the registry.

A rule says how a wiring is chosen and how it changes. It sees weights, their gradients or the optimizer's state
where it asks for them, a budget and a step, and never the model. Its callers (`wire_`, the graphs, `finalize_`)
know nothing but this contract:

- `Rule.own_budget`: most rules take the caller's budget; one that fixes its own (dense, N:M) says how much.
- `Rule.setup`, once, when all layers are wired, and `Rule.rebudget` when a schedule has changed their budgets:
  what the rule must remember goes into buffers of the edges, and so into the checkpoint.
- `Rule.plan`, before training: how many optimizer steps there will be, for rules with a schedule of their own.
- `Rule.forward`: the weight of the forward pass, and through autograd where the gradient goes. May look at
  ``edges.training`` (targeted dropout), hold more than k edges in training (annealing), scale (soft thresholds).
- `Rule.real`: the wiring: exactly k edges, those that are left when the model is evaluated and finalized.
- `Rule.step`, after every optimizer step: for rules that act between steps (SET, RigL, sparse momentum). What it does
  is a function of the step's number and of what was remembered, so that a run that was resumed goes on the same.
- `Rule.moves_budget`: most rules keep every layer's number of edges; one that moves edges between layers says so.

A long file, since rules, edges, layers and pools refer to one another.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from wirings.budgets.schedules import Ramp
from wirings.errors import WiringError, unknown
from wirings.selection import functional as primitive
from wirings.selection import sharded
from wirings.utils.layers import original_weight
from wirings.utils.transforms import in_transform


class Rule(ABC):
    """How a wiring is chosen, and how it changes. See the module's text for the contract."""

    name: ClassVar[str]
    own_budget: ClassVar[bool] = False
    """Whether the rule fixes the number of edges itself, by `budget`, and takes none from the caller."""
    moves_budget: bool = False
    """Whether the rule moves edges between layers, by writing ``edges.k``: only their sum is the budget's then."""
    layers_only: ClassVar[bool] = False
    """Whether the rule wires layers alone, and no neural graphs, whose edges are no matrix."""
    for_good: ClassVar[bool] = False
    """Whether edges that the rule has removed never come back, so that no schedule can ask for more."""
    reaches: ClassVar[str] = "real"
    """Whose gradient training needs: ``"real"`` edges', of ``"some"`` others too, or in some steps, or ``"all"``."""
    schedule: Any = None
    """How layers come down to their budgets over training, for any rule: see `get`."""

    def budget(self, allowed: int, shape: tuple[int, ...]) -> int:
        """With ``own_budget``: the number of edges of a weight of this shape with ``allowed`` allowed edges."""
        raise NotImplementedError

    def setup(self, layers: Sequence[Layer]) -> None:  # noqa: B027 - most rules have nothing to prepare
        """Called once, after all layers were wired: choose and remember what the rule needs."""

    def rebudget(self, layers: Sequence[Layer]) -> None:  # noqa: B027 - pure functions of the weights need nothing
        """Called when a schedule has changed the budgets of ``layers``."""

    def plan(self, layers: Sequence[Layer], steps: int) -> None:  # noqa: B027 - most rules have no schedule
        """Called before training: it will have ``steps`` optimizer steps. See `wirings.rules.planned`."""

    @abstractmethod
    def real(self, weight: Tensor, edges: Edges) -> Tensor:
        """The wiring: a boolean mask with exactly the budget's number of true entries."""

    def forward(self, weight: Tensor, edges: Edges) -> Tensor:
        """The weight that the forward pass uses. By default real edges alone, and only they get a gradient."""
        return torch.where(self.real(weight, edges), weight, 0.0)

    def used(self, weight: Tensor, edges: Edges) -> Tensor | None:
        """The edges that training uses, whose gradients count when they are clipped; None for all that have one."""
        return self.real(weight, edges)

    def step(self, layers: Sequence[Layer], step: int, optimizer: torch.optim.Optimizer | None) -> None:  # noqa: B027
        """Called after optimizer step number ``step`` (from 1). ``optimizer`` is what the user passed, or None."""

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value!r}" for key, value in sorted(vars(self).items()) if key[0] != "_")
        return f"{type(self).__name__}({settings})"


class Edges(nn.Module):
    """The edges of one weight: how many are real, which are allowed, and what the rule remembers of them.

    `wire_` puts it on a weight as a parametrization. Called with the weight, it gives the weight of the forward pass.

    Args:
        rule: the rule, shared by all edges of a model.
        k: how many edges are real; with a ``pool``, how many in the whole pool.
        possible: how many edges are allowed.
        allowed: a boolean mask of the weight's shape, or None if all edges are allowed.
        pool: the weights that share one budget with this one, or None for a budget of its own.
        saved: whether ``k`` changes over training, and so is part of what a checkpoint holds.
    """

    k: Tensor
    allowed: Tensor | None
    left: Tensor | None

    def __init__(
        self,
        rule: Rule,
        k: int,
        possible: int,
        allowed: Tensor | None = None,
        pool: Pool | None = None,
        saved: bool = False,
    ) -> None:
        super().__init__()
        self.rule, self.possible, self.pool = rule, possible, pool
        self.together: Any = None  # a `selection.batched.Together`, where edges of all layers are chosen at once
        self.place = 0  # among its members
        self.planned: int | None = None
        self.replanned = False  # since the last step
        self.end: int | None = None  # what k comes to, where a schedule moves it
        # A tensor, so that a schedule can change it under torch.compile and in captured CUDA graphs. What follows from
        # the call that wired the model is not saved; a k that the rule or a schedule has moved does not follow from it.
        self.register_buffer("k", torch.tensor(k, dtype=torch.int64), persistent=rule.moves_budget or saved)
        self.register_buffer("allowed", allowed, persistent=False)
        self.register_buffer("left", None)

    def forward(self, weight: Tensor) -> Tensor:
        if sharded.is_sharded(weight):  # somebody looks at it outside of the forward pass, where weights are whole
            with sharded.on_shards():
                used = self.rule.forward(weight, self)
        else:
            used = self.rule.forward(weight, self)
        if used is not weight and not torch.compiler.is_compiling() and not in_transform(weight):
            used._all_edges = weight.detach()  # type: ignore[attr-defined]  # for right_inverse
            # `torch.distributed.checkpoint` follows the names in a state_dict, such as fc.weight.wiring.seed.
            used.wiring = self  # type: ignore[attr-defined]
        return used

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Assigning to a wired weight sets all its edges, hallucinated ones included.

        What a wired weight gave before brings all its edges back, not the real ones alone: who saves ``module.weight``,
        assigns something else for a while and then restores it (as `torch.func.functional_call` does) loses nothing.
        """
        return getattr(weight, "_all_edges", weight)

    def real(self, weight: Tensor) -> Tensor:
        """The wiring that the rule gives this weight: a boolean mask."""
        with torch.no_grad(), sharded.on_shards(sharded.is_sharded(weight)):
            return self.rule.real(weight.detach(), self)

    def remember(self, name: str, value: Tensor, saved: bool = True) -> None:
        """Keep ``value`` as the rule's memory: saved and loaded with the model, moved with it to a device.

        What is called ``left`` are the edges that can still be chosen, for rules that remove edges for good. What
        follows from the call that wired the model need not be ``saved``. A mask is whole on every process, even of a
        sharded weight, since the forward pass sees whole weights; other memory is sharded if it is so at first.
        """
        now = self._buffers.get(name)
        if value.dtype == torch.bool or (now is not None and not sharded.is_sharded(now)):
            value = sharded.whole(value)
        if name in self._buffers and self._buffers[name] is not None:
            getattr(self, name).copy_(value)
        else:
            self.register_buffer(name, value, persistent=saved)

    def memory(self) -> dict[str, Tensor]:
        """What the rule remembers, or learns, and a checkpoint holds, by name."""
        passing = self._non_persistent_buffers_set
        kept = {name: b for name, b in self._buffers.items() if name not in passing and b is not None}
        return kept | {name: p for name, p in self._parameters.items() if p is not None}

    def density(self) -> Tensor:
        """The fraction of allowed edges that is real: of this weight, or of the whole pool."""
        layers = () if self.pool is None else self.pool.layers
        return self.k / (sum(layer.edges.possible for layer in layers) or self.possible)

    def within(self) -> Tensor | None:
        """The edges that a choice is made among: the allowed ones, or what the rule has left of them; None for all."""
        return self.allowed if self.left is None else self.left

    def choose(self, weight: Tensor) -> Tensor:
        """The budget's number of edges of largest magnitude, in this weight or over the whole pool."""
        if self.pool is None:
            return primitive.choose(weight, self.k, self.within())
        return self.pool.choose(self)

    def choose_more(self, weight: Tensor, density: float) -> Tensor:
        """The edges of largest magnitude up to a larger ``density``, or the budget's number of them if that is more."""
        if self.pool is None:
            return primitive.choose(weight, self.more(density), self.within())
        return self.pool.choose_more(self, density)

    def more(self, density: float) -> Tensor:
        """The number of edges of this weight at a larger ``density``, or the budget's if that is more."""
        return self.k.clamp(min=int(density * self.possible + 1e-6))

    def next_out(self, weight: Tensor, real: Tensor) -> Tensor:
        """The magnitude of the strongest edge that is not real, 0 if all are; in a pool, of all layers' edges."""
        return next_out(weight, real, self.within()) if self.pool is None else self.pool.next_out(self)

    def keep(self, weight: Tensor) -> Tensor:
        """The chosen edges alone, the gradient passed straight through to every allowed edge."""
        if self.pool is not None:
            return primitive.straight_through(weight, self.pool.choose(self), self.allowed)
        kept = None if self.together is None else self.together.kept(self, weight)
        if kept is not None:
            return primitive.handed_through(weight, kept, self.allowed)
        return primitive.real_edges(weight, self.k, self.allowed)

    def extra_repr(self) -> str:
        return f"{self.rule!r}, k={int(self.k)}" + (" (over all layers)" if self.pool is not None else "")


@dataclass(frozen=True)
class Layer:
    """One wired weight, as a rule and a report see it."""

    name: str
    module: nn.Module
    attribute: str
    edges: Edges
    find_receivers: Callable[[nn.Module, str, Tensor], Tensor]
    """`wirings.utils.layers.receivers`, which knows modules; rules do not."""

    def receivers(self) -> Tensor:
        """The node that each edge leads to: int32 numbers from 0, of a shape that broadcasts to the weight's."""
        return self.find_receivers(self.module, self.attribute, self.weight).to(self.weight.device)

    @property
    def weight(self) -> nn.Parameter:
        """The parameter with all weights, hallucinated ones included; the one that the optimizer holds."""
        return original_weight(self.module, self.attribute)


class Pool:
    """Layers that share one budget: their edges are ranked together.

    The choice is made once for all and kept until a weight changes, so that it costs one ranking a step however
    many layers ask. A change is seen by the weights' version counters; `forget`, called at every forward pass of the
    model and by whoever looks at a wiring from outside, covers writes that they do not count (``weight.data``).
    """

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self._stamp: list[tuple[Tensor, int, int]] = []
        self._masks: list[Tensor] = []
        self._more: dict[Any, tuple[Any, Any]] = {}
        self._cut: sharded.Cut | None = None

    def choose(self, edges: Edges) -> Tensor:
        """The wiring of ``edges``, one of the pool's."""
        place, weights = self._place(edges), self._weights()
        if torch.compiler.is_compiling() or any(in_transform(w) or w.is_inference() for w in weights):
            # A compiler drops the repeated calls by itself; under torch.func there is no version to go by.
            return choose_together(self.layers, weights)[place]
        left = [layer.edges.left for layer in self.layers if layer.edges.left is not None]
        if any(sharded.is_sharded(w) for w in weights):
            return self._choose_sharded(place, weights, left)
        stamp = [(x, x._version, x.data_ptr()) for x in (self.layers[0].edges.k, *weights, *left)]
        if len(stamp) != len(self._stamp) or any(
            a is not b or rest != others for (a, *rest), (b, *others) in zip(stamp, self._stamp, strict=True)
        ):
            self._stamp, self._masks = stamp, choose_together(self.layers, weights)
        return self._masks[place]

    def _place(self, edges: Edges) -> int:
        return next(i for i, layer in enumerate(self.layers) if layer.edges is edges)

    def _k(self) -> Tensor:
        """The same tensor for whoever asks, so that a compiler sees that choices are the same."""
        return self.layers[0].edges.k

    def _weights(self) -> list[nn.Parameter]:
        if not torch.compiler.is_compiling():
            return [layer.weight for layer in self.layers]
        # Every layer asks, so this is traced a number of times that goes with the square of the layers: in few steps.
        return [getattr(layer.module.parametrizations, layer.attribute).original for layer in self.layers]

    def choose_more(self, edges: Edges, density: float) -> Tensor:
        """`Edges.choose_more` for ``edges``, one of the pool's: the strongest of all layers together."""
        place, weights = self._place(edges), self._weights()
        most = int(density * sum(layer.edges.possible for layer in self.layers) + 1e-6)

        def choice() -> list[Tensor]:
            return choose_together(self.layers, weights, [self._k().clamp(min=most)] * len(weights))

        if any(sharded.is_sharded(weight) for weight in weights):
            within, k = [layer.edges.within() for layer in self.layers], self._k().clamp(min=most)
            cut = self._kept(edges, density, lambda: sharded.Cut.find(weights, k, within))
            return cut.mask(place, weights[place].detach(), within[place])
        return self._kept(edges, density, choice)[place]

    def next_out(self, edges: Edges) -> Tensor:
        """The magnitude of the strongest edge of all layers that is not real."""

        def strongest() -> Tensor:
            if torch.compiler.is_compiling():  # few operations for it to look at: one row, which it makes once for all
                row, among = _in_a_row(self._weights(), [one.edges.within() for one in self.layers])
                return next_out(row, primitive.choose(row, self._k(), among), among)
            with sharded.on_shards(any(sharded.is_sharded(one.weight) for one in self.layers)):
                parts = [next_out(one.weight, self.choose(one.edges), one.edges.within()) for one in self.layers]
                return torch.stack([sharded.whole(part).double() for part in parts]).amax()

        return self._kept(edges, "next out", strongest)

    def _kept(self, edges: Edges, what: Any, find: Callable[[], Any]) -> Any:
        """What follows from the weights of all layers: found once, and kept as long as the choice of edges is."""
        if torch.compiler.is_compiling() or any(in_transform(w) or w.is_inference() for w in self._weights()):
            return find()
        self.choose(edges)  # makes a new stamp where anything has changed
        if what not in self._more or self._more[what][0] is not self._stamp:
            self._more[what] = self._stamp, find()
        return self._more[what][1]

    def _choose_sharded(self, place: int, weights: list[nn.Parameter], left: list[Tensor]) -> Tensor:
        """The same where some weights are sharded. What is kept is where the ranking is cut off.

        FSDP puts another tensor in a weight's place while its module runs. That is no change; what tells one is the
        version of those that are the same tensors as before.
        """
        now = [(x, x._version, 0) for x in (self.layers[0].edges.k, *weights, *left)]
        kept = len(now) == len(self._stamp) and all(
            a is not b or one == other for (a, one, _), (b, other, _) in zip(now, self._stamp, strict=True)
        )
        within = [layer.edges.within() for layer in self.layers]
        if self._cut is None or not kept:
            self._stamp, self._cut = now, sharded.Cut.find(weights, self.layers[0].edges.k, within)
        return self._cut.mask(place, weights[place].detach(), within[place])

    def forget(self) -> None:
        self._stamp, self._masks, self._cut = [], [], None

    def __deepcopy__(self, memo: dict[int, Any]) -> Pool:
        replica = memo[id(self)] = Pool()
        replica.layers = copy.deepcopy(self.layers, memo)
        return replica


def next_out(weight: Tensor, real: Tensor, within: Tensor | None) -> Tensor:
    """The magnitude of the strongest edge of one weight that is not real, 0 if all are."""
    size = weight.detach().abs().masked_fill(real, 0.0)
    return (size if within is None else size.masked_fill(~within, 0.0)).amax()


def choose_together(
    layers: Sequence[Layer],
    scores: Sequence[Tensor],
    counts: Sequence[int | Tensor] | None = None,
    within: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:
    """For each layer its wiring by the magnitude of ``scores``: each its own budget, or the pool's over all.

    For rules that rank something else than the weights, such as random numbers or momentum, or that choose another
    number of edges than the budget: ``counts``, one a layer, or in a pool the same number in each, for all together.
    Edges are chosen among the allowed ones that the rule has left, or ``within`` other masks.
    """
    counts = [layer.edges.k for layer in layers] if counts is None else counts
    within = [layer.edges.within() for layer in layers] if within is None else within
    if layers[0].edges.pool is None:
        return [primitive.choose(s, k, among) for s, k, among in zip(scores, counts, within, strict=True)]
    if any(sharded.is_sharded(s) for s in scores):
        cut = sharded.Cut.find(scores, torch.as_tensor(counts[0]), within)
        return [cut.mask(i, s, among) for i, (s, among) in enumerate(zip(scores, within, strict=True))]
    row, allowed = _in_a_row(scores, within)
    real = primitive.choose(row, counts[0], allowed)
    parts = real.split([s.numel() for s in scores])
    return [part.view(s.shape) for part, s in zip(parts, scores, strict=True)]


def _in_a_row(scores: Sequence[Tensor], within: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """All layers' scores one after the other, and so their masks, if any has one."""
    dtype = scores[0].dtype
    for score in scores[1:]:
        dtype = torch.promote_types(dtype, score.dtype)
    row = torch.cat([s.detach().reshape(-1).to(dtype) for s in scores])
    if all(among is None for among in within):
        return row, None
    masks = zip(within, scores, strict=True)
    return row, torch.cat([(torch.ones_like(s, dtype=torch.bool) if a is None else a).reshape(-1) for a, s in masks])


_registry: dict[str, type[Rule]] = {}
R = TypeVar("R", bound=type[Rule])


def register(cls: R) -> R:
    """Make a rule available by its ``name``. Registered rules are put through the contract tests."""
    if cls.name in _registry:
        raise WiringError(f"a rule named {cls.name!r} is registered already ({_registry[cls.name].__qualname__}).")
    _registry[cls.name] = cls
    return cls


def names() -> list[str]:
    """The registered rules' names."""
    return sorted(_registry)


def get(rule: str | Rule, schedule: Any = None, **settings: Any) -> Rule:
    """The rule of that name, made with ``settings``; a rule that is one already is given back.

    Any rule takes a ``schedule``, by which layers come down to their budgets over training: ``"cubic"``, ``"linear"``
    or a mapping, ``{"kind": "cubic", "start": 1.0, "begin": 0.0, "end": 0.5, "every": 1}``: from the density ``start``
    (all edges) between the fractions ``begin`` and ``end`` of training, with a change every so many steps. These values
    are the defaults. `Wiring.plan` says how long the training is.
    """
    if isinstance(rule, Rule):
        if schedule is not None or settings:
            given = ", ".join([*(["schedule"] if schedule is not None else []), *settings])
            raise WiringError(
                f"settings ({given}) go with a rule's name, but {rule!r} is made already: make it with them; its "
                "schedule is rule.schedule."
            )
        return rule
    if not isinstance(rule, str):
        raise WiringError(
            f"a rule is a name or a wirings.rules.Rule object, not {rule!r}. Names: {', '.join(names())}."
        )
    if rule not in _registry:
        raise unknown("rule", rule, _registry)
    try:
        made = _registry[rule](**settings)
    except TypeError as error:
        raise WiringError(f"rule {rule!r} does not take these settings: {error}") from error
    if schedule is not None:
        Ramp.of(schedule)  # an error for one that there is not
        made.schedule = schedule
    return made
