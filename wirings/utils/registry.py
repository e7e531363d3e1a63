"""Classes that are found by their name, such as rules and node functions."""

from __future__ import annotations

from typing import Any, TypeVar

from wirings.errors import WiringError

T = TypeVar("T")
C = TypeVar("C", bound=type[Any])


class Registry(dict[str, type[T]]):
    """Classes by their attribute ``name``.

    Args:
        kind: what messages call such a class, such as ``"rule"``.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def register(self, cls: C) -> C:
        """Add a class, and return it, so that this can be a decorator."""
        name = getattr(cls, "name", "")
        if not name:
            raise WiringError(f"{cls.__qualname__} has no name to register it by. Set the class attribute name.")
        if name in self:
            raise WiringError(f"a {self.kind} named {name!r} is already registered ({self[name].__qualname__}).")
        self[name] = cls
        return cls

    def names(self) -> list[str]:
        """The names of the registered classes, sorted."""
        return sorted(self)
