"""The training loop, one for every recipe. It knows no model and no rule.

A run is a folder: ``settings.yaml``, ``log.csv``, ``initial.safetensors`` (the model before the first step),
``last.safetensors`` and ``best.safetensors`` (checkpoints), ``history.wirings`` (how the wiring changed), and at the
end ``result.json``. One process works in it at a time; while it does, ``.lock`` says which. Batches are a function of
the seed, the epoch and the place in it, so a run that was stopped goes on as if it had not been.
"""

from __future__ import annotations

import copy
import datetime
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wirings.errors import WiringError
from wirings.train import checkpoint, results
from wirings.train.build import build, load_data
from wirings.train.checkpoint import BEST, INITIAL, LAST, RESULT
from wirings.train.data.base import Data, Loader
from wirings.train.distributed import Place, alone, start, together
from wirings.train.evaluate import evaluate
from wirings.train.log import Log, tell_skipped
from wirings.train.recording import HISTORY, Recording
from wirings.train.settings import Settings, first_difference, from_mapping, to_mapping
from wirings.train.step import Captured, Step, acts_between_steps, make_fast, make_optimizer
from wirings.train.summary import Progress, read_progress, summary
from wirings.wire.handle import Wiring


def train(
    name: str,
    settings: Settings,
    out: Path,
    *,
    device: str | None = None,
    resume: bool = False,
    max_minutes: float | None = None,
    overrides: dict[str, Any] | None = None,
    log: Log | None = None,
    begin: Callable[[nn.Module, Wiring | None], None] | None = None,
) -> results.Result | None:
    """Train a recipe's settings; None if the time was up before the end, or if this process is not the first.

    A recipe that starts from another one's network is trained by `wirings.train.phases.train`, as any other can be.

    Args:
        name: the recipe's, for messages and the result.
        settings: all of them.
        out: the run's folder.
        device: such as ``"cuda"`` or ``"cpu"``; by default a GPU where there is one.
        resume: go on from the folder's last checkpoint, if it has one.
        max_minutes: stop at a checkpoint after so long.
        overrides: what the caller changed in the recipe, for the record.
        log: told of everything; by default silent.
        begin: what to do with the new model and its wiring before the first step; a run that goes on has done it.
    """
    place, log = start(device), log or Log()
    with alone(place, out, log.say):
        more: dict[str, Any] = {"resume": resume, "max_minutes": max_minutes, "overrides": overrides, "begin": begin}
        return train_alone(name, settings, out, place, log, **more)


