"""Recipes: named settings, with one YAML file for each table of the paper.

    table1.yaml     settings that all rows share, then `rows`, a mapping from a row's name to what it changes; in the
                    paper's order, with `paper` (what the paper reports) and `note`

A row of another table is listed by its full name, such as ``table2/dnw``, with nothing below it. A row that builds on
another recipe names it as its `base`. Recipes that the table does not show are below `unlisted`.

A YAML file of your own is a recipe, too. It may name a recipe or another file as its `base`.
"""

from __future__ import annotations

import copy
import functools
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from wirings.errors import WiringError, unknown
from wirings.train import typed_dataclasses as typed
from wirings.train.settings import Settings, from_mapping
from wirings.train.yaml_io import parse_yaml
from wirings.utils.checks import is_number
from wirings.utils.files import read_regular_text
from wirings.utils.text import shortened

PAPER_KEYS = ("accuracy", "std", "top5", "params", "mult_adds", "published")
"""Keys of `paper`: accuracy in percent, its standard deviation over runs, top-5 accuracy in percent, number of
parameters, number of multiply-adds, and the accuracy that the authors published with their code (which the paper rounds
or omits)."""
_FOLDER = Path(str(files("wirings.train.recipes")))


@dataclass(frozen=True)
class Recipe:
    """A named set of settings."""

    name: str
    """Name of the recipe, such as ``table1/static-dnw``; for a file, its name without the ending."""
    settings: Settings
    """Settings of the training run."""
    paper: dict[str, float] | None = None
    """What the paper reports (see `PAPER_KEYS`), or None if the paper has no such row."""
    note: str | None = None
    """Remark for readers of the table."""


@dataclass(frozen=True)
class _TableFile:
    """What a table's YAML file holds."""

    shared: dict[str, Any]
    """Settings that all rows share."""
    rows: tuple[str, ...]
    """Full names of the rows, in the paper's order."""
    recipes: dict[str, dict[str, Any]]
    """What each recipe of this file changes, by its full name; unlisted recipes included."""


def names() -> list[str]:
    """Return the names of all recipes that come with the package, sorted, such as ``table1/static-dnw``."""
    return sorted(name for table in _table_files().values() for name in table.recipes)


def tables() -> list[str]:
    """Return the names of all tables, sorted, such as ``table1``."""
    return sorted(_table_files())


def table(number: int | str) -> list[Recipe]:
    """Return the rows of a table in the paper's order.

    Args:
        number: Number of the table in the paper, or its name, such as ``"table1"`` or ``"resnet"``.
    """
    name = f"table{number}" if str(number).isdecimal() else str(number)
    if name not in tables():
        raise unknown("table", name, tables())
    return [get(row) for row in _table_files()[name].rows]


def is_file(name: str | Path) -> bool:
    """Whether ``name`` is the path of a YAML file rather than the name of a recipe."""
    if not isinstance(name, (str, Path)):
        raise WiringError(f"expected the name of a recipe or the path of a YAML file, got {type(name).__name__}.")
    return isinstance(name, Path) or name.endswith((".yaml", ".yml"))


def get(name: str | Path) -> Recipe:
    """Return a recipe.

    Args:
        name: Name of a recipe (see `names`), or the path of a YAML file.
    """
    if not is_file(name) and name not in names():
        error = _unknown_recipe("recipe", str(name))
        raise WiringError(f"{error} To train a file of your own, give its path, which ends in .yaml.")
    source = Path(name) if is_file(name) else str(name)
    try:
        mapping = _changes(source)
        paper, note = mapping.get("paper"), mapping.get("note")
        if paper is not None:
            paper = _checked_paper(paper)
        if note is not None and not isinstance(note, str):
            raise WiringError(f"note must be a string, got {note!r}.")
        settings = from_mapping(_resolved(source, ()))
        return Recipe(_name_of(source), settings, paper, note)
    except WiringError as error:
        message = str(error) if str(error).startswith(str(source)) else f"{source}: {error}"
        raise WiringError(shortened(message, 1000)) from error


