"""The file format of histories: a sequence of chunks with lengths and checksums. Nothing in a file can execute.

    8 bytes     "WIRINGS" and the version of the format
    chunks      kind (4 bytes), length and CRC-32 of kind and content (little-endian uint32 each), then the content,
                compressed with zlib

    HEAD        JSON: the structure of the wiring, and what the caller says about the run
    STEP        one record: the wiring at a step, as the difference from the previous record
    NOTE        JSON: a step, and values that belong to it, such as the loss

A record, uncompressed, consists of the step, the number of edges that were real at the previous record and the number
of new edges (uint32 each); for each edge that was real, the change of its code, modulo 256 (a code of 0 means that the
edge is no longer real); the codes of the new edges; and the gaps between the flat indices of the new edges, as four
planes of bytes, low bytes first. Indices ascend.

Each chunk is appended with a single write. A run that is killed therefore leaves complete chunks and at most one
partial chunk at the end of the file, which can be distinguished from damage elsewhere.
"""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wirings.errors import WiringError
from wirings.utils.files import read_regular

VERSION = 1
MAGIC = b"WIRINGS" + bytes([VERSION])
HEAD, STEP, NOTE = b"HEAD", b"STEP", b"NOTE"
_CHUNK, _RECORD = struct.Struct("<4sII"), struct.Struct("<III")
MAX_CHUNK_BYTES = 1 << 30
"""The largest uncompressed size of a record: a damaged file must not fill the memory."""
MAX_JSON_BYTES, MAX_RATIO = 1 << 24, 32
"""The largest size of JSON, beyond which it may be `MAX_RATIO` times as large as it is compressed."""


class Chunk(NamedTuple):
    """One chunk of a history file; the content is compressed."""

    kind: bytes
    content: bytes

    def framed(self) -> bytes:
        """The bytes of the chunk in a file, with length and checksum."""
        return _CHUNK.pack(self.kind, len(self.content), zlib.crc32(self.kind + self.content)) + self.content


def pack(kind: bytes, content: bytes) -> Chunk:
    """Compress a chunk."""
    return Chunk(kind, zlib.compress(content, 6))


def unpack(chunk: Chunk, limit: int = MAX_CHUNK_BYTES) -> bytes:
    """Decompress a chunk's content, of ``limit`` bytes at most.

    Raises:
        ValueError: the content is damaged, or longer.
    """
    decompressor = zlib.decompressobj()
    try:
        content = decompressor.decompress(chunk.content, limit + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not decompressor.eof or len(content) > limit:
        raise ValueError("the content is truncated or too long")
    return content


def pack_json(kind: bytes, value: Any) -> Chunk:
    """Store a value as JSON in a chunk."""
    return pack(kind, json.dumps(value, allow_nan=False, separators=(",", ":")).encode())


def unpack_json(chunk: Chunk) -> Any:
    """Read the JSON value of a chunk."""
    return json.loads(unpack(chunk, max(MAX_JSON_BYTES, MAX_RATIO * len(chunk.content))))


def pack_record(step: int, before: np.ndarray, after: np.ndarray) -> Chunk:
    """Store a record as the difference between two wirings.

    Args:
        step: the optimizer step of the record.
        before: int8 codes of all possible edges at the previous record, 0 for edges that are not real.
        after: int8 codes at this record.
    """
    was = np.flatnonzero(before)
    delta = after[was].view(np.uint8) - before[was].view(np.uint8)
    new = np.flatnonzero((before == 0) & (after != 0))
    gaps = np.diff(new, prepend=0).astype("<u4")
    planes = gaps.view(np.uint8).reshape(-1, 4).T
    parts = (_RECORD.pack(step, len(was), len(new)), delta.tobytes(), after[new].tobytes(), planes.tobytes())
    return pack(STEP, b"".join(parts))


class RecordDelta(NamedTuple):
    """The content of a record: the difference from the previous one."""

    step: int
    delta: np.ndarray
    """For each edge that was real, the change of its code, modulo 256."""
    new: np.ndarray
    """Flat indices of the edges that became real."""
    codes: np.ndarray
    """The int8 codes of the new edges."""


def step_of(chunk: Chunk) -> int:
    """The step of a record, without decompressing all of it."""
    return _record_head(chunk)[0]


def _record_head(chunk: Chunk) -> tuple[int, int, int]:
    """The step of a record, the number of edges before it, and that of its new edges."""
    try:
        start = zlib.decompressobj().decompress(chunk.content, _RECORD.size)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(start) < _RECORD.size:
        raise ValueError("the record is truncated")
    step, was, new = _RECORD.unpack(start)
    return step, was, new


def unpack_record(chunk: Chunk, before: int | None = None, limit: int | None = None) -> RecordDelta:
    """Read a record.

    Args:
        chunk: the record.
        before: the number of edges that were real before it, checked before memory is taken.
        limit: the most edges that there may be after it.

    Raises:
        ValueError: the record is damaged.
    """
    step, was, new = _record_head(chunk)
    if before is not None and was != before:
        raise ValueError(f"it changes {was} edges, but {before} were real before it")
    if limit is not None and was + new > limit:
        raise ValueError(f"it has {was + new:,} edges, more than a file of this size or structure can have")
    at = _RECORD.size
    content = unpack(chunk, min(MAX_CHUNK_BYTES, at + was + 5 * new))
    if len(content) != at + was + 5 * new:
        raise ValueError(f"expected {at + was + 5 * new} bytes, got {len(content)}")
    delta = np.frombuffer(content, np.uint8, was, at)
    codes = np.frombuffer(content, np.int8, new, at + was)
    planes = np.frombuffer(content, np.uint8, 4 * new, at + was + new).reshape(4, new)
    gaps = np.ascontiguousarray(planes.T).view("<u4").reshape(-1)
    return RecordDelta(step, delta, np.cumsum(gaps, dtype=np.int64), codes)


def read_chunks(path: Path) -> tuple[list[Chunk], str | None]:
    """Read a history file.

    Returns:
        All complete chunks, and a description of the damage that follows them, or None if the file is intact.
    """
    try:
        data = read_regular(path)
    except OSError as error:
        raise WiringError(f"cannot read the history {path}: {error.strerror}.") from error
    if data[:7] != MAGIC[:7]:
        raise WiringError(f"{path} is not a history of a wiring. Expected a file written by Recorder or History.save.")
    if data[7:8] != MAGIC[7:]:
        got = str(data[7]) if len(data) > 7 else "missing"
        raise WiringError(f"{path} has format version {got}, but this release of wirings reads version {VERSION}.")
    chunks: list[Chunk] = []
    at = len(MAGIC)
    while at < len(data):
        if at + _CHUNK.size > len(data):
            return chunks, f"it ends inside chunk {len(chunks) + 1}"
        kind, length, checksum = _CHUNK.unpack_from(data, at)
        at += _CHUNK.size
        content = data[at : at + length]
        if kind not in (HEAD, STEP, NOTE):
            return chunks, f"chunk {len(chunks) + 1} has an unknown kind"
        if len(content) < length:
            return chunks, f"it ends inside chunk {len(chunks) + 1}"
        if zlib.crc32(kind + content) != checksum:
            return chunks, f"chunk {len(chunks) + 1} has a wrong checksum"
        chunks.append(Chunk(kind, content))
        at += length
    return chunks, None
