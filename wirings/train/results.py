"""Results: one small JSON file for each finished run, ``results/<table>/<row>/seed<N>.json``."""

from __future__ import annotations

import datetime
import json
import math
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch

from wirings.errors import WiringError
from wirings.train import files
from wirings.train import typed_dataclasses as typed
from wirings.train.data.metrics import ACCURACY, METRICS, Metric
from wirings.train.settings import Settings, from_mapping, to_mapping
from wirings.train.typed_dataclasses import TypedDataclass
from wirings.train.yaml_io import dump_yaml, parse_yaml
from wirings.utils.compiler import cpu_name
from wirings.utils.files import check_path, read_regular_text
from wirings.utils.text import shortened

SCHEMA = 1
LARGEST = 2**22
"""The most bytes of a result that is read; those of the library have a few thousand."""
FILE = "seed{}.json"
_OF_METRIC = ("metric", "higher_is_better", "value", "best_value")
"""Fields of results that are measured by another metric than accuracy."""
_OF_SWEEP = ("most_others", "mean_others", "mps")
"""Fields of results of runs that a sweep has trained."""


@dataclass(frozen=True, kw_only=True)
class Result(TypedDataclass):
    """The result of a run, and everything that it depends on."""

    schema: int = SCHEMA
    """The version of these fields."""
    recipe: str
    """The recipe's name, such as ``table1/static-dnw``."""
    seed: int
    metric: str | None = None
    """The name of the metric that the run is compared by, such as ``bits_per_byte``; None for accuracy."""
    higher_is_better: bool | None = None
    """Whether higher values of the metric are better; None for accuracy, of which they are."""
    value: float | None = None
    """The metric of the last epoch on the whole test set; None for accuracy."""
    best_value: float | None = None
    """The metric of the best epoch. It is selected on the test set, so do not report it."""
    accuracy: float
    """The accuracy of the last epoch on the whole test set, in percent; of text, that of the next token."""
    top5: float | None = None
    """The top-5 accuracy of the last epoch, in percent."""
    best_accuracy: float | None = None
    """The accuracy of the best epoch, in percent. It is selected on the test set, so do not report it."""
    test_loss: float | None = None
    """The mean loss of the last epoch on the test set; None if it is not finite."""
    epochs: int
    steps: int
    """The number of optimizer steps."""
    edges: int | None = None
    """The number of real edges; None if nothing is wired."""
    usable_edges: int | None = None
    """The number of real edges between nodes that are not dead."""
    dead_nodes: int | None = None
    """The number of nodes of graphs and wired layers that cannot reach the network's output, or cannot be reached from
    its input. A node at which one graph ends and the next begins is counted in both."""
    params: int
    """Parameters as the paper counts them: real edges, the kernels of nodes with an outgoing edge, and everything
    outside of graphs, but not the norms of graphs' nodes (see `wirings.profile`). The tiny classifiers of Table 1 count
    the kernels of all nodes."""
    mult_adds: int | None = None
    """Multiply-adds for one image as the paper counts them: those of real edges and of nodes with an outgoing edge; the
    first convolution and the classifier count for channels in use. None if the model has no ``input_shape``."""
    live_params: int | None = None
    """Parameters left when everything dead is removed and everything constant is folded into biases."""
    live_mult_adds: int | None = None
    """Multiply-adds left when everything dead is removed and everything constant is folded into biases."""
    settings: dict[str, Any]
    """All settings of the run."""
    overrides: dict[str, Any]
    """Settings that differ from the recipe, by dotted name. Tables only count results without any."""
    precision: str
    hardware: str
    versions: dict[str, str]
    commit: str | None
    """The commit of the code; None if it is not in a repository."""
    dirty: bool | None
    """Whether the code had uncommitted changes."""
    started: str
    """Date and time of the start, ISO 8601."""
    train_s: float
    """Seconds spent on training steps."""
    wall_s: float
    """Seconds spent in all."""
    data_md5: str | None = None
    """The checksum of the data, if it has one."""
    most_others: int | None = None
    """The largest number of other runs of the same sweep on the same GPU (without a GPU, on the CPU) at a time. 0: the
    run was alone. None: not known, since it was not trained by a sweep on one machine."""
    mean_others: float | None = None
    """The mean number of these runs over the time of this one."""
    mps: bool | None = None
    """Whether these runs overlapped under NVIDIA's MPS, rather than taking turns."""

    def __post_init__(self) -> None:
        if isinstance(self.test_loss, float) and not math.isfinite(self.test_loss):
            object.__setattr__(self, "test_loss", None)
        super().__post_init__()

    def check(self) -> None:
        if self.schema != SCHEMA:
            raise WiringError(f"schema must be {SCHEMA}, got {self.schema}. Use the version of wirings that wrote it.")
        known = [name for name in METRICS if name != ACCURACY.name]
        self.need("metric", self.metric in known, f"one of {', '.join(known)}, or null for accuracy")
        if (self.metric is None) != (self.value is None):
            raise WiringError("metric and value must be given together.")
        parts = PurePosixPath(self.recipe).parts
        self.need("recipe", bool(parts) and not {"/", ".."} & set(parts), "a name such as 'table1/static-dnw'")
        for name in ("accuracy", "top5", "best_accuracy"):
            self.need(name, 0 <= (getattr(self, name) or 0) <= 100, "a percentage")
        for name in (
            *("seed", "epochs", "steps", "edges", "usable_edges", "dead_nodes", "params", "mult_adds", "live_params"),
            *("live_mult_adds", "train_s", "wall_s", "most_others", "mean_others"),
        ):
            self.need(name, (getattr(self, name) or 0) >= 0, "0 or more")
        try:
            datetime.datetime.fromisoformat(self.started)
        except ValueError as error:
            raise WiringError(f"started must be a date and time in ISO 8601, got {self.started!r}.") from error

    @property
    def measured_by(self) -> Metric:
        """What the run is compared by."""
        return METRICS[ACCURACY.name if self.metric is None else self.metric]

    @property
    def score(self) -> float:
        """The value of the metric, such as the accuracy in percent."""
        return self.accuracy if self.value is None else self.value

    def __str__(self) -> str:
        """The value of the metric with its unit, such as ``93.10 %``."""
        return self.measured_by.format(self.score)


