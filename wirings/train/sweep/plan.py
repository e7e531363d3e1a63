"""Which runs a sweep has: every recipe with every combination of settings and every seed.

A recipe that starts from another one's network needs a run of that one, with the same seed. It is in the plan once for
all that start from it, before them.
"""

from __future__ import annotations

import fnmatch
import hashlib
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wirings.errors import WiringError, unknown
from wirings.train import recipes
from wirings.train.phases import first_settings
from wirings.train.settings import Settings, with_overrides
from wirings.train.yaml_io import parse_yaml

KEYS = ("recipes", "seeds", "settings", "variants")
_LONGEST = 100
"""Letters of a folder's name that tells settings."""


@dataclass(frozen=True)
class Run:
    """One training run of a sweep."""

    recipe: str
    """What `wirings train` takes: a recipe's name, or the path of a YAML file."""
    name: str
    """The recipe's name."""
    seed: int
    changes: tuple[str, ...]
    """Settings that are not the recipe's, as ``--set`` takes them."""
    settings: Settings = field(repr=False)
    start: Run | None = None
    """The run that it starts from."""
    wanted: bool = True
    """Whether it was asked for, and not only what others start from."""

    @property
    def place(self) -> str:
        """Its folder within the sweep's: ``<recipe>/[<settings>/]seed<N>``."""
        told = ",".join(change.replace('"', "") for change in self.changes)
        said = re.sub(r"[^\w.,=+-]+", "_", told)[:_LONGEST]
        if said != told:  # what the letters do not tell apart, the digits do
            said += "-" + hashlib.sha256("\n".join(self.changes).encode()).hexdigest()[:8]
        return "/".join([self.name, *([said] if said else []), f"seed{self.seed}"])


def make(
    names: Sequence[str], seeds: Sequence[int], grid: Sequence[Sequence[str]], variants: Sequence[Sequence[str]] = ()
) -> list[Run]:
    """The runs of a sweep, in the order in which they are to be started; all settings are checked.

    Args:
        names: recipes, patterns of them such as ``"ste/*-2"``, or paths of YAML files.
        seeds: at least one.
        grid: for each setting that is changed its values, such as ``["optimizer.lr=0.1", "optimizer.lr=0.05"]``; every
            combination is trained.
        variants: instead or as well, groups of changes that belong together; each group with every combination.
    """
    names = [name for word in names for name in _matching(word)]
    if not names:
        raise WiringError("a sweep needs a recipe at least, such as: wirings sweep table2/dnw table2/random --seed 0,1")
    if not seeds:
        raise WiringError("a sweep needs a seed at least: --seed 0")
    for what, values in (("recipe", names), ("seed", seeds)):
        if len(set(values)) < len(values):
            twice = next(value for value in values if list(values).count(value) > 1)
            raise WiringError(f"the {what} {twice!r} is given twice; every run of a sweep is another one.")
    found: dict[str, Run] = {}
    for seed, name in itertools.product(seeds, names):  # a whole comparison early, then the same with the next seed
        for texts in combinations(grid, variants):
            for run in _with_first(name, seed, texts):
                known = found.setdefault(run.place, run)
                if known.settings != run.settings or known.recipe != run.recipe:
                    raise WiringError(
                        f"two runs of this sweep would share the folder {run.place}: {known.recipe} and {run.recipe} "
                        "have one name, or differ in settings that are not told apart. Rename one of the files."
                    )
                if run.wanted and not known.wanted:
                    found[run.place] = replace(known, wanted=True)
    return list(found.values())


def _matching(word: str) -> list[str]:
    """The recipes that a pattern matches; what is no pattern is a name."""
    if not any(letter in word for letter in "*?[") or (word.endswith((".yaml", ".yml")) and Path(word).is_file()):
        return [word]
    found = fnmatch.filter(recipes.names(), word)
    if not found:
        raise WiringError(f"no recipe matches {word!r}; `wirings recipes` lists them all.")
    return found


