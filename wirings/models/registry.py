"""Models by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn

from wirings.budgets.budget import Amount
from wirings.errors import WiringError, unknown
from wirings.rules import Dense, Rule
from wirings.rules import get as get_rule
from wirings.wire.wire import wire_

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


def wired(
    model: nn.Module,
    rule: str | Rule | None,
    density: float | None,
    skip: Sequence[str] = (),
    share: str = "uniform",
) -> nn.Module:
    """A plain model, wired if a ``density`` says how much of it is to stay, or if the rule says that itself.

    The handle is its ``wiring``; None for the dense network, which has nothing to choose. ``share``: as for `wire_`.
    """
    chosen = None if rule is None else get_rule(rule)
    if chosen is None or (isinstance(chosen, Dense) and density is None):
        model.wiring = None  # type: ignore[assignment]
        return model
    if density is None and not chosen.own_budget:
        raise WiringError(
            f"rule {chosen.name!r} needs a budget: give the model a density, the fraction of its weights to keep, or "
            "take the rule 'dense'."
        )
    model.wiring = wire_(model, chosen, density=density, skip=skip, share=share)  # type: ignore[assignment]
    return model


def names() -> list[str]:
    """The registered models' names."""
    return sorted(_registry)


def get(name: str, **settings: Any) -> nn.Module:
    """The model of that name, made with ``settings``."""
    if name not in _registry:
        raise unknown("model", name, _registry)
    classes = settings.get("classes", 1)
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 1:
        raise WiringError(f"classes is how many a model tells apart, at least 1, but it is {classes!r}.")
    try:
        return _registry[name](**settings)
    except TypeError as error:
        raise WiringError(f"model {name!r} does not take these settings: {error}") from error
