"""TensorBoard and Weights & Biases: both get the same curves and the same pictures. Both packages are optional."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wirings.errors import WiringError
from wirings.train import files
from wirings.train.settings import Settings, to_mapping
from wirings.utils.text import printable, shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WANDB_RUN = "wandb.txt"
"""The file in a run's folder with the id of its run at Weights & Biases, for when it is resumed."""


class Tracker(ABC):
    """A program that shows a run while it trains. Opened when the run begins or resumes."""

    @abstractmethod
    def log(self, epoch: int, values: Mapping[str, float], figures: Mapping[str, Figure]) -> None:
        """Add a point to every curve, and pictures.

        Args:
            epoch: the number of finished epochs.
            values: what was measured, by the names of the curves.
            figures: matplotlib figures by name; may be empty.
        """

    @abstractmethod
    def close(self) -> None:
        """The run is finished, or stops for now."""


class TensorBoardTracker(Tracker):
    """Writes ``tensorboard/`` in a run's folder.

    Args:
        folder: the run's folder.
        epoch: the number of epochs that are finished already. What is there of later ones is hidden.
    """

    def __init__(self, folder: Path, epoch: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=epoch + 1)

    def log(self, epoch: int, values: Mapping[str, float], figures: Mapping[str, Figure]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, epoch)
        for name, figure in figures.items():
            self._writer.add_figure(name, figure, epoch)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker(Tracker):
    """Logs to a project of Weights & Biases. ``WANDB_MODE=offline`` writes to the run's folder alone.

    Args:
        project: the project's name.
        folder: the run's folder. If it holds the id of an earlier start, that one is continued.
        name: the recipe's name.
        settings: the run's settings, shown as its config.
    """

    def __init__(self, project: str, folder: Path, name: str, settings: Settings) -> None:
        import wandb

        self._wandb, known = wandb, folder / WANDB_RUN
        try:
            self._run = wandb.init(
                project=project,
                name=f"{name}, seed {settings.seed}",
                group=name,
                dir=str(folder),
                id=known.read_text(encoding="utf-8").strip() if known.is_file() else None,
                resume="allow",
                config={"recipe": name, **to_mapping(settings)},
            )
        except Exception as error:  # of the network, or of a missing login
            reason = printable(shortened(" ".join(str(error).split()), 200))
            raise WiringError(
                f"Weights & Biases could not be started ({reason}). Run `wandb login`, set WANDB_MODE=offline, or "
                "leave --wandb out."
            ) from error
        files.write_text(known, f"{self._run.id}\n")
        # Its own count of steps only grows, but a resumed run repeats epochs after its checkpoint.
        self._run.define_metric("epoch", hidden=True)
        self._run.define_metric("*", step_metric="epoch")

    def log(self, epoch: int, values: Mapping[str, float], figures: Mapping[str, Figure]) -> None:
        pictures = {name: self._wandb.Image(figure) for name, figure in figures.items()}
        self._run.log({"epoch": epoch, **values, **pictures})

    def close(self) -> None:
        self._run.finish()


def require(package: str, what: str) -> None:
    """Raise unless a tracker's package is installed: before hours of training, not after."""
    if importlib.util.find_spec(package) is None:
        raise WiringError(f"{what} the package {package}: pip install {package}")


def curves(line: Mapping[str, Any]) -> dict[str, float]:
    """The values of a line of a run's log that make curves; those of counters do not."""
    counters = ("epoch", "steps", "images", "tokens")
    return {name: value for name, value in line.items() if isinstance(value, (int, float)) and name not in counters}
