"""``wire_(…, structure=…)``: groups on the weights of a model, and budgets that count them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from wirings.budgets.budget import Amount, Budget, LayerSize
from wirings.budgets.schedules import Schedule
from wirings.errors import WiringError
from wirings.rules.rule import Rule
from wirings.selection.graph_groups import lay_over_graph
from wirings.selection.grouped import reaches_hallucinated
from wirings.selection.sharded import whole
from wirings.selection.structure import Structure
from wirings.selection.weight_groups import WeightGroups
from wirings.selection.weight_layout import WeightLayout
from wirings.utils.checks import check_int, is_int, is_number
from wirings.utils.layers import CONVOLUTIONS, is_graph_weight, sends_first
from wirings.utils.text import brief
from wirings.wire.checks import first_names
from wirings.wire.layer import Layer
from wirings.wire.targets import Target


def check_rule(structure: Structure, rule: Rule) -> None:
    """Raise unless the rule can choose edges of this structure."""
    if rule.own_budget:
        why = "chooses its wiring without a budget"
    elif rule.free_only:
        why = "chooses single edges in a way of its own"
    elif structure.nm is not None and rule.moves_budget:
        why = "moves edges between layers, where N:M fixes their number"
    else:
        return
    raise WiringError(
        f"structure={structure.text!r} cannot be combined with {rule!r}, which {why}. Use another rule, such as 'dnw' "
        "or 'random', or drop structure=."
    )


def check_gradient_every(structure: Structure | None, rule: Rule, every: object) -> None:
    """Raise unless the gradient of hallucinated edges can be taken in every so many steps only."""
    if check_int("wire_()", "gradient_every", every) == 1:
        return
    kept = rule.kept_at_once
    if structure is None:
        raise WiringError(f"gradient_every={every} needs a structure of edges, such as structure='32x32'. Give one.")
    if kept is None or not reaches_hallucinated(kept):
        raise WiringError(
            f"gradient_every={every} is for rules whose gradient reaches all edges in every step, such as 'dnw' and "
            f"'soft_threshold', but {rule!r} decides itself which edges it reaches. Drop gradient_every=."
        )


def check_given(structure: Structure, given: Mapping[str, Any], share: str) -> dict[str, Any]:
    """What the caller gave as a budget, or the density that the structure fixes; raises if they contradict."""
    if structure.nm is None:
        if given["mult_adds"] is not None and any(given[name] is not None for name in ("density", "k", "params")):
            raise WiringError("mult_adds= bounds a number of single edges; with structure=, give it alone, or drop it.")
        if given["mult_adds"] is not None and share in ("global", "scaled"):
            raise WiringError(
                f"mult_adds= with share={share!r} ranks single edges; with structure=, use share='uniform' or 'erk'."
            )
        return dict(given)
    n, m = structure.nm
    fixes = f"structure={structure.text!r} fixes the number of edges: {n} of every {m}"
    if share != "uniform":
        raise WiringError(f"{fixes}. Drop share={share!r}.")
    density = given["density"]
    end = density.end if isinstance(density, Schedule) else density
    others = [name for name in ("budget", "params", "mult_adds") if given[name] is not None]
    if others or (density is not None and given["k"] is not None):
        raise WiringError(f"{fixes}. Drop {others[0] if others else 'k'}=.")
    if density is not None and (not is_number(end) or abs(end - n / m) > 1e-9):
        raise WiringError(f"{fixes}, a density of {n / m:g}. Drop density={brief(density)}.")
    return {**given, "density": n / m if density is None else density, "k": None}


def check_total_k(structure: Structure, k: int | None, sizes: Sequence[LayerSize]) -> None:
    """Raise if the caller's number of edges is not the one that the structure fixes."""
    if structure.nm is None or k is None:
        return
    fixed = sum(size.allowed for size in sizes) // structure.nm[1] * structure.nm[0]
    if k != fixed:
        raise WiringError(
            f"structure={structure.text!r} fixes the number of edges of these layers at {fixed:,}. Drop k={brief(k)}."
        )


def groups_of(
    structure: Structure | None, targets: Sequence[Target], masks: Sequence[Tensor | None]
) -> Sequence[WeightGroups | None]:
    """The groups of every weight; None for each without a structure."""
    if structure is None:
        return [None] * len(targets)
    return [_groups(structure, target, mask) for target, mask in zip(targets, masks, strict=True)]


def _groups(structure: Structure, target: Target, mask: Tensor | None) -> WeightGroups:
    _, module, attribute = target.places[0]
    if is_graph_weight(module, attribute):
        return lay_over_graph(structure, target.name, module.tiles, mask)  # type: ignore[arg-type]
    shape = tuple(target.weight.shape)
    kernel = ("kernel",) * (len(shape) - 2)
    axes = target.axes or ((("in", "out") if sends_first(module) else ("out", "in")) + kernel)
    layout = WeightLayout(shape, axes, module.groups if isinstance(module, CONVOLUTIONS) else 1)
    return structure.lay_over(target.name, layout, mask)


def complete(
    groups: Sequence[WeightGroups | None], starts: Sequence[Tensor], masks: Sequence[Tensor | None], k: int
) -> list[Tensor]:
    """Masks of whole groups that contain these edges; of N:M groups, at least ``k`` edges of each."""
    args = zip(groups, starts, masks, strict=True)
    return [start if one is None else one.complete(start, k, mask) for one, start, mask in args]


