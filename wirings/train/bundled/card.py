"""What is known about a trained network: its run's result, the results of other seeds, and checksums of its files."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from wirings.errors import WiringError
from wirings.train import files
from wirings.train import typed_dataclasses as typed
from wirings.train.results import LARGEST, Result
from wirings.train.typed_dataclasses import TypedDataclass
from wirings.utils.text import shortened

CARD, SCHEMA = "card.json", 1


@dataclass(frozen=True, kw_only=True)
class NetworkCard(TypedDataclass):
    """The card of a trained network."""

    schema: int = SCHEMA
    """The version of these fields."""
    result: Result
    """The result of the run that trained it: recipe, seed, accuracy, edges, multiply-adds and all settings. Folders of
    the machine that trained it are left out."""
    scores: dict[str, float]
    """The metric of every known run of the recipe, by seed, this one included."""
    measured: float
    """The metric on the whole test set, of the network in the file: rounded, if its weights are."""
    measured_on: str
    """The hardware that it was measured on."""
    mult_adds: int | None = None
    """Multiply-adds for one example, as `wirings.profile` counts them; None if the model has no ``input_shape``."""
    dtype: str | None = None
    """What the weights are rounded to; None if they are those of the run, bit for bit."""
    classes: int
    """The number of classes or tokens."""
    class_names: tuple[str, ...] | None = None
    """The names of the classes, or the tokens, if the data has its own."""
    model_sha256: str
    """The checksum of ``model.safetensors``."""
    history_sha256: str | None = None
    """The checksum of ``history.wirings``; None if there is none."""

    def check(self) -> None:
        if self.schema != SCHEMA:
            raise WiringError(f"schema must be {SCHEMA}, got {self.schema}. Upgrade wirings.")
        self.need("classes", self.classes >= 1, "at least 1")
        self.need("mult_adds", (self.mult_adds or 0) >= 0, "0 or more")
        for name in ("model_sha256", "history_sha256"):
            sha256 = getattr(self, name)
            self.need(name, sha256 is None or re.fullmatch("[0-9a-f]{64}", sha256) is not None, "a SHA-256")
        if self.class_names is not None and len(self.class_names) != self.classes:
            raise WiringError(f"class_names must be {self.classes} names, got {len(self.class_names)}.")

    @property
    def quality(self) -> str:
        """The metric of the network in the file, such as ``89.51 %``."""
        return self.result.measured_by.format(self.measured)

    @property
    def stored_result(self) -> Result:
        """The run's result with multiply-adds, and with the metric of the file's network if its weights are rounded."""
        mult_adds = self.result.mult_adds if self.mult_adds is None else self.mult_adds
        result = replace(self.result, mult_adds=mult_adds)
        return result if self.dtype is None else _with_score(result, self.measured)

    @property
    def results_of_seeds(self) -> list[Result]:
        """The stored result, and one for every other seed, of which only the seed and the metric are known."""
        own, more = self.stored_result, {int(seed): score for seed, score in self.scores.items()}
        others = [_with_score(replace(own, seed=seed), score) for seed, score in more.items() if seed != own.seed]
        return [own, *others]

    @property
    def over_seeds(self) -> str:
        """The mean and the standard deviation over all seeds, such as ``89.48 ± 0.19 % (5)``; empty for one seed."""
        values = list(self.scores.values())
        if len(values) < 2:
            return ""
        return f"{self.result.measured_by.format(statistics.mean(values), statistics.stdev(values))} ({len(values)})"


def _with_score(result: Result, score: float) -> Result:
    return replace(result, accuracy=score) if result.value is None else replace(result, value=score)


def read_card(folder: Path) -> NetworkCard:
    """Read the card in the folder of a trained network."""
    path = folder / CARD
    try:
        if path.stat().st_size > LARGEST:
            raise WiringError(f"it has more than {LARGEST:,} bytes.")
        mapping = json.loads(path.read_text(encoding="utf-8"))
        return typed.build(NetworkCard, mapping, what="field of a card")
    except OSError as error:
        raise WiringError(f"{path} cannot be read: {error.strerror}.") from error
    except (WiringError, ValueError, RecursionError) as error:
        raise WiringError(
            f"{path} is damaged or not the card of a trained network: {shortened(str(error))} Install wirings again, "
            "or restore it."
        ) from error


def write_card(folder: Path, card: NetworkCard) -> None:
    """Write the card of a trained network, complete or not at all."""
    text = json.dumps(typed.to_plain(card), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    files.write_text(folder / CARD, text)
