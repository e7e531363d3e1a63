"""Models by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeVar, overload

from torch import nn

from wirings.errors import WiringError, unknown
from wirings.models.option_groups import LayerWiring
from wirings.utils.checks import is_int

M = TypeVar("M", bound=Callable[..., nn.Module])


@dataclass(frozen=True)
class RegisteredModel:
    """A function that builds a model, and the options it takes."""

    build: Callable[..., nn.Module]
    groups: dict[str, Any]
    """Parameters of the function that are groups of options: dataclasses, with the model's defaults."""
    own: dict[str, Any]
    """The model's own options and their defaults."""
    wires_layers: bool
    """Whether the layers are wired after building, since the function takes no rule itself."""

    @property
    def options(self) -> dict[str, Any]:
        """All options and their defaults."""
        grouped = {f.name: getattr(group, f.name) for group in self.groups.values() for f in fields(group)}
        return {**grouped, **self.own}

    def __call__(self, options: dict[str, Any]) -> nn.Module:
        """Build the model with these options, all of which must be known."""
        given = dict(options)
        groups = {}
        for parameter, group in self.groups.items():
            mine = {field.name: given.pop(field.name) for field in fields(group) if field.name in given}
            groups[parameter] = replace(group, **mine)
        if not self.wires_layers:
            return self.build(**groups, **given)
        wiring = groups.pop(_WIRING)
        return wiring.wire(self.build(**groups, **given))


class BuiltAs(NamedTuple):
    """How `get` built a model."""

    name: str
    options: dict[str, Any]
    """The options that were given, except for the rule, which the model's wiring knows."""


_WIRING = "wiring"
_BUILT_AS = "_built_as"
_registry: dict[str, RegisteredModel] = {}


@overload
def register(build: M) -> M: ...


@overload
def register(*, passes_on: Iterable[str]) -> Callable[[M], M]: ...


def register(build: M | None = None, *, passes_on: Iterable[str] = ()) -> M | Callable[[M], M]:
    """Function decorator that makes a model available under the function's name.

    The function's keyword parameters are the model's options. A parameter whose default is a dataclass is a group of
    options, such as `NetworkSize`: each of its fields is an option, and the function is called with the whole group. So
    a model states only its own options and how its defaults differ. A function that takes no ``rule``, neither by
    itself nor in a group, builds a plain model; `get` then wires all its layers and takes the options of `LayerWiring`.

    Args:
        build: The function.
        passes_on: Names of further options that the function takes as ``**`` arguments and passes on.

    >>> @register
    ... def two_linear(hidden: int = 8, classes: int = 10) -> nn.Module:
    ...     return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, classes))
    >>> get("two_linear", rule="dnw", density=0.5, classes=2).wiring.look()[1].edges
    8
    >>> _ = _registry.pop("two_linear")
    """

    def add(function: M) -> M:
        name = function.__name__
        present = _registry[name].build if name in _registry else function
        # The same function again is fine: notebooks run a cell twice.
        if (present.__module__, present.__qualname__) != (function.__module__, function.__qualname__):
            raise WiringError(f"a model named {name!r} is registered already. Choose another name.")
        _registry[name] = _describe(function, passes_on)
        return function

    return add if build is None else add(build)


def _describe(function: Callable[..., nn.Module], passes_on: Iterable[str]) -> RegisteredModel:
    groups: dict[str, Any] = {}
    own: dict[str, Any] = dict.fromkeys(passes_on)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        if is_dataclass(parameter.default) and not isinstance(parameter.default, type):
            groups[parameter.name] = parameter.default
        else:
            own[parameter.name] = parameter.default
    model = RegisteredModel(function, groups, own, wires_layers=False)
    if "rule" in model.options:
        return model
    return RegisteredModel(function, {**groups, _WIRING: LayerWiring()}, own, wires_layers=True)


def names() -> list[str]:
    """Return the names of the registered models, sorted."""
    return sorted(_registry)


def options(name: str) -> dict[str, Any]:
    """Return the options that a model takes and their defaults (None for those that it passes on)."""
    if name not in _registry:
        raise unknown("model", name, _registry)
    return _registry[name].options


def is_bundled(name: str) -> bool:
    """Return whether a model comes with the library; others are registered by users' code."""
    return name in _registry and _registry[name].build.__module__.partition(".")[0] == __name__.partition(".")[0]


def get(name: str, **given: Any) -> nn.Module:
    """Build a registered model.

    Args:
        name: One of `names`.
        given: Options of the model, see `options`.
    """
    known = options(name)
    for key in given:
        if key not in known:
            raise unknown(f"option of model {name!r}:", key, known)
    classes = given.get("classes", 1)
    if not is_int(classes) or classes < 1:
        raise WiringError(f"classes must be an integer of at least 1, got {classes!r}.")
    model = _registry[name](given)
    model.__dict__[_BUILT_AS] = BuiltAs(name, {key: value for key, value in given.items() if key != "rule"})
    return model


def built_as(model: nn.Module) -> BuiltAs | None:
    """Return the name and the options that `get` built a model with; None for any other model.

    >>> built_as(get("resnet18", rule="dnw", density=0.1, width=0.25))
    BuiltAs(name='resnet18', options={'density': 0.1, 'width': 0.25})
    """
    return model.__dict__.get(_BUILT_AS)
