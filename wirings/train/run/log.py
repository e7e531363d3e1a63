"""What a run reports while it trains: a progress bar, a CSV file, TensorBoard, Weights & Biases."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wirings.history import History
from wirings.train import files
from wirings.train.data.base import Data
from wirings.train.data.metrics import ACCURACY, metric_of
from wirings.train.run.folder import HISTORY, LOG
from wirings.train.run.trackers import TensorBoardTracker, Tracker, WandbTracker, curves, require
from wirings.train.settings import Settings
from wirings.utils.text import printable
from wirings.wire.handle import Wiring

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Log:
    """Writes ``log.csv``, one line for each epoch, and prints nothing."""

    def say(self, text: str) -> None:
        """Report something that the user should know."""

    def begin(self, name: str, settings: Settings, batches: int, epoch: int, out: Path) -> None:
        """A run begins, or resumes. What this raises ends the run before its next step.

        Args:
            name: the recipe's name.
            settings: the run's settings.
            batches: the number of batches of each epoch but the last.
            epoch: the number of finished epochs.
            out: the run's folder.
        """

    def batch(self, done: int) -> None:
        """``done`` batches of the epoch are finished."""

    def epoch(self, line: dict[str, Any], out: Path, history: list[dict[str, Any]], wiring: Wiring | None) -> None:
        """An epoch is finished.

        Args:
            line: what was measured.
            out: the run's folder.
            history: the lines of all epochs up to this one.
            wiring: the handle, or None if nothing is wired.
        """
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(line))
        writer.writeheader()
        writer.writerows(history)
        # The whole file each time, so that a resumed run has no duplicate lines.
        files.write_text(out / LOG, text.getvalue())

    def end(self) -> None:
        """The run is finished, or stops for now."""


def report_skipped_images(data: Data, log: Log, reported: int) -> int:
    """Report images that could not be decoded, if there are more than before.

    Args:
        data: the data whose loaders skip images.
        log: the log to report them to.
        reported: the number that was reported before.

    Returns:
        The number of skipped images.
    """
    names = [name for loader in (data.train, data.test) for name in getattr(loader, "skipped", ())]
    if len(names) > reported:
        rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
        log.say(f"Skipped {len(names)} images that cannot be decoded: {', '.join(names[:3])}{rest}.")
    return len(names)


class ConsoleLog(Log):
    """Prints a progress bar and a line for each epoch: loss, accuracy, learning rate, swapped edges, images per second.

    Args:
        tensorboard: whether to write curves and pictures of the wiring to ``tensorboard/`` in the run's folder.
        wandb: the project of Weights & Biases that gets the same curves and pictures, or None.
    """

    def __init__(self, tensorboard: bool = False, wandb: str | None = None) -> None:
        from rich.console import Console

        if tensorboard:
            require("tensorboard", "TensorBoard files need")
        if wandb is not None:
            require("wandb", "Weights & Biases needs")
        self.console, self.tensorboard, self.wandb = Console(), tensorboard, wandb
        self.bar: Any = None
        self.trackers: list[Tracker] = []
        self._batches, self._epochs = 1, 1

    def say(self, text: str) -> None:
        self.console.print(printable(text, keep="\n\t"), highlight=False, soft_wrap=True, markup=False)

    def begin(self, name: str, settings: Settings, batches: int, epoch: int, out: Path) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        if self.tensorboard:
            self.trackers.append(TensorBoardTracker(out, epoch))
        if self.wandb is not None:
            self.trackers.append(WandbTracker(self.wandb, out, name, settings))
        self._batches = batches
        self._epochs, steps = settings.length(batches)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self.bar = Progress(*columns, console=self.console, transient=True, refresh_per_second=2)
        self.bar.start()
        label = printable(f"{name}, seed {settings.seed}")
        self.task = self.bar.add_task(label, total=steps, completed=batches * epoch)
        self._epoch = epoch

    def batch(self, done: int) -> None:
        self.bar.update(self.task, completed=self._epoch * self._batches + done)

    def epoch(self, line: dict[str, Any], out: Path, history: list[dict[str, Any]], wiring: Wiring | None) -> None:
        super().epoch(line, out, history, wiring)
        self._epoch = line["epoch"]
        seconds = line["seconds"] - (history[-2]["seconds"] if len(history) > 1 else 0.0)
        unit = "tokens" if "tokens" in line else "images"
        swapped = "" if line["swapped"] is None else f", {line['swapped'] / self._batches:.1f} edges swapped per step"
        self.say(
            f"epoch {line['epoch']:3}/{self._epochs}: loss {line['train_loss']:.4f}, train "
            f"{line['train_accuracy']:.2f} %{_tested(line)}, lr {line['lr']:.4g}{swapped}, "
            f"{line[unit] / max(seconds, 1e-9):,.0f} {unit}/s"
        )
        if self.trackers:
            self._track(line, out, wiring)

    def _track(self, line: dict[str, Any], out: Path, wiring: Wiring | None) -> None:
        # Drawing may take longer than an epoch, so there are pictures of epochs 1, 2, 4, 8, … and the last only.
        epoch, found = line["epoch"], {}
        if wiring is not None and (epoch & (epoch - 1) == 0 or epoch == self._epochs):
            found = {f"wiring/{name}": figure for name, figure in _figures(wiring, out / HISTORY).items()}
        for tracker in self.trackers:
            tracker.log(epoch, curves(line), found)

    def end(self) -> None:
        if self.bar is not None:
            self.bar.stop()
        while self.trackers:  # the next phase has its own
            self.trackers.pop().close()


def _tested(line: dict[str, Any]) -> str:
    """What was measured on the test set after an epoch, for the console; empty if nothing was."""
    metric = metric_of(line)
    if (value := line[metric.name]) is None:
        return ""
    remark = f" ({line['loss']:.4f})" if metric == ACCURACY else metric.remark(value)
    return f", test {metric.format(value)}{remark}"


def _figures(wiring: Wiring, recorded: Path) -> dict[str, Figure]:
    """The pictures of `wirings show --pictures`: of the wiring as it is now, and of its history if there is a file."""
    from wirings.draw.gallery import figures, over_time

    found = figures(wiring.model)
    if recorded.exists():
        found |= {name: picture.figure() for name, picture in over_time(History.load(recorded, whole=False)).items()}
    return found