def in_groups(
    plan: Budget, sizes: Sequence[LayerSize], groups: Sequence[WeightGroups | None]
) -> tuple[Budget, list[LayerSize]]:
    """A budget of edges and the sizes of layers, in groups instead of edges.

    A density is the fraction of the groups. A number of edges is rounded down to whole groups; if groups have different
    sizes, in every layer.
    """
    found = [one for one in groups if one is not None]
    if not found:
        return plan, list(sizes)
    grouped = [
        replace(size, allowed=one.possible, cost=_cost(plan, size, one)) for size, one in zip(sizes, found, strict=True)
    ]
    if plan.mapping is not None:
        amounts = {
            size.name: _amount(plan.amount_for(size.names), size, one) for size, one in zip(sizes, found, strict=True)
        }
        return replace(plan, mapping=amounts), grouped
    if plan.spent is not None:
        least = sum(size.cost for size in grouped)
        if plan.spent < least:
            raise WiringError(
                f"mult_adds= leaves {plan.spent:,} multiply-adds for the wired layers, but one group of edges in each "
                f"of the {len(grouped)} layers costs {least:,}. Raise mult_adds=, or use smaller groups."
            )
        return plan, grouped
    if plan.k is None:
        return plan, grouped
    edges, everything = int(plan.k), sum(one.edges for one in found)
    if edges > everything:
        return plan, list(sizes)  # which raises
    for layer, one in zip(sizes, found, strict=True):
        _check_equal(f"k = {edges:,} edges", layer, one)
    each = {one.edges / one.possible for one in found}
    if len(each) == 1 and all(one.equal for one in found):
        size = found[0].edges // found[0].possible
        least = 1 if plan.ranks_together else len(found)
        if edges < least * size:
            raise WiringError(
                f"k = {edges:,} edges are fewer than {least} whole group{'s' if least > 1 else ''} of {size:,}; the "
                f"nearest that can be met is {least * size:,}."
            )
        return replace(plan, k=edges // size), grouped
    if plan.share != "uniform":
        raise WiringError(
            f"k = {edges:,} edges cannot be shared out with share={plan.share!r} over groups of different sizes. Give "
            "density=, the fraction of the groups."
        )
    least = max(math.ceil(everything / one.possible) for one in found)
    if edges < least:
        raise WiringError(
            f"k = {edges:,} edges are fewer than one whole group in each layer at one density; "
            f"the nearest that can be met is {least:,}."
        )
    return replace(plan, k=None, density=edges / everything), grouped


def _cost(plan: Budget, size: LayerSize, groups: WeightGroups) -> int:
    """The multiply-adds of one group."""
    if plan.spent is None:
        return size.cost
    _check_equal("mult_adds=", size, groups)
    return size.cost * (groups.edges // groups.possible)


def _check_equal(what: str, size: LayerSize, groups: WeightGroups) -> None:
    """Raise unless all groups of a layer have as many edges: whole groups could exceed a budget of edges otherwise."""
    if not groups.equal:
        raise WiringError(
            f"{what} cannot be met by whole groups of one size: those of {size.name} of shape {size.shape} differ, as "
            "at borders, where edges are not allowed, or between nodes of a graph. Give a density instead, the "
            "fraction of the groups (a float as edges= of a graph)."
        )


def _amount(amount: Amount | None, size: LayerSize, groups: WeightGroups) -> Amount:
    if not is_int(amount):
        return 1.0 if amount is None else amount
    _check_equal(f"a budget of {amount:,} edges", size, groups)
    if amount > groups.edges:
        raise WiringError(f"{amount:,} edges were requested in {size.name}, which allows only {groups.edges:,}.")
    units = int(amount * groups.possible / groups.edges + 1e-9)
    if not units:
        raise WiringError(
            f"{amount} edges in {size.name} are fewer than one whole group of {groups.edges // groups.possible:,}."
        )
    return units


FAR = 2.0
"""How many times the density that was asked for the groups of all layers may have before `wire_` warns."""


def warn_if_denser(structure: Structure, density: object, targets: Sequence[Target], groups: Any) -> None:
    """Warn if one group in every layer is much more than a density, the same for all layers, asks for."""
    if not is_number(density) or structure.nm is not None:
        return
    each = list(zip(targets, groups, strict=True))
    few = [target.name for target, one in each if density * one.possible < 1]
    total = sum(one.edges for one in groups)
    least = sum(max(1, int(density * one.possible + 1e-6)) * one.edges / one.possible for one in groups)
    if few and least > FAR * density * total:
        warnings.warn(
            f"structure={structure.text!r} leaves {100 * least / total:.2g} % of the edges instead of "
            f"{100 * density:.2g} %: every layer keeps one group at least, and {len(few)} of {len(each)} layers "
            f"({first_names(few)}) have fewer than {math.ceil(1 / density):,}. Use smaller groups, skip these layers, "
            'or share="global".',
            stacklevel=3,
        )


def check_whole_groups(layer: Layer, real: Tensor) -> None:
    """Raise if a rule's wiring has parts of groups."""
    groups = layer.edges.groups
    if groups is not None and not groups.whole(whole(real), layer.edges.allowed):
        raise WiringError(
            f"{layer.name}: rule {layer.edges.rule.name!r} has chosen edges that are not whole groups. Either a "
            "checkpoint of another structure was loaded without the handle's own (wiring.load_state_dict), or the "
            "rule is broken: let it use edges.choose, edges.choose_among or rules.choose_by, or drop structure=."
        )
