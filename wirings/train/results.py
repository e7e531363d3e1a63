"""Results: one small JSON file a measured run, ``results/<table>/<row>/seed<N>.json``."""

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
from wirings.train import checkpoint, typed
from wirings.train.settings import Settings, from_mapping, to_mapping
from wirings.train.text import dump_yaml, parse_yaml
from wirings.train.typed import Typed

SCHEMA = 1
FILE = "seed{}.json"


@dataclass(frozen=True, kw_only=True)
class Result(Typed):
    """What one run reached, and all that it depends on."""

    schema: int = SCHEMA
    """The version of this list of fields."""
    recipe: str
    """The recipe's name, such as ``table1/static-dnw``."""
    seed: int
    accuracy: float
    """Of the last epoch on the whole test set, in percent."""
    top5: float | None = None
    """The same for the right class among the five likeliest."""
    best_accuracy: float | None = None
    """Of the best epoch, in percent; it is chosen on the test set, so it is no figure to report."""
    test_loss: float | None = None
    """Of the last epoch, a mean over images; None if it is not finite."""
    epochs: int
    steps: int
    """Optimizer steps."""
    edges: int | None = None
    """Real edges of what is wired; None if nothing is."""
    usable_edges: int | None = None
    """Those of them between nodes that are not dead."""
    dead_nodes: int | None = None
    """Nodes that cannot reach the network's output, or that nothing reaches from its input: of its graphs and its other
    wired layers. A node where one graph ends and the next begins is counted in both."""
    params: int
    """As the paper counts them: real edges, the kernels of nodes that an edge leaves, and all of what is no graph's; no
    norms of graphs' nodes (see `wirings.profile`). The tiny classifiers of Table 1 count the kernels of all nodes."""
    mult_adds: int | None = None
    """For one image, as the paper counts them: those of real edges and of nodes that an edge leaves, the first
    convolution and the classifier for channels that are used. None for a model that does not say what it takes."""
    live_params: int | None = None
    """Parameters that are left when everything dead is removed and everything constant folded into biases."""
    live_mult_adds: int | None = None
    """The same for multiply-adds."""
    settings: dict[str, Any]
    """All settings of the run."""
    overrides: dict[str, Any]
    """Settings that are not the recipe's, by dotted name. Tables count only results without any."""
    precision: str
    hardware: str
    versions: dict[str, str]
    commit: str | None
    """Of the code; None where it lies in no repository."""
    dirty: bool | None
    """Whether the code had changes that are in no commit."""
    started: str
    """Date and time, ISO 8601."""
    train_s: float
    """Seconds that training steps took."""
    wall_s: float
    """Seconds in all."""
    data_md5: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.test_loss, float) and not math.isfinite(self.test_loss):
            object.__setattr__(self, "test_loss", None)
        super().__post_init__()

    def check(self) -> None:
        if self.schema != SCHEMA:
            raise WiringError(f"schema is {self.schema}, but this version of wirings knows {SCHEMA} alone.")
        parts = PurePosixPath(self.recipe).parts
        self.need("recipe", bool(parts) and not {"/", ".."} & set(parts), "a name such as 'table1/static-dnw'")
        for name in ("accuracy", "top5", "best_accuracy"):
            self.need(name, 0 <= (getattr(self, name) or 0) <= 100, "a percentage")
        for name in (
            *("seed", "epochs", "steps", "edges", "usable_edges", "dead_nodes", "params", "mult_adds", "live_params"),
            *("live_mult_adds", "train_s", "wall_s"),
        ):
            self.need(name, (getattr(self, name) or 0) >= 0, "0 or more")
        try:
            datetime.datetime.fromisoformat(self.started)
        except ValueError as error:
            raise WiringError(f"started must be a date and time in ISO 8601, but it is {self.started!r}.") from error


def path_of(folder: Path, recipe: str, seed: int) -> Path:
    """Where the result of a recipe and seed lies in a folder of results."""
    return Path(folder) / recipe / FILE.format(seed)


