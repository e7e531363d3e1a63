"""Turn a finished run into a small folder that holds its trained network, as `wirings.train.bundled` describes.

The network is measured as it is stored, so that a card never claims what its file does not reach.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from wirings.errors import WiringError
from wirings.history import History
from wirings.profiling import profile
from wirings.train import bundled, results
from wirings.train.bundled.card import NetworkCard, read_card, write_card
from wirings.train.distributed import start
from wirings.train.results import Result
from wirings.train.run.folder import HISTORY, RESULT
from wirings.train.saved_runs import measure_by, open_with_header
from wirings.utils.files import check_folder, check_path, disk_errors
from wirings.wire.sparse_file import save_sparse

LIMIT, HISTORY_LIMIT = 2_000_000, 300_000
"""The most bytes of a network with its history, and of the history alone."""
_ROUNDINGS = (None, "float16", "int8")
_RECORDS = (200, 100, 50, 25, 12, 6, 3, 1)


def bundle_run(
    run: str | Path,
    into: str | Path,
    *,
    name: str | None = None,
    others: Iterable[Result] = (),
    limit: int = LIMIT,
    history_limit: int = HISTORY_LIMIT,
    device: str | None = None,
) -> Path:
    """Write the folder of a trained network.

    Args:
        run: the folder of a finished run.
        into: the folder that gets a folder of the network's name.
        name: the network's name, ``table/row``; by default the recipe's, if the run has the recipe's settings.
        others: results of other seeds, for the mean on the card.
        limit: the most bytes of the network and its history together. Weights are rounded to half precision, or to 8
            bits, if they do not fit otherwise.
        history_limit: the most bytes of the history, which gets fewer records until it fits.
        device: what to measure on; by default a GPU, if there is one.

    Returns:
        The folder. One that was there before is replaced.
    """
    folder = check_path(run)
    check_folder(into, "into")
    if not (folder / RESULT).is_file():
        raise WiringError(f"{folder} is not a finished run: expected {RESULT} in it.")
    result = results.read(folder / RESULT)
    target = Path(into) / _name(name, result)
    opened, about = open_with_header(folder, False, "cpu")
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".bundle-", dir=target.parent))
    try:
        history = _write_history(folder / HISTORY, work / bundled.HISTORY, min(history_limit, limit // 2))
        dtype = _write_model(opened.model, work / bundled.MODEL, limit - history, target)
        names = about.get("names")
        card = NetworkCard(
            result=_without_folders(result),
            scores=_scores(result, others),
            measured=result.score,  # replaced below
            measured_on=result.hardware,
            mult_adds=profile(opened.model).mult_adds if hasattr(opened.model, "input_shape") else None,
            dtype=dtype,
            classes=int(about["classes"]),
            class_names=None if names is None else tuple(names),
            model_sha256=_sha256(work / bundled.MODEL),
            history_sha256=_sha256(work / bundled.HISTORY) if history else None,
        )
        write_card(work, card)
        directory = opened.settings.data.directory
        found = measure_by(work, data=None if directory is None else Path(directory), device=device)
        hardware = results.environment(start(device).device)["hardware"]
        write_card(work, replace(card, measured=found.value, measured_on=hardware))
        with disk_errors(target):
            shutil.rmtree(target, ignore_errors=True)
            work.chmod(0o755)
            work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def update_scores(folder: Path, directory: Path) -> bool:
    """Renew the scores of other seeds on a card from a folder of results; returns whether they have changed."""
    card = read_card(folder)
    scores = _scores(card.result, results.find(directory, card.result.recipe))
    if scores != card.scores:
        write_card(folder, replace(card, scores=scores))
    return scores != card.scores


def _name(name: str | None, result: Result) -> str:
    overrides = _without_folders(result).overrides
    if name is None and overrides:
        changed = ", ".join(f"{key}={value}" for key, value in overrides.items())
        raise WiringError(f"the run differs from recipe {result.recipe} ({changed}). Give the network another name.")
    name = result.recipe if name is None else name
    if name.count("/") != 1 or any(part in ("", ".", "..") for part in name.split("/")):
        raise WiringError(f"the name of a trained network must be table/row, got {name!r}.")
    return name


def _write_model(model: Any, path: Path, limit: int, target: Path) -> str | None:
    """Write the network with the finest weights that fit; returns what they are rounded to."""
    for dtype in _ROUNDINGS:
        if save_sparse(model, path, dtype).stat().st_size <= limit:
            return dtype
    raise WiringError(
        f"{target} would take {path.stat().st_size:,} bytes for its network, even in 8 bits, but {limit:,} are left. "
        "Raise the limit, or bundle a network with fewer edges."
    )


def _write_history(source: Path, path: Path, limit: int) -> int:
    """Write as many records of a run's history as fit, and return the size of the file; 0 if there is none."""
    if not source.is_file():
        return 0
    history = History.load(source)
    for records in _RECORDS:
        if len(found := history.thinned(records).to_bytes()) <= limit:
            path.write_bytes(found)
            return len(found)
    return 0


def _scores(result: Result, others: Iterable[Result]) -> dict[str, float]:
    """Scores by seed, in order, of runs with the same settings."""
    alike = [one for one in others if one.recipe == result.recipe and one.overrides == result.overrides]
    return {str(one.seed): one.score for one in sorted([*alike, result], key=lambda one: one.seed)}


def _without_folders(result: Result) -> Result:
    """A result without the folder of the data, which only the machine of the run has."""
    settings = dict(result.settings)
    if isinstance(settings.get("data"), dict):
        settings["data"] = {**settings["data"], "directory": None}
    overrides = {key: value for key, value in result.overrides.items() if key != "data.directory"}
    return replace(result, settings=settings, overrides=overrides)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
