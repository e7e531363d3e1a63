"""A sweep of fake training processes."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from wirings.train import results
from wirings.train.sweep import folder, local, schedule
from wirings.train.sweep.plan import SweepRun
from wirings.train.sweep.schedule import RunProgress

FAKE = Path(__file__).with_name("fake.py")


class Recorder:
    """A listener that keeps all messages and counts updates."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.updates = 0

    def update(self, states: Sequence[RunProgress]) -> None:
        self.updates += 1

    def say(self, text: str) -> None:
        self.said.append(text)


def write_template(path: Path) -> Path:
    """Write the result that all fake runs end with."""
    known: dict[str, Any] = {
        "epochs": 2,
        "steps": 4,
        "params": 10,
        "settings": {},
        "overrides": {},
        "precision": "fp32",
    }
    known |= {"hardware": "none", "versions": {}, "commit": None, "dirty": None, "started": "2026-01-01"}
    results.write_json(
        path, results.Result(recipe="digits/x", seed=0, accuracy=50.0, train_s=60.0, wall_s=70.0, **known)
    )
    return path


def command_of(template: Path, how: dict[str, str] | Callable[[SweepRun], str]) -> Callable[..., list[str]]:
    """The command lines of fake runs. See `go`."""

    def command(run: SweepRun, out: Path, **options: Any) -> list[str]:
        kind = (
            next((kind for part, kind in how.items() if part in run.path), "finish")
            if isinstance(how, dict)
            else how(run)
        )
        return [sys.executable, "-S", "-E", str(FAKE), str(template), str(out / run.path), kind]

    return command


def go(
    tmp_path: Path, runs: Sequence[SweepRun], how: dict[str, str] | Callable[[SweepRun], str], **more: Any
) -> tuple[list[RunProgress], Recorder]:
    """Run a sweep. ``how`` maps a part of a folder's name to what its run does; all others finish. Or it says it."""
    recorder, out = more.pop("recorder", None) or Recorder(), tmp_path / "out"
    command = command_of(tmp_path / "template.json", how)
    folder.claim_sweep_folder(out, runs)
    executor = more.pop("executor", None) or local.LocalExecutor(jobs=more.pop("jobs", 3), device="cpu")
    return schedule.run_sweep(runs, out, executor, recorder, command=command, **more), recorder
