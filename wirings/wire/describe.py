"""Describe in plain values how a model is wired, so that `wirings.rewire_` can wire another model in the same way."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from wirings import rules
from wirings.budgets.budget import Amount, Budget, ConstantSchedule, LayerSize, Ramp, Schedule
from wirings.budgets.schedules import KINDS
from wirings.errors import WiringError, unknown
from wirings.rules.rule import Rule
from wirings.selection.structure import Structure
from wirings.utils.checks import is_int
from wirings.utils.text import brief
from wirings.version import __version__
from wirings.wire.layer import Layer
from wirings.wire.parametrization import wired

FORMAT = 3
"""The latest format of descriptions. A change that earlier versions would misread gets the next number."""
FREE_FORMAT, STRUCTURE_FORMAT = 1, 2
"""The formats of wirings without a structure and with one, which earlier versions can read. The latest is that of a
bound on multiply-adds that counts nodes."""
MOST_COST = 2**28
"""The most multiply-adds of one edge, as many as on an image of 16,384 pixels a side."""


def describe(
    model: nn.Module,
    part: str,
    rule: Rule,
    layers: list[Layer],
    budget: Budget | None,
    sizes: list[LayerSize],
    state: dict[str, Any],
    structure: Structure | None = None,
) -> dict[str, Any]:
    """Describe a wiring in values that JSON can hold.

    Args:
        model: the model that the layers' names refer to: the wired one, or one that contains it.
        part: the name of the wired model in it, "" for the model itself.
        rule: the rule.
        layers: the wired layers.
        budget: the budget as given, or None if the rule has its own.
        sizes: the sizes of the layers.
        state: the state of the handle.
        structure: which edges are real together, if not each by itself. Budgets then count groups.

    Raises:
        WiringError: if the rule or a schedule of the budget cannot be made again from its settings.
    """
    names: dict[int, list[str]] = {}
    for name, _, _, edges in wired(model):
        names.setdefault(id(edges), []).append(name)
    if missing := [layer.name for layer in layers if id(layer.edges) not in names]:
        raise WiringError(f"{missing[0]} is not a wired layer of this {type(model).__name__}.")
    counts_nodes = any(size.nodes is not None for size in sizes)
    return {
        "format": FORMAT if counts_nodes else FREE_FORMAT if structure is None else STRUCTURE_FORMAT,
        "version": __version__,
        "model": type(model).__name__,
        "part": part,
        "rule": _describe_rule(rule),
        "budget": None if budget is None else _describe_budget(budget, sizes, [names[id(x.edges)][0] for x in layers]),
        "layers": [
            {
                "names": names[id(layer.edges)],
                "shape": list(layer.weight.shape),
                "axes": None if layer.edges.axes is None else " ".join(layer.edges.axes),
                "allowed": layer.edges.possible_edges,
                "masked": layer.edges.allowed is not None,
                "cost": size.cost,
                **({} if size.nodes is None else {"nodes": list(size.nodes)}),
            }
            for layer, size in zip(layers, sizes, strict=True)
        ],
        "state": state,
        **({} if structure is None else {"structure": structure.text}),
    }


def check_format(description: Any) -> None:
    """Raise unless this is a description that this version can read."""
    if not isinstance(description, Mapping) or not {"format", "rule", "layers", "state"} <= description.keys():
        raise WiringError(
            f"expected the description of a wiring (Wiring.describe()), got {type(description).__name__} without it."
        )
    if not is_int(description["format"]) or description["format"] > FORMAT:
        raise WiringError(
            f"the wiring was saved by wirings {description.get('version', '?')} in format {description['format']!r}, "
            f"but this is wirings {__version__}, which reads formats up to {FORMAT}: upgrade wirings."
        )


def check_costs(layers: Sequence[Mapping[str, Any]]) -> None:
    """Raise if an edge costs nothing, or an edge or node so much that sharing out a budget would take all memory."""
    for layer in layers:
        if not is_int(layer["cost"]) or not 1 <= layer["cost"] <= MOST_COST:
            raise WiringError(
                f"'cost' in the description of a layer must be an integer from 1 to {MOST_COST:,}, got "
                f"{brief(layer['cost'])}."
            )
        nodes = layer.get("nodes")
        right = isinstance(nodes, list) and all(is_int(cost) and 0 <= cost <= MOST_COST for cost in nodes)
        if nodes is not None and not right:
            raise WiringError(
                f"'nodes' in the description of a layer must be integers from 0 to {MOST_COST:,}, got {brief(nodes)}."
            )


def describe_part(description: Mapping[str, Any]) -> dict[str, Any]:
    """A description with the names in the part that was wired, instead of those in the model that it was saved with."""
    prefix = f"{description['part']}."
    layers = [
        {**layer, "names": [name.removeprefix(prefix) for name in layer["names"] if name.startswith(prefix)]}
        for layer in description["layers"]
    ]
    budget = description.get("budget")
    if budget is not None and budget.get("mapping") is not None:
        mapping = {name.removeprefix(prefix): amount for name, amount in budget["mapping"].items()}
        budget = {**budget, "mapping": mapping}
    return {**description, "part": "", "budget": budget, "layers": layers}


# ---- rules ----------------------------------------------------------------------------------------------------------


def _describe_rule(rule: Rule) -> dict[str, Any]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = [p.name for p in inspect.signature(type(rule)).parameters.values() if p.kind not in kinds]
    remedy = "Register the rule (wirings.rules.register), and keep its settings as attributes of the same names."
    try:
        settings = {name: getattr(rule, name) for name in parameters}
        made = rules.get(rule.name, rule.schedule, **settings)
        described = {"name": rule.name, "settings": settings, "schedule": rule.schedule}
        json.dumps(described)
    except (WiringError, AttributeError, TypeError, ValueError) as error:
        raise WiringError(f"rule {rule!r} cannot be made again from its settings: {error}. {remedy}") from error
    if type(made) is not type(rule):
        raise WiringError(f"rule {rule!r} is not the registered rule {rule.name!r}. {remedy}")
    return described


def make_rule(description: Mapping[str, Any]) -> Rule:
    """The rule of a description."""
    return rules.get(description["name"], description.get("schedule"), **description.get("settings", {}))


# ---- budgets --------------------------------------------------------------------------------------------------------


def _describe_budget(budget: Budget, sizes: list[LayerSize], names: list[str]) -> dict[str, Any]:
    mapping = None
    if budget.mapping is not None:  # by the layers' names, which patterns may no longer match in a larger model
        mapping = {name: budget.amount_for(size.names) for name, size in zip(names, sizes, strict=True)}
    return {
        "density": _describe_amount(budget.density),
        "k": _describe_amount(budget.k),
        "mapping": None if mapping is None else {p: _describe_amount(amount) for p, amount in mapping.items()},
        "share": budget.share,
        "ramp": None if budget.ramp is None else _describe_amount(budget.ramp.way),
        "spent": budget.spent,
    }


def make_budget(description: Mapping[str, Any] | None) -> Budget | None:
    """The budget of a description."""
    if description is None:
        return None
    mapping, ramp, spent = (description.get(key) for key in ("mapping", "ramp", "spent"))
    if spent is not None and not (is_int(spent) and spent > 0):  # dividing less than nothing would not end
        raise WiringError(f"'spent' in the description of a budget must be a positive integer, got {spent!r:.60}.")
    return Budget(
        density=_make_amount(description.get("density")),
        k=description.get("k"),
        mapping=None if mapping is None else {p: _make_amount(amount) for p, amount in mapping.items()},
        share=description.get("share", "uniform"),
        ramp=None if ramp is None else Ramp(_make_amount(ramp)),
        spent=spent,
    )


def _describe_amount(amount: Amount | None) -> Any:
    if isinstance(amount, ConstantSchedule):
        return float(amount.density)
    if isinstance(amount, Schedule):
        kind = next((kind for kind, cls in KINDS.items() if type(amount) is cls), None)
        if kind is None:
            raise WiringError(f"the schedule {amount!r} is not one of {', '.join(c.__name__ for c in KINDS.values())}.")
        return {"kind": kind, **{name: _number(value) for name, value in vars(amount).items()}}
    return None if amount is None else _number(amount)


def _make_amount(amount: Any) -> Any:
    if not isinstance(amount, Mapping):
        return amount
    kind, *values = (amount.get(key) for key in ("kind", "start", "end", "steps", "begin", "every"))
    if kind not in KINDS:
        raise unknown("kind of schedule", str(kind), KINDS)
    schedule: Any = KINDS[kind]
    return schedule(*values)


def _number(value: Any) -> int | float:
    return int(value) if is_int(value) else float(value)
