"""When a run writes its checkpoints, and how it resumes from the last one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import Tensor

from wirings.errors import WiringError
from wirings.train.distributed import ProcessContext
from wirings.train.run import checkpoint
from wirings.train.run.folder import BEST, INITIAL, LAST
from wirings.train.run.progress import LINE, Progress, read_progress
from wirings.train.run.step import TrainingStep
from wirings.train.settings import Settings, first_difference, from_mapping


class RunCheckpoints:
    """The checkpoints of a run. Rank 0 writes them.

    Args:
        folder: the run's folder.
        step: the step whose state is saved.
        about: what the header of every checkpoint holds.
        context: this process.
    """

    def __init__(self, folder: Path, step: TrainingStep, about: dict[str, Any], context: ProcessContext) -> None:
        self.folder, self.step, self.about, self.context = folder, step, about, context
        self._best: tuple[dict[str, Tensor], dict[str, Any]] | None = None

    @property
    def last(self) -> Path:
        """The checkpoint to resume from."""
        return self.folder / LAST

    def save_initial(self) -> None:
        """Write the model before its first step."""
        checkpoint.save_model(self.folder / INITIAL, self.step.model, self.about)

    def keep_best(self, progress: Progress) -> None:
        """Keep a copy of the current state in memory, to be written as the best one by the next `save`."""
        self._best = self._collect(progress)

    def save(self, progress: Progress) -> None:
        """Write the best state, if it is new, and the current one; returns when all processes are here."""
        if self.context.first:
            if self._best is not None:
                checkpoint.write_tensors(self.folder / BEST, *self._best)
            checkpoint.write_tensors(self.last, *self._collect(progress))
        self._best = None
        self.context.barrier()

    def _collect(self, progress: Progress) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return checkpoint.collect(self.step, {**self.about, "progress": copy.deepcopy(vars(progress))})

    def resume(self, name: str, settings: Settings, per_epoch: int, line: tuple[str, ...] = LINE) -> Progress:
        """Restore the last checkpoint, which must be of the same recipe, settings and data.

        Args:
            name: the recipe's name.
            settings: the run's settings.
            per_epoch: the number of batches in an epoch.
            line: the columns of an epoch's line of the log.

        Returns:
            The progress of the run.
        """
        path = self.last
        tensors, about = checkpoint.read(path)
        if (recipe := checkpoint.field(about, "recipe", str, path)) != name:
            raise WiringError(f"{path} belongs to the recipe {recipe!r}, not to {name!r}. Give another --out.")
        try:
            then = from_mapping(checkpoint.field(about, "settings", dict, path))
            saved, length = checkpoint.field(about, "progress", dict, path), settings.length(per_epoch)
            progress = read_progress(saved, length, per_epoch, line)
        except WiringError as error:
            raise checkpoint.damaged(path, error) from error
        if different := first_difference(then, settings):
            key, before, now = different
            raise WiringError(
                f"{path} was trained with {key} = {before!r}, but now it is {now!r}. A run is resumed with its own "
                "settings; give another --out for a new run."
            )
        if checkpoint.other_data(about, self.about.get("data_md5")):
            raise WiringError(
                f"{path} was trained on other data: the checksum of {settings.data.name} has changed. A run is resumed "
                "with its own data; restore it, or give another --out for a new run."
            )
        checkpoint.restore(self.step, tensors, about, path)
        return progress
