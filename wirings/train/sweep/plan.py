"""Which runs a sweep has: every recipe with every combination of settings and every seed.

A recipe that starts from the trained network of another recipe needs a run of that one with the same seed. The plan has
it once for all runs that start from it, before them.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wirings.errors import WiringError, unknown
from wirings.train import recipes
from wirings.train.phases import first_settings
from wirings.train.settings import Settings, with_overrides
from wirings.train.yaml_io import parse_yaml
from wirings.utils.files import read_regular_text
from wirings.utils.text import brief

KEYS = ("recipes", "seeds", "settings", "variants")
"""Keys of a sweep's YAML file."""
_LONGEST = 100
"""Characters of a folder's name that describe the settings."""


@dataclass(frozen=True)
class SweepRun:
    """One training run of a sweep."""

    recipe: str
    """Name of the recipe, or the path of its YAML file, as `wirings train` takes it."""
    name: str
    """Name of the recipe."""
    seed: int
    """Random seed."""
    changes: tuple[str, ...]
    """Settings that differ from the recipe's, as ``--set`` takes them."""
    settings: Settings = field(repr=False)
    """All settings of the run."""
    start: SweepRun | None = None
    """The run whose trained network this one starts from, or None."""
    requested: bool = True
    """Whether the user asked for this run. False if it is only there for others to start from."""

    @functools.cached_property
    def path(self) -> str:
        """The run's folder, relative to the sweep's: ``<recipe>/[<settings>/]seed<N>``."""
        written = ",".join(change.replace('"', "") for change in self.changes)
        label = re.sub(r"[^\w.,=+-]+", "_", written)[:_LONGEST]
        if label != written:  # the digits distinguish settings that the label does not
            label += "-" + hashlib.sha256("\n".join(self.changes).encode()).hexdigest()[:8]
        return "/".join([self.name, *([label] if label else []), f"seed{self.seed}"])


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep trains: recipes × seeds × settings × variants."""

    recipes: Sequence[str]
    """Names of recipes, patterns of names such as ``"ste/*-2"``, or paths of YAML files."""
    seeds: Sequence[int] = (0,)
    """Random seeds."""
    grid: Sequence[Sequence[str]] = ()
    """The values of each changed setting, such as ``["optimizer.lr=0.1", "optimizer.lr=0.05"]``. All combinations are
    trained."""
    variants: Sequence[Sequence[str]] = ()
    """Groups of changes that belong together. Each group is trained with every combination of ``grid``."""
    path: Path | None = None
    """The YAML file that it was read from, which messages name."""

    def runs(self) -> list[SweepRun]:
        """Return the runs in the order in which to start them. All settings are checked."""
        with _naming(self.path):
            return self._runs()

    def _runs(self) -> list[SweepRun]:
        names = [name for word in self.recipes for name in matching_recipes(word)]
        if not names:
            raise WiringError("a sweep needs a recipe, such as: wirings sweep table2/dnw table2/random --seed 0,1")
        if not self.seeds:
            raise WiringError("a sweep needs a seed, such as --seed 0.")
        for what, values in (("recipe", names), ("seed", self.seeds)):
            if len(set(values)) < len(values):
                twice = next(value for value in values if list(values).count(value) > 1)
                raise WiringError(f"the {what} {twice!r} is given twice. Remove one.")
        found: dict[str, SweepRun] = {}
        for seed, name in itertools.product(self.seeds, names):  # one whole comparison early, then the next seed
            for texts in combinations(self.grid, self.variants):
                for run in _with_first(name, seed, texts):
                    known = found.setdefault(run.path, run)
                    if known.settings != run.settings or known.recipe != run.recipe:
                        raise WiringError(
                            f"two runs of this sweep have the same folder {run.path}: {known.recipe} and {run.recipe} "
                            "have the same name, or settings that its name does not distinguish. Rename one of the "
                            "files."
                        )
                    if run.requested and not known.requested:
                        found[run.path] = replace(known, requested=True)
        return list(found.values())


@contextmanager
def _naming(path: Path | None) -> Iterator[None]:
    """Name the file of a sweep in messages that do not."""
    try:
        yield
    except WiringError as error:
        if path is None or str(path) in str(error):
            raise
        raise WiringError(f"{path}: {error}") from error


def matching_recipes(word: str) -> list[str]:
    """The names of the recipes that match a pattern; a word without wildcards is a name."""
    if not any(letter in word for letter in "*?[") or (recipes.is_file(word) and Path(word).is_file()):
        return [word]
    found = fnmatch.filter(recipes.names(), word)
    if not found:
        raise WiringError(f"no recipe matches {brief(word)}. `wirings recipes` lists them.")
    return found


def combinations(grid: Sequence[Sequence[str]], variants: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return every combination of changes: one value of each setting in ``grid``, and one of ``variants``.

    >>> combinations([["a=1"], ["b=1", "b=2"]], [["c=1"], ["c=2", "d=0"]])
    [('a=1', 'b=1', 'c=1'), ('a=1', 'b=1', 'c=2', 'd=0'), ('a=1', 'b=2', 'c=1'), ('a=1', 'b=2', 'c=2', 'd=0')]
    """
    return [(*one, *variant) for one in itertools.product(*grid) for variant in (variants or [()])]


