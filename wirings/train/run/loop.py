"""The training loop, one for every recipe. It knows no model and no rule.

A run is a folder: ``settings.yaml``, ``log.csv``, ``initial.safetensors`` (the model before its first step),
``last.safetensors`` and ``best.safetensors`` (checkpoints), ``history.wirings`` (how the wiring changed) and, at the
end, ``result.json``. One process works in it at a time, named in ``.lock``. Batches are a function of the seed, the
epoch and the position in it, so that a resumed run continues as if it had not been interrupted.
"""

from __future__ import annotations

import datetime
import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wirings.errors import WiringError
from wirings.train import files, results
from wirings.train.build import build, load_data
from wirings.train.distributed import ProcessContext, explain_lost_process, lock_folder, start
from wirings.train.results import Result
from wirings.train.run.captured_step import capture
from wirings.train.run.evaluate import evaluate_by_metric
from wirings.train.run.folder import HISTORY, RESULT, SETTINGS, is_new
from wirings.train.run.heartbeat import Heartbeat
from wirings.train.run.log import Log, report_skipped_images
from wirings.train.run.optimizer import make_optimizer
from wirings.train.run.progress import Progress, columns
from wirings.train.run.recording import Recording
from wirings.train.run.saving import RunCheckpoints
from wirings.train.run.step import TrainingStep, acts_between_steps
from wirings.train.run.summary import summarize_run
from wirings.train.settings import Settings, to_mapping
from wirings.utils.signals import StopSignals
from wirings.wire.handle import Wiring

Initialize = Callable[[nn.Module, Wiring | None], None]
DIVERGED = "training diverged"
"""How the error begins that ends a run whose loss or weights are not finite; `wirings tune` looks for it."""
STOP_INTERVAL = 10
"""Steps after which several processes agree whether one of them was asked to stop."""


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
    initialize: Initialize | None = None,
    signals: StopSignals | None = None,
) -> Result | None:
    """Train with the given settings.

    Recipes that start from another one are trained by `wirings.train.phases.train`, which also trains all others.

    Args:
        name: the recipe's name, for messages and the result.
        settings: the run's settings.
        out: the run's folder.
        device: such as ``"cuda"`` or ``"cpu"``; by default a GPU, if there is one.
        resume: continue from the folder's last checkpoint, if it has one.
        max_minutes: save a checkpoint and stop after this time.
        overrides: what the caller changed in the recipe, kept with the result.
        log: receives the progress; by default, nothing is printed.
        initialize: called with a new model and its wiring before the first step. A resumed run does not call it.
        signals: save a checkpoint and stop when one of these is received.

    Returns:
        The result on rank 0; None on other ranks, and if the run was stopped before the end.
    """
    context, log = start(device), log or Log()
    with lock_folder(context, out, log.say):
        run = Run(name, settings, out, context, log, resume=resume, overrides=overrides, initialize=initialize)
        return run.train(max_minutes, signals)


