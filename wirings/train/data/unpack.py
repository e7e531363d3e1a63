"""Read compressed files into a bounded amount of memory: a small file can stand for any number of bytes."""

from __future__ import annotations

import gzip
import lzma
import zlib
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from wirings.errors import WiringError
from wirings.utils.files import read_regular

MOST_BYTES, MAX_RATIO = 2**28, 64
"""What any compressed file may unpack to, and a large one as a multiple of its size."""
_XZ_MEMORY = 2**29
"""What the decompressor of ``.xz`` may take; its strongest preset takes 65 MiB."""
_PIECE = 2**14
"""Bytes of an ``.xz`` file that are decompressed at a time."""


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """Return the contents of a file, decompressed if its name ends in ``.xz`` or ``.gz``.

    Args:
        path: The file.
        most: The most bytes that a compressed file may unpack to; by default as above.
    """
    try:
        if path.suffix not in (".gz", ".xz"):
            return read_regular(path)
        limit = max(MOST_BYTES, MAX_RATIO * path.stat().st_size) if most is None else most
        with BytesIO(read_regular(path)) as file:
            contents = gunzip(file, limit) if path.suffix == ".gz" else _unxz(file, limit)
    except (lzma.LZMAError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise WiringError(f"{path} cannot be decompressed ({error}). Get it again.") from error
    except OSError as error:
        raise WiringError(f"{path} cannot be read: {error.strerror or error}.") from error
    if len(contents) > limit:
        raise WiringError(
            f"{path} unpacks to more than {limit:,} bytes, much more than usual for its size. If you trust it, "
            "decompress it yourself and give the result."
        )
    return contents


def gunzip(file: BinaryIO, limit: int) -> bytes:
    """Decompress an open file; the result has ``limit`` + 1 bytes if there are more than ``limit``."""
    with gzip.open(file, "rb") as unpacked:
        return unpacked.read(limit + 1)


def _unxz(file: BinaryIO, limit: int) -> bytes:
    """Decompress one stream after the other, since `lzma.open` does not limit the decompressor's memory.

    Reads pieces of the file: every stream copies what is left of its piece, which may hold many empty streams.
    """
    parts, left, piece = list[bytes](), limit + 1, file.read(_PIECE)
    while left and piece:
        decompressor = lzma.LZMADecompressor(lzma.FORMAT_AUTO, memlimit=_XZ_MEMORY)
        while True:
            parts.append(decompressor.decompress(piece, left))
            left -= len(parts[-1])
            if left == 0 or decompressor.eof:
                break
            if not (piece := file.read(_PIECE)):
                raise EOFError("the file is truncated")
        piece = decompressor.unused_data.lstrip(b"\0")  # streams may be padded
        while not piece and (more := file.read(_PIECE)):
            piece = more.lstrip(b"\0")
    return b"".join(parts)