def _with_first(name: str, seed: int, texts: Sequence[str]) -> list[SweepRun]:
    """A run, after the run that it starts from, if any."""
    recipe = recipes.get(name)
    keys = [text.partition("=")[0].strip() for text in texts]
    if "seed" in keys:
        raise WiringError("the seeds of a sweep are set with --seed, not with --set seed=….")
    if len(set(keys)) < len(keys):
        raise WiringError(f"the setting {max(keys, key=keys.count)!r} is given twice for one run: {', '.join(texts)}.")
    settings, overrides = with_overrides(recipe.settings, texts)
    settings = replace(settings, seed=seed)
    run = SweepRun(_absolute(name), recipe.name, seed, tuple(canonical_changes(texts)), settings)
    if settings.start.recipe is None:
        return [run]
    first = recipes.get(settings.start.recipe)
    first_wanted, changed = first_settings(recipe.name, settings, first, overrides)
    if first_wanted.checkpoint_every != first.settings.checkpoint_every:
        changed["checkpoint_every"] = first_wanted.checkpoint_every
    changes = tuple(canonical_changes(f"{key}={json.dumps(value)}" for key, value in changed.items()))
    source = _absolute(settings.start.recipe)
    earlier = SweepRun(source, first.name, seed, changes, first_wanted, requested=False)
    return [earlier, replace(run, start=earlier)]


def _absolute(recipe: str) -> str:
    """A recipe's name, or the absolute path of its file."""
    return str(Path(recipe).resolve()) if recipes.is_file(recipe) else recipe


def canonical_changes(texts: Iterable[str]) -> list[str]:
    """Changes of settings in one order and one spelling, so that 0.10 is 0.1: sorted by key, values as JSON."""
    pairs = [
        (key.strip(), parse_yaml(value, f"the value of {key}")) for key, _, value in (t.partition("=") for t in texts)
    ]
    return [f"{key}={json.dumps(value, sort_keys=True)}" for key, value in sorted(pairs, key=lambda pair: pair[0])]


