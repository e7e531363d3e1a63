"""Trained networks that come with the package, named after their recipes: ``wirings models`` lists them.

Each is a folder of up to three files, which `wirings.train.bundle_run` writes: ``model.safetensors``, the real edges as
`wirings.save_sparse` stores them; ``card.json``, what the network is and what it reaches; and ``history.wirings``, some
records of its history. Folders of this kind elsewhere are opened by their paths.
"""

from __future__ import annotations

import hashlib
from os import PathLike
from pathlib import Path

from torch import nn

from wirings.errors import WiringError, unknown
from wirings.train.bundled.card import CARD, NetworkCard, read_card
from wirings.wire.finalize import unwire_
from wirings.wire.parametrization import wired
from wirings.wire.sparse_file import load_sparse

__all__ = [
    "FOLDER",
    "HISTORY",
    "MODEL",
    "card_of",
    "check_file",
    "find",
    "folder_of",
    "load_into",
    "names",
    "read_card",
]

FOLDER = Path(__file__).parent
MODEL, HISTORY = "model.safetensors", "history.wirings"


def names() -> list[str]:
    """The names of the trained networks."""
    return sorted(path.parent.relative_to(FOLDER).as_posix() for path in FOLDER.glob(f"*/*/{CARD}"))


def folder_of(name: str) -> Path:
    """The folder of a trained network that comes with the package."""
    if name not in names():
        raise unknown("trained network", name, names())
    return FOLDER / name


def find(run: str | PathLike[str]) -> Path | None:
    """The folder of a trained network, given its name or its folder; None if it is neither."""
    path = Path(run)
    if (path / CARD).is_file():
        return path
    return FOLDER / str(run) if not path.exists() and str(run) in names() else None


def card_of(name: str) -> NetworkCard:
    """The card of a trained network that comes with the package."""
    return read_card(folder_of(name))


def load_into(model: nn.Module, folder: Path, card: NetworkCard) -> None:
    """Load the weights of a trained network into a new model, which is plain afterwards.

    Raises:
        WiringError: if the file is damaged, not the one that the card describes, or does not fit the model.
    """
    check_file(folder / MODEL, card.model_sha256)
    if wired(model):
        unwire_(model)  # not finalized: a schedule of its rule has not begun, and all weights are replaced
    load_sparse(model, folder / MODEL)


def check_file(path: Path, sha256: str) -> None:
    """Raise unless a file has this checksum."""
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise WiringError(f"{path} cannot be read: {error.strerror}. Install wirings again, or restore it.") from error
    if found != sha256:
        raise WiringError(
            f"{path} is damaged: its SHA-256 is {found[:12]}…, but {CARD} says {sha256[:12]}…. Install wirings again, "
            "or restore the file."
        )
