"""The best learning rate of recipes, chosen on held-out training data: what `wirings tune` trains."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from wirings.errors import WiringError
from wirings.train import data as data_sets
from wirings.train.data.metrics import ACCURACY, Metric
from wirings.train.recipes import is_file
from wirings.train.run.loop import DIVERGED
from wirings.train.sweep.folder import has_result
from wirings.train.sweep.plan import SweepPlan, SweepRun, canonical_changes, is_sweep_file, matching_recipes
from wirings.train.sweep.process import output_tail
from wirings.train.sweep.rate_search import RateSearch, best_rate
from wirings.train.sweep.schedule import FAILED, WAITING, RunProgress, state_of
from wirings.train.tables.tuned import losses_of, worse_sides

RATE = "optimizer.lr"
"""The setting that is tuned."""
OPTIONS = "data.options."
"""Where the settings are that hold out data."""


@dataclass
class TunedRecipe:
    """A recipe and the learning rates that were tried for it."""

    recipe: str
    """Its name, or the path of its file."""
    name: str
    start: float
    """The rate to begin with."""
    changes: tuple[str, ...]
    """Settings that differ from the recipe's for all rates, with those that hold out data."""
    held_out: dict[str, Any]
    """The options of the data set that hold out data."""
    seeds: tuple[int, ...]
    found: dict[float, list[RunProgress]] = field(default_factory=dict)
    """The runs that are over, by rate."""
    over: bool = False
    """Whether the search has ended."""
    _runs: dict[float, list[SweepRun]] = field(default_factory=dict, repr=False)

    @property
    def metric(self) -> Metric:
        """What the runs are compared by, once one has a result."""
        results = (state.result for states in self.found.values() for state in states)
        return next((result.measured_by for result in results if result is not None), ACCURACY)

    @property
    def values(self) -> dict[float, float]:
        """The mean over all seeds, by rate; infinite if one of the trainings diverged."""
        return {rate: _mean(states) for rate, states in sorted(self.found.items())}

    @property
    def losses(self) -> dict[float, float]:
        """The same, as numbers of which the smallest is best."""
        return losses_of(self.values, self.metric)

    @property
    def best(self) -> float | None:
        """The best rate so far, or None if all trainings diverged."""
        return best_rate(self.losses)

    @property
    def bracketed(self) -> bool:
        """Whether rates on both sides of the best one were worse."""
        return self.best is not None and all(worse_sides(self.losses, self.best))

    def runs(self, rate: float) -> list[SweepRun]:
        """The runs with one rate, each after the one that it starts from."""
        if rate not in self._runs:  # settings take milliseconds to read, and a sweep asks several times a second
            grid = [[change] for change in (f"{RATE}={rate!r}", *self.changes)]
            self._runs[rate] = SweepPlan([self.recipe], self.seeds, grid).runs()
        return self._runs[rate]

    def update(self, states: Mapping[str, RunProgress]) -> list[SweepRun]:
        """Read what was measured, and return the runs to add."""
        self.found, self.over = {}, False
        search = RateSearch(self.start)
        while missing := search.missing(self.losses):
            runs = {rate: self.runs(rate) for rate in missing}
            if new := [run for part in runs.values() for run in part if run.path not in states]:
                return new
            mine = {rate: [states[run.path] for run in part if run.requested] for rate, part in runs.items()}
            ended = {rate: part for rate, part in mine.items() if all(map(_is_over, part))}
            self.found.update(ended)
            if len(ended) < len(missing):
                return []
        self.over = True
        return []


