"""A run's history of its wiring: ``history.wirings`` in its folder, played by ``wirings show RUN --html``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from wirings.errors import WiringError
from wirings.history import History, Recorder
from wirings.history.from_model import structure_of, wired_weights_of
from wirings.train.settings import Settings
from wirings.train.step import Step
from wirings.train.summary import Progress
from wirings.wire.handle import Wiring

HISTORY, DAMAGED = "history.wirings", "history.damaged.wirings"
RECORDS, LEAST = 200, 8
"""Records of a run whose settings do not say how many, and steps from one to the next at least."""
ENOUGH = 10_000_000
"""Edges in all records together, at about half a byte each: of a large wiring there are fewer records."""


class Recording:
    """Records what the settings ask for, in the first process; else does nothing.

    Args:
        step: whose wiring is recorded; None in the other processes.
        settings: of the run.
        path: the history's file.
        name: the recipe's.
        progress: where the run stands. One that has made steps goes on with the history in the file.
        in_all: steps of the whole run.
        say: what to do with something that the user should know.
    """

    def __init__(
        self,
        step: Step | None,
        settings: Settings,
        path: Path,
        name: str,
        progress: Progress,
        in_all: int,
        say: Callable[[str], None],
    ) -> None:
        self.step = step
        self.recorder: Recorder | None = None
        if step is None or step.wiring is None or settings.history_every == 0:
            return
        done = progress.steps
        before = _before(path, step.wiring, done, progress.records, say) if done else None
        every = settings.history_every or usual_every(step.wiring, in_all)
        about = {"recipe": name, "seed": settings.seed, "model": settings.model.name, "data": settings.data.name}
        self.recorder = Recorder(step.wiring, every, path=path, about=about, resume=before, step=done)
        if before is not None and len(before.chunks) < progress.records and before.steps[-1] < done:
            self.recorder.record()  # where the wiring is known again

    @property
    def records(self) -> int:
        """Records and notes up to now, those before a resume included."""
        return 0 if self.recorder is None else len(self.recorder.history().chunks)

    def after(self, number: int) -> None:
        """Optimizer step ``number`` is done; nobody waits for the device."""
        if self.recorder is not None and self.step is not None and number % self.recorder.every == 0:
            loss, _, examples = self.step.totals.unbind()
            self.recorder.step(number, loss=loss / examples)  # the mean since the epoch began, which a checkpoint holds

    def epoch(self, line: dict[str, Any]) -> None:
        """An epoch is over; ``line`` is the log's."""
        if self.recorder is not None:
            self.recorder.steps = line["steps"]
            names = {"accuracy": "accuracy", "loss": "test_loss"}
            self.recorder.note(**{to: line[of] for of, to in names.items() if line[of] is not None})

    def flush(self) -> None:
        """Write what is not in the file yet. Comes before a checkpoint: what is after that is recorded again."""
        if self.recorder is not None:
            self.recorder.flush()

    def close(self) -> None:
        if self.recorder is not None:
            self.recorder.close()


def _before(path: Path, wiring: Wiring, done: int, records: int, say: Callable[[str], None]) -> History | None:
    """The history up to the step that a run goes on from. A damaged one is set aside, and what is left of it is told.

    What a killed run had written after its last checkpoint is no loss: it is recorded again.

    Args:
        path: the history's file.
        wiring: what it must be of.
        done: the step that the run goes on from.
        records: records and notes that it had there.
        say: told what is lost.
    """
    if not path.exists():
        say(f"the history begins anew: there is no {path}.")
        return None
    aside = path.with_name(DAMAGED)
    try:
        found = History.load(path, whole=False)
        if found.structure.to_json() != structure_of(wired_weights_of(wiring)).to_json():
            raise WiringError(f"{path} is of another network.")
        kept, damage = found.sound(done)
        if not len(kept):
            raise WiringError(f"{path} is damaged: {damage or 'it has no records'}.")
    except WiringError as error:
        _rename(path, aside)
        say(f"the history begins anew: {error} That file is {aside} now.")
        return None
    if len(kept.chunks) < records:
        _rename(path, aside)
        say(
            f"{path} is damaged: {damage or 'it ends too early'}. It is kept up to step {kept.steps[-1]:,}; what "
            f"followed, up to step {done:,}, is lost. The damaged file is {aside} now."
        )
    return kept


def _rename(path: Path, aside: Path) -> None:
    try:
        path.replace(aside)
    except OSError as error:
        raise WiringError(f"{path} is damaged and cannot be renamed: {error.strerror}. Move it away.") from error


def usual_every(wiring: Wiring, steps: int) -> int:
    """Steps from one record to the next in a run of so many steps."""
    edges = sum(int(torch.count_nonzero(mask)) for mask in wiring.masks().values())
    return max(LEAST, steps // min(RECORDS, max(10, ENOUGH // max(edges, 1))))
