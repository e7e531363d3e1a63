"""Typed dataclasses from plain values, such as YAML and JSON hold, and back; errors name the key."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import math
import textwrap
import types
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from wirings.errors import WiringError, unknown
from wirings.utils.text import brief, shortened


class TypedDataclass:
    """Base class of frozen dataclasses that check their values against the fields' annotations.

    Where a float is expected, an integer or a string such as "1e-4" is accepted; where a tuple is expected, a list. Any
    other value that does not match the annotation raises a `WiringError` that names the key.
    """

    prefix: ClassVar[str] = ""
    """Prefix of the fields' names in messages, such as ``"optimizer."``."""

    def __post_init__(self) -> None:
        for name, annotation in typed_fields(type(self)).items():
            object.__setattr__(self, name, _checked(getattr(self, name), annotation, self.prefix + name))
        self.check()

    def check(self) -> None:
        """Raise a `WiringError` if a value has the right type but is invalid."""

    def need(self, name: str, right: bool, expected: str) -> None:
        """Raise unless the field ``name`` is None or ``right`` is true; ``expected`` completes "must be …"."""
        value = getattr(self, name)
        if value is not None and not right:
            raise WiringError(f"{self.prefix + name} must be {expected}, got {shortened(str(to_plain(value)), 200)}.")


T = TypeVar("T", bound=TypedDataclass)


def build(cls: type[T], mapping: Any, what: str = "setting") -> T:
    """Build a dataclass, and the dataclasses inside it, from a mapping of plain values.

    Args:
        cls: the dataclass.
        mapping: its fields; those left out get their defaults.
        what: what messages call a field.
    """
    return _build(cls, mapping, "", cls, what)


def _build(cls: type[T], mapping: Any, key: str, root: type, what: str) -> T:
    if not isinstance(mapping, Mapping):
        raise _wrong(key or "the file", f"a mapping ({', '.join(typed_fields(cls))})", mapping)
    prefix = f"{key}." if key else ""
    values: dict[str, Any] = {}
    for name, value in mapping.items():
        if name not in typed_fields(cls):
            raise unknown_key(f"{prefix}{name}", root, what)
        annotation = typed_fields(cls)[name]
        values[name] = _build(annotation, value, prefix + name, root, what) if _is_group(annotation) else value
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in values or not _required(field):
            continue
        annotation = typed_fields(cls)[field.name]
        if not _is_group(annotation):
            raise WiringError(f"the {what} {prefix + field.name!r} is missing. It must be {_expected(annotation)}.")
        values[field.name] = _build(annotation, {}, prefix + field.name, root, what)
    return cls(**values)


def to_plain(value: Any, key: str = "the value") -> Any:
    """Copy ``value`` to plain values that YAML and JSON can hold: dataclasses become mappings, tuples become lists."""
    if isinstance(value, TypedDataclass):
        prefix = "" if key == "the value" else f"{key}."
        return {name: to_plain(getattr(value, name), prefix + name) for name in typed_fields(type(value))}
    if isinstance(value, Mapping):
        if wrong := [name for name in value if not isinstance(name, str)]:
            raise WiringError(f"{key} must have strings as keys, got {brief(wrong[0])}.")
        return {name: to_plain(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item, key) for item in value]
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    raise _wrong(key, "a string, a finite number, true, false, null, or a list or mapping of these", value)


def typed_fields(cls: type) -> dict[str, Any]:
    """The fields of a dataclass and their types."""
    return _typed_fields(cls)


