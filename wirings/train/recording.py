"""A run's history of its wiring: ``history.wirings`` in its folder, played by ``wirings show RUN --html``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from wirings.errors import WiringError
from wirings.history import History, Recorder
from wirings.train.settings import Settings
from wirings.train.step import Step
from wirings.wire.handle import Wiring

HISTORY = "history.wirings"
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
        steps: those that the run has made, and those of the whole run. With some made, it goes on with the history in
            the file.
        say: what to do with something that the user should know.
    """

    def __init__(
        self,
        step: Step | None,
        settings: Settings,
        path: Path,
        name: str,
        steps: tuple[int, int],
        say: Callable[[str], None],
    ) -> None:
        self.step = step
        self.recorder: Recorder | None = None
        if step is None or step.wiring is None or settings.history_every == 0:
            return
        done, in_all = steps
        before = None
        if done and path.exists():
            try:
                before = History.load(path, whole=False)
            except WiringError as error:
                say(f"the history begins anew: {error}")
        elif done:
            say(f"the history begins anew: there is no {path}.")
        every = settings.history_every or usual_every(step.wiring, in_all)
        about = {"recipe": name, "seed": settings.seed, "model": settings.model.name, "data": settings.data.name}
        self.recorder = Recorder(step.wiring, every, path=path, about=about, resume=before, step=done)

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


def usual_every(wiring: Wiring, steps: int) -> int:
    """Steps from one record to the next in a run of so many steps."""
    edges = sum(int(torch.count_nonzero(mask)) for mask in wiring.masks().values())
    return max(LEAST, steps // min(RECORDS, max(10, ENOUGH // max(edges, 1))))
