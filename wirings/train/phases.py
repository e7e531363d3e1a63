"""Train a recipe in two phases: first the network that it starts from, then the recipe itself.

Lottery tickets and fine-tuning take their wiring from a network that was trained with all its edges. A recipe names the
one that trains it (``start.recipe``): a finished run of that recipe with the same seed is used if there is one;
otherwise it is trained first. Recipes that start from the same one share its run.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wirings import rules
from wirings.errors import WiringError
from wirings.train import recipes
from wirings.train import typed_dataclasses as typed
from wirings.train.build import build
from wirings.train.distributed import ProcessContext, lock_folder, start
from wirings.train.results import Result, load_settings
from wirings.train.run import checkpoint
from wirings.train.run.folder import INITIAL, LAST, RESULT, SETTINGS, is_finished, is_new
from wirings.train.run.log import Log
from wirings.train.run.loop import Initialize, Run
from wirings.train.settings import Settings, StartSettings, first_difference, to_mapping, with_overrides
from wirings.utils.signals import StopSignals
from wirings.wire.handle import Wiring
from wirings.wire.rewind import rewind_
from wirings.wire.start import prune_to_budget

OWN = ("model", "rule", "start", "optimizer", "schedule")
"""Groups of settings whose overrides apply to the recipe only; all others apply to both phases."""
SAME = ("seed", "model.name", "data.name", "data.options")
"""Settings that both phases must agree in, even if the user chose the run to start from."""


@dataclass(frozen=True)
class FirstPhase:
    """The run that a recipe starts from."""

    recipe: str
    """The name of its recipe."""
    settings: Settings
    overrides: dict[str, Any]
    """What differs from its recipe."""
    folder: Path
    given: bool
    """Whether the user gave the folder."""


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
    signals: StopSignals | None = None,
) -> Result | None:
    """Train with a recipe's settings, and train what it starts from first, if there is no such run yet.

    Args:
        name: the recipe's name, for messages and the result.
        settings: the run's settings.
        out: the run's folder.
        first_run: the folder of the finished run to start from; by default ``<recipe>/seed<N>`` in the same folder of
            runs as ``out``, where it is trained if needed.
        device: such as ``"cuda"`` or ``"cpu"``; by default a GPU, if there is one.
        resume: continue from the last checkpoint of either phase, if it has one.
        max_minutes: save a checkpoint and stop after this time, for both phases together.
        overrides: what the caller changed in the recipe. All but those of the groups `OWN` apply to both phases.
        log: receives the progress; by default, nothing is printed.
        signals: save a checkpoint and stop when one of these is received.

    Returns:
        The recipe's result on rank 0; None on other ranks, and if the run was stopped before the end of either phase.
    """
    _check_rule(settings)
    if settings.start.recipe is None:
        _check_starts_new(name, settings, first_run)
    context, log, overrides = start(device), log or Log(), dict(overrides or {})
    with lock_folder(context, out, log.say):
        begun = time.perf_counter()
        initialize: Initialize | None = None
        if settings.start.recipe is not None and not is_new(out, resume):
            overrides |= _overrides_of_start(out)  # the checkpoint has everything else that it started from
        elif settings.start.recipe is not None:
            first = _first_phase(name, settings, out, first_run, overrides)
            if not _train_first(first, name, settings, context, log, signals, resume=resume, max_minutes=max_minutes):
                return None
            overrides |= _check_first(first, settings)
            pruned = ", pruned" if settings.start.prune else ""
            log.say(f"Starting from {first.folder}, {settings.start.weights} weights{pruned}.")
            initialize = partial(start_from, first.folder, settings.start)
        left = None if max_minutes is None else max(0.0, max_minutes - (time.perf_counter() - begun) / 60)
        run = Run(name, settings, out, context, log, resume=resume, overrides=overrides, initialize=initialize)
        return run.train(left, signals)


def _first_phase(
    name: str, settings: Settings, out: Path, first_run: Path | None, overrides: dict[str, Any]
) -> FirstPhase:
    """Which run a recipe starts from, and where it is."""
    assert settings.start.recipe is not None
    first = recipes.get(settings.start.recipe)
    wanted, changed = first_settings(name, settings, first, overrides)
    folder = first_run
    if folder is None:
        folder = runs_folder(out, name, settings.seed) / first.name / f"seed{settings.seed}"
    return FirstPhase(first.name, wanted, changed, folder, given=first_run is not None)


def _train_first(
    first: FirstPhase,
    name: str,
    settings: Settings,
    context: ProcessContext,
    log: Log,
    signals: StopSignals | None,
    *,
    resume: bool,
    max_minutes: float | None,
) -> bool:
    """Train the first phase if needed. Returns False if it was stopped before its end."""
    if first.given or context.broadcast_flag(is_finished(first.folder)):
        return True
    _check_fits(name, settings, first)
    instead = f"give the folder of a finished run of {first.recipe} with --start, or another --out"
    with lock_folder(context, first.folder, log.say, instead):
        # Taking the lock does not wait, but another process may have finished the run since the first look.
        if context.broadcast_flag(is_finished(first.folder)):
            return True
        log.say(f"{name} starts from the network of {first.recipe}, which is trained first, in {first.folder}.")
        run = Run(first.recipe, first.settings, first.folder, context, log, resume=resume, overrides=first.overrides)
        result = run.train(max_minutes, signals)
        if result is not None:
            log.say(f"{first.recipe}, seed {result.seed}: {result}. Next is {name}.")
        return context.broadcast_flag(result is not None)


def start_from(folder: Path, settings: StartSettings, model: nn.Module, wiring: Wiring | None) -> None:
    """Let the trained weights of a finished run choose the wiring of a new model.

    Args:
        folder: the finished run.
        settings: which of its weights the model then gets, and whether they are pruned.
        model: the new model.
        wiring: its handle, or None if nothing is wired.
    """
    tensors, _ = checkpoint.read(folder / LAST)
    for layer in [] if wiring is None or not wiring.rule.keeps_zeros else wiring.layers:
        layer.edges.memory()["wiring"].fill_(True)  # all trained weights are loaded, then pruned
    _rewind(model, checkpoint.model_state(tensors, checkpoint.evaluated(tensors)), folder / LAST)
    if wiring is not None:
        if settings.prune:
            prune_to_budget(wiring.layers)
        else:
            wiring.rule.setup(wiring.layers)  # again: its weights were random when the model was built
        wiring.look()  # swapped edges are counted from here
    if settings.weights == "initial":
        tensors, _ = checkpoint.read(folder / INITIAL)
        _rewind(model, checkpoint.model_state(tensors), folder / INITIAL)


def runs_folder(out: Path, name: str, seed: int) -> Path:
    """The folder of runs that ``out`` is in: without the usual ``<recipe>/seed<N>``, or else its parent.

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
    """The settings of the first phase, and what differs from its recipe.

    It has the data, the seed and the overrides of the second phase, except for those of the groups `OWN`.
    """
    if first.settings.start.recipe is not None:
        raise WiringError(
            f"{name} starts from {first.name}, which itself starts from {first.settings.start.recipe}. Set "
            "start.recipe to a recipe that starts from a new network."
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
    epochs = changes.get("epochs")
    if isinstance(epochs, int) and first.settings.schedule.warmup_epochs > epochs:
        changes["schedule.warmup_epochs"] = epochs  # it cannot be given for the first phase, and would be rejected
    return with_overrides(first.settings, [f"{key}={json.dumps(value)}" for key, value in changes.items()])


def _check_rule(settings: Settings) -> None:
    """Raise for rules that need a pruned network, unless a recipe prunes what it starts from, and can."""
    if settings.start.prune and (settings.start.recipe is None or settings.start.weights != "trained"):
        raise WiringError("start.prune needs start.recipe, the network to prune, and start.weights = trained.")
    if rules.get(settings.rule.name, **settings.rule.options).keeps_zeros and not settings.start.prune:
        raise WiringError(
            f"rule {settings.rule.name!r} keeps the zeros of a pruned model, but the network that a recipe starts from "
            "is not pruned. Name a trained one with start.recipe, set start.prune=true and give the model a density."
        )
    if settings.start.prune and settings.rule.name == rules.Dense.name:
        raise WiringError("start.prune needs a rule with a budget, such as 'keep', got 'dense'.")


def _check_starts_new(name: str, settings: Settings, first_run: Path | None) -> None:
    if first_run is not None:
        raise WiringError(f"{name} starts from a new network, not from {first_run}. Leave --start out.")
    if rules.get(settings.rule.name, **settings.rule.options).needs_trained_weights:
        raise WiringError(
            f"rule {settings.rule.name!r} takes its wiring from a trained network, but {name} starts from a new one. "
            "Name the recipe to train first, such as start.recipe=table2/complete."
        )


def _check_fits(name: str, settings: Settings, first: FirstPhase) -> None:
    """Raise if the first network's weights do not fit the second, before hours of training."""
    context = ProcessContext(0, 1, torch.device("cpu"))
    ours, theirs = (
        {key: tuple(value.shape) for key, value in build(one, 10, context)[0].state_dict().items()}
        for one in (settings, first.settings)
    )
    for key in sorted(key for key in ours.keys() | theirs.keys() if ".wiring." not in key):
        if ours.get(key) != theirs.get(key):
            raise WiringError(
                f"{name} cannot start from {first.recipe}: {key} is {ours.get(key, 'missing')} in its network and "
                f"{theirs.get(key, 'missing')} in the other. Overrides of model.… apply to {name} only. Train "
                f"{first.recipe} with the same overrides, and give its folder with --start."
            )


def _check_first(first: FirstPhase, settings: Settings) -> dict[str, Any]:
    """Raise unless the folder holds a finished run to start from.

    Returns:
        What differs in that run from its recipe, to be kept with the result.
    """
    folder = first.folder
    command = f"wirings train {first.recipe} --seed {settings.seed} --out {folder}"
    if not (folder / LAST).exists() or not (folder / SETTINGS).exists():
        raise WiringError(
            f"{folder} is not the folder of a run to start from: expected {SETTINGS} and {LAST} in it. Train it with "
            f"`{command}`, or leave --start out to have it trained first."
        )
    if not (folder / RESULT).exists():
        raise WiringError(f"the run in {folder} is not finished. Continue it with `{command} --resume`.")
    if settings.start.weights == "initial" and not (folder / INITIAL).exists():
        raise WiringError(
            f"{folder} has no {INITIAL}, which start.weights=initial needs. The run may be of an earlier version: "
            "train it again in another folder."
        )
    recipe, then, overrides = load_settings(folder / SETTINGS)
    if recipe != first.recipe:
        raise WiringError(f"{folder} is a run of {recipe!r}, but {first.recipe!r} is needed to start from.")
    before, now = to_mapping(then), to_mapping(first.settings)
    for key in SAME:
        if typed.at(before, key) != typed.at(now, key):
            advice = "Give another folder with --start, or leave it out."
            if not first.given:
                advice = "Give the folder of another run with --start, or an --out in another folder of runs."
            raise WiringError(
                f"the run in {folder} has {key} = {typed.at(before, key)!r}, but must have {typed.at(now, key)!r} to "
                f"be started from. {advice}"
            )
    if not first.given and (different := first_difference(then, first.settings)):
        raise WiringError(
            f"the run in {folder}, which would be started from, was trained with {different[0]} = {different[1]!r}, "
            f"but now it is {different[2]!r}. Give --start {folder} to use it anyway, or an --out in another folder of "
            "runs to train another one."
        )
    return {f"start.{key}": value for key, value in overrides.items()}


def _overrides_of_start(out: Path) -> dict[str, Any]:
    """What the settings of a resumed run say about the overrides of the run that it started from."""
    _, _, overrides = load_settings(out / SETTINGS)
    own = [f"start.{name}" for name in typed.typed_fields(StartSettings)]
    return {key: value for key, value in overrides.items() if key.startswith("start.") and key not in own}


def _rewind(model: nn.Module, state: dict[str, Any], path: Path) -> None:
    try:
        rewind_(model, state)
    except WiringError as error:
        raise WiringError(f"cannot start from {path}: {error}") from error