@functools.cache
def _typed_fields(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def leaves(cls: type, prefix: str = "") -> dict[str, Any]:
    """The dotted names of all fields that are not dataclasses themselves, and their types."""
    found: dict[str, Any] = {}
    for name, annotation in typed_fields(cls).items():
        found.update(
            leaves(annotation, f"{prefix}{name}.") if _is_group(annotation) else {f"{prefix}{name}": annotation}
        )
    return found


def documented(cls: type, prefix: str = "") -> dict[str, str]:
    """The dotted names of all fields and their help texts: the docstrings below them in the source."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for field, below in zip(body.body, [*body.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        name = field.target.id
        if _is_group(typed_fields(cls).get(name)):
            found.update(documented(typed_fields(cls)[name], f"{prefix}{name}."))
        elif isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[prefix + name] = " ".join(str(below.value.value).split())
    return found


def unknown_key(key: str, root: type, what: str = "setting") -> WiringError:
    """The error for a dotted key that ``root`` does not have: it suggests the nearest key and lists its group."""
    group, _, last = key.rpartition(".")
    cls: Any = root
    for part in group.split(".") if group else []:
        cls = typed_fields(cls).get(part) if _is_group(cls) else None
    if not _is_group(cls):
        cls, group = root, ""
    choices = [f"{group}.{name}" if group else name for name in typed_fields(cls)]
    # Only the last parts are compared: with the same group in front, all keys look alike.
    by_last = {name.rpartition(".")[2]: name for name in [*leaves(root), *choices]}
    near = difflib.get_close_matches(last, by_last, n=1)
    hint = f" Did you mean {by_last[near[0]]!r}?" if near else ""
    return WiringError(f"unknown {what} {brief(key)}.{hint} Choose from: {', '.join(choices)}.")


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``below`` updated by ``above``, mapping by mapping; lists are replaced."""
    both = dict(below)
    for key, value in above.items():
        under = both.get(key)
        both[key] = merged(under, value) if isinstance(under, Mapping) and isinstance(value, Mapping) else value
    return both


def put(mapping: dict[str, Any], key: str, value: Any, root: type) -> None:
    """Set the value of a dotted key in the mapping that `to_plain` made of a ``root``.

    Fields that are mappings accept any key.
    """
    known = leaves(root)
    free = [name for name, annotation in known.items() if get_origin(annotation) is dict]
    if key not in known and not any(key.startswith(f"{name}.") for name in free):
        if below := [name for name in known if name.startswith(f"{key}.")]:
            raise WiringError(f"{key!r} is a group. Set one of {', '.join(below)}.")
        raise unknown_key(key, root)
    *path, last = key.split(".")
    for part in path:
        mapping = mapping.setdefault(part, {})
        if not isinstance(mapping, dict):
            raise WiringError(f"{key!r} cannot be set: {part!r} must be a mapping, got {brief(mapping)}.")
    mapping[last] = value


def at(mapping: Any, key: str, absent: Any = None) -> Any:
    """The value of a dotted key in nested mappings, or ``absent``."""
    for part in key.split("."):
        if not isinstance(mapping, Mapping) or part not in mapping:
            return absent
        mapping = mapping[part]
    return mapping


def _is_group(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, TypedDataclass)


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _wrong(key: str, expected: str, value: Any) -> WiringError:
    got = "null" if value is None else f"{value!r} ({type(value).__name__})"
    return WiringError(f"{key} must be {expected}, got {shortened(str(got), 200)}.")


_NAMES: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "true or false values"),
    int: ("an integer", "integers"),
    float: ("a finite number", "finite numbers"),
    str: ("a string", "strings"),
}


def _expected(annotation: Any) -> str:
    """What messages call a value of this type."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if option is types.NoneType else _expected(option) for option in inner)
    if origin is Literal:
        return f"one of {_listed(inner)}"
    if origin is tuple:
        return f"a list of {_NAMES[inner[0]][1]}"
    if origin is dict:
        return "a mapping" if inner[1] is Any else f"a mapping to {_NAMES[inner[1]][1]}"
    return _NAMES[annotation][0] if annotation in _NAMES else f"a {annotation.__name__}"


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(repr(name) for name in names)


def _checked(value: Any, annotation: Any, key: str) -> Any:
    """``value``, converted to the annotated type."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        if value is None and types.NoneType in inner:
            return None
        options = [option for option in inner if option is not types.NoneType]
        if len(options) == 1:
            try:
                return _checked(value, options[0], key)
            except WiringError as error:
                if get_origin(options[0]) is Literal and isinstance(value, str):
                    raise
                raise _wrong(key, _expected(annotation), value) from error
    if origin is Literal:
        if isinstance(value, str) and value not in inner:
            raise unknown(key, value, inner)
        if value in inner:
            return value
    elif origin is tuple and isinstance(value, list | tuple):
        return tuple(_checked(item, inner[0], f"{key}[{place}]") for place, item in enumerate(value))
    elif origin is dict and isinstance(value, Mapping):
        copy = to_plain(value, key)
        return {
            name: item if inner[1] is Any else _checked(item, inner[1], f"{key}.{name}") for name, item in copy.items()
        }
    elif annotation is float and not isinstance(value, bool) and isinstance(value, int | float | str):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    elif annotation is int and isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    elif (annotation in (bool, str) or _is_group(annotation)) and isinstance(value, annotation):
        return value
    raise _wrong(key, _expected(annotation), value)
