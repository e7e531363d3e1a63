"""Tiny Shakespeare (Karpathy, 2015): 1.1 MB of plays, whose 65 different characters are the tokens.

By convention, the first 90 % are for training and the last 10 % for validation. It is found or downloaded once and kept
in the cache.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from wirings.errors import WiringError
from wirings.train.data.base import Data, Dataset, LoadOptions, register_dataset
from wirings.train.data.download import UnreachableError, download
from wirings.train.data.metrics import NATS
from wirings.train.data.text_loader import text_loaders
from wirings.train.data.unpack import read_bytes
from wirings.utils.cache import cache_folder, write_whole

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
PREPARED = "tinyshakespeare.txt"
NAMES = (PREPARED, "input.txt", "shakespeare.txt")
"""Names that the file has in a user's folder, also compressed."""
TRAIN_PERCENT = 90


@register_dataset("shakespeare")
class Shakespeare(Dataset):
    """Tiny Shakespeare, downloaded if necessary. A model is measured by its loss in nats per character."""

    title = "Tiny Shakespeare"
    classes: int = 65
    can_fetch = True
    held_out = MappingProxyType({"holdout": 0.05})

    def load(
        self,
        options: LoadOptions,
        *,
        context: int = 256,
        epoch_steps: int | None = None,
        holdout: float | None = None,
        sha256: str | None = SHA256,
    ) -> Data:
        """Read the text.

        Args:
            options: Options of every data set. ``directory`` is the file, or a folder that contains it.
            context: Number of characters of a window.
            epoch_steps: Number of steps of an epoch, after which the model is evaluated; by default as many as hold
                all of the training text.
            holdout: Fraction of the training text to test on instead of the validation text, to choose settings.
            sha256: Checksum of the file; another one for other text in UTF-8, or null for any. Such text is read from
                the directory and not kept.
        """
        where = options.directory
        path, contents = _own(where, sha256) if sha256 != SHA256 else _prepared(where)
        characters = decode(contents, str(path))
        vocabulary = sorted(set(characters))
        places = np.frombuffer(characters.encode("utf-32-le"), dtype=np.uint32)
        numbers = np.searchsorted(np.array([ord(character) for character in vocabulary], dtype=np.uint32), places)
        tokens = numbers.astype(np.uint8 if len(vocabulary) <= 256 else np.int32)
        cut = len(tokens) * TRAIN_PERCENT // 100
        loaders = text_loaders(
            options, tokens[:cut], tokens[cut:], context=context, epoch_steps=epoch_steps, holdout=holdout
        )
        more: dict[str, Any] = {"md5": hashlib.md5(contents).hexdigest(), "tokens": True, "metric": NATS}
        return Data(self.name, len(vocabulary), (context,), *loaders, names=tuple(vocabulary), **more)

    def fetch(self, directory: Path | None = None) -> Path:
        """Make sure that the text is in the cache. See `prepare`."""
        return prepare(directory)

    def write_sample(self, folder: Path) -> dict[str, Any]:
        """Write 600 characters of another text."""
        (folder / "input.txt").write_text("To be, or not to be: that is the question.\n" * 14, encoding="utf-8")
        return {"directory": folder, "context": 8, "sha256": None}


def decode(contents: bytes, where: str) -> str:
    """Decode UTF-8 text."""
    try:
        text = contents.decode("utf-8")
    except UnicodeDecodeError as error:
        raise WiringError(
            f"{where} is not UTF-8 text (byte {error.start:,}), so it has no characters as tokens. Convert it, or use "
            "data set 'text', whose tokens are bytes."
        ) from error
    if not text:
        raise WiringError(f"{where} is empty. Give a file of text.")
    return text


def prepare(directory: Path | None = None) -> Path:
    """Make sure that Tiny Shakespeare is in the cache, and return its path.

    Args:
        directory: The file, or the folder that contains it; by default the cache, into which it is downloaded.
    """
    target = cache_folder() / PREPARED
    if directory is not None and directory.resolve() not in (target.resolve(), target.parent.resolve()):
        path, contents = _given(directory)
        if not _matches(contents):
            raise WiringError(
                f"{path} is not Tiny Shakespeare as published: expected sha256 {SHA256[:12]}…, got "
                f"{hashlib.sha256(contents).hexdigest()[:12]}…. Remove it; for other text, use data set 'text', or "
                "this one with data.options.sha256=null."
            )
        if not target.is_file() or target.read_bytes() != contents:
            write_whole(target, lambda file: file.write(contents))
        return target
    if target.is_file() and _matches(target.read_bytes()):
        return target
    try:
        contents = download(URL)
    except UnreachableError as error:
        raise WiringError(
            f"Tiny Shakespeare was neither found nor downloaded: {URL}: {error}. Give the folder that contains "
            f"{NAMES[1]} with --data."
        ) from error
    if not _matches(contents):
        raise WiringError(f"{URL} has another checksum than expected (sha256 {SHA256[:12]}…). Try again.")
    write_whole(target, lambda file: file.write(contents))
    return target


def _prepared(directory: Path | None) -> tuple[Path, bytes]:
    """The file in the cache, and its contents."""
    path = prepare(directory)
    return path, path.read_bytes()


def _own(directory: Path | None, sha256: str | None) -> tuple[Path, bytes]:
    """Another file, and its contents."""
    if directory is None:
        raise WiringError(f"expected a file of text, or a folder with {NAMES[1]}. Give it with --data.")
    path, contents = _given(directory)
    if sha256 is not None and hashlib.sha256(contents).hexdigest() != sha256:
        raise WiringError(f"{path} does not have the checksum in data.options.sha256. Use null for any.")
    return path, contents


def _given(directory: Path) -> tuple[Path, bytes]:
    """The file that was given, or the first one in a folder that may be it, and its contents."""
    if not directory.exists():
        raise WiringError(f"there is no file or folder {directory} to read Tiny Shakespeare from. Leave it out.")
    inside = (directory / f"{name}{ending}" for name in NAMES for ending in ("", ".xz", ".gz"))
    path = next((path for path in (directory, *inside) if path.is_file()), None)
    if path is None:
        raise WiringError(f"expected a file of text, or a folder with {NAMES[1]}, got {directory}. Fix --data.")
    return path, read_bytes(path)


def _matches(contents: bytes) -> bool:
    return hashlib.sha256(contents).hexdigest() == SHA256
