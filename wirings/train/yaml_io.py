"""Read and write YAML."""

from __future__ import annotations

import re
from typing import Any

import yaml  # type: ignore[import-untyped]

from wirings.errors import WiringError

LARGEST = 100_000
"""Most values that a YAML text may stand for, with every alias (``*name``) counted as what it refers to."""


def parse_yaml(text: str, where: str) -> Any:
    """Parse a YAML text to plain values.

    Args:
        text: The text. Aliases that refer to themselves, or that multiply to more than `LARGEST` values, are rejected.
        where: What messages call it.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _size(node, {}) <= LARGEST:
            return loader.construct_document(node)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # the last two: a 13th month, brackets without end
        raise WiringError(f"{where} is not YAML: {' '.join(str(error).split())}") from error
    except (AttributeError, LookupError, TypeError, OverflowError) as error:  # PyYAML, for !!timestamp z or !!bool z
        raise WiringError(f"{where} is not YAML: a tag (!!…) does not fit its value.") from error
    raise WiringError(f"{where} stands for more than {LARGEST:,} values. Use fewer aliases (*name).")


def _size(node: Any, known: dict[int, int | None]) -> int:
    """The number of values that a YAML node stands for. ``known``: sizes by node, None while one is being counted."""
    if not isinstance(node.value, list):
        return 1
    if id(node) not in known:
        known[id(node)] = None
        parts = [part for item in node.value for part in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] = 1 + sum(_size(part, known) for part in parts)
    size = known[id(node)]
    if size is None:
        raise yaml.composer.ComposerError(None, None, "an alias refers to itself", node.start_mark)
    return size


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Safe YAML in which 1e-4 is a number (PyYAML wants 1.0e-4), 2:4 is text, and a duplicate key is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key.value, str):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"found the key {key.value!r} twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _without_base_60(resolvers: dict[Any, list[tuple[str, Any]]]) -> dict[Any, list[tuple[str, Any]]]:
    """YAML's rules for what a plain text stands for, without those that read 2:4 as the number 124."""
    plain = {
        "tag:yaml.org,2002:int": re.compile(r"[-+]?(0b[01_]+|0x[\da-fA-F_]+|0[0-7_]*|[1-9][\d_]*)$"),
        "tag:yaml.org,2002:float": re.compile(
            r"[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*)([eE][-+]\d+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
        ),
    }
    return {first: [(tag, plain.get(tag, rule)) for tag, rule in rules] for first, rules in resolvers.items()}


_Loader.yaml_implicit_resolvers = _without_base_60(_Loader.yaml_implicit_resolvers)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)[eE][-+]?\d+$"), list("-+.0123456789")
)


def dump_yaml(value: Any) -> str:
    """Format a plain value as YAML; keys keep their order."""
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
    return text
