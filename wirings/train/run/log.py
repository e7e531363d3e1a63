"""What a run reports while it trains: a progress bar, a CSV file, TensorBoard."""

from __future__ import annotations

import csv
import importlib.util
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wirings.errors import WiringError
from wirings.history import History, snapshot_of
from wirings.train import files
from wirings.train.data.base import Data
from wirings.train.run.folder import HISTORY, LOG
from wirings.train.settings import Settings
from wirings.utils.text import printable
from wirings.wire.handle import Wiring

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Log:
    """Writes ``log.csv``, one line for each epoch, and prints nothing."""

    def say(self, text: str) -> None:
        """Report something that the user should know."""

    def begin(self, name: str, settings: Settings, batches: int, epoch: int) -> None:
        """A run begins, or resumes after ``epoch`` finished epochs, of ``batches`` batches each."""

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
        tensorboard: whether to write scalars and pictures of the wiring to ``tensorboard/`` in the run's folder.
    """

    def __init__(self, tensorboard: bool = False) -> None:
        from rich.console import Console

        if tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise WiringError("TensorBoard files need the package tensorboard: pip install tensorboard")
        self.console, self.tensorboard = Console(), tensorboard
        self.bar: Any = None
        self.writer: Any = None
        self._batches, self._epochs = 1, 1

    def say(self, text: str) -> None:
        self.console.print(printable(text, keep="\n\t"), highlight=False, soft_wrap=True, markup=False)

    def begin(self, name: str, settings: Settings, batches: int, epoch: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._batches, self._epochs = batches, settings.epochs
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self.bar = Progress(*columns, console=self.console, transient=True, refresh_per_second=2)
        self.bar.start()
        label = printable(f"{name}, seed {settings.seed}")
        self.task = self.bar.add_task(label, total=batches * settings.epochs, completed=batches * epoch)
        self._epoch = epoch

    def batch(self, done: int) -> None:
        self.bar.update(self.task, completed=self._epoch * self._batches + done)

    def epoch(self, line: dict[str, Any], out: Path, history: list[dict[str, Any]], wiring: Wiring | None) -> None:
        super().epoch(line, out, history, wiring)
        self._epoch = line["epoch"]
        seconds, images = line["seconds"] - (history[-2]["seconds"] if len(history) > 1 else 0.0), line["images"]
        test = "" if line["accuracy"] is None else f", test {line['accuracy']:.2f} % ({line['loss']:.4f})"
        swapped = "" if line["swapped"] is None else f", {line['swapped'] / self._batches:.1f} edges swapped per step"
        self.say(
            f"epoch {line['epoch']:3}/{self._epochs}: loss {line['train_loss']:.4f}, train "
            f"{line['train_accuracy']:.2f} %{test}, lr {line['lr']:.4g}{swapped}, {images / max(seconds, 1e-9):,.0f} "
            "images/s"
        )
        if self.tensorboard:
            self._to_tensorboard(line, out, wiring)

    def _to_tensorboard(self, line: dict[str, Any], out: Path, wiring: Wiring | None) -> None:
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(out / "tensorboard"), purge_step=line["epoch"])
        for name, value in line.items():
            if isinstance(value, (int, float)) and name not in ("epoch", "steps", "images"):
                self.writer.add_scalar(name, value, line["epoch"])
        # Drawing may take longer than an epoch, so there are pictures of epochs 1, 2, 4, 8, … and the last only.
        epoch = line["epoch"]
        if wiring is not None and (epoch & (epoch - 1) == 0 or epoch == self._epochs):
            for name, figure in figures(wiring, out / HISTORY).items():
                self.writer.add_figure(f"wiring/{name}", figure, epoch)
        self.writer.flush()

    def end(self) -> None:
        if self.bar is not None:
            self.bar.stop()
        if self.writer is not None:
            self.writer.close()
            self.writer = None  # the next phase has its own folder


def figures(wiring: Wiring, recorded: Path) -> dict[str, Figure]:
    """The pictures of `wirings show --pictures`: of the wiring as it is now, and of its history if there is a file."""
    from wirings.draw.gallery import over_time, pictures

    found = pictures(snapshot_of(wiring.model))
    if recorded.exists():
        found |= over_time(History.load(recorded, whole=False))
    return {name: picture.figure() for name, picture in found.items()}
