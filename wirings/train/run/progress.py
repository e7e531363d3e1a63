"""The progress of a run: saved in every checkpoint, and checked when it is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from wirings.errors import WiringError
from wirings.train.data.base import Data
from wirings.train.data.metrics import ACCURACY
from wirings.train.run.checkpoint import is_json_number


@dataclass
class Progress:
    """The progress of a run."""

    epoch: int = 0
    """Finished epochs."""
    batch: int = 0
    """Finished batches of the current epoch."""
    steps: int = 0
    """Optimizer steps made."""
    best: float = -1.0
    """The best value of the metric so far, such as the accuracy in percent; -1 before the first evaluation."""
    seconds: float = 0.0
    """Time spent on training steps, without evaluation."""
    wall: float = 0.0
    """Time spent in all."""
    started: str = ""
    """Date and time of the start, ISO 8601."""
    totals: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    """The summed loss, correct predictions and labels of the current epoch."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """The log's line of each finished epoch."""
    records: int = 0
    """Records and notes in the history of the wiring, from which a resumed run sees whether some are lost."""


LINE = (
    "epoch",
    "steps",
    "lr",
    "train_loss",
    "train_accuracy",
    "loss",
    "accuracy",
    "top5",
    "swapped",
    "seconds",
    "images",
)
"""The columns of an epoch's line: numbers, or None for what was not measured."""


def columns(data: Data) -> tuple[str, ...]:
    """The columns of an epoch's line: a metric other than accuracy has one more, and tokens replace images."""
    named = [data.unit if name == "images" else name for name in LINE]
    if data.metric != ACCURACY:
        named.insert(named.index("swapped"), data.metric.name)
    return tuple(named)


def read_progress(saved: dict[str, Any], length: tuple[int, int], per_epoch: int, line: tuple[str, ...]) -> Progress:
    """Read a run's progress from its checkpoint.

    Args:
        saved: what the checkpoint holds.
        length: the number of epochs and of optimizer steps of the run.
        per_epoch: the number of batches in an epoch.
        line: the columns of an epoch's line.

    Raises:
        WiringError: if no such run can have this progress.
    """
    new = Progress()
    if saved.keys() != vars(new).keys():
        raise WiringError("its progress has unexpected or missing entries")
    for key, value in saved.items():
        expected = type(getattr(new, key))
        if not (is_json_number(value) if expected is float else type(value) is expected):
            raise WiringError(f"its progress has an invalid {key!r}")
    found = Progress(**saved)
    epochs, steps = length
    consistent = min(found.epoch * per_epoch, steps) + found.batch == found.steps
    in_range = 0 <= found.epoch <= epochs and 0 <= found.batch < per_epoch and found.steps <= steps
    if not consistent or not in_range:
        raise WiringError(f"its progress is impossible: epoch {found.epoch}, batch {found.batch}, step {found.steps}")
    lines = [tuple(each) if isinstance(each, dict) else () for each in found.history]
    if lines != [line] * found.epoch or not all(
        value is None or is_json_number(value) for each in found.history for value in each.values()
    ):
        raise WiringError("its progress has invalid lines of the log")
    if len(found.totals) != 3 or not all(map(is_json_number, found.totals)):
        raise WiringError("its progress has an invalid 'totals'")
    return found