def parse_values(text: str) -> list[str]:
    """Split the values of one setting, as ``--set`` takes them. Commas in brackets or quotes do not separate values.

    >>> parse_values("optimizer.lr=0.1, 0.05"), parse_values("schedule.milestones=[80, 120]")
    (['optimizer.lr=0.1', 'optimizer.lr=0.05'], ['schedule.milestones=[80, 120]'])
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or not value.strip():
        raise WiringError(f"--set expects name=value, or name=value,value,… for several, got {text!r}.")
    parts, depth, quote = [""], 0, ""
    for letter in value:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        depth += (letter in "[{(") - (letter in ")}]") if not quote else 0
        if letter == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    if not all(part.strip() for part in parts):
        raise WiringError(f"--set {text}: a value between commas is empty.")
    return [f"{key.strip()}={part.strip()}" for part in parts]


def parse_seeds(texts: Sequence[str]) -> list[int]:
    """Parse seeds, written as ``0,1,2`` or ``0-4``.

    >>> parse_seeds(["0-2", "7,9"])
    [0, 1, 2, 7, 9]
    """
    found: list[int] = []
    for part in (part.strip() for text in texts for part in str(text).split(",")):
        match = re.fullmatch(r"(\d{1,19})(?:-(\d{1,19}))?", part, re.ASCII)
        if match is None:
            raise WiringError(f"--seed expects numbers, such as 0,1,2 or 0-4, got {brief(part)}.")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise WiringError(f"--seed {part} is an empty range. Write the smaller number first.")
        if last - first >= _MOST_SEEDS:
            raise WiringError(f"--seed {part} has {last - first + 1:,} seeds; at most {_MOST_SEEDS:,} are allowed.")
        found += range(first, last + 1)
    return found


_MOST_SEEDS = 10_000


def is_sweep_file(path: Path) -> bool:
    """Whether a YAML file describes a sweep rather than a recipe."""
    try:
        mapping = parse_yaml(read_regular_text(path), str(path))
    except (OSError, ValueError):  # reading it as a recipe gives the better message
        return False
    return isinstance(mapping, dict) and "recipes" in mapping


def read_sweep_file(path: Path) -> SweepPlan:
    """Read a sweep's YAML file. Paths of recipes in it are relative to the file."""
    with _naming(path):
        return _read_sweep_file(path)


def _read_sweep_file(path: Path) -> SweepPlan:
    try:
        mapping = parse_yaml(read_regular_text(path), str(path))
    except UnicodeDecodeError as error:
        raise WiringError(f"{path} cannot be read as a sweep: it is not UTF-8 text.") from error
    except OSError as error:
        raise WiringError(f"{path} cannot be read: {error.strerror}.") from error
    if not isinstance(mapping, dict) or "recipes" not in mapping:
        raise WiringError(f"{path} is not a sweep: it must have recipes:, and may have {', '.join(KEYS[1:])}.")
    for key in mapping:
        if key not in KEYS:
            raise unknown("key of a sweep", str(key), KEYS)
    listed = {key: mapping.get(key) or [] for key in KEYS}
    for key in ("recipes", "seeds", "variants"):
        listed[key] = listed[key] if isinstance(listed[key], list) else [listed[key]]
    settings: Any = listed["settings"] or {}
    if not all(isinstance(one, dict) for one in [settings, *listed["variants"]]):
        raise WiringError(f"{path}: settings must be a mapping from settings to values, variants a list of mappings.")
    for key, values in settings.items():
        if values == []:
            raise WiringError(f"{path}: settings has no value for {key}. Give one, or remove the key.")
    return SweepPlan(
        [str(path.parent / n) if recipes.is_file(str(n)) else str(n) for n in listed["recipes"]],
        parse_seeds([str(seed) for seed in listed["seeds"]]) or [0],
        [_texts(path, key, values if isinstance(values, list) else [values]) for key, values in settings.items()],
        [[_texts(path, key, [value])[0] for key, value in one.items()] for one in listed["variants"]],
        path,
    )


def _texts(path: Path, key: Any, values: Sequence[Any]) -> list[str]:
    """The values of a setting as ``--set`` takes them."""
    try:
        return [f"{key}={json.dumps(value)}" for value in values]
    except (TypeError, ValueError) as error:  # a date, for instance
        raise WiringError(f"{path}: the value of {key} must be plain: {error}.") from error