def train_alone(
    name: str,
    settings: Settings,
    out: Path,
    place: Place,
    log: Log,
    *,
    resume: bool,
    max_minutes: float | None,
    overrides: dict[str, Any] | None,
    begin: Callable[[nn.Module, Wiring | None], None] | None = None,
) -> results.Result | None:
    """`train` in a folder that the caller has locked."""
    begun = time.perf_counter()
    last, new = out / LAST, is_new(out, resume)
    if new and begin is None and settings.start.recipe is not None:
        raise WiringError(f"{name} starts from {settings.start.recipe}: wirings.train.phases.train trains that first.")
    torch.manual_seed(settings.seed)
    found = load_data(settings, place)
    model, wiring = build(settings, found.classes, place, found if new else None)
    if new and begin is not None:
        begin(model, wiring)
    if wiring is not None:
        wiring.plan(settings.epochs * len(found.train))
    optimizer = make_optimizer(model, wiring, settings, place.device)
    step = Step(model, wiring, optimizer, settings, place.device, place.world)
    fast = make_fast(step, found.train, log.say) if settings.fast else None
    if place.world > 1:
        step.used = nn.parallel.DistributedDataParallel(model)
    progress = Progress(started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
    if not new:
        progress = _resume(step, last, name, settings, len(found.train))
        if progress.epoch < settings.epochs:
            log.say(f"goes on at epoch {progress.epoch + 1}, batch {progress.batch + 1}")
    finished = out / RESULT
    if progress.epoch == settings.epochs and finished.exists():  # nothing to do, and nothing to write again
        return results.read(finished) if place.first else None
    if place.first:
        checkpoint.clean(out)
        results.save_settings(out / "settings.yaml", name, settings, overrides or {})
    about = {"recipe": name, "settings": to_mapping(settings), "classes": found.classes, "names": found.names}
    if new and place.first:
        checkpoint.save_model(out / INITIAL, model, about)
    in_all = settings.epochs * len(found.train)
    recording = Recording(step if place.first else None, settings, out / HISTORY, name, progress, in_all, log.say)
    wall_before = progress.wall
    best: tuple[dict[str, Tensor], dict[str, Any]] | None = None

    def described() -> dict[str, Any]:
        progress.totals = place.total(step.totals.clone()).tolist()
        progress.wall = wall_before + time.perf_counter() - begun
        return {**about, "progress": copy.deepcopy(vars(progress))}

    def save() -> None:
        nonlocal best
        _check(step, progress, settings, len(found.train), place, last)
        recording.flush()
        progress.records = recording.records
        now = described()
        if place.first:
            if best is not None:
                checkpoint.write_tensors(out / BEST, *best)
            checkpoint.write_tensors(last, *checkpoint.collect(step, now))
        best = None
        place.wait()

    deadline, told = math.inf if max_minutes is None else begun + 60 * max_minutes, 0
    log.begin(name, settings, len(found.train), progress.epoch)
    try:
        with together(place, f"Start all of them again with --resume: {out} is as its last checkpoint left it."):
            while progress.epoch < settings.epochs:
                if not _epoch(step, fast, found.train, progress, settings, place, deadline, log, save, recording):
                    where = f"epoch {progress.epoch + 1}, batch {progress.batch + 1}"
                    log.say(f"time is up: {out} goes on with --resume from {where}")
                    return None
                _check(step, progress, settings, len(found.train), place, last)
                line = _line(step, found, progress, settings, place)
                progress.history.append(line)
                recording.epoch(line)
                progress.epoch, progress.batch = progress.epoch + 1, 0
                better = line["accuracy"] is not None and line["accuracy"] > progress.best
                progress.best = line["accuracy"] if better else progress.best
                # The last checkpoint comes last: a run killed before it makes this epoch, and all its files, again.
                if place.first:
                    log.epoch(line, out, progress.history, wiring)
                    told = tell_skipped(found, log, told)
                if better:  # kept as it is now, and written with the next checkpoint
                    best = checkpoint.collect(step, described())
                if progress.epoch % settings.checkpoint_epochs == 0 or progress.epoch == settings.epochs:
                    save()
    finally:
        log.end()
        recording.close()
    if not place.first:
        return None
    progress.wall = wall_before + time.perf_counter() - begun
    environment = results.environment(place.device)
    result = summary(name, settings, model, wiring, progress, overrides or {}, data_md5=found.md5, **environment)
    results.write_json(finished, result)
    return result


def is_new(out: Path, resume: bool) -> bool:
    """Whether a run in this folder begins, not goes on; an error if it would begin over another."""
    begun = (out / LAST).exists()
    if begun and not resume:
        raise WiringError(f"{out} holds a run already: go on with --resume, or give another --out.")
    if not begun and (out / RESULT).exists():
        raise WiringError(f"{out} holds the result of a run whose {LAST} is gone: give another --out.")
    return not begun


def _epoch(
    step: Step,
    fast: Captured | None,
    loader: Loader,
    progress: Progress,
    settings: Settings,
    place: Place,
    deadline: float,
    log: Log,
    save: Any,
    recording: Recording,
) -> bool:
    """The rest of an epoch; False if time was up before its end."""
    step.model.train()
    totals = progress.totals if progress.batch and place.first else [0.0, 0.0, 0.0]
    step.totals.copy_(torch.tensor(totals, dtype=torch.float64))
    per_epoch, between = len(loader), acts_between_steps(step.wiring)
    batches: Any
    if fast is not None:
        sizes = loader.sizes()[progress.batch :]
        loader.begin(progress.epoch, progress.batch)  # type: ignore[attr-defined]
        batches = iter(sizes)
    else:
        batches = loader.epoch(progress.epoch, progress.batch)
    clock = time.perf_counter()
    for batch in batches:
        step.set_lr(settings.optimizer.lr * settings.schedule.factor_at(progress.steps, per_epoch, settings.epochs))
        if fast is not None:
            fast(batch)
        else:
            whole = min(settings.batch, loader.examples - progress.batch * settings.batch)
            x, y = batch
            step(x, y, whole)
        if between and step.wiring is not None:
            step.wiring.step(step.optimizer)
        progress.batch, progress.steps = progress.batch + 1, progress.steps + 1
        recording.after(progress.steps)
        log.batch(progress.batch)
        every = settings.checkpoint_every
        due = every is not None and progress.steps % every == 0 and progress.batch < per_epoch
        late = place.same_everywhere(time.perf_counter() > deadline) if deadline < math.inf else False
        if due or (late and progress.batch < per_epoch):
            progress.seconds += time.perf_counter() - clock
            save()
            clock = time.perf_counter()
            if late:
                return False
    if place.device.type == "cuda":
        torch.cuda.current_stream().synchronize()  # other streams may have runs of their own
    progress.seconds += time.perf_counter() - clock
    return True


def _line(step: Step, found: Data, progress: Progress, settings: Settings, place: Place) -> dict[str, Any]:
    """What an epoch's line of the log says."""
    place.total(step.totals)
    loss, accuracy, examples = step.read()
    line: dict[str, Any] = {
        "epoch": progress.epoch + 1,
        "steps": progress.steps,
        "lr": settings.optimizer.lr
        * settings.schedule.factor_at(progress.steps - 1, len(found.train), settings.epochs),
        "train_loss": loss,
        "train_accuracy": accuracy,
        "loss": None,
        "accuracy": None,
        "top5": None,
        "swapped": None if step.wiring is None else sum(r.swapped for r in step.wiring.look()),
        "seconds": progress.seconds,
        "images": examples,
    }
    final = progress.epoch + 1 == settings.epochs
    if final or (progress.epoch + 1) % settings.evaluate_every == 0:
        model = step.model if step.average is None else step.average
        line["loss"], line["accuracy"], line["top5"] = evaluate(model, found.test, step.autocast, place)
    return line


def _check(step: Step, progress: Progress, settings: Settings, per_epoch: int, place: Place, last: Path) -> None:
    """Raise if a loss or a weight is not finite, before anything is written."""
    bad = int(place.most(step.bad.clone()).item())
    names, parameters = zip(*step.model.named_parameters(), strict=True)
    finite = torch.stack([parameter.isfinite().all() for parameter in parameters]).tolist()
    broken = [name for name, fine in zip(names, finite, strict=True) if not fine]
    if bad < 0 and not broken:
        return
    number = progress.steps if bad < 0 else progress.steps - int(step.count.item()) + bad + 1
    lr = settings.optimizer.lr * settings.schedule.factor_at(number - 1, per_epoch, settings.epochs)
    others = f" and {len(broken) - 1} others" if len(broken) > 1 else ""
    where = f"; weights are not finite in {broken[0]}{others}" if broken else ""
    good = f"The last good checkpoint is {last}" if last.exists() else "There is no checkpoint yet"
    raise WiringError(
        f"the {'loss was' if bad >= 0 else 'weights were'} not finite at step {number} (lr {lr:g}){where}. "
        f"{good}. Lower optimizer.lr, set clip, or take a wider precision."
    )


def _resume(step: Step, path: Path, name: str, settings: Settings, per_epoch: int) -> Progress:
    tensors, about = checkpoint.read(path)
    if (recipe := checkpoint.field(about, "recipe", str, path)) != name:
        raise WiringError(f"{path} belongs to the recipe {recipe!r}, not to {name!r}; give another --out.")
    try:
        then = from_mapping(checkpoint.field(about, "settings", dict, path))
        progress = read_progress(checkpoint.field(about, "progress", dict, path), settings.epochs, per_epoch)
    except WiringError as error:
        raise checkpoint.damaged(path, error) from error
    if different := first_difference(then, settings):
        key, before, now = different
        raise WiringError(
            f"{path} was made with {key} = {before!r}, now it is {now!r}; a run goes on with its own settings. "
            "Give another --out for a new one."
        )
    checkpoint.restore(step, tensors, about, path)
    return progress