def combinations(grid: Sequence[Sequence[str]], variants: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Every combination of changes: one of each of ``grid``'s, and one of ``variants``.

    >>> combinations([["a=1"], ["b=1", "b=2"]], [["c=1"], ["c=2", "d=0"]])
    [('a=1', 'b=1', 'c=1'), ('a=1', 'b=1', 'c=2', 'd=0'), ('a=1', 'b=2', 'c=1'), ('a=1', 'b=2', 'c=2', 'd=0')]
    """
    return [(*one, *variant) for one in itertools.product(*grid) for variant in (variants or [()])]


def _with_first(name: str, seed: int, texts: Sequence[str]) -> list[Run]:
    """A run, and before it the one that it starts from, if it does."""
    recipe = recipes.get(name)
    keys = [text.partition("=")[0].strip() for text in texts]
    if "seed" in keys:
        raise WiringError("the seed of a sweep's runs is set by --seed, not by --set seed=….")
    if len(set(keys)) < len(keys):
        raise WiringError(f"one run cannot have the setting {max(keys, key=keys.count)!r} twice: {', '.join(texts)}.")
    settings, overrides = with_overrides(recipe.settings, texts)
    settings = replace(settings, seed=seed)
    run = Run(_from_anywhere(name), recipe.name, seed, tuple(_canonical(texts)), settings)
    if settings.start.recipe is None:
        return [run]
    first = recipes.get(settings.start.recipe)
    wanted, changed = first_settings(recipe.name, settings, first, overrides)
    if wanted.checkpoint_every != first.settings.checkpoint_every:
        changed["checkpoint_every"] = wanted.checkpoint_every
    changes = tuple(_canonical(f"{key}={json.dumps(value)}" for key, value in changed.items()))
    earlier = Run(_from_anywhere(settings.start.recipe), first.name, seed, changes, wanted, wanted=False)
    return [earlier, replace(run, start=earlier)]


def _from_anywhere(recipe: str) -> str:
    """A recipe's name, or the whole path of its file."""
    return str(Path(recipe).resolve()) if recipe.endswith((".yaml", ".yml")) else recipe


def _canonical(texts: Any) -> list[str]:
    """Changes in one order and one spelling, so that 0.10 is 0.1: sorted by key, values as JSON."""
    pairs = [
        (key.strip(), parse_yaml(value, f"the value of {key}")) for key, _, value in (t.partition("=") for t in texts)
    ]
    return [f"{key}={json.dumps(value, sort_keys=True)}" for key, value in sorted(pairs, key=lambda pair: pair[0])]


def values_of(text: str) -> list[str]:
    """What ``--set`` says of one setting: ``optimizer.lr=0.1,0.05`` is two changes; commas in brackets are not ours.

    >>> values_of("optimizer.lr=0.1, 0.05"), values_of("schedule.milestones=[80, 120]")
    (['optimizer.lr=0.1', 'optimizer.lr=0.05'], ['schedule.milestones=[80, 120]'])
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or not value.strip():
        raise WiringError(f"{text!r} changes no setting: write name=value, or name=value,value,… for several.")
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
        raise WiringError(f"{text!r} has an empty value between its commas.")
    return [f"{key.strip()}={part.strip()}" for part in parts]


def seeds_of(texts: Sequence[str]) -> list[int]:
    """Seeds as they are written: ``0,1,2``, ``0-4``, or several of these.

    >>> seeds_of(["0-2", "7,9"])
    [0, 1, 2, 7, 9]
    """
    found: list[int] = []
    for part in (part.strip() for text in texts for part in str(text).split(",")):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise WiringError(f"--seed takes numbers, such as 0,1,2 or 0-4, but {part!r} came.")
        first = int(match[1])
        if match[2] is not None and int(match[2]) < first:
            raise WiringError(f"--seed {part} has no seeds in it: write the smaller number first.")
        found += range(first, int(match[2] or first) + 1)
    return found


def is_sweep(path: Path) -> bool:
    """Whether a file describes a sweep, and not a recipe."""
    try:
        mapping = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError):
        return False  # who reads it as a recipe says what is wrong
    return isinstance(mapping, dict) and "recipes" in mapping


def read(path: Path) -> dict[str, Any]:
    """What a sweep's YAML file says: recipes, seeds, settings and variants, as `make` takes them."""
    try:
        mapping = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise WiringError(f"{path} cannot be read: {error.strerror}.") from error
    if not isinstance(mapping, dict) or "recipes" not in mapping:
        raise WiringError(f"{path} describes no sweep: it must hold recipes:, and may hold {', '.join(KEYS[1:])}.")
    for key in mapping:
        if key not in KEYS:
            raise unknown("key of a sweep", str(key), KEYS)
    listed = {key: mapping.get(key) or [] for key in KEYS}
    for key in ("recipes", "seeds", "variants"):
        listed[key] = listed[key] if isinstance(listed[key], list) else [listed[key]]
    if not all(isinstance(one, dict) for one in [listed["settings"] or {}, *listed["variants"]]):
        raise WiringError(f"{path}: settings is a mapping from settings to values, variants a list of such mappings.")
    for key, values in dict(listed["settings"] or {}).items():
        if values == []:
            raise WiringError(f"{path}: settings has no value for {key}: give it one, or leave it out.")
    beside = path.parent
    return {
        "names": [str(beside / n) if str(n).endswith((".yaml", ".yml")) else str(n) for n in listed["recipes"]],
        "seeds": seeds_of([str(seed) for seed in listed["seeds"]]),
        "grid": [
            [f"{key}={json.dumps(value)}" for value in (values if isinstance(values, list) else [values])]
            for key, values in dict(listed["settings"] or {}).items()
        ],
        "variants": [[f"{key}={json.dumps(value)}" for key, value in one.items()] for one in listed["variants"]],
    }
