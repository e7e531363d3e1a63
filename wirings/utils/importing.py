"""Functions of a user's own, named as ``package.module:function``."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wirings.errors import WiringError
from wirings.utils.text import brief

_NOT_OWN = {*sys.stdlib_module_names, "torch"}
"""Packages with functions that run programs or load code, as their arguments, which are settings, say."""


def is_import_path(name: str) -> bool:
    """Whether ``name`` refers to a function by module and name, such as ``package.module:function``."""
    return ":" in name


def check_import_path(path: str, setting: str) -> None:
    """Raise unless ``path`` has the form ``package.module:function``. Nothing is imported."""
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", path):
        raise WiringError(f"{setting} must be a name or package.module:function, got {brief(path)}.")


def import_function(path: str, setting: str) -> Callable[..., Any]:
    """Import a function. Modules in the current directory are found, as by ``python -m``.

    Args:
        path: Module and name of the function, such as ``package.module:function``.
        setting: What messages call the setting that holds ``path``, such as ``"model.name"``.
    """
    check_import_path(path, setting)
    module_name, _, name = path.partition(":")
    here = os.getcwd()
    if not sys.flags.safe_path and not {"", here} & set(sys.path):
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise WiringError(
                f"{setting} is {path!r}, but there is no module {error.name!r} in {here} or among the installed "
                "packages. Fix the name, or start in the directory that contains the module."
            ) from error
        raise WiringError(
            f"{setting} is {path!r}, but importing {module_name!r} failed: {type(error).__name__}: {error}"
        ) from error
    top, file = module_name.partition(".")[0], Path(getattr(module, "__file__", None) or "")
    # A file of the same name in the current directory is the user's own; an environment below it is not.
    if top in _NOT_OWN and not (file == Path(here, f"{top}.py") or file.is_relative_to(Path(here, top))):
        raise WiringError(
            f"{setting} is {path!r}, but must name a function of your own: settings cannot call what Python and "
            "PyTorch provide, such as torch.hub:load. Write a function that does."
        )
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = difflib.get_close_matches(name, functions, n=1)
        hint = f" Did you mean {module_name}:{near[0]}?" if near else ""
        raise WiringError(f"{setting} is {path!r}, but module {module_name!r} has no function {name!r}.{hint}")
    return function


def has_parameter(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of this name; ``**kwargs`` does not count, see `takes_argument`."""
    return name in inspect.signature(function).parameters


def takes_argument(function: Callable[..., Any], name: str) -> bool:
    """Whether a function can be called with a keyword argument ``name``, also by ``**kwargs``."""
    parameters = inspect.signature(function).parameters.values()
    return has_parameter(function, name) or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def check_function_arguments(function: Callable[..., Any], path: str, *positional: Any, **named: Any) -> None:
    """Raise unless a function can be called with these arguments. A TypeError raised inside of it is not caught."""
    try:
        inspect.signature(function).bind(*positional, **named)
    except TypeError as error:
        given = ", ".join(named) or "none"
        raise WiringError(f"{path} cannot be called with its options ({given}): {error}.") from error
