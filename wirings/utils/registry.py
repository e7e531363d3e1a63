"""Classes that are found by their name, such as rules and node functions."""

from __future__ import annotations

from typing import Any

from wirings.errors import WiringError


def add_class(registry: dict[str, Any], cls: Any, kind: str) -> None:
    """Add a class to a registry under its attribute ``name``.

    Args:
        registry: classes by name.
        cls: the class to add.
        kind: what messages call such a class, such as ``"rule"``.
    """
    name = getattr(cls, "name", "")
    if not name:
        raise WiringError(f"{cls.__qualname__} has no name to register it by. Set the class attribute name.")
    if name in registry:
        raise WiringError(f"a {kind} named {name!r} is already registered ({registry[name].__qualname__}).")
    registry[name] = cls
