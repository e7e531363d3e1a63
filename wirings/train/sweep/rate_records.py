"""Records of tuned learning rates, ``results/tuning/<table>.json``: one line for each run, diverged ones included."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wirings.errors import WiringError
from wirings.train import recipes
from wirings.train.sweep.schedule import RunProgress
from wirings.train.sweep.tuning import OPTIONS, TunedRecipe
from wirings.train.tables.tuned import read_lines, record_path
from wirings.utils.files import whole_file

SCALED, STEPS = "model.options.scale_weights", "steps"
"""Settings that may differ from the recipe's in a record, since it names them."""
_IDENTITY = ("recipe", "lr", "scale_weights", "seed", "steps", "holdout")
"""The fields that tell one training from another; the others are what it gave."""


def unnamed(recipe: TunedRecipe) -> list[str]:
    """The settings that were changed and that a line does not name, so that the recipe's rates cannot be recorded."""
    named = {SCALED, *(OPTIONS + key for key in recipe.held_out)}
    if recipes.get(recipe.recipe).settings.steps is not None:  # for others, nothing says what the usual number is
        named.add(STEPS)
    return [key for change in recipe.changes if (key := change.partition("=")[0].strip()) not in named]


def lines_of(recipe: TunedRecipe) -> list[dict[str, Any]]:
    """A line for each run that is over; none if settings were changed that a line does not name.

    None either if all trainings diverged: then the metric and the number of steps are not known.
    """
    over = [state for states in recipe.found.values() for state in states]
    results = [state.result for state in over if state.result is not None]
    if unnamed(recipe) or not results:
        return []
    return [_line(recipe, state, results[0].steps) for state in over]


def _line(recipe: TunedRecipe, state: RunProgress, steps: int) -> dict[str, Any]:
    settings, result = state.run.settings, state.result
    return {
        "recipe": recipe.name,
        "lr": settings.optimizer.lr,
        "scale_weights": bool(settings.model.options.get("scale_weights", False)),
        "seed": state.run.seed,
        "steps": steps,
        "holdout": next(iter(recipe.held_out.values()), None),
        "metric": recipe.metric.name,
        "value": None if result is None else float(recipe.metric.number(result.score)),
        "commit": None if result is None else result.commit,
    }


def check_records(results: Path, tuned: Sequence[TunedRecipe]) -> None:
    """Raise if the rates cannot be recorded, or if the records to add to cannot be read."""
    for recipe in tuned:
        if changed := unnamed(recipe):
            raise WiringError(
                f"--results keeps the rates of recipes as they are, but {changed[0]} is changed. Leave --results out, "
                "or the change."
            )
        read_lines(record_path(results, recipe.name))


def write_rates(results: Path, tuned: Sequence[TunedRecipe]) -> list[Path]:
    """Add what was measured to the records, a file for each table. Lines of the same trainings are replaced."""
    by_path: dict[Path, list[dict[str, Any]]] = {}
    for recipe in tuned:
        by_path.setdefault(record_path(results, recipe.name), []).extend(lines_of(recipe))
    return [_add(path, lines) for path, lines in by_path.items() if lines]


def _add(path: Path, lines: Sequence[dict[str, Any]]) -> Path:
    merged = {tuple(line.get(name) for name in _IDENTITY): line for line in [*read_lines(path), *lines]}
    text = ",\n ".join(json.dumps(line) for line in merged.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as part:
        part.write_text(f"[\n {text}\n]\n", encoding="utf-8")
    return path
