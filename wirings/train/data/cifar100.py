"""CIFAR-100 (Krizhevsky, 2009): 50,000 images to train on and 10,000 to test on, 32 × 32 pixels, a hundred classes.

It is found or downloaded once and kept in the cache as ``cifar100.npy``: uint8 (60000, 3073), training images first. A
record is the fine label, then 32 × 32 red, green and blue values each, row by row. Records are sorted by label and
pixels within each part, so that the file is the same whatever layout it was made from. The md5 of all this follows at
the end of the file: checksums of the sorted records are not published, so a change is detected by the file's own.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from wirings.errors import WiringError
from wirings.train.data.augment import decode, need_pillow
from wirings.train.data.base import Data, LoadOptions, register_dataset
from wirings.train.data.cifar import CIFAR
from wirings.train.data.cifar_files import RECORD, downloaded, from_pickle, read_array, read_members, read_part
from wirings.train.data.download import UnreachableError
from wirings.train.data.folder import class_folders, image_files
from wirings.utils.cache import cache_folder, write_whole
from wirings.utils.checks import is_int
from wirings.utils.text import brief

PREPARED = "cifar100.npy"
ARCHIVES = {
    "cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8",
    "cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85",
}
"""md5 of the official archives."""
PICKLES = {"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"}
"""md5 of the files in cifar-100-python.tar.gz."""
URL = "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"
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
Source = tuple[str, Callable[[], Records]]
"""Where the data may be, and a function that reads or downloads it."""


@register_dataset("cifar100")
class CIFAR100(CIFAR):
    """CIFAR-100 with its fine labels. Augmentation flips images and shifts them by up to four pixels."""

    title = "CIFAR-100"
    classes: int = 100
    class_names = tuple(NAMES)
    mean, std = (0.507, 0.487, 0.441), (0.267, 0.256, 0.276)

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
            options: Options of every data set. What the directory holds is read instead of the cache, and not kept.
            holdout: Hold out this many training images and test on them instead of on the test set.
            cutout: Side in pixels of a square that augmentation hides at a random place of every image; 0 for none.
            per_class: Images of every class to train and to test on, for other data in the same layout. It is neither
                read from the cache nor kept there.
        """

        def read() -> tuple[np.ndarray, int]:
            records = _read(options.directory, cache_folder(), lambda _: None, _checked_counts(per_class))
            return records, per_class[1] * self.classes

        return self.load_records(options, read, holdout=holdout, cutout=cutout)

    def fetch(self, directory: Path | None = None) -> Path:
        """Make sure that the prepared file is in the cache, and return its path."""
        home = cache_folder()
        records = _read(directory, home, print, PER_CLASS)
        if directory is not None:
            save(home / PREPARED, records)
        return home / PREPARED

    def write_sample(self, folder: Path) -> dict[str, Any]:
        """Write a training and a test image of every class in the official binary layout."""
        random = np.random.default_rng(0)
        for part in PARTS:
            records = random.integers(0, 256, (100, RECORD + 1), dtype=np.uint8)
            records[:, 0], records[:, 1] = 0, np.arange(100)
            (folder / f"{part}.bin").write_bytes(records.tobytes())
        return {"directory": folder, "per_class": (1, 1)}


def save(path: Path, records: np.ndarray) -> None:
    """Write a prepared file."""
    file = BytesIO()
    np.save(file, records)
    write_whole(path, lambda whole: whole.write(with_md5(file.getvalue())))


def with_md5(content: bytes) -> bytes:
    """Append the md5 that `read` compares."""
    return content + hashlib.md5(content).hexdigest().encode()


def read(path: Path) -> np.ndarray:
    """Read the records of a prepared file, and check its checksum."""
    content = read_part(path)
    size = max(0, len(content) - 2 * hashlib.md5().digest_size)
    content, md5 = content[:size], content[size:]
    if md5 != hashlib.md5(content).hexdigest().encode():
        raise WiringError(f"{path} is truncated or damaged (its checksum is missing or differs). Remove it.")
    return read_array(content, path)


def _read(directory: Path | str | None, home: Path, say: Say, per_class: tuple[int, int]) -> np.ndarray:
    """Read the records from the directory, if it holds them, or from the cache, which is filled if necessary."""
    if directory is not None and not Path(directory).exists():
        raise WiringError(f"there is no folder {directory} to read CIFAR-100 from. Leave it out to use {home}.")
    official = per_class == PER_CLASS
    prepared = home / PREPARED
    tried: list[str] = []
    if directory is not None:
        records = _first(_given(Path(directory), per_class), tried, say, per_class)
        if records is not None:
            return records
    if official and prepared.exists():
        try:
            return _checked(read(prepared), per_class, str(prepared))
        except WiringError as error:
            say(f"{error} Preparing it again.")
    records = _first(_kept(home, say, official), tried, say, per_class)
    if records is None:
        raise WiringError(
            "CIFAR-100 was neither found nor downloaded. Tried:\n  " + "\n  ".join(tried) + "\nPut "
            f"{' or '.join(ARCHIVES)}, packed or unpacked, into {home}, or give the folder that contains it, or train/ "
            "and test/ with a folder of images for each class."
        )
    if official:
        save(prepared, records)
    return records


def _first(sources: Iterator[Source], tried: list[str], say: Say, per_class: tuple[int, int]) -> np.ndarray | None:
    """Return the sorted records of the first source that can be reached; add the others to ``tried``."""
    for where, fetch in sources:
        try:
            parts = fetch()
        except UnreachableError as error:
            tried.append(f"{where}: {error}")
            continue
        say(f"read {where}")
        return _checked(np.concatenate([_sorted(part) for part in parts]), per_class, where)
    return None


