"""Records the history of a run's wiring in ``history.wirings``; ``wirings show RUN --html`` plays it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from wirings.errors import WiringError
from wirings.history import History, Recorder
from wirings.history.from_model import structure_of_wiring
from wirings.train.data.metrics import metric_of
from wirings.train.distributed import ProcessContext
from wirings.train.run.folder import DAMAGED_HISTORY
from wirings.train.run.progress import Progress
from wirings.train.run.step import TrainingStep
from wirings.train.settings import Settings
from wirings.wire.handle import Wiring

RECORDS, MIN_INTERVAL = 200, 8
"""By default, how many records a run has, and the fewest steps between two of them."""
MAX_EDGES = 10_000_000
"""By default, the most edges in all records together, at about half a byte each: large wirings have fewer records."""


class Recording:
    """Records the wiring as often as the settings say, and after the last step.

    Rank 0 does; other ranks contribute their part of the loss.

    Args:
        step: the step whose wiring is recorded.
        settings: the run's settings.
        path: the history's file.
        name: the recipe's name.
        context: this process.
    """

    def __init__(self, step: TrainingStep, settings: Settings, path: Path, name: str, context: ProcessContext) -> None:
        self.step, self.settings, self.path, self.name, self.context = step, settings, path, name, context
        self.recorder: Recorder | None = None
        self._every = self._last = 0

    def start(self, progress: Progress, total_steps: int, say: Callable[[str], None]) -> None:
        """Open the history: a new one, or the one in the file if the run is resumed.

        Args:
            progress: the progress of the run.
            total_steps: optimizer steps of the whole run.
            say: called with what is lost if the file is damaged.
        """
        step, settings = self.step, self.settings
        if step.wiring is None or settings.history_every == 0:
            return
        self._last, self._every = total_steps, settings.history_every or default_interval(step.wiring, total_steps)
        if not self.context.first:
            return
        done = progress.steps
        before = _load_before(self.path, step.wiring, progress, say) if done else None
        about = {"recipe": self.name, "seed": settings.seed, "model": settings.model.name, "data": settings.data.name}
        self.recorder = Recorder(step.wiring, self._every, path=self.path, about=about, resume=before, step=done)
        if before is not None and len(before.chunks) < progress.records and before.steps[-1] < done:
            self.recorder.record()  # records were lost: continue from the wiring as it is now

    @property
    def records(self) -> int:
        """The number of records and notes, including those from before the run was resumed."""
        return 0 if self.recorder is None else len(self.recorder.history().chunks)

    def after_step(self, number: int) -> None:
        """Optimizer step ``number`` is done. Does not wait for the device."""
        if self._every == 0 or (number % self._every != 0 and number != self._last):
            return
        # The mean since the epoch began, over all processes: their sums are part of a checkpoint, so a resumed run has
        # the same.
        loss, _, examples = self.context.all_reduce_sum(self.step.totals.clone()).unbind()
        if self.recorder is not None:
            self.recorder.steps = number
            self.recorder.record(loss=loss / examples)

    def after_epoch(self, line: dict[str, Any]) -> None:
        """An epoch is finished; ``line`` is that of the log."""
        if self.recorder is not None:
            self.recorder.steps = line["steps"]
            metric = metric_of(line).name
            names = {"accuracy": "accuracy", "loss": "test_loss", metric: metric}
            self.recorder.note(**{to: line[of] for of, to in names.items() if line[of] is not None})

    def flush(self) -> None:
        """Write all records to the file. Call it before a checkpoint: a resumed run records again what comes later."""
        if self.recorder is not None:
            self.recorder.flush()

    def close(self) -> None:
        """Write all records and close the file."""
        if self.recorder is not None:
            self.recorder.close()


def _load_before(path: Path, wiring: Wiring, progress: Progress, say: Callable[[str], None]) -> History | None:
    """Load the history up to the step that a run is resumed from.

    A damaged file is renamed, and its intact records are kept. Records that a killed run wrote after its last
    checkpoint are dropped: they are recorded again.

    Args:
        path: the history's file.
        wiring: the handle whose history the file must be.
        progress: where the run is resumed.
        say: called with what is lost.
    """
    if not path.exists():
        say(f"A new history begins: {path} does not exist.")
        return None
    done, aside = progress.steps, path.with_name(DAMAGED_HISTORY)
    try:
        found = History.load(path, whole=False)
        if not found.structure.same_edges(structure_of_wiring(wiring)):
            raise WiringError(f"{path} is the history of another network.")
        kept, damage = found.sound(done)
        if not len(kept):
            raise WiringError(f"{path} is damaged: {damage or 'it has no records'}.")
    except WiringError as error:
        _rename(path, aside)
        say(f"A new history begins: {error} The old file was renamed to {aside}.")
        return None
    if len(kept.chunks) < progress.records:
        _rename(path, aside)
        say(
            f"{path} is damaged: {damage or 'it ends too early'}. Records up to step {kept.steps[-1]:,} are kept; "
            f"those up to step {done:,} are lost. The damaged file was renamed to {aside}."
        )
    return kept


def _rename(path: Path, aside: Path) -> None:
    try:
        path.replace(aside)
    except OSError as error:
        raise WiringError(f"{path} is damaged and cannot be renamed: {error.strerror}. Move it away.") from error


def default_interval(wiring: Wiring, steps: int) -> int:
    """The number of steps between records, by default, in a run of ``steps`` steps."""
    edges = sum(int(torch.count_nonzero(mask)) for mask in wiring.masks().values())
    return max(MIN_INTERVAL, steps // min(RECORDS, max(10, MAX_EDGES // max(edges, 1))))
