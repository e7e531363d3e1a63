"""CIFAR-100 (Krizhevsky, 2009): 50,000 images to train on and 10,000 to test on, 32 × 32 pixels, a hundred classes.

It is found or downloaded once and kept in the cache as ``cifar100.npy``: uint8 (60000, 3073), training images first. A
record is the fine label, then 32 × 32 red, green and blue values each, row by row. Records are sorted by label and
pixels within each part, so that the file is the same whatever layout it was made from.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from wirings.errors import WiringError
from wirings.train.data.augment import decode, need_pillow
from wirings.train.data.base import Data, ImageDataset, LoadOptions, register_dataset
from wirings.train.data.cifar10_layouts import RECORD, unpickle
from wirings.train.data.device import device_loaders
from wirings.train.data.download import UnreachableError, download_chunks
from wirings.train.data.folder import class_folders, image_files
from wirings.train.data.sampling import hold_out
from wirings.train.data.unpack import MOST_BYTES, gunzip
from wirings.utils.cache import cache_folder, write_whole
from wirings.utils.checks import is_int

PREPARED = "cifar100.npy"
URL = "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"
URL_MD5 = "03b5dce01913d631647c71ecec9e9cb8"
ARCHIVES = ("cifar-100-binary.tar.gz", "cifar-100-python.tar.gz")
FOLDERS = ("", "cifar-100-binary", "cifar-100-python")
PARTS = ("train", "test")
PER_CLASS = (500, 100)
"""Images of every class to train and to test on."""
NAMES = [
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl",
    "boy", "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair",
    "chimpanzee", "clock", "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin",
    "elephant", "flatfish", "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp",
    "lawn_mower", "leopard", "lion", "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain",
    "mouse", "mushroom", "oak_tree", "orange", "orchid", "otter", "palm_tree", "pear", "pickup_truck",
    "pine_tree", "plain", "plate", "poppy", "porcupine", "possum", "rabbit", "raccoon", "ray", "road", "rocket",
    "rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper", "snail", "snake", "spider", "squirrel",
    "streetcar", "sunflower", "sweet_pepper", "table", "tank", "telephone", "television", "tiger", "tractor",
    "train", "trout", "tulip", "turtle", "wardrobe", "whale", "willow_tree", "wolf", "woman", "worm",
]  # fmt: skip

Say = Callable[[str], object]
Records = list[np.ndarray]
"""The records of the training and of the test images."""


@register_dataset("cifar100")
class CIFAR100(ImageDataset):
    """CIFAR-100 with its fine labels. Augmentation flips images and shifts them by up to four pixels."""

    title = "CIFAR-100"
    classes: int = 100
    class_names = tuple(NAMES)
    image_size: int = 32
    mean, std = (0.507, 0.487, 0.441), (0.267, 0.256, 0.276)
    can_fetch = True

    def load(
        self,
        options: LoadOptions,
        *,
        holdout: int | None = None,
        cutout: int = 0,
        per_class: tuple[int, int] = PER_CLASS,
    ) -> Data:
        """Load CIFAR-100, and prepare it first if necessary.

        Args:
            options: Options of every data set.
            holdout: Hold out this many training images and test on them instead of on the test set.
            cutout: Side in pixels of a square that augmentation hides at a random place of every image; 0 for none.
            per_class: Images of every class to train and to test on, for other data in the same layout.
        """
        if not is_int(cutout) or not 0 <= cutout <= self.image_size:
            raise WiringError(f"data.options.cutout must be an integer from 0 to {self.image_size}, got {cutout!r}.")
        _, records = _prepared(options.directory, cache_folder(), lambda _: None, tuple(per_class))
        first = per_class[0] * self.classes
        train: Any = slice(None, first)
        test: Any = slice(first, None)
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
        """Make sure that the prepared file is in the cache, and return its path."""
        path, _ = _prepared(directory, cache_folder(), print, PER_CLASS)
        return path

    def write_sample(self, folder: Path) -> dict[str, Any]:
        """Write a training and a test image of every class in the official binary layout."""
        random = np.random.default_rng(0)
        for part in PARTS:
            records = random.integers(0, 256, (100, RECORD + 1), dtype=np.uint8)
            records[:, 0], records[:, 1] = 0, np.arange(100)
            (folder / f"{part}.bin").write_bytes(records.tobytes())
        return {"directory": folder, "per_class": (1, 1)}


def _prepared(
    directory: Path | str | None, home: Path, say: Say, per_class: tuple[int, ...]
) -> tuple[Path, np.ndarray]:
    """Return the prepared file and its records; find or download them first if necessary."""
    target = home / PREPARED
    if directory is not None and not Path(directory).exists():
        raise WiringError(f"there is no folder {directory} to read CIFAR-100 from. Leave it out to use {home}.")
    if target.is_file():
        try:
            return target, _checked(_load(target), per_class, str(target))
        except WiringError as error:
            say(f"{error} Preparing it again.")
    tried: list[str] = []
    for where, read in _sources(directory, home, say, per_class[0] * len(NAMES)):
        try:
            parts = read()
        except UnreachableError as error:
            tried.append(f"{where}: {error}")
            continue
        say(f"read {where}")
        records = _checked(np.concatenate([_sorted(part) for part in parts]), per_class, where)
        write_whole(target, lambda file, records=records: np.save(file, records))  # type: ignore[misc]
        return target, records
    raise WiringError(
        "CIFAR-100 was neither found nor downloaded. Tried:\n  " + "\n  ".join(tried) + f"\nPut {' or '.join(ARCHIVES)}"
        f", packed or unpacked, into {home}, or give the folder that contains it, or train/ and test/ with a folder of "
        "images for each class."
    )


def _sources(
    directory: Path | str | None, home: Path, say: Say, trains: int
) -> Iterator[tuple[str, Callable[[], Records]]]:
    """Yield the sources in the order they are tried: a name, and a function that reads or downloads it.

    Args:
        directory: A folder that may hold the data.
        home: The cache.
        say: Called with messages about the progress.
        trains: Number of training images, which come first in a prepared file.
    """

    def nothing() -> Records:
        raise UnreachableError("contains no CIFAR-100 in any known layout")

    for folder in ([] if directory is None else [Path(directory)]) + [home]:
        found = list(_find(folder))
        prepared = folder / PREPARED
        if folder != home and prepared.is_file():
            found.insert(0, (str(prepared), lambda path=prepared: np.split(_load(path), [trains])))  # type: ignore[misc]
        yield from found or [(str(folder), nothing)]
    yield URL, lambda: _download(home, say)


def _find(place: Path) -> Iterator[tuple[str, Callable[[], Records]]]:
    """Find CIFAR-100 in a folder: class folders, unpacked or packed archives; or in an archive itself."""
    if place.is_file():
        yield str(place), lambda: _from_archive(place)
        return
    if all((place / part).is_dir() for part in PARTS):
        yield f"{place} (class folders)", lambda: [_from_folders(place / part) for part in PARTS]
    for folder in (place / name for name in FOLDERS):
        for ending in (".bin", ""):
            files = [folder / f"{part}{ending}" for part in PARTS]
            if all(file.is_file() for file in files):
                yield str(folder), lambda files=files: [_from_file(f.read_bytes(), str(f)) for f in files]  # type: ignore[misc]
    for archive in (place / name for name in ARCHIVES):
        if archive.is_file():
            yield str(archive), lambda archive=archive: _from_archive(archive)  # type: ignore[misc]


def _from_folders(folder: Path) -> np.ndarray:
    need_pillow()
    names = class_folders(folder)
    if names != NAMES:
        odd = sorted(set(names) ^ set(NAMES))
        raise WiringError(f"{folder} must have a folder for each of CIFAR-100's classes; {odd[0]!r} differs.")
    records = []
    for label, name in enumerate(names):
        for path in image_files(folder / name):
            try:
                pixels = np.asarray(decode(Path(path)))
            except Exception as error:  # Pillow raises exceptions of many types for damaged images
                raise WiringError(f"{path} cannot be decoded ({error}). Download it again.") from error
            if pixels.shape != (32, 32, 3):
                raise WiringError(f"{path} must have 32 × 32 pixels, got {pixels.shape[1]} × {pixels.shape[0]}.")
            records.append(np.concatenate([[np.uint8(label)], pixels.transpose(2, 0, 1).reshape(-1)]))
    return np.stack(records)


def _from_file(content: bytes, where: str) -> np.ndarray:
    """Read a file of the official binary layout (coarse label, fine label, pixels) or a Python pickle."""
    if not where.endswith(".bin"):
        fields = {k.decode() if isinstance(k, bytes) else k: v for k, v in unpickle(content, where).items()}
        pixels, labels = fields.get("data"), fields.get("fine_labels")
        if not isinstance(pixels, np.ndarray) or not isinstance(labels, list) or len(pixels) != len(labels):
            raise WiringError(f"{where} must have the keys 'data' and 'fine_labels', got {sorted(map(str, fields))}.")
        return np.concatenate([np.array(labels, dtype=np.uint8)[:, None], pixels], axis=1)
    if not content or len(content) % (RECORD + 1):
        raise WiringError(f"{where} is truncated: its size is not a multiple of {RECORD + 1:,}. Download it again.")
    return np.frombuffer(content, dtype=np.uint8).reshape(-1, RECORD + 1)[:, 1:]


def _from_archive(archive: Path) -> Records:
    """Read an archive. Nothing is unpacked to disk, so no member can overwrite a file."""
    found: dict[str, bytes] = {}
    try:
        with archive.open("rb") as packed:
            contents = gunzip(packed, MOST_BYTES)
        if len(contents) > MOST_BYTES:
            raise tarfile.ReadError(f"it unpacks to more than {MOST_BYTES:,} bytes")
        with tarfile.open(fileobj=BytesIO(contents), mode="r:") as tar:
            for member in tar:
                name = member.name.rpartition("/")[2]
                file = tar.extractfile(member) if member.isfile() and name.removesuffix(".bin") in PARTS else None
                if file is not None:
                    found[name] = file.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise WiringError(f"{archive} is truncated or damaged ({error}). Remove it and download it again.") from error
    for ending in (".bin", ""):
        if all(f"{part}{ending}" in found for part in PARTS):
            return [_from_file(found[f"{part}{ending}"], f"{archive}: {part}{ending}") for part in PARTS]
    raise WiringError(f"{archive} is not a complete CIFAR-100. Remove it and download it again.")


def _load(path: Path) -> np.ndarray:
    try:
        records = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise WiringError(f"{path} is truncated or damaged ({error}). Remove it.") from error
    if records.dtype != np.uint8 or records.ndim != 2:
        raise WiringError(f"{path} must hold uint8 (60000, {RECORD}), got {records.dtype} {records.shape}. Remove it.")
    return np.asarray(records)


def _sorted(records: np.ndarray) -> np.ndarray:
    """Sort the records of a part by label and pixels."""
    return records[sorted(range(len(records)), key=lambda i: records[i].tobytes())]


def _checked(records: np.ndarray, per_class: tuple[int, ...], where: str) -> np.ndarray:
    """Raise unless there are as many images of every class as there should be."""
    total = sum(per_class) * len(NAMES)
    counts = [np.full(len(NAMES), number) for number in per_class]
    first = per_class[0] * len(NAMES)
    if records.shape != (total, RECORD) or any(
        not np.array_equal(np.bincount(part[:, 0], minlength=len(NAMES)), count)
        for part, count in zip((records[:first], records[first:]), counts, strict=True)
    ):
        raise WiringError(
            f"{where} does not hold CIFAR-100 as published: expected {total:,} images of 32 × 32 pixels, "
            f"{per_class[0]} of each class to train and {per_class[1]} to test on, got {len(records):,}."
        )
    return records


def _download(home: Path, say: Say) -> Records:
    say(f"downloading {URL}")
    archive = home / f"cifar-100-binary.{os.getpid()}.tar.gz"  # with the process id, since others may download it, too
    digest = hashlib.md5()

    def fill(file: IO[bytes]) -> None:
        for chunk in download_chunks(URL):
            digest.update(chunk)
            file.write(chunk)

    write_whole(archive, fill)
    try:
        if digest.hexdigest() != URL_MD5:
            raise WiringError(f"expected md5 {URL_MD5} for {URL}, got {digest.hexdigest()}. Try again.")
        return _from_archive(archive)
    finally:
        archive.unlink(missing_ok=True)