def path_of(folder: Path, recipe: str, seed: int) -> Path:
    """The file of a recipe's result in a folder of results."""
    return Path(folder) / recipe / FILE.format(seed)


def write(result: Result, folder: Path, overwrite: bool = False) -> Path:
    """Write a result to its file in a folder of results.

    Args:
        result: the result.
        folder: the folder of results.
        overwrite: whether to replace an earlier result of the same recipe and seed; otherwise, that raises.

    Returns:
        The file.
    """
    path = path_of(folder, result.recipe, result.seed)
    if path.exists() and not overwrite:
        raise WiringError(
            f"{path} already holds a result of {result.recipe}, seed {result.seed}. Remove it, give another folder, or "
            "pass overwrite=True."
        )
    write_json(path, result)
    return path


def write_json(path: Path, result: Result) -> None:
    """Write a result to a file, complete or not at all."""
    mapping = typed.to_plain(result)
    if result.metric is None:  # accuracy has fields of its own
        mapping = {name: value for name, value in mapping.items() if name not in _OF_METRIC}
    if result.most_others is None:
        mapping = {name: value for name, value in mapping.items() if name not in _OF_SWEEP}
    text = json.dumps(mapping, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    files.write_text(path, text)


def read(path: Path) -> Result:
    """Read a result from a file."""
    path = check_path(path)
    try:
        if path.stat().st_size > LARGEST:
            raise WiringError(f"it has more than {LARGEST:,} bytes.")
        mapping = json.loads(read_regular_text(path))
        if isinstance(mapping, dict) and "schema" not in mapping:
            raise WiringError(f"it has no schema (expected {SCHEMA}).")
        if isinstance(mapping, dict) and mapping["schema"] != SCHEMA:  # before its fields, which may differ
            raise WiringError(f"its schema is {mapping['schema']!r}, but this version of wirings only reads {SCHEMA}.")
        return typed.build(Result, mapping, what="field of a result")
    except OSError as error:
        raise WiringError(f"{path} cannot be read: {error.strerror}.") from error
    except WiringError as error:
        raise WiringError(f"{path} is not a result: {shortened(str(error))}") from error
    except (ValueError, RecursionError) as error:
        raise WiringError(
            f"{path} is damaged: it is not valid JSON ({error}). Restore it, or remove it and train again."
        ) from error


def find(folder: Path, recipe: str) -> list[Result]:
    """All results of a recipe in a folder of results, sorted by seed."""
    found = []
    for path in (Path(folder) / recipe).glob(FILE.format("*")):
        result = read(path)
        if path != path_of(folder, result.recipe, result.seed):
            raise WiringError(f"{path} is misplaced: it is the result of {result.recipe}, seed {result.seed}. Move it.")
        found.append(result)
    return sorted(found, key=lambda result: result.seed)


def save_settings(path: Path, recipe: str, settings: Settings, overrides: dict[str, Any]) -> None:
    """Write the name of a run's recipe, what differs from it, and all settings to a YAML file."""
    mapping = {"recipe": recipe, "overrides": overrides, "settings": to_mapping(settings)}
    files.write_text(path, dump_yaml(mapping))


def load_settings(path: Path) -> tuple[str, Settings, dict[str, Any]]:
    """Read what `save_settings` wrote: the recipe's name, all settings, and what differs from the recipe."""
    try:
        mapping = parse_yaml(read_regular_text(check_path(path)), "it")
        if not isinstance(mapping, dict) or set(mapping) != {"recipe", "overrides", "settings"}:
            raise WiringError("expected the keys recipe, overrides and settings.")
        if not isinstance(mapping["overrides"], dict):
            raise WiringError("overrides must be a mapping of settings.")
        return str(mapping["recipe"]), from_mapping(mapping["settings"]), mapping["overrides"]
    except (OSError, UnicodeDecodeError) as error:
        raise WiringError(f"{path} cannot be read: {error}.") from error
    except WiringError as error:
        raise WiringError(f"{path} does not hold the settings of a run: {shortened(str(error))}") from error


def environment(device: torch.device | str) -> dict[str, Any]:
    """What a run depends on besides its settings: hardware, versions, the commit and whether there are changes."""
    device, package = torch.device(device), Path(__file__).parents[1]
    # The package may be installed inside another repository, so ask for a file of it, not only for the folder.
    ours = _git(package, "ls-files", "--error-unmatch", "__init__.py") is not None
    commit = _git(package, "rev-parse", "--short", "HEAD") if ours else None
    changes = _git(package, "status", "--porcelain", "--", ".") if ours else None
    return {
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "versions": {
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "commit": commit,
        "dirty": None if changes is None else bool(changes),
    }


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
