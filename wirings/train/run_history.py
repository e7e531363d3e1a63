"""What there is to see of a run: its history, or at least the wiring that it ended with."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from wirings.errors import WiringError
from wirings.history import History, snapshot_of
from wirings.train import bundled, checkpoint
from wirings.train.recording import HISTORY
from wirings.train.runs import open_run


class Shown(NamedTuple):
    """A history, what to call it, and what a reader must be told of it."""

    history: History
    title: str
    note: str = ""


def look_at(run: str | Path) -> Shown:
    """The history of a run.

    Args:
        run: a run's folder, a history's file, or the name of a trained network that comes with the package.
    """
    path = Path(run)
    if path.is_file():
        return _load(path)
    if (path / HISTORY).is_file():
        return _load(path / HISTORY)
    known = not path.exists() and str(run) in bundled.names()
    if known and (kept := bundled.path_of(str(run)).with_suffix(".wirings")).is_file():
        return _load(kept)
    model, settings, name, _ = open_run(run, device="cpu")
    note = (
        f"{run} comes without a history: what you see is its wiring at the end."
        if known
        else f"{run} has no history ({HISTORY}): what you see is its wiring at the end. Runs record one unless "
        "history_every is 0."
    )
    about = {"rule": settings.rule.name, "recipe": name, "seed": settings.seed}
    if (last := path / checkpoint.LAST).is_file():
        step = int(checkpoint.read(last)[1]["progress"]["steps"])
        return Shown(snapshot_of(model, about, step), _title(about), note)
    return Shown(snapshot_of(model, about), _title(about), note)


def _load(path: Path) -> Shown:
    history = History.load(path, whole=False)
    if not len(history):
        raise WiringError(f"{path} has no record" + (f": {history.damage}." if history.damage else " yet. Train on."))
    note = ""
    if history.damage is not None:
        note = f"{path} is damaged: {history.damage}. What you see is good, up to step {history.steps[-1]:,}."
    return Shown(history, _title(history.about, path), note)


def _title(about: dict[str, object], path: Path | None = None) -> str:
    if "recipe" not in about:
        return "a wiring" if path is None else path.name
    return f"{about['recipe']}" + (f", seed {about['seed']}" if "seed" in about else "")
