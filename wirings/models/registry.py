"""Models by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from wirings.errors import WiringError, unknown

_registry: dict[str, Callable[..., nn.Module]] = {}
M = TypeVar("M", bound=Callable[..., nn.Module])


def register(make: M) -> M:
    """Make a model available by the name of the function that makes it. Registered models are put through the tests."""
    _registry[make.__name__] = make
    return make


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
