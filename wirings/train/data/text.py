"""Text of your own: any file, or any folder of files, whose bytes are the tokens.

Files that end in ``.xz`` or ``.gz`` are decompressed. In a folder that contains ``train`` or ``train.*``, only that is
trained on. What a model is measured on is, in this order:

- the option ``validation``, a file or folder;
- in a folder that contains ``train`` or ``train.*``, the entry called ``val``, ``valid`` or ``validation``, such as
  ``val.txt.xz``, or else ``test``;
- a fraction of the text: its end, or with ``split: files`` whole files, chosen by a checksum of their paths.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from wirings.errors import WiringError, unknown
from wirings.train.data.base import Data, Dataset, LoadOptions, register_dataset
from wirings.train.data.metrics import BITS_PER_BYTE
from wirings.train.data.text_loader import check_fraction, text_loaders
from wirings.train.data.unpack import read_bytes

TRAIN, VALIDATION = (("train",),), (("val", "valid", "validation"), ("test",))
"""Names of files and folders, up to the first dot, that hold the two parts of a text; names that come first win."""
SPLITS = ("end", "files")
_PACKED = re.compile(
    rb"(?P<gzip>\x1f\x8b)|(?P<xz>\xfd7zXZ\0)|(?P<bzip2>BZh[1-9]1AY&SY)|(?P<zstd>\x28\xb5\x2f\xfd)|(?P<zip>PK\x03\x04)"
)
"""How compressed files begin."""


@register_dataset("text")
class Text(Dataset):
    """A file or folder of text, as bytes. A model is measured by bits per byte."""

    title = "text"
    classes: int = 256
    held_out = MappingProxyType({"holdout": 0.05})

    def load(
        self,
        options: LoadOptions,
        *,
        context: int = 256,
        epoch_steps: int | None = None,
        validation: str | None = None,
        fraction: float = 0.1,
        split: str = "end",
        holdout: float | None = None,
    ) -> Data:
        """Read the text.

        Args:
            options: Options of every data set. ``directory`` is the file or folder.
            context: Number of bytes of a window.
            epoch_steps: Number of steps of an epoch, after which the model is evaluated; by default as many as hold
                all of the training text.
            validation: File or folder to validate on, which may be relative to the directory.
            fraction: Fraction of the text to validate on, if there is neither ``validation`` nor a file or folder
                named for it.
            split: Which fraction: ``"end"``, the end of the text, or ``"files"``, whole files.
            holdout: Fraction of the training text to test on instead of the validation text, to choose settings.
        """
        if options.directory is None:
            raise WiringError("data set 'text' needs a file or folder of text. Give it with --data, or directory=.")
        train, test = _split(options.directory, validation, fraction, split)
        digest = hashlib.md5(train)
        digest.update(test)
        parts = (np.frombuffer(bytearray(text), dtype=np.uint8) for text in (train, test))
        loaders = text_loaders(options, *parts, context=context, epoch_steps=epoch_steps, holdout=holdout)
        more: dict[str, Any] = {"md5": digest.hexdigest(), "tokens": True, "metric": BITS_PER_BYTE}
        return Data(self.name, self.classes, (context,), *loaders, **more)

    def write_sample(self, folder: Path) -> dict[str, Any]:
        """Write a training text of 1,200 bytes and a validation text of 120."""
        line = b"Colourless green ideas sleep furiously. "
        (folder / "train.txt").write_bytes(line * 30)
        with gzip.open(folder / "val.txt.gz", "wb") as file:
            file.write(line * 3)
        return {"directory": folder, "context": 8}


def _split(root: Path, validation: str | None, fraction: float, split: str) -> tuple[bytes, bytes]:
    """The training text and the validation text."""
    if not root.exists():
        raise WiringError(f"there is no text {root}. Give a file or folder with --data, or directory=.")
    if split not in SPLITS:
        raise unknown("data.options.split", str(split), SPLITS)
    check_fraction("fraction", fraction)
    train = _named_part(root, TRAIN)
    files = _files(train or root)
    held = _named_part(root, VALIDATION) if train and validation is None else None
    if validation is not None:
        held = (root if root.is_dir() else root.parent) / validation
        if not held.exists():
            raise WiringError(f"there is no validation text {held}. Fix data.options.validation.")
    if held is not None:
        tested = _files(held)
        # Resolved, so that a file is the same however its path is spelled.
        known = {path.resolve() for path in tested}
        rest = [path for path in files if path.resolve() not in known]
        if files and not rest:
            raise WiringError(f"nothing is left to train on: {held} is all of the text. Validate on another text.")
        return _joined(rest, train or root), _joined(tested, held)
    if split == "files":
        held_out = (
            {path for path in files if _falls_below(path.relative_to(root), fraction)} if root.is_dir() else set()
        )
        rest = [path for path in files if path not in held_out]
        if not held_out or not rest:
            raise WiringError(
                f"split: files leaves no file to {'train' if held_out else 'validate'} on: {root} has {len(files)}. "
                "Use split: end, or name a file with data.options.validation."
            )
        return _joined(rest, root), _joined(sorted(held_out), root)
    text = _joined(files, root)
    cut = len(text) - round(fraction * len(text))
    return text[:cut], text[cut:]


def _named_part(root: Path, names: Sequence[Sequence[str]]) -> Path | None:
    """The file or folder in a folder that has one of these names, such as ``train.txt``; the first names win."""
    if not root.is_dir():
        return None
    entries = sorted(path for path in root.iterdir() if not path.name.startswith("."))
    for alike in names:
        found = [path for path in entries if path.name.partition(".")[0] in alike]
        if len(found) > 1:
            raise WiringError(
                f"{root} holds both {found[0].name} and {found[1].name}. Remove one, or rename it so that only one is "
                f"called {' or '.join(alike)}."
            )
        if found:
            return found[0]
    return None


def _files(path: Path) -> list[Path]:
    """A file, or all files below a folder, sorted by path; hidden ones are left out."""
    if path.is_file():
        return [path]
    below = (file for file in path.rglob("*") if file.is_file())
    return sorted(file for file in below if not any(part.startswith(".") for part in file.relative_to(path).parts))


def _joined(files: Sequence[Path], where: Path) -> bytes:
    """The bytes of all files, one after the other; raises if there are none, or if one is still compressed."""
    contents = [read_bytes(path) for path in files]
    for path, part in zip(files, contents, strict=True):
        if (packed := _PACKED.match(part)) is not None:
            raise WiringError(
                f"{path} is compressed ({packed.lastgroup}), not text. Decompress it; only files that end in .xz or "
                ".gz are decompressed here."
            )
    if binary := [path for path, part in zip(files, contents, strict=True) if b"\0" in part]:
        more = f" and {len(binary) - 3:,} more" if len(binary) > 3 else ""
        warnings.warn(
            f"{', '.join(map(str, binary[:3]))}{more} cannot be text in UTF-8, with bytes of 0. They are "
            "tokens all the same: remove these files, or convert them, unless you mean to train on them.",
            stacklevel=2,
        )
    text = b"".join(contents)
    if not text:
        reason = "is empty" if where.is_file() else "holds no text" if files else "holds no files"
        raise WiringError(f"{where} {reason}. Give a file or folder of text.")
    return text


def _falls_below(path: Path, fraction: float) -> bool:
    """Whether a file belongs to a fraction of all files. It depends on the file's path alone."""
    return int.from_bytes(hashlib.md5(path.as_posix().encode()).digest()[:4]) < fraction * 2**32
