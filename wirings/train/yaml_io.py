"""Read and write YAML."""

from __future__ import annotations

import re
from typing import Any

import yaml  # type: ignore[import-untyped]

from wirings.errors import WiringError


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML. ``where`` is what messages call the text."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # the last two: a 13th month, deep nesting
        raise WiringError(f"{where} is not YAML: {' '.join(str(error).split())}") from error


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Safe YAML that reads 1e-4 as a number (PyYAML needs 1.0e-4) and rejects duplicate keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key.value, str)]
        for place, key in enumerate(keys):
            if key.value in {other.value for other in keys[:place]}:
                raise yaml.constructor.ConstructorError(
                    None, None, f"found the key {key.value!r} twice", key.start_mark
                )
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)[eE][-+]?\d+$"), list("-+.0123456789")
)


def dump_yaml(value: Any) -> str:
    """Format a plain value as YAML; keys keep their order."""
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
    return text
