"""What a run of a sweep tells while it trains: how many steps it has made, and what it shares its device with."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wirings.train.run.folder import PROGRESS
from wirings.utils.files import read_regular_text

VARIABLE = "WIRINGS_SHARING"
"""Environment variable with the path of a file that says how many runs of a sweep are on this run's device."""
EVERY = 1.0
"""Seconds between two heartbeats."""


@dataclass(frozen=True)
class Beat:
    """What a run last told."""

    time: float
    """When, in seconds since the epoch."""
    steps: int
    """Optimizer steps made."""
    epoch: int
    """Finished epochs."""


def read_beat(folder: Path) -> Beat | None:
    """Read what the run in a folder last told; None if it has told nothing."""
    found = _read(folder / PROGRESS)
    try:
        return Beat(float(found["time"]), int(found["steps"]), int(found["epoch"]))
    except (KeyError, TypeError, ValueError):
        return None


def write_sharing(path: Path, runs: int, mps: bool) -> None:
    """Write for the runs on a device how many they are, and whether they overlap under NVIDIA's MPS."""
    _write(path, {"runs": runs, "mps": mps})


class Heartbeat:
    """Writes ``progress.json`` to a run's folder, about once a second, if the run belongs to a sweep.

    A resumed run continues the count of its neighbours.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        given = os.environ.get(VARIABLE)
        self._path, self._device = folder / PROGRESS, Path(given) if given else None
        known = _read(self._path).get("shared")
        self._shared: dict[str, Any] | None = known if _is_sharing(known) else None
        self._last = self._written = time.time()

    def step(self, steps: int, epoch: int) -> None:
        """Note that a step was made; ``epoch`` epochs are finished."""
        if self._device is not None and time.time() - self._written >= EVERY:
            self._beat(steps, epoch)

    def end(self, steps: int, epoch: int) -> dict[str, Any]:
        """Write the last heartbeat of a run, and return what the result says about its neighbours."""
        if self._device is not None:
            self._beat(steps, epoch)
        if (found := self._shared) is None:
            return {}
        mean = found["others"] / found["seconds"] if found["seconds"] else 0.0
        return {"most_others": found["most"], "mean_others": round(mean, 3), "mps": found["mps"]}

    def _beat(self, steps: int, epoch: int) -> None:
        now = time.time()
        passed, self._last, self._written = max(now - self._last, 0.0), now, now
        assert self._device is not None
        with suppress(KeyError, TypeError, ValueError):  # the sweep that wrote it has ended
            told = _read(self._device)
            others, mps = max(int(told["runs"]) - 1, 0), bool(told["mps"])
            before = self._shared or {"seconds": 0.0, "others": 0.0, "most": 0}
            self._shared = {
                "seconds": before["seconds"] + passed,
                "others": before["others"] + passed * others,
                "most": max(before["most"], others),
                "mps": mps,
            }
        _write(self._path, {"time": now, "steps": steps, "epoch": epoch, "shared": self._shared})


def _is_sharing(found: Any) -> bool:
    kinds: dict[str, Any] = {"seconds": (int, float), "others": (int, float), "most": int, "mps": bool}
    return isinstance(found, dict) and all(isinstance(found.get(name), kind) for name, kind in kinds.items())


def _read(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file; empty if there is none, or if it is damaged."""
    try:
        found = json.loads(read_regular_text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, content: dict[str, Any]) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with suppress(OSError):  # a full disk ends a run at its next checkpoint, with a message
        part.write_text(json.dumps(content), encoding="utf-8")  # not flushed to the disk: it may be lost with the power
        os.replace(part, path)
