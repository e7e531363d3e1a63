"""Training in two phases: first the network that a recipe starts from, then the recipe itself.

Lottery tickets and fine-tuning take their wiring from a network that was trained with all its edges. A recipe names it
(``start.recipe``); a finished run of it with the same seed is used, or else it is trained first. Recipes that start
from the same one share its run.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wirings import rules
from wirings.errors import WiringError
from wirings.train import checkpoint, loop, recipes, typed
from wirings.train.build import build
from wirings.train.checkpoint import INITIAL, LAST, RESULT
from wirings.train.distributed import Place, alone, start
from wirings.train.log import Log
from wirings.train.results import Result, load_settings
from wirings.train.settings import Settings, first_difference, to_mapping, with_overrides
from wirings.wire.handle import Wiring
from wirings.wire.rewind import rewind_

OWN = ("model", "rule", "start", "optimizer", "schedule")
"""Groups of settings whose changes are for the recipe alone; changes of all others are for what it starts from, too."""
SAME = ("seed", "model.name", "data.name", "data.options")
"""Settings in which a run that is started from must be like the recipe's, even where it was named on purpose."""


def train(
    name: str,
    settings: Settings,
    out: Path,
    *,
    first_run: Path | None = None,
    device: str | None = None,
    resume: bool = False,
    max_minutes: float | None = None,
    overrides: dict[str, Any] | None = None,
    log: Log | None = None,
) -> Result | None:
    """Train a recipe's settings, and before that what it starts from, if it does and that is not there.

    What is returned is the recipe's result alone; None if time was up before the end, whichever phase that was in, or
    if this process is not the first.

    Args:
        name: the recipe's, for messages and the result.
        settings: all of them.
        out: the run's folder.
        first_run: the folder of the finished run to start from; by default ``<recipe>/seed<N>`` in the folder of runs
            that ``out`` is in, where it is trained if need be.
        device: such as ``"cuda"`` or ``"cpu"``; by default a GPU where there is one.
        resume: go on from the last checkpoint of either phase, if it has one.
        max_minutes: stop at a checkpoint after so long, both phases together.
        overrides: what the caller changed in the recipe. All but those of the groups `OWN` are for both phases.
        log: told of everything; by default silent.
    """
    if settings.start.recipe is None:
        _check_alone(name, settings, first_run)
    place, log, overrides = start(device), log or Log(), dict(overrides or {})
    with alone(place, out, log.say):
        return _train(name, settings, out, place, log, first_run, resume, max_minutes, overrides)


def _train(
    name: str,
    settings: Settings,
    out: Path,
    place: Place,
    log: Log,
    first_run: Path | None,
    resume: bool,
    max_minutes: float | None,
    overrides: dict[str, Any],
) -> Result | None:
    """`train`, in a folder that nobody else works in."""
    begun = time.perf_counter()
    more: dict[str, Any] = {"resume": resume, "max_minutes": max_minutes}
    if settings.start.recipe is None:
        return loop.train_alone(name, settings, out, place, log, overrides=overrides, **more)
    if not loop.is_new(out, resume):  # its checkpoint has all that it started from
        overrides |= _started_with(out)
        return loop.train_alone(name, settings, out, place, log, overrides=overrides, **more)
    first = recipes.get(settings.start.recipe)
    wanted, changed = first_settings(name, settings, first, overrides)
    if first_run is None:
        folder = runs_folder(out, name, settings.seed) / first.name / f"seed{settings.seed}"
        if not place.same_everywhere(_finished(folder)):
            _check_fits(name, settings, first.name, wanted)
            with alone(place, folder, log.say):
                if not _first_phase(name, first.name, wanted, folder, place, log, overrides=changed, **more):
                    return None
        overrides |= _check(folder, first.name, wanted, settings, named=False)
    else:
        folder = first_run
        overrides |= _check(folder, first.name, wanted, settings, named=True)
    log.say(f"starts from {folder}, {settings.start.weights} weights")
    left = None if max_minutes is None else max(0.0, max_minutes - (time.perf_counter() - begun) / 60)

    def begin(model: nn.Module, wiring: Wiring | None) -> None:
        begin_from(folder, settings.start.weights, model, wiring)

    more |= {"max_minutes": left, "begin": begin}
    return loop.train_alone(name, settings, out, place, log, overrides=overrides, **more)


def _first_phase(
    name: str,
    first: str,
    wanted: Settings,
    folder: Path,
    place: Place,
    log: Log,
    **more: Any,
) -> bool:
    """Train what a recipe starts from, in a folder that nobody else works in; False if time was up before its end."""
    if place.same_everywhere(_finished(folder)):  # another process has, a moment ago
        return True
    log.say(f"{name} starts from the network of {first}, which is trained first, in {folder}")
    result = loop.train_alone(first, wanted, folder, place, log, **more)
    if result is not None:
        log.say(f"{first}, seed {result.seed}: {result.accuracy:.2f} %; now {name}")
    return place.same_everywhere(result is not None)


def begin_from(folder: Path, weights: str, model: nn.Module, wiring: Wiring | None) -> None:
    """Let a run's trained weights decide the wiring; then give the model those, or the ones that the run began with."""
    tensors, _ = checkpoint.read(folder / LAST)
    _rewind(model, checkpoint.model_state(tensors, checkpoint.evaluated(tensors)), folder / LAST)
    if wiring is not None:
        wiring.rule.setup(wiring.layers)  # again: when the model was built its weights were new
        wiring.look()  # edges swapped are counted from here
    if weights == "initial":
        tensors, _ = checkpoint.read(folder / INITIAL)
        _rewind(model, checkpoint.model_state(tensors), folder / INITIAL)


