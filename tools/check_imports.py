"""Check that imports inside `wirings` go one way; `make lint` runs it.

    python -m tools.check_imports [FOLDER OF THE PACKAGE]

Packages are layers, listed below from the ground up. A module must not import from a layer above its own, which also
rules out cycles between layers, and must not use a private name (`_name`) of another layer. Imports inside functions
count like all others; those under ``if TYPE_CHECKING:`` do not, since they only serve annotations.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

LAYERS = (
    ("errors", "version", "utils"),
    ("selection",),
    ("budgets",),
    ("rules",),
    ("wire",),
    ("graph",),
    ("models",),
    ("profiling",),
    ("compaction",),
    ("engine",),
    ("history",),
    ("draw",),
    ("train.data",),
    ("train",),
    ("train.recipes",),
    ("train.phases", "train.networks", "train.tables"),
    ("train.sweep",),
    ("train.integrations",),
    ("cli",),
    ("", "__main__"),  # the root: the public list, and the command
)
"""From the ground up. A module belongs to the longest name that it starts with."""

_LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}


def layer_of(module: str) -> str:
    """The layer of a module, given without the leading ``wirings.``, such as ``train.data.cifar10``."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if (name := ".".join(parts[:length])) in _LEVELS:
            return name
    return ""


def check(package: Path) -> list[str]:
    """The violations in a package's folder, a line each."""
    modules = {_module_of(path, package) for path in package.rglob("*.py")}
    found = []
    for path in sorted(package.rglob("*.py")):
        own = layer_of(_module_of(path, package))
        for line, target, name in _imports(path, package.name, modules):
            other = layer_of(target)
            where = f"{path.relative_to(package.parent)}:{line}"
            if _LEVELS[other] > _LEVELS[own]:
                found.append(f"{where}: {own or 'the root'} must not import {target or 'the root'}, a layer above it")
            private = [part for part in (*target.split("."), name) if part.startswith("_") and part != "__init__"]
            if private and other != own and not private[0].startswith("__"):
                found.append(f"{where}: {private[0]} is private to {other or 'the root'}")
    return found


def _module_of(path: Path, package: Path) -> str:
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path, package: str, modules: set[str]) -> Iterator[tuple[int, str, str]]:
    """Every use of another module of the package: its line, the module, and the name that is used."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    skipped = {id(inner) for node in ast.walk(tree) if _is_for_types(node) for inner in ast.walk(node)}
    bound = {}  # names in this file that are modules of the package
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == package or alias.name.startswith(f"{package}."):
                    yield node.lineno, alias.name.removeprefix(package).lstrip("."), ""
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, "", ""  # relative: name the package, so that its layer can be seen
        elif isinstance(node, ast.ImportFrom) and (
            node.module == package or (node.module or "").startswith(package + ".")
        ):
            base = str(node.module).removeprefix(package).lstrip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                if inner in modules:
                    bound[alias.asname or alias.name] = inner
                    yield node.lineno, inner, ""
                else:
                    yield node.lineno, base, alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in bound:
            yield node.lineno, bound[node.value.id], node.attr


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def main() -> None:
    package = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "wirings"
    found = check(package)
    print("\n".join(found) or "imports go one way")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