@functools.cache
def _table_files() -> dict[str, _TableFile]:
    """The tables that come with the package, by name."""
    return {path.stem: _read_table(path) for path in sorted(_FOLDER.glob("*.yaml"))}


def _read_table(path: Path) -> _TableFile:
    mapping = _read(path)
    rows, unlisted = mapping.pop("rows"), mapping.pop("unlisted", {})
    own = {name: changes for name, changes in rows.items() if "/" not in name}  # the others are rows of another table
    return _TableFile(
        mapping,
        tuple(name if "/" in name else f"{path.stem}/{name}" for name in rows),
        {f"{path.stem}/{name}": changes or {} for name, changes in {**own, **unlisted}.items()},
    )


def _changes(source: str | Path) -> dict[str, Any]:
    """What a recipe says itself, `base`, `paper` and `note` included. Never changes the cached tables."""
    if isinstance(source, Path):
        return _read(source)
    return copy.deepcopy(_table_files()[source.partition("/")[0]].recipes[source])


def _resolved(source: str | Path, above: tuple[str | Path, ...]) -> dict[str, Any]:
    """The settings of a recipe on top of those of its base or table. ``above``: recipes that are based on this one."""
    key = source.resolve() if isinstance(source, Path) else source
    if key in above:
        chain = [step.name if isinstance(step, Path) else step for step in (*above, key)]
        raise WiringError(f"{source} is its own base: {' → '.join(chain)}.")
    mapping = _changes(source)
    settings = {name: value for name, value in mapping.items() if name not in ("base", "paper", "note")}
    if "base" in mapping:
        return typed.merged(_resolved(_base(mapping["base"], source), (*above, key)), settings)
    if isinstance(source, Path):
        return settings
    return typed.merged(copy.deepcopy(_table_files()[source.partition("/")[0]].shared), settings)


def _base(base: Any, source: str | Path) -> str | Path:
    """The recipe that ``source`` names as its base; a relative path starts from the folder of ``source``."""
    if not isinstance(base, str):
        raise WiringError(f"base must be the name of a recipe or a path, got {base!r}.")
    if is_file(base) and isinstance(source, Path):
        try:
            return source.parent / Path(base).expanduser()
        except RuntimeError as error:
            raise WiringError(f"base {base!r} cannot be found: {error}") from error
    if base not in names():
        raise _unknown_recipe("base", base)
    return base


def _name_of(source: str | Path) -> str:
    """A recipe's name. It is also the name of a folder of runs, so a file cannot be called ``...yaml``."""
    if isinstance(source, str):
        return source
    name = re.sub(r"\.ya?ml$", "", source.name)
    if not name.strip("."):
        raise WiringError(f"{source}: a recipe is named after its file, and {name!r} is not a name. Rename the file.")
    return name


def _unknown_recipe(kind: str, name: str) -> WiringError:
    """The error for an unknown recipe. It lists the recipes of the same table, or the tables: all are too many."""
    of_table = [other for other in names() if other.startswith(f"{name.partition('/')[0]}/")]
    error = unknown(kind, name, names(), listed=of_table or [f"{table}/…" for table in tables()])
    return WiringError(f"{error} `wirings recipes` describes them.")


def _read(path: Path) -> dict[str, Any]:
    try:
        text = read_regular_text(path)
    except UnicodeDecodeError as error:
        raise WiringError(f"{path} cannot be read as a recipe: it is not UTF-8 text.") from error
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise WiringError(f"{path} cannot be read as a recipe: {reason}.") from error
    mapping = parse_yaml(text, str(path))
    if not isinstance(mapping, dict):
        raise WiringError(f"{path} must hold a mapping of settings, such as epochs: 160, got {mapping!r}.")
    return mapping


def _checked_paper(paper: Any) -> dict[str, float]:
    if not isinstance(paper, dict) or not {"accuracy", "published"} & paper.keys():
        raise WiringError(f"paper must be a mapping with accuracy in percent, got {paper!r}.")
    for key, value in paper.items():
        if key not in PAPER_KEYS:
            raise unknown("key of paper", str(key), PAPER_KEYS)
        if not is_number(value):
            raise WiringError(f"paper.{key} must be a number, got {value!r}.")
    return dict(paper)
