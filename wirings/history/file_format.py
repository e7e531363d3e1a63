"""The file of a history: chunks one after the other, each with its length and checksum; nothing in it can execute.

    8 bytes     "WIRINGS" and the version of the format
    chunks      4 bytes of kind, the length and the CRC-32 of kind and content as little-endian numbers of 4 bytes, then
                the content, compressed by zlib

    HEAD        JSON: the structure, and what the caller says about the run
    STEP        one record: what the wiring is at a step, as the difference from the record before
    NOTE        JSON: a step and numbers that belong to it, such as the loss

A record, uncompressed: the step, the number of places that were real at the record before and the number that are new,
as numbers of 4 bytes; for each place that was real the difference of its code, modulo 256 (a code of 0 is an edge that
is no longer real); the codes of the new places; the gaps between the new places, as four planes of bytes, the low ones
first. Places are in ascending order.

A chunk is written in one go at the end of the file, so a run that is killed leaves whole chunks, and at worst a part of
one, which is told apart from a damaged file by the file's end.
"""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wirings.errors import WiringError

VERSION = 1
MAGIC = b"WIRINGS" + bytes([VERSION])
HEAD, STEP, NOTE = b"HEAD", b"STEP", b"NOTE"
_CHUNK, _RECORD = struct.Struct("<4sII"), struct.Struct("<III")
LONGEST = 1 << 30
"""Bytes that a chunk may have uncompressed: a damaged one must not fill the memory."""


class Chunk(NamedTuple):
    """A kind, and a content as it is in the file, compressed."""

    kind: bytes
    content: bytes

    def framed(self) -> bytes:
        return _CHUNK.pack(self.kind, len(self.content), zlib.crc32(self.kind + self.content)) + self.content


def pack(kind: bytes, content: bytes) -> Chunk:
    return Chunk(kind, zlib.compress(content, 6))


def unpack(chunk: Chunk) -> bytes:
    """A chunk's content, uncompressed; raises ValueError if it is none."""
    opened = zlib.decompressobj()
    try:
        content = opened.decompress(chunk.content, LONGEST)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not opened.eof:
        raise ValueError("it is cut off, or too long")
    return content


def pack_json(kind: bytes, value: Any) -> Chunk:
    return pack(kind, json.dumps(value, allow_nan=False, separators=(",", ":")).encode())


def unpack_json(chunk: Chunk) -> Any:
    return json.loads(unpack(chunk))


def difference(step: int, before: np.ndarray, after: np.ndarray) -> Chunk:
    """A record: from the codes of all places before to those after, int8."""
    was = np.flatnonzero(before)
    delta = after[was].view(np.uint8) - before[was].view(np.uint8)
    new = np.flatnonzero((before == 0) & (after != 0))
    gaps = np.diff(new, prepend=0).astype("<u4")
    planes = gaps.view(np.uint8).reshape(-1, 4).T
    parts = (_RECORD.pack(step, len(was), len(new)), delta.tobytes(), after[new].tobytes(), planes.tobytes())
    return pack(STEP, b"".join(parts))


class Difference(NamedTuple):
    """A record, read again."""

    step: int
    delta: np.ndarray
    """For each place that was real: the difference of its code, modulo 256."""
    new: np.ndarray
    """The places that are real now and were not."""
    codes: np.ndarray
    """Theirs."""


def step_of(chunk: Chunk) -> int:
    """The step of a record, without reading the rest of it."""
    try:
        start = zlib.decompressobj().decompress(chunk.content, _RECORD.size)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(start) < _RECORD.size:
        raise ValueError("a record is cut off")
    return int(_RECORD.unpack(start)[0])


def read_difference(chunk: Chunk) -> Difference:
    content = unpack(chunk)
    if len(content) < _RECORD.size:
        raise ValueError("it is cut off")
    step, was, new = _RECORD.unpack_from(content)
    at = _RECORD.size
    if len(content) != at + was + 5 * new:
        raise ValueError(f"it has {len(content)} bytes instead of {at + was + 5 * new}")
    delta = np.frombuffer(content, np.uint8, was, at)
    codes = np.frombuffer(content, np.int8, new, at + was)
    planes = np.frombuffer(content, np.uint8, 4 * new, at + was + new).reshape(4, new)
    gaps = np.ascontiguousarray(planes.T).view("<u4").reshape(-1)
    return Difference(step, delta, np.cumsum(gaps, dtype=np.int64), codes)


def read(path: Path) -> tuple[list[Chunk], str | None]:
    """All whole chunks of a file, and what is wrong with the rest of it, if anything is."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise WiringError(f"the history {path} cannot be read: {error.strerror}.") from error
    if data[:7] != MAGIC[:7]:
        raise WiringError(
            f"{path} is no history of a wiring: it does not begin as one. Give a file that History.save wrote."
        )
    if data[7:8] != MAGIC[7:]:
        came = str(data[7]) if len(data) > 7 else "none"
        raise WiringError(f"{path} is a history of version {came}; this version of wirings reads {VERSION}.")
    chunks: list[Chunk] = []
    at = len(MAGIC)
    while at < len(data):
        if at + _CHUNK.size > len(data):
            return chunks, f"it ends inside chunk {len(chunks) + 1}"
        kind, length, checksum = _CHUNK.unpack_from(data, at)
        at += _CHUNK.size
        content = data[at : at + length]
        if kind not in (HEAD, STEP, NOTE):
            return chunks, f"chunk {len(chunks) + 1} is of an unknown kind"
        if len(content) < length:
            return chunks, f"it ends inside chunk {len(chunks) + 1}"
        if zlib.crc32(kind + content) != checksum:
            return chunks, f"the checksum of chunk {len(chunks) + 1} is wrong"
        chunks.append(Chunk(kind, content))
        at += length
    return chunks, None
