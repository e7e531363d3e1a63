"""Models by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from wirings.budget import Amount
from wirings.errors import WiringError, unknown
from wirings.rules import Rule
from wirings.rules import get as get_rule

_registry: dict[str, Callable[..., nn.Module]] = {}
M = TypeVar("M", bound=Callable[..., nn.Module])


def register(make: M) -> M:
    """Make a model available by the name of the function that makes it. Registered models are put through the tests."""
    _registry[make.__name__] = make
    return make


def budget(rule: str | Rule | None, edges: Amount | None, default: int) -> Amount | None:
    """How many edges a model is to have: as given, or ``default``, or none to say where the rule has its own budget."""
    own = rule is not None and get_rule(rule).own_budget
    return default if edges is None and not own else edges


def names() -> list[str]:
    """The registered models' names."""
    return sorted(_registry)


def get(name: str, **settings: Any) -> nn.Module:
    """The model of that name, made with ``settings``."""
    if name not in _registry:
        raise unknown("model", name, _registry)
    try:
        return _registry[name](**settings)
    except TypeError as error:
        raise WiringError(f"model {name!r} does not take these settings: {error}") from error
