"""Rules by name."""

from __future__ import annotations

from typing import Any, TypeVar

from wirings.budgets.schedules import Ramp
from wirings.errors import WiringError, unknown
from wirings.rules.rule import Rule
from wirings.utils.registry import Registry
from wirings.utils.text import brief

_registry: Registry[Rule] = Registry("rule")
R = TypeVar("R", bound=type[Rule])
REPLACED = {"nm": 'N:M is a structure that any rule can have: wire_(model, "dnw", structure="2:4").'}
"""Names of rules that are gone, and what to use instead."""


def register(cls: R) -> R:
    """Make a rule available by its ``name``. The contract tests run for every registered rule."""
    return _registry.register(cls)


def names() -> list[str]:
    """The names of the registered rules, sorted."""
    return _registry.names()


def get(rule: str | Rule, schedule: Any = None, **settings: Any) -> Rule:
    """Make the rule of a given name.

    Args:
        rule: a name (see `names`), or a rule, which is returned as it is.
        schedule: how layers decrease to their budgets over training, for any rule: ``"cubic"``, ``"linear"``, or a
            mapping with the defaults ``{"kind": "cubic", "start": 1.0, "begin": 0.0, "end": 0.5, "every": 1}``: from
            the density ``start``, between the fractions ``begin`` and ``end`` of training, with a change every
            ``every`` steps. `Wiring.plan` sets the length of training.
        **settings: the arguments of the rule's constructor.
    """
    if isinstance(rule, Rule):
        if schedule is not None or settings:
            given = ", ".join([*(["schedule"] if schedule is not None else []), *settings])
            raise WiringError(
                f"settings ({given}) go with a rule's name, but got the rule {rule!r}: pass them to its constructor, "
                "and set its schedule as rule.schedule."
            )
        return rule
    if not isinstance(rule, str):
        raise WiringError(
            f"expected the name of a rule or a wirings.rules.Rule, got {brief(rule)}. Names: {', '.join(names())}."
        )
    if rule in REPLACED and rule not in _registry:
        raise WiringError(f"rule {rule!r} no longer exists. {REPLACED[rule]}")
    if rule not in _registry:
        raise unknown("rule", rule, _registry)
    try:
        made = _registry[rule](**settings)
    except TypeError as error:
        raise WiringError(f"rule {rule!r} does not take these settings: {error}") from error
    if schedule is not None:
        Ramp.of(schedule)  # raises if there is no such schedule
        made.schedule = schedule
    return made
