"""Load the history of a run's wiring, or its final wiring if the run has no history."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from wirings.errors import WiringError
from wirings.history import History, snapshot_of
from wirings.train import bundled
from wirings.train.run import checkpoint
from wirings.train.run.folder import HISTORY, LAST
from wirings.train.saved_runs import open_run


class RunHistory(NamedTuple):
    """A history and its title."""

    history: History
    title: str
    note: str = ""
    """What the reader should know, such as that the history is damaged; may be empty."""


def load_run_history(run: str | Path) -> RunHistory:
    """Load the history of a run.

    Args:
        run: a run's folder, a history's file, or the name of a trained network that comes with the package.
    """
    path = Path(run)
    if path.is_file():
        return _load(path)
    bundle = bundled.find(run)
    if bundle is not None and (sha256 := bundled.read_card(bundle).history_sha256) is not None:
        bundled.check_file(bundle / bundled.HISTORY, sha256)
        return _load(bundle / bundled.HISTORY)
    if (path / HISTORY).is_file():
        return _load(path / HISTORY)
    model, settings, name, _ = open_run(run, device="cpu")
    note = (
        f"{run} comes without a history: this is its wiring at the end."
        if bundle is not None
        else f"{run} has no history ({HISTORY}): this is its wiring at the end. Runs record a history unless "
        "history_every is 0."
    )
    about = {"rule": settings.rule.name, "recipe": name, "seed": settings.seed}
    if (last := path / LAST).is_file():
        step = int(checkpoint.read(last)[1]["progress"]["steps"])
        return RunHistory(snapshot_of(model, about, step), _title(about), note)
    return RunHistory(snapshot_of(model, about), _title(about), note)


def _load(path: Path) -> RunHistory:
    history = History.load(path, whole=False)
    if not len(history):
        raise WiringError(
            f"{path} has no records" + (f": {history.damage}." if history.damage else " yet. Continue training.")
        )
    note = ""
    if history.damage is not None:
        note = f"{path} is damaged: {history.damage}. It is shown up to step {history.steps[-1]:,}, which is intact."
    return RunHistory(history, _title(history.about, path), note)


def _title(about: dict[str, object], path: Path | None = None) -> str:
    if "recipe" not in about:
        return "a wiring" if path is None else path.name
    return f"{about['recipe']}" + (f", seed {about['seed']}" if "seed" in about else "")
