"""Recipes: one small YAML file a row of the paper's tables, which holds only what differs from its table's base.

    table1/base.yaml          settings that all rows share, and `rows`, their order in the paper; a row of another table
                              by its full name
    table1/static-dnw.yaml    settings of this row, `paper` (what the paper reports), `note`

A file of your own works as well: it may name another recipe, or another file, as its `base`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from wirings.errors import WiringError, unknown
from wirings.train import typed_dataclasses as typed
from wirings.train.settings import Settings, from_mapping
from wirings.train.yaml_io import parse_yaml

PAPER = ("accuracy", "std", "top5", "params", "mult_adds", "published")
"""What `paper` may hold: percent, its standard deviation over runs, percent, two numbers, and the percentage that the
authors published with their code; the paper rounds it, or does not have the row."""
_FOLDER = Path(str(files("wirings.train.recipes")))


@dataclass(frozen=True)
class Recipe:
    """A named set of settings."""

    name: str
    settings: Settings
    paper: dict[str, float] | None = None
    """What the paper reports; None if this is no row of it."""
    note: str | None = None
    """What a reader should know of this row."""


def names() -> list[str]:
    """The names of all recipes that come with the package, such as ``table1/static-dnw``."""
    found = (path.relative_to(_FOLDER).with_suffix("") for path in _FOLDER.glob("*/*.yaml") if path.stem != "base")
    return sorted(path.as_posix() for path in found)


def tables() -> list[str]:
    """The names of all tables, such as ``table1``."""
    return sorted({name.partition("/")[0] for name in names()})


def table(number: int | str) -> list[Recipe]:
    """The rows of one table (1, or ``"table1"``), in the paper's order."""
    name = f"table{number}" if str(number).isdecimal() else str(number)
    if name not in tables():
        raise unknown("table", name, tables())
    rows = _read(_FOLDER / name / "base.yaml").get("rows", [])
    return [get(row if "/" in row else f"{name}/{row}") for row in rows]


def get(name: str | Path) -> Recipe:
    """The recipe of that name, or the one in a YAML file of that path, whose name is then the file's."""
    own = isinstance(name, Path) or name.endswith((".yaml", ".yml"))
    if not own and name not in names():
        near = _unknown("recipe", str(name))
        raise WiringError(f"{near} A file of your own is given by its path, which ends in .yaml.")
    path = Path(name) if own else _FOLDER / f"{name}.yaml"
    try:
        mapping = _read(path)
        paper, note = mapping.get("paper"), mapping.get("note")
        if paper is not None:
            paper = _checked_paper(paper)
        if note is not None and not isinstance(note, str):
            raise WiringError(f"note must be a text, but {note!r} came.")
        settings = from_mapping(_with_base(path, mapping, ()))
    except WiringError as error:
        message = str(error) if str(error).startswith(str(path)) else f"{path}: {error}"
        raise WiringError(message) from error
    return Recipe(path.stem if own else str(name), settings, paper, note)


def _with_base(path: Path, mapping: dict[str, Any], above: tuple[Path, ...]) -> dict[str, Any]:
    """The settings of a file on top of those of its base, and of its base's base."""
    if path.resolve() in above:
        raise WiringError(f"{path} is its own base: {' → '.join(step.name for step in (*above, path))}.")
    of_table = path.resolve().parent.parent == _FOLDER.resolve()
    if of_table and path.name == "base.yaml":
        return {key: value for key, value in mapping.items() if key != "rows"}
    settings = {key: value for key, value in mapping.items() if key not in ("base", "paper", "note")}
    base = _named(mapping["base"], path) if "base" in mapping else path.with_name("base.yaml") if of_table else None
    if base is None:
        return settings
    return typed.merged(_with_base(base, _read(base), (*above, path.resolve())), settings)


def _named(base: Any, path: Path) -> Path:
    """The file that is named as the base of the one at ``path``."""
    if not isinstance(base, str):
        raise WiringError(f"base must be a recipe's name or a path, but {base!r} came.")
    if base.endswith((".yaml", ".yml")):
        return path.parent / Path(base).expanduser()
    if base not in names():
        raise _unknown("base", base)
    return _FOLDER / f"{base}.yaml"


def _unknown(kind: str, name: str) -> WiringError:
    """The error for a recipe that does not exist: lists those of its table, or the tables, since all are too many."""
    of_table = [other for other in names() if other.startswith(f"{name.partition('/')[0]}/")]
    near = unknown(kind, name, names(), listed=of_table or [f"{table}/…" for table in tables()])
    return WiringError(f"{near} `wirings recipes` says what each is.")


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise WiringError(f"{path} cannot be read as a recipe: {reason}.") from error
    mapping = parse_yaml(text, str(path))
    if not isinstance(mapping, dict):
        raise WiringError(f"{path} must hold a mapping of settings, such as epochs: 160, but holds {mapping!r}.")
    return mapping


def _checked_paper(paper: Any) -> dict[str, float]:
    if not isinstance(paper, dict) or not {"accuracy", "published"} & paper.keys():
        raise WiringError(f"paper must be a mapping with accuracy, in percent, but {paper!r} came.")
    for key, value in paper.items():
        if key not in PAPER:
            raise unknown("key of paper", str(key), PAPER)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise WiringError(f"paper.{key} must be a number, but {value!r} came.")
    return dict(paper)
