"""What a run tells while it goes: a progress bar, a CSV file, TensorBoard."""

from __future__ import annotations

import csv
import importlib.util
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wirings.errors import WiringError
from wirings.history import History, still
from wirings.train.checkpoint import write
from wirings.train.data.base import Data
from wirings.train.recording import HISTORY
from wirings.train.settings import Settings
from wirings.utils.console import printable
from wirings.wire.handle import Wiring

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Log:
    """Writes ``log.csv``, one line an epoch, and says nothing."""

    def say(self, text: str) -> None:
        """Something that the user should know."""

    def begin(self, name: str, settings: Settings, batches: int, epoch: int) -> None:
        """A run begins, or goes on at ``epoch`` (from 0), with ``batches`` batches an epoch."""

    def batch(self, done: int) -> None:
        """So many batches of the epoch are done."""

    def epoch(self, line: dict[str, Any], out: Path, history: list[dict[str, Any]], wiring: Wiring | None) -> None:
        """An epoch is over; ``history`` has the lines of all."""
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(line))
        writer.writeheader()
        writer.writerows(history)
        # Whole, each time: a run that goes on from a checkpoint has no line twice.
        write(out / "log.csv", lambda part: Path(part).write_text(text.getvalue()))

    def end(self) -> None:
        """The run is over, for now."""


def tell_skipped(found: Data, log: Log, told: int) -> int:
    """Say how many images were left out, and which, where there are more than before."""
    names = [name for loader in (found.train, found.test) for name in getattr(loader, "skipped", ())]
    if len(names) > told:
        rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
        log.say(f"{len(names)} images cannot be decoded and were left out: {', '.join(names[:3])}{rest}")
    return len(names)


class Shown(Log):
    """A progress bar with images a second, loss, accuracy, edges swapped and the time that is left; a line an epoch.

    Args:
        tensorboard: whether scalars and pictures of the wiring go to ``tensorboard/`` in the run's folder as well.
    """

    def __init__(self, tensorboard: bool = False) -> None:
        from rich.console import Console

        if tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise WiringError("TensorBoard files need a package of their own: pip install tensorboard")
        self.console, self.tensorboard = Console(), tensorboard
        self.bar: Any = None
        self.writer: Any = None
        self._batches, self._epochs = 1, 1

    def say(self, text: str) -> None:
        self.console.print(printable(text), highlight=False, soft_wrap=True, markup=False)

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
        label = printable(f"{name}, seed {settings.seed}", keep="")
        self.task = self.bar.add_task(label, total=batches * settings.epochs, completed=batches * epoch)
        self._epoch = epoch

    def batch(self, done: int) -> None:
        self.bar.update(self.task, completed=self._epoch * self._batches + done)

    def epoch(self, line: dict[str, Any], out: Path, history: list[dict[str, Any]], wiring: Wiring | None) -> None:
        super().epoch(line, out, history, wiring)
        self._epoch = line["epoch"]
        seconds, images = line["seconds"] - (history[-2]["seconds"] if len(history) > 1 else 0.0), line["images"]
        test = "" if line["accuracy"] is None else f", test {line['accuracy']:.2f} % ({line['loss']:.4f})"
        per_step = "" if line["swapped"] is None else f", {line['swapped'] / self._batches:.1f} edges swapped a step"
        self.say(
            f"epoch {line['epoch']:3}/{self._epochs}: loss {line['train_loss']:.4f}, train "
            f"{line['train_accuracy']:.2f} %{test}, lr {line['lr']:.4g}{per_step}, {images / max(seconds, 1e-9):,.0f} "
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
        # Pictures take longer than an epoch may: those of epochs 1, 2, 4, 8, … and the last show how it goes.
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
            self.writer = None  # the next phase has a folder of its own


def figures(wiring: Wiring, recorded: Path) -> dict[str, Figure]:
    """The pictures that `wirings show --pictures` makes: of a wiring as it is now, and of what is recorded of it."""
    from wirings.draw.gallery import over_time, pictures

    found = pictures(still(wiring.model))
    if recorded.exists():
        found |= over_time(History.load(recorded, whole=False))
    return {name: picture.figure() for name, picture in found.items()}