def _given(place: Path, per_class: tuple[int, int]) -> Iterator[Source]:
    """Yield what a folder of the user, or an archive, may be read as."""
    prepared = place / PREPARED
    if prepared.exists():
        yield str(prepared), lambda: np.split(read(prepared), [per_class[0] * len(NAMES)])
    yield from _find(place, per_class == PER_CLASS)


def _kept(home: Path, say: Say, official: bool) -> Iterator[Source]:
    """Yield what the cache may be filled from."""
    yield from _find(home, official)
    name = URL.rpartition("/")[2]
    yield URL, lambda: downloaded(URL, ARCHIVES[name], home, say, _from_archive)


def _find(place: Path, official: bool) -> Iterator[Source]:
    """Find CIFAR-100 in a folder: class folders, unpacked or packed archives; or in an archive itself.

    Args:
        place: The folder or the archive.
        official: Whether pickles, and archives under the names of the official ones, must have their checksums.
    """

    def nothing() -> Records:
        raise UnreachableError("contains no CIFAR-100 in any known layout")

    def packed(archive: Path) -> Source:
        return str(archive), lambda: _from_archive(archive, ARCHIVES.get(archive.name) if official else None)

    if place.is_file():
        yield packed(place)
        return
    if all((place / part).is_dir() for part in PARTS):
        yield f"{place} (class folders)", lambda: [_from_folders(place / part) for part in PARTS]
    for folder in (place / name for name in FOLDERS):
        for ending in (".bin", ""):
            files = [folder / f"{part}{ending}" for part in PARTS]
            if all(file.is_file() for file in files):
                yield str(folder), functools.partial(_from_files, files, official)
    yield from (packed(place / name) for name in ARCHIVES if (place / name).is_file())
    yield str(place), nothing


def _from_folders(folder: Path) -> np.ndarray:
    need_pillow()
    names = class_folders(folder)
    if names != NAMES:
        odd = sorted(set(names) ^ set(NAMES))
        raise WiringError(f"{folder} must have a folder for each of CIFAR-100's classes; {brief(odd[0])} differs.")
    records = []
    for label, name in enumerate(names):
        for path in image_files(folder / name):
            try:
                pixels = np.asarray(decode(Path(path)))
            except Exception as error:  # Pillow raises exceptions of many types for damaged images
                raise WiringError(f"{path} cannot be decoded ({error}). Download it again.") from error
            if pixels.shape != (32, 32, 3):
                raise WiringError(f"{path} must have 32 × 32 pixels, got {pixels.shape[1]} × {pixels.shape[0]}.")
            records.append(np.append(np.uint8(label), pixels.transpose(2, 0, 1)))
    return np.stack(records)


def _from_files(files: Sequence[Path], official: bool) -> Records:
    """Read unpacked files, and compare the checksums of pickles with the official ones if they must be equal."""
    found = []
    for file in files:
        content = read_part(file)
        expected = PICKLES.get(file.name) if official else None
        if expected is not None and (got := hashlib.md5(content).hexdigest()) != expected:
            raise WiringError(f"expected md5 {expected} for {file}, got {got}. Remove it and download it again.")
        found.append(_from_file(content, str(file)))
    return found


def _from_file(content: bytes, where: str) -> np.ndarray:
    """Read a file of the official binary layout (coarse label, fine label, pixels) or a Python pickle."""
    if not where.endswith(".bin"):
        return from_pickle(content, where, key="fine_labels", classes=len(NAMES), title="CIFAR-100")
    if not content or len(content) % (RECORD + 1):
        raise WiringError(f"{where} is truncated: its size is not a multiple of {RECORD + 1:,}. Download it again.")
    return np.frombuffer(content, dtype=np.uint8).reshape(-1, RECORD + 1)[:, 1:]


def _from_archive(archive: Path, md5: str | None = None) -> Records:
    found = read_members(archive, {f"{part}{ending}" for part in PARTS for ending in (".bin", "")}, md5)
    for ending in (".bin", ""):
        if all(f"{part}{ending}" in found for part in PARTS):
            return [_from_file(found[f"{part}{ending}"], f"{archive}: {part}{ending}") for part in PARTS]
    raise WiringError(f"{archive} is not a complete CIFAR-100. Remove it and download it again.")


def _sorted(records: np.ndarray) -> np.ndarray:
    """Sort the records of a part by label and pixels."""
    return records[sorted(range(len(records)), key=lambda i: records[i].tobytes())]


def _checked_counts(per_class: Any) -> tuple[int, int]:
    """Raise unless these are two numbers of images."""
    if (
        not isinstance(per_class, list | tuple)
        or len(per_class) != 2
        or not all(is_int(n) and n > 0 for n in per_class)
    ):
        raise WiringError(f"data.options.per_class must be two positive integers, got {brief(per_class)}.")
    return per_class[0], per_class[1]


def _checked(records: np.ndarray, per_class: tuple[int, int], where: str) -> np.ndarray:
    """Raise unless there are as many images of every class as there should be."""
    classes, total = len(NAMES), sum(per_class) * len(NAMES)
    parts = np.split(records, [per_class[0] * classes])
    if len(records) != total or any(
        not np.array_equal(np.bincount(part[:, 0], minlength=classes), np.full(classes, number))
        for part, number in zip(parts, per_class, strict=True)
    ):
        raise WiringError(
            f"{where} does not hold CIFAR-100 as published: expected {total:,} images of 32 × 32 pixels, "
            f"{per_class[0]} of each class to train and {per_class[1]} to test on, got {len(records):,}."
        )
    return records