class Run:
    """A training run in a folder that the caller has locked.

    Args:
        name: the recipe's name, for messages and the result.
        settings: the run's settings.
        folder: the run's folder.
        context: this process.
        log: receives the progress.
        resume: continue from the folder's last checkpoint, if it has one.
        overrides: what the caller changed in the recipe, kept with the result.
        initialize: called with a new model and its wiring before the first step.

    Attributes:
        data: the training and test data.
        model: the model to train.
        wiring: its handle, or None if nothing is wired.
        step: makes one training step.
        captured: the same step in a CUDA graph, or None.
        checkpoints: writes and restores checkpoints.
        recording: records the history of the wiring.
        heartbeat: tells the sweep that the run belongs to how far it is; None on ranks other than 0.
        progress: the progress of the run.
        epochs: the number of epochs, of which the last may be shorter than the others.
        total_steps: optimizer steps of the whole run.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        folder: Path,
        context: ProcessContext,
        log: Log,
        *,
        resume: bool = False,
        overrides: dict[str, Any] | None = None,
        initialize: Initialize | None = None,
    ) -> None:
        self._begun = time.perf_counter()
        self.name, self.settings, self.folder, self.context, self.log = name, settings, folder, context, log
        self.overrides, self.new = overrides or {}, is_new(folder, resume)
        if self.new and initialize is None and settings.start.recipe is not None:
            raise WiringError(
                f"{name} starts from {settings.start.recipe}. Use wirings.train.phases.train, which trains that first."
            )
        torch.manual_seed(settings.seed)
        self.data = load_data(settings, context)
        self.epochs, self.total_steps = settings.length(self.per_epoch)
        self.model, self.wiring = build(settings, self.data.classes, context, self.data if self.new else None)
        if self.new and initialize is not None:
            initialize(self.model, self.wiring)
        if self.wiring is not None:
            self.wiring.plan(self.total_steps)
        optimizer = make_optimizer(self.model, self.wiring, settings, context.device)
        padded = self.data.train.padded
        self.step = TrainingStep(self.model, self.wiring, optimizer, settings, context.device, context.world, padded)
        self.captured = capture(self.step, self.data.train, log.say) if settings.fast else None
        if context.world > 1:
            self.step.used = nn.parallel.DistributedDataParallel(self.model)
        of_data = {"classes": self.data.classes, "names": self.data.names, "data_md5": self.data.md5}
        about = {"recipe": name, "settings": to_mapping(settings), **of_data}
        self.checkpoints = RunCheckpoints(folder, self.step, about, context)
        self.recording = Recording(self.step, settings, folder / HISTORY, name, context)
        if self.new:
            self.progress = Progress(started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
        else:
            self.progress = self.checkpoints.resume(name, settings, self.per_epoch, columns(self.data))
        self.heartbeat = Heartbeat(folder) if context.first else None
        self._wall_before = self.progress.wall
        self._images_skipped = 0
        self._deadline = math.inf  # in seconds of time.perf_counter
        self._signals: StopSignals | None = None
        self._is_saved = False  # whether the last finished epoch is in a checkpoint

    @property
    def per_epoch(self) -> int:
        """Batches in an epoch."""
        return len(self.data.train)

    def lr_at(self, step: int) -> float:
        """The learning rate of optimizer step ``step``, counted from 0."""
        factor = self.settings.schedule.factor_at(step, self.per_epoch, self.epochs, self.total_steps)
        return self.settings.optimizer.lr * factor

    def train(self, max_minutes: float | None = None, signals: StopSignals | None = None) -> Result | None:
        """Train until the end, until ``max_minutes`` after the run was made, or until a signal is received.

        Returns the result, as `wirings.train.run.train` does.
        """
        progress, epochs = self.progress, self.epochs
        if progress.epoch == epochs and (self.folder / RESULT).exists():  # nothing to do, and nothing to overwrite
            return results.read(self.folder / RESULT) if self.context.first else None
        self._deadline = math.inf if max_minutes is None else self._begun + 60 * max_minutes
        self._signals = signals
        with nullcontext() if signals is None else signals.deferred():
            return self._train_epochs()

    def _train_epochs(self) -> Result | None:
        progress, epochs = self.progress, self.epochs
        self._open_folder()
        advice = f"Start all processes again with --resume: {self.folder} is as its last checkpoint left it."
        try:
            self.log.begin(self.name, self.settings, self.per_epoch, progress.epoch, self.folder)
            with explain_lost_process(self.context, advice):
                while progress.epoch < epochs:
                    stops = not self.train_epoch()
                    if not stops:
                        self._end_epoch()
                        stops = progress.epoch < epochs and self._stops_now()
                        if stops and not self._is_saved:
                            self._save()
                    if stops:
                        self._say_stopped()
                        return None
        finally:
            self.log.end()
            self.recording.close()
        return self._finish() if self.context.first else None

    def _open_folder(self) -> None:
        """Write the first files of a new run, or prepare the folder of a resumed one."""
        if not self.new and self.progress.epoch < self.epochs:
            self.log.say(f"Resuming at {self._position()}.")
        if self.context.first:
            files.remove_partial_files(self.folder)
            results.save_settings(self.folder / SETTINGS, self.name, self.settings, self.overrides)
            if self.new:
                self.checkpoints.save_initial()
        self.recording.start(self.progress, self.total_steps, self.log.say)

    def _stops_now(self) -> bool:
        """Whether the run is to stop here: a signal was received by any process, or the time is up."""
        signals = self._signals
        wanted = time.perf_counter() > self._deadline or (signals is not None and signals.received is not None)
        return self.context.any_flag(wanted) if self._deadline < math.inf or signals is not None else wanted

    def _say_stopped(self) -> None:
        signals = self._signals
        why = "The time is up" if time.perf_counter() > self._deadline else "Another process was stopped"
        if signals is not None and signals.received is not None:
            why = f"Stopped by {signals.name}"
        self.log.say(f"{why}. Continue {self.folder} with --resume, at {self._position()}.")

    def train_epoch(self) -> bool:
        """Train the rest of an epoch, without evaluation.

        Returns:
            False if it saved a checkpoint and stopped before the end of the epoch.
        """
        step, progress, every = self.step, self.progress, self.settings.checkpoint_every
        self.model.train()
        totals = progress.totals if progress.batch and self.context.first else [0.0, 0.0, 0.0]
        step.totals.copy_(torch.tensor(totals, dtype=torch.float64))
        between = acts_between_steps(self.wiring)
        batches, clock = self._batches(), time.perf_counter()
        for batch in batches:
            step.set_lr(self.lr_at(progress.steps))
            self._train_batch(batch)
            if between and self.wiring is not None:
                self.wiring.step(step.optimizer)
            progress.batch, progress.steps = progress.batch + 1, progress.steps + 1
            self.recording.after_step(progress.steps)
            self.log.batch(progress.batch)
            if self.heartbeat is not None:
                self.heartbeat.step(progress.steps, progress.epoch)
            due = every is not None and progress.steps % every == 0
            # Several processes have to agree, for which they wait for their devices.
            asks = self.context.world == 1 or self._deadline < math.inf or progress.steps % STOP_INTERVAL == 0
            stops = asks and self._stops_now()
            if (due or stops) and progress.batch < self.per_epoch and progress.steps < self.total_steps:
                progress.seconds += time.perf_counter() - clock
                self._save()
                clock = time.perf_counter()
                if stops:
                    return False
        if self.context.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # not the device: other streams may be in use by other runs
        progress.seconds += time.perf_counter() - clock
        return True

    def _batches(self) -> Iterator[Any]:
        """The remaining batches of an epoch; only their sizes if a captured step fetches them itself."""
        progress, loader = self.progress, self.data.train
        left = self.total_steps - progress.steps
        if self.captured is None:
            return itertools.islice(loader.epoch(progress.epoch, progress.batch), left)
        sizes = loader.sizes()[progress.batch :]
        loader.begin(progress.epoch, progress.batch)  # type: ignore[attr-defined]
        return iter(sizes[:left])

    def _train_batch(self, batch: Any) -> None:
        if self.captured is not None:
            self.captured(batch)
            return
        x, y = batch
        self.step(x, y, self.data.train.batch_size(self.progress.batch))

    def _end_epoch(self) -> None:
        """Evaluate, log and save."""
        self._check_finite()
        progress, settings = self.progress, self.settings
        line = self._epoch_line()
        progress.history.append(line)
        self.recording.after_epoch(line)
        progress.epoch, progress.batch = progress.epoch + 1, 0
        metric = self.data.metric
        value = line[metric.name]
        better = value is not None and (progress.best < 0 or metric.better(value, progress.best))
        if better:
            progress.best = value
        # The checkpoint is written last: a run that is killed before it repeats this epoch and writes all files again.
        if self.context.first:
            self.log.epoch(line, self.folder, progress.history, self.wiring)
            self._images_skipped = report_skipped_images(self.data, self.log, self._images_skipped)
        if better:
            self._update_progress()
            self.checkpoints.keep_best(progress)
        self._is_saved = progress.epoch % settings.checkpoint_epochs == 0 or progress.epoch == self.epochs
        if self._is_saved:
            self._save()

    def _epoch_line(self) -> dict[str, Any]:
        """An epoch's line of the log (`wirings.train.run.progress.columns`)."""
        step, progress, settings = self.step, self.progress, self.settings
        self.context.all_reduce_sum(step.totals)
        train_loss, train_accuracy, count = step.read()
        known: dict[str, Any] = {
            "epoch": progress.epoch + 1,
            "steps": progress.steps,
            "lr": self.lr_at(progress.steps - 1),
            "train_loss": train_loss,
            "train_accuracy": train_accuracy,
            "swapped": None if self.wiring is None else sum(report.swapped for report in self.wiring.look()),
            "seconds": progress.seconds,
            self.data.unit: count,
        }
        line = {name: known.get(name) for name in columns(self.data)}
        final = progress.epoch + 1 == self.epochs
        if final or (progress.epoch + 1) % settings.evaluate_every == 0:
            model = self.model if step.average is None else step.average
            found = evaluate_by_metric(model, self.data, step.autocast, self.context)
            line |= {"loss": found.loss, "accuracy": found.accuracy, "top5": found.top5, found.metric.name: found.value}
            for name, text in found.files.items():
                files.write_text(self.folder / name, text)
        return line

    def _save(self) -> None:
        """Write a checkpoint, and before it the history up to here."""
        self._check_finite()
        self.recording.flush()
        self.progress.records = self.recording.records
        self._update_progress()
        self.checkpoints.save(self.progress)

    def _update_progress(self) -> None:
        self.progress.totals = self.context.all_reduce_sum(self.step.totals.clone()).tolist()
        self.progress.wall = self._wall_before + time.perf_counter() - self._begun

    def _check_finite(self) -> None:
        """Raise if a loss or a weight is not finite, before anything is written."""
        step = self.step
        bad = int(self.context.all_reduce_max(step.bad.clone()).item())
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        finite = torch.stack([parameter.isfinite().all() for parameter in parameters]).tolist()
        broken = [name for name, fine in zip(names, finite, strict=True) if not fine]
        if bad < 0 and not broken:
            return
        number = self.progress.steps if bad < 0 else self.progress.steps - int(step.count.item()) + bad + 1
        others = f" and {len(broken) - 1} others" if len(broken) > 1 else ""
        weights = f"weights of {broken[0]}{others}" if broken else ""
        what = " and ".join(filter(None, ["" if bad < 0 else "the loss", weights]))
        last = self.checkpoints.last
        good = f"The last good checkpoint is {last}" if last.exists() else "There is no checkpoint yet"
        raise WiringError(
            f"{DIVERGED} at step {number} (lr {self.lr_at(number - 1):g}): {what} {'are' if broken else 'is'} "
            f"not finite. {good}. Lower optimizer.lr, set clip, or use a wider precision."
        )

    def _finish(self) -> Result:
        """Write the result."""
        self.progress.wall = self._wall_before + time.perf_counter() - self._begun
        environment = results.environment(self.context.device)
        shared = {} if self.heartbeat is None else self.heartbeat.end(self.progress.steps, self.progress.epoch)
        more = {"overrides": self.overrides, "data_md5": self.data.md5, **shared, **environment}
        metric = self.data.metric
        result = summarize_run(self.name, self.settings, self.model, self.wiring, self.progress, metric, **more)
        results.write_json(self.folder / RESULT, result)
        return result

    def _position(self) -> str:
        return f"epoch {self.progress.epoch + 1}, batch {self.progress.batch + 1}"