class Tuning:
    """Searches for the learning rates of several recipes, side by side.

    Args:
        recipes: Names of recipes, patterns of names, or paths of YAML files.
        seeds: Random seeds; with several, the mean counts.
        changes: Settings that differ from the recipes', as ``--set`` takes them. A learning rate is where to begin.
    """

    def __init__(self, recipes: Sequence[str], seeds: Sequence[int] = (0,), changes: Sequence[str] = ()) -> None:
        names = dict.fromkeys(name for word in recipes for name in matching_recipes(word))
        if not names:
            raise WiringError("a search needs a recipe, such as: wirings tune text/dense text/dnw-10 --out tuning/text")
        for name in names:
            if is_file(name) and is_sweep_file(Path(name)):
                raise WiringError(f"{name} describes a sweep. Give the recipes whose learning rates are to be tuned.")
        self.recipes = [_tuned(name, tuple(seeds), changes) for name in names]
        for recipe in self.recipes:
            if twins := [other.recipe for other in self.recipes if other.name == recipe.name and other is not recipe]:
                raise WiringError(
                    f"{recipe.recipe} and {twins[0]} have the same name, {recipe.name}, and so the same folders. "
                    "Rename one of them."
                )
        self._seen: list[tuple[str, int]] = []

    def more(self, states: Iterable[RunProgress]) -> list[SweepRun]:
        """The runs to add to a sweep: see `wirings.train.sweep.schedule.run_sweep`.

        Runs that diverged before the sweep was stopped are not repeated when it continues.
        """
        states = list(states)
        seen = [(state.status, state.attempts) for state in states]
        if states and seen == self._seen:
            return []  # nothing has ended since it was asked
        self._seen = seen
        by_path = {state.run.path: state for state in states}
        for state in by_path.values():
            if state.status == WAITING and not state.attempts and _diverged_in(state.folder):
                state.status, state.reason = FAILED, output_tail(state.folder)
        return [run for recipe in self.recipes for run in recipe.update(by_path)]

    def belongs(self, line: Mapping[str, Any]) -> bool:
        """Whether a run that a sweep's folder lists is one of these searches, with whatever rate and seed."""
        changes = [str(change) for change in line.get("changes", ())]
        rest = sorted(change for change in changes if not change.startswith(f"{RATE}="))
        return any(
            line.get("recipe") == recipe.recipe and rest == sorted(canonical_changes(recipe.changes))
            for recipe in self.recipes
        )

    def first_runs(self, out: Path) -> list[SweepRun]:
        """The runs to begin with, and those that an earlier sweep in the same folder had come to."""
        states: dict[str, RunProgress] = {}
        while more := self.more(states.values()):
            states |= {run.path: state_of(run, out) for run in more}
        self._seen = []
        return [state.run for state in states.values()]


def has_diverged(state: RunProgress) -> bool:
    """Whether a run failed since its training diverged."""
    return state.status == FAILED and _diverged_in(state.folder)


def _diverged_in(folder: Path) -> bool:
    return not has_result(folder) and DIVERGED in output_tail(folder, lines=3)


def _is_over(state: RunProgress) -> bool:
    return state.result is not None or has_diverged(state)


def _mean(states: Sequence[RunProgress]) -> float:
    return fmean(math.inf if state.result is None else state.result.score for state in states)


def _tuned(recipe: str, seeds: tuple[int, ...], changes: Sequence[str]) -> TunedRecipe:
    """What is searched for one recipe; raises if its data set cannot hold out data."""
    run = SweepPlan([recipe], seeds, [[change] for change in changes]).runs()[-1]
    given = {change.partition("=")[0].strip() for change in changes}
    dataset = data_sets.get(run.settings.data.name)
    if not dataset.held_out and not any(key.startswith("data.") and key != "data.name" for key in given):
        raise WiringError(
            f"{run.name}: the data set {run.settings.data.name!r} does not say how to hold out training data, so that "
            "the rate would be chosen on its test set. Set the option that does with --set data.options.…=…, or give "
            "training data in two parts with --set data.directory=…"
        )
    added = {key: value for key, value in dataset.held_out.items() if OPTIONS + key not in given}
    kept = [change for change in changes if change.partition("=")[0].strip() != RATE]
    return TunedRecipe(
        run.recipe,
        run.name,
        run.settings.optimizer.lr,
        (*kept, *(f"{OPTIONS}{key}={json.dumps(value)}" for key, value in added.items())),
        {key: added.get(key, run.settings.data.options.get(key)) for key in dataset.held_out},
        seeds,
    )