def runs_folder(out: Path, name: str, seed: int) -> Path:
    """The folder of runs that a run's folder is in, by the usual names or else right above it.

    >>> runs_folder(Path("runs/table2/lottery/seed1"), "table2/lottery", 1).as_posix()
    'runs'
    >>> runs_folder(Path("tuning/third"), "table2/lottery", 1).as_posix()
    'tuning'
    """
    usual = Path(name, f"seed{seed}").parts
    return Path(*out.parts[: -len(usual)]) if out.parts[-len(usual) :] == usual else out.parent


def first_settings(
    name: str, settings: Settings, first: recipes.Recipe, overrides: dict[str, Any]
) -> tuple[Settings, dict[str, Any]]:
    """The settings of the first phase, and what in them differs from its recipe's.

    It has the data and the seed of the second, and its overrides but for those of the groups `OWN`.
    """
    if first.settings.start.recipe is not None:
        raise WiringError(
            f"{name} starts from {first.name}, which starts from {first.settings.start.recipe} itself; name a recipe "
            "that starts from a new network."
        )
    values = to_mapping(settings)
    shared = [key for key in typed.leaves(Settings) if key.startswith("data.")] + [
        "seed",
        "checkpoint_epochs",
        "checkpoint_every",
        "history_every",
    ]
    changes = {key: typed.at(values, key) for key in shared}
    changes |= {key: value for key, value in overrides.items() if key.partition(".")[0] not in (*OWN, "data")}
    return with_overrides(first.settings, [f"{key}={json.dumps(value)}" for key, value in changes.items()])


def _check_alone(name: str, settings: Settings, first_run: Path | None) -> None:
    if first_run is not None:
        raise WiringError(f"{name} starts from a new network, not from {first_run}: leave --start out.")
    if isinstance(rules.get(settings.rule.name, **settings.rule.options), rules.FineTune):
        raise WiringError(
            f"rule {settings.rule.name!r} takes its wiring from a trained network, but {name} starts from a new one: "
            "name the recipe that is trained first, such as start.recipe=table2/complete."
        )


def _check_fits(name: str, settings: Settings, first: str, wanted: Settings) -> None:
    """Raise, before hours of training, if the first network's weights would not fit the second."""
    place = Place(0, 1, torch.device("cpu"))
    ours, theirs = (
        {key: tuple(value.shape) for key, value in build(one, 10, place)[0].state_dict().items()}
        for one in (settings, wanted)
    )
    for key in sorted(key for key in ours.keys() | theirs.keys() if ".wiring." not in key):
        if ours.get(key) != theirs.get(key):
            raise WiringError(
                f"{name} cannot start from {first}: {key} is {ours.get(key, 'not there')} in its network and "
                f"{theirs.get(key, 'not there')} in the other. Changes of model.… are for the recipe itself; train "
                f"{first} with the same ones, and name its folder with --start."
            )


def _finished(folder: Path) -> bool:
    return (folder / LAST).exists() and (folder / RESULT).exists()


def _check(folder: Path, first: str, wanted: Settings, settings: Settings, named: bool) -> dict[str, Any]:
    """Raise unless the folder holds a run to start from. Gives what in it is not its recipe's, for the record."""
    remedy = f"wirings train {first} --seed {settings.seed} --out {folder}"
    if not (folder / LAST).exists() or not (folder / "settings.yaml").exists():
        raise WiringError(
            f"{folder} is no folder of a run to start from: expected settings.yaml and {LAST} in it. Train it with "
            f"`{remedy}`, or leave --start out, and it is trained first."
        )
    if not (folder / RESULT).exists():
        raise WiringError(f"the run in {folder} has not come to its end: `{remedy} --resume` goes on with it.")
    if settings.start.weights == "initial" and not (folder / INITIAL).exists():
        raise WiringError(
            f"{folder} has no {INITIAL}, the weights that its run began with, which are asked for (start.weights). It "
            "may be a run of an earlier version: train it again in another folder."
        )
    recipe, then, overrides = load_settings(folder / "settings.yaml")
    if recipe != first:
        raise WiringError(f"{folder} is a run of {recipe!r}, not of {first!r}, which is to be started from.")
    before, now = to_mapping(then), to_mapping(wanted)
    for key in SAME:
        if typed.at(before, key) != typed.at(now, key):
            remedy = "Name another folder with --start, or leave it out."
            if not named:
                remedy = "Name the folder of another run with --start, or give --out in another folder of runs."
            raise WiringError(
                f"the run in {folder} has {key} = {typed.at(before, key)!r}, but to be started from it must have "
                f"{typed.at(now, key)!r}. {remedy}"
            )
    if not named and (different := first_difference(then, wanted)):
        raise WiringError(
            f"the run in {folder}, which would be started from, was made with {different[0]} = {different[1]!r}, now "
            f"it is {different[2]!r}. To take it as it is give --start {folder}; to train another give --out in "
            "another folder of runs."
        )
    return {f"start.{key}": value for key, value in overrides.items()}


def _started_with(out: Path) -> dict[str, Any]:
    """What a run that goes on has noted of what it started from."""
    _, _, overrides = load_settings(out / "settings.yaml")
    own = [f"start.{name}" for name in ("recipe", "weights")]
    return {key: value for key, value in overrides.items() if key.startswith("start.") and key not in own}


def _rewind(model: nn.Module, state: dict[str, Any], path: Path) -> None:
    try:
        rewind_(model, state)
    except WiringError as error:
        raise WiringError(f"{path} cannot be started from: {error}") from error
