"""What the files of CIFAR-10 and CIFAR-100 have in common: records, prepared files, pickles, archives and downloads.

A record is 3,073 bytes: the label, then 32 × 32 red, green and blue values each, row by row. Every reader raises a
`WiringError` for a damaged file, and takes no more memory than the file justifies.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import pickletools
import tarfile
import zlib
from collections.abc import Callable, Collection
from io import BytesIO
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from wirings.errors import WiringError
from wirings.train.data.download import download_chunks
from wirings.train.data.unpack import MOST_BYTES, gunzip
from wirings.utils.cache import write_whole
from wirings.utils.files import read_regular
from wirings.utils.text import brief, shortened

RECORD = 1 + 3 * 32 * 32

T = TypeVar("T")


def read_part(path: Path) -> bytes:
    """Return the contents of a file."""
    try:
        return read_regular(path)
    except OSError as error:
        raise WiringError(f"{path} cannot be read: {error.strerror}.") from error


def read_array(content: bytes, path: Path) -> np.ndarray:
    """Read records, uint8 (n, 3073), from the contents of a ``.npy`` file.

    Args:
        content: The contents.
        path: The file, for error messages.
    """
    try:
        records = np.lib.format.read_array(BytesIO(content), allow_pickle=False)
    except Exception as error:  # NumPy raises exceptions of many types for damaged headers
        raise WiringError(f"{path} is truncated or damaged ({shortened(str(error), 200)}). Remove it.") from error
    if records.dtype != np.uint8 or records.ndim != 2 or records.shape[1] != RECORD:
        raise WiringError(f"{path} must hold uint8 (60000, {RECORD}), got {records.dtype} {records.shape}. Remove it.")
    return np.ascontiguousarray(records)


def labelled(labels: list[int], pixels: np.ndarray, classes: int, where: str) -> np.ndarray:
    """Return the records of labels and pixels, uint8 (n, 3072)."""
    if pixels.shape != (len(labels), RECORD - 1) or not all(type(n) is int and 0 <= n < classes for n in labels):
        raise WiringError(
            f"{where} must have {RECORD - 1:,} values for each image and one label from 0 to {classes - 1}, got values "
            f"of shape {pixels.shape} and {len(labels):,} labels. Download it again."
        )
    return np.concatenate([np.array(labels, dtype=np.uint8)[:, None], pixels], axis=1)


def from_pickle(content: bytes, where: str, *, key: str, classes: int, title: str) -> np.ndarray:
    """Read records from an untrusted pickle.

    Args:
        content: The pickle.
        where: Where it comes from, for error messages.
        key: Name of the list of labels.
        classes: Number of classes.
        title: Name of the data set, for error messages.
    """
    # Keys are bytes as Python 2 wrote them, text as Python 3 writes them.
    found = unpickle(content, where, title)
    fields = {k.decode("latin1") if isinstance(k, bytes) else k: v for k, v in found.items()}
    pixels, labels = fields.get("data"), fields.get(key)
    if not isinstance(pixels, np.ndarray) or not isinstance(labels, list):
        names = brief(sorted(map(str, fields)))
        raise WiringError(f"{where} must have the keys 'data' and {key!r}, got {names}.")
    return labelled(labels, pixels, classes, where)


def read_members(archive: Path, wanted: Collection[str], md5: str | None = None) -> dict[str, bytes]:
    """Read files of an archive by their names. Nothing is unpacked to disk, so no member can overwrite a file.

    Args:
        archive: A ``.tar.gz`` file.
        wanted: Names without folders.
        md5: What the archive's checksum must be; None for any.
    """
    found: dict[str, bytes] = {}
    try:
        packed = read_regular(archive)
        if md5 is not None and (got := hashlib.md5(packed).hexdigest()) != md5:
            raise WiringError(f"expected md5 {md5} for {archive}, got {got}. Remove it and download it again.")
        contents = gunzip(BytesIO(packed), MOST_BYTES)
        if len(contents) > MOST_BYTES:
            raise tarfile.ReadError(f"it unpacks to more than {MOST_BYTES:,} bytes")
        with tarfile.open(fileobj=BytesIO(contents), mode="r:") as tar:
            for member in tar:
                name = member.name.rpartition("/")[2]
                if name in wanted and member.issparse():  # a few bytes that stand for any number of zeros
                    raise tarfile.ReadError(f"{brief(name)} in it is a sparse file, which is not supported")
                file = tar.extractfile(member) if member.isfile() and name in wanted else None
                if file is not None:
                    found[name] = file.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise WiringError(f"{archive} is truncated or damaged ({error}). Remove it and download it again.") from error
    return found


def downloaded(url: str, md5: str, home: Path, say: Callable[[str], object], read: Callable[[Path], T]) -> T:
    """Download an archive into the cache, check it, and return what ``read`` makes of it. The archive is not kept."""
    say(f"downloading {url}")
    name = url.rpartition("/")[2].removesuffix(".tar.gz")
    archive = home / f"{name}.{os.getpid()}.tar.gz"  # with the process id, since others may download it, too
    digest = hashlib.md5()

    def fill(file: IO[bytes]) -> None:
        for chunk in download_chunks(url):
            digest.update(chunk)
            file.write(chunk)

    write_whole(archive, fill)
    try:
        if digest.hexdigest() != md5:
            raise WiringError(f"expected md5 {md5} for {url}, got {digest.hexdigest()}. Try again.")
        return read(archive)
    finally:
        archive.unlink(missing_ok=True)


MOST_TUPLES = 16
"""Tuples in a pickle; those of CIFAR-10 have seven. Each may double the time that hashing the next one takes."""
_NOT_USED = {"INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "FROZENSET", "EMPTY_SET", "NEXT_BUFFER", "DUP"}


def _check_opcodes(content: bytes) -> None:
    """Raise if a small pickle would take much memory or time.

    Python reserves all entries of the memo up to the last one that a pickle names.
    """
    tuples = 0
    for opcode, argument, _ in pickletools.genops(content):
        tuples += "TUPLE" in opcode.name
        if opcode.name in _NOT_USED or tuples > MOST_TUPLES:
            raise ValueError(f"the published files have not as many {opcode.name} opcodes")
        if "PUT" in opcode.name and not 0 <= int(str(argument)) <= len(content):
            raise ValueError(f"{opcode.name} {argument}")


def unpickle(content: bytes, where: str, title: str) -> dict[Any, Any]:
    """Read a dictionary of plain values and uint8 arrays from an untrusted pickle.

    A pickle names functions for its reader to call. The few names that these files need are replaced by stand-ins that
    only assemble an array. Any other name is rejected, so a pickle cannot run code of its own.

    Args:
        content: The pickle.
        where: Where it comes from, for error messages.
        title: Name of the data set, for error messages.
    """

    # Defined for each file, since a pickle can set attributes of what it is given.
    class Dtype:
        def __init__(self, name: Any, *_: Any) -> None:
            if name not in ("u1", b"u1"):
                got = repr(name[:20]) if isinstance(name, str | bytes) else type(name).__name__
                raise WiringError(f"{where} holds an array of {got} instead of bytes (u1). This is not {title}.")

        def __setstate__(self, _: Any) -> None: ...

    class Array:
        value: np.ndarray

        def __init__(self, *_: Any) -> None: ...

        def __setstate__(self, state: Any) -> None:
            _, shape, dtype, fortran, raw = state
            if not isinstance(dtype, Dtype) or not isinstance(raw, bytes):
                raise WiringError(f"{where} holds an array of something other than bytes. This is not {title}.")
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
                    f"{where} wants to run {what}, which {title}'s own files never do. It was not run. "
                    f"Remove the file and download {title} again."
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
