"""Budgets: how many edges there are, how they are shared out over layers, and how that changes over training.

A budget is a density (a float, the fraction of allowed edges that is real), a number of edges k (an int), a mapping
from layer patterns to either, or a property of the whole network: its parameters, or its multiply-adds for an example
input. It is shared out in one of four ways:

- ``uniform``: the same density in every layer;
- ``erk``: the Erdős–Rényi kernel rule (`_erk`): a layer's density is proportional to the sum of its dimensions divided
  by their product, so that small layers stay denser; at most 1;
- ``global``: one number for all layers, whose edges are ranked together;
- ``scaled``: the same, with magnitudes divided by the scale that each layer starts with.

Multiply-adds are counted by `wirings.budgets.edge_costs` and shared out by `wirings.budgets.apportion`. With a number
of edges as well, they are a bound, which `wirings.budgets.prices` meets together with the number.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from wirings.budgets.apportion import round_to_total, spend
from wirings.budgets.prices import bounded_counts, check_feasible
from wirings.budgets.schedules import (
    ConstantSchedule,
    CubicSchedule,
    Density,
    LinearSchedule,
    Ramp,
    Schedule,
    at,
    check_density,
    floor_of,
)
from wirings.errors import WiringError, unknown
from wirings.utils.checks import is_int, is_number
from wirings.utils.text import brief

__all__ = [
    "Amount",
    "Budget",
    "ConstantSchedule",
    "CubicSchedule",
    "Density",
    "LayerSize",
    "LinearSchedule",
    "Ramp",
    "Schedule",
    "check_density",
    "matches",
]

SHARES = ("uniform", "erk", "global", "scaled")
WHOLE = {"params": "parameters", "mult_adds": "multiply-adds"}
"""The budgets of the whole network, and what they count."""
Amount = int | Density

_EXPECTED = "budget= expects a mapping from layer patterns to densities or numbers of edges, got"


@dataclass(frozen=True)
class LayerSize:
    """What a budget needs to know about a layer: its name, the shape of its weight, its number of allowed edges."""

    names: tuple[str, ...]
    """All names of the weight; several if it is tied."""
    shape: tuple[int, ...]
    allowed: int
    cost: int = 1
    """The multiply-adds of one edge, if they were counted."""
    stacked: bool = False
    """Whether dimension 0 counts matrices (experts), each of which is a layer of the remaining shape."""
    nodes: tuple[int, ...] | None = None
    """For a graph, the multiply-adds of each node that an edge leaves, if a bound counts only nodes in use."""

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class Budget:
    """A number of edges, shared out over layers.

    Exactly one of density, k, mapping, params and mult_adds is given; or mult_adds as a bound beside density, k or
    params.
    """

    density: Density | None = None
    k: int | None = None
    mapping: Mapping[str, Amount] | None = None
    share: str = "uniform"
    params: float | None = None
    """The parameters of the whole network: an integer, or a float up to 1.0, a fraction of those with all edges."""
    mult_adds: float | None = None
    """The multiply-adds of the whole network, in the same two ways."""
    ramp: Ramp | None = None
    """How the numbers of edges decrease to the budget over training."""
    spent: int | None = None
    """The multiply-adds that the edges cost, or may cost beside a number of edges, as computed by `of_network`."""
    _fixed: tuple[Sequence[LayerSize], list[int]] | None = field(default=None, init=False, repr=False, compare=False)
    """Layers that were asked for before, and their numbers, if these are the same at every step."""

    def __post_init__(self) -> None:
        given = {"density": self.density, "k": self.k, "budget": self.mapping}
        given |= {"params": self.params, "mult_adds": self.mult_adds}
        got = " and ".join(name for name, value in given.items() if value is not None) or "none"
        bounded = got in ("density and mult_adds", "k and mult_adds", "params and mult_adds")
        if got not in given and not bounded and (got != "none" or self.spent is None):
            raise WiringError(
                "a budget is exactly one of density=, k= or budget= (a mapping from layer patterns), or for the whole "
                "network params= or mult_adds=; or mult_adds= as a bound beside density=, k= or params=; "
                f"got {got}."
            )
        if bounded and isinstance(self.density, Schedule):
            raise WiringError(
                "mult_adds= bounds a number of edges, which a schedule of the density changes; give the density at the "
                'end, and the schedule to the rule: rules.get(…, schedule="cubic").'
            )
        if not isinstance(self.share, str) or self.share not in SHARES:
            raise unknown("share", str(self.share), SHARES)
        if self.mapping is not None:
            self._check_mapping(self.mapping)
        for name in WHOLE:
            if given[name] is not None:
                _check_whole_network(name, given[name])
        if self.density is not None:
            if not isinstance(self.density, (Schedule, ConstantSchedule)):
                check_density(self.density, "density", " Use k for a number of edges.")
        elif self.k is not None and (not is_int(self.k) or self.k < 1):
            raise WiringError(
                f"k must be a whole number of edges, at least 1, got {brief(self.k)}. Use density= for a fraction."
            )
        if self.ramp is not None and self._schedules():
            raise WiringError("both the rule (schedule=…) and the budget have a schedule; drop one of them.")

    def _check_mapping(self, mapping: object) -> None:
        if not isinstance(mapping, Mapping):
            raise WiringError(f"{_EXPECTED} {brief(mapping)}; for one number for all layers use density= or k=.")
        if self.share != "uniform":
            raise WiringError(
                f"budget= already determines how edges are shared out; drop share={self.share!r}, or use one density= "
                "or k= for all layers."
            )
        if not mapping:
            raise WiringError("budget= is an empty mapping; it needs at least one layer pattern with a density or k.")
        for pattern, amount in mapping.items():
            where = f"budget[{brief(pattern)}]"
            if not isinstance(pattern, str):
                text = brief(pattern)
                raise WiringError(f"{_EXPECTED} {brief(mapping)}: a pattern must be a string; write {text!r}.")
            if isinstance(amount, (Schedule, ConstantSchedule)):
                continue
            if is_int(amount):
                if amount < 1:
                    raise WiringError(f"{where} must be at least 1 edge, got {amount}; leave the layer out instead.")
            else:
                check_density(amount, where, " Use an int for a number of edges.")

    def _schedules(self) -> list[Schedule]:
        amounts = self.mapping.values() if self.mapping is not None else [self.density]
        return [amount for amount in amounts if isinstance(amount, Schedule)]

    @property
    def changes(self) -> bool:
        """Whether the numbers depend on the step."""
        return bool(self._schedules()) or self.ramp is not None or self.ranks_layers

    @property
    def ranks_layers(self) -> bool:
        """Whether each layer's number comes from a ranking of all edges that is repeated every few steps.

        A global number of edges does not need it: its layers are ranked together in every pass.
        """
        return self.spent is not None and self.ranks_together

    @property
    def ranks_together(self) -> bool:
        """Whether the edges of all layers compete in one ranking."""
        return self.share in ("global", "scaled")

    def planned(self, steps: int) -> Budget:
        """The budget for a training of ``steps`` optimizer steps: fractions of training become steps."""

        def plan(amount: Amount) -> Amount:
            return amount.planned(steps) if isinstance(amount, Schedule) else amount

        return replace(
            self,
            density=None if self.density is None else plan(self.density),
            mapping=None if self.mapping is None else {p: plan(amount) for p, amount in self.mapping.items()},
            ramp=None if self.ramp is None else self.ramp.planned(steps),
        )

    def idle(self, steps: int) -> str | None:
        """Why a training of ``steps`` optimizer steps ends before a schedule begins; None if it does not."""
        planned = self.planned(steps)
        schedules = planned._schedules() + ([] if planned.ramp is None else [planned.ramp.way])
        late = [int(one.begin) for one in schedules if one.begin >= steps]
        return f"its schedule begins after step {late[0]:,}; let it begin earlier" if late else None

    def of_network(self, sizes: Sequence[LayerSize], rest: int) -> Budget:
        """Turn ``params`` of the whole network into a number of edges, or else ``mult_adds`` into what edges may cost.

        Raises if no wiring of these layers meets the number, and names the nearest one that can be met.

        Args:
            sizes: the layers to wire.
            rest: the parameters or multiply-adds of the rest of the network.
        """
        name = next((name for name in WHOLE if getattr(self, name) is not None), None)
        if name is None:
            return self
        costs = [1 if name == "params" else size.cost for size in sizes]
        nodes = 0 if name == "params" else sum(sum(size.nodes or ()) for size in sizes)
        least = rest + sum(costs)
        most = rest + nodes + sum(size.allowed * cost for size, cost in zip(sizes, costs, strict=True))
        given = getattr(self, name)
        number = math.floor(float(given) * most + 1e-6) if _is_share(given) else int(given)
        if name == "mult_adds" and self._number(sizes) is not None:
            return self._bounded(sizes, number, rest, nodes)
        if not least <= number <= most:
            asked = f"{given:g} of {most:,}, {number:,} {WHOLE[name]}," if _is_share(given) else f"{number:,}"
            raise WiringError(
                f"{name} = {asked} cannot be met: with one edge in each of the {len(sizes)} wired layers the network "
                f"has {least:,} {WHOLE[name]}, with all edges {most:,} ({rest:,} of them outside wired layers). "
                f"The nearest that can be met is {least if number < least else most:,}."
                + (" For fewer, wire more layers: skip fewer, if any are skipped." if number < least else "")
            )
        if name == "params":
            return replace(self, params=None, k=number - rest)
        return replace(self, mult_adds=None, spent=number - rest)

    def _number(self, sizes: Sequence[LayerSize]) -> int | None:
        """The number of all edges, if it is the same at every step and not that of each layer."""
        if self.k is not None:
            return int(self.k)
        if self.density is None or isinstance(self.density, Schedule):
            return None
        return max(floor_of(at(self.density, 0), sum(size.allowed for size in sizes)), len(sizes))

    def _bounded(self, sizes: Sequence[LayerSize], number: int, rest: int, nodes: int) -> Budget:
        """The budget of a number of edges with a bound of ``number`` multiply-adds for the whole network.

        The bound must leave room for all ``nodes`` that may come into use: which ones, weights will decide.
        """
        edges, allowed = self._number(sizes), [size.allowed for size in sizes]
        assert edges is not None
        replace(self, mult_adds=None, share="uniform", ramp=None)._counts(sizes, 0, None)  # raises if k is out of range
        given = f"k = {edges:,} and mult_adds = {number:,}"
        check_feasible(given, allowed, [size.cost for size in sizes], edges, number - rest, rest, nodes)
        return replace(self, mult_adds=None, density=None, k=edges, spent=number - rest)

    def amount_for(self, names: Sequence[str]) -> Amount | None:
        """With a mapping: the amount of the first pattern that matches one of a weight's names, or None."""
        assert self.mapping is not None
        return next((a for p, a in self.mapping.items() if any(matches(name, p) for name in names)), None)

    def counts(self, sizes: Sequence[LayerSize], step: int = 0, ranked: Sequence[int] | None = None) -> list[int]:
        """The number of edges of each layer after ``step`` steps; one number for all of them if shared globally.

        Args:
            sizes: the wired layers.
            step: the number of optimizer steps.
            ranked: for a budget that `ranks_layers`, the number of edges of each layer in the ranking of all.
        """
        if self._fixed is None or self._fixed[0] is not sizes:
            counts = self._counts(sizes, step, ranked)
            if not self._schedules() and not self.ranks_layers:
                object.__setattr__(self, "_fixed", (sizes, counts))
        else:
            counts = list(self._fixed[1])
        if self.ramp is None:
            return counts
        allowed = [size.allowed for size in sizes]
        if len(counts) < len(allowed):
            allowed = [sum(allowed)]
        return self.ramp.counts(counts, allowed, step)

    def _counts(self, sizes: Sequence[LayerSize], step: int, ranked: Sequence[int] | None) -> list[int]:
        """The numbers without the ramp."""
        total, allowed = sum(size.allowed for size in sizes), [size.allowed for size in sizes]
        if self.mapping is not None:
            amounts = [self.amount_for(size.names) for size in sizes]
            return [
                _count(1.0 if amount is None else amount, size, step)
                for amount, size in zip(amounts, sizes, strict=True)
            ]
        if self.spent is not None and self.k is not None:
            return list(ranked) if ranked is not None else self._priced(sizes)
        if self.spent is not None:
            shares = ranked if ranked is not None else allowed if self.share == "uniform" else _erk_shares(sizes)
            return spend(self.spent, shares, allowed, [size.cost for size in sizes])
        if self.k is not None:
            if self.k > total:
                names = (
                    sizes[0].name if len(sizes) == 1 else f"the {len(sizes)} layers {sizes[0].name} … {sizes[-1].name}"
                )
                raise WiringError(f"k = {self.k} edges were requested, but {names} allow only {total}; lower k.")
            if self.k < len(sizes) and not self.ranks_together:
                raise WiringError(
                    f"k = {self.k} edges cannot be shared out over {len(sizes)} wired layers: a layer without edges "
                    f"would cut the network. The nearest that can be met is {len(sizes)}. Raise k, or wire fewer "
                    "layers (skip more)."
                )
            edges = int(self.k)
        else:
            assert self.density is not None
            if self.share == "uniform":
                return [floor_of(at(self.density, step), n) for n in allowed]
            edges = floor_of(at(self.density, step), total)
        if self.ranks_together:
            return [edges]
        edges = max(edges, len(sizes))  # a layer without edges would cut the network
        wanted = [edges / total * n for n in allowed] if self.share == "uniform" else _erk(sizes, edges)
        return round_to_total(wanted, allowed, edges)

    def _priced(self, sizes: Sequence[LayerSize]) -> list[int]:
        """The numbers by shares, or as close to them as the bound on multiply-adds allows."""
        allowed, costs = [size.allowed for size in sizes], [size.cost for size in sizes]
        counts = replace(self, spent=None, ramp=None)._counts(sizes, 0, None)
        if sum(count * cost for count, cost in zip(counts, costs, strict=True)) <= (self.spent or 0):
            return counts
        shares = allowed if self.share == "uniform" else _erk_shares(sizes)
        return bounded_counts(shares, allowed, costs, sum(counts), self.spent or 0)


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern names a weight or a module that contains it.

    ``name`` is the weight's full name, such as ``layer1.0.conv1.weight``. A pattern may have ``*``, ``?`` and ``[…]``.

    >>> [matches("layer1.0.conv1.weight", p) for p in ("layer1", "layer1.0.conv1", "*.conv1", "layer*.weight", "conv1")]
    [True, True, True, True, False]
    """
    parts = name.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[: i + 1]), pattern) for i in range(len(parts)))


def _is_share(amount: float) -> bool:
    return not is_int(amount) and amount <= 1


def _check_whole_network(name: str, amount: object) -> None:
    if not is_number(amount) or not amount > 0 or not (_is_share(amount) or float(amount).is_integer()):
        raise WiringError(
            f"{name} must be a whole number of {WHOLE[name]} of the whole network, or a fraction of those with all "
            f"edges, a float from 0.0 to 1.0, got {brief(amount)}."
        )


def _count(amount: Amount, size: LayerSize, step: int) -> int:
    if not is_int(amount):
        return floor_of(at(amount, step), size.allowed)
    if amount > size.allowed:
        raise WiringError(
            f"k = {amount} edges were requested in {size.name}, but its weight of shape {size.shape} allows only "
            f"{size.allowed}; lower k for this layer."
        )
    return int(amount)


def _erk(sizes: Sequence[LayerSize], edges: int) -> list[float]:
    """Numbers of edges by the Erdős–Rényi kernel rule, capped at full layers."""
    raw = [share / size.allowed for share, size in zip(_erk_shares(sizes), sizes, strict=True)]
    full: set[int] = set()
    while True:
        open_ = [i for i in range(len(sizes)) if i not in full]
        left = edges - sum(sizes[i].allowed for i in full)
        weight = sum(raw[i] * sizes[i].allowed for i in open_)
        scale = left / weight if weight else 0.0
        over = [i for i in open_ if scale * raw[i] > 1]
        if not over:
            return [float(s.allowed) if i in full else scale * raw[i] * s.allowed for i, s in enumerate(sizes)]
        full.update(over)


def _erk_shares(sizes: Sequence[LayerSize]) -> list[float]:
    """Edges of each layer in proportion to sum(shape) / prod(shape) × allowed, ignoring that a layer may be full."""
    shapes = [size.shape[1:] if size.stacked else size.shape for size in sizes]
    return [sum(shape) / math.prod(shape) * size.allowed for shape, size in zip(shapes, sizes, strict=True)]