def write(result: Result, folder: Path, overwrite: bool = False) -> Path:
    """Put a result in its place in a folder of results, whole or not at all. Gives the file.

    With ``overwrite`` it may take the place of an earlier result of the same recipe and seed.
    """
    path = path_of(folder, result.recipe, result.seed)
    if path.exists() and not overwrite:
        raise WiringError(
            f"{path} holds a result of {result.recipe}, seed {result.seed} already. Remove it, give another folder, "
            "or overwrite it on purpose (overwrite=True)."
        )
    write_json(path, result)
    return path


def write_json(path: Path, result: Result) -> None:
    """Write a result to a file, whole or not at all."""
    text = json.dumps(typed.to_plain(result), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    checkpoint.write(path, lambda part: Path(part).write_text(text, encoding="utf-8"))


def read(path: Path) -> Result:
    """The result in a file."""
    try:
        mapping = json.loads(Path(path).read_text(encoding="utf-8"))
        if isinstance(mapping, dict) and "schema" not in mapping:
            raise WiringError(f"it has no schema, which a result must have ({SCHEMA}).")
        if isinstance(mapping, dict) and mapping["schema"] != SCHEMA:  # before its fields, which may be others
            raise WiringError(f"its schema is {mapping['schema']!r}, but this version of wirings knows {SCHEMA} alone.")
        return typed.build(Result, mapping, what="field of a result")
    except OSError as error:
        raise WiringError(f"{path} cannot be read: {error.strerror}.") from error
    except WiringError as error:
        raise WiringError(f"{path} is not a result: {error}") from error
    except (ValueError, RecursionError) as error:
        raise WiringError(
            f"{path} is damaged: it is not JSON ({error}). Restore it, or remove it and measure again."
        ) from error


def find(folder: Path, recipe: str) -> list[Result]:
    """All results of a recipe in a folder of results, sorted by seed."""
    found = []
    for path in (Path(folder) / recipe).glob(FILE.format("*")):
        result = read(path)
        if path != path_of(folder, result.recipe, result.seed):
            raise WiringError(f"{path} is in the wrong place: it is the result of {result.recipe}, seed {result.seed}.")
        found.append(result)
    return sorted(found, key=lambda result: result.seed)


def save_settings(path: Path, recipe: str, settings: Settings, overrides: dict[str, Any]) -> None:
    """Write what a run is made of to a YAML file: its recipe's name, what differs from it, and all settings."""
    mapping = {"recipe": recipe, "overrides": overrides, "settings": to_mapping(settings)}
    text = dump_yaml(mapping)
    checkpoint.write(path, lambda part: Path(part).write_text(text, encoding="utf-8"))


def load_settings(path: Path) -> tuple[str, Settings, dict[str, Any]]:
    """What `save_settings` wrote: the recipe's name, all settings, what differs from the recipe."""
    try:
        mapping = parse_yaml(Path(path).read_text(encoding="utf-8"), "it")
        if not isinstance(mapping, dict) or set(mapping) != {"recipe", "overrides", "settings"}:
            raise WiringError("it must hold recipe, overrides and settings.")
        return str(mapping["recipe"]), from_mapping(mapping["settings"]), dict(mapping["overrides"])
    except (OSError, UnicodeDecodeError) as error:
        raise WiringError(f"{path} cannot be read: {error}.") from error
    except WiringError as error:
        raise WiringError(f"{path} does not hold the settings of a run: {error}") from error


def environment(device: torch.device | str) -> dict[str, Any]:
    """What a run depends on besides its settings: hardware, versions, commit, whether the code was changed since."""
    device, package = torch.device(device), Path(__file__).parents[1]
    # The package may be installed inside somebody else's repository: ask for the file, not just for the folder.
    ours = _git(package, "ls-files", "--error-unmatch", "__init__.py") is not None
    commit = _git(package, "rev-parse", "--short", "HEAD") if ours else None
    changes = _git(package, "status", "--porcelain", "--", ".") if ours else None
    return {
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
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


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({len(names)} cores)" if names else platform.processor() or platform.machine()
