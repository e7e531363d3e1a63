"""The data of a compiled network as one image of memory: its steps, the arrays that they point to, and constants.

Steps are C structs. They are copied byte for byte, with a list of their pointers, so nothing here depends on what a
kind of step contains.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from wirings.engine.execution_plan import ExecutionPlan
from wirings.engine.step import KernelSizes

ALIGNMENT = 64
"""Bytes to which everything in an image is aligned."""
STRING_WORDS = 12_000
"""Words per string literal, of which compilers need to support 65,536 characters."""
MIN_RUN = 4
"""Fewer equal words than this are written one by one."""


@dataclass(frozen=True)
class PlanPlaces:
    """Where the parts of a plan are in an image, in bytes; ``PlanData`` in C++."""

    steps: int = 0
    floats: int = 0
    constant_rows: int = 0
    constants: int = 0
    count: int = 0
    constant_row_count: int = 0


class NetworkImage:
    """An image of memory, and the words from which it is made. Equal arrays are stored once."""

    def __init__(self) -> None:
        self.bytes = 0
        self.parts: list[tuple[int, int, int, int, int]] = []
        """Where words are copied to: from, to, rows, columns and pitch, in words."""
        self.pointers: list[tuple[int, int]] = []
        """The place of each pointer, and the place that it points to, in bytes."""
        self._words: list[np.ndarray] = []
        self._count = 0
        self._arrays: dict[bytes, int] = {}
        self._stored: dict[bytes, int] = {}

    @property
    def words(self) -> np.ndarray:
        return np.concatenate([*self._words, np.zeros(0, np.uint32)])

    def add_array(self, array: np.ndarray) -> int:
        """Add an array; returns its place."""
        key = _key(array.tobytes(), array.shape)
        if key not in self._arrays:
            self._arrays[key] = self._add(array)
        return self._arrays[key]

    def add_structs(self, structs: Sequence[ctypes.Structure], places: dict[int, int]) -> int:
        """Add structs, one after the other; returns the place of the first.

        Args:
            structs: the structs.
            places: the places in the image of everything that they point to, by address.
        """
        data = bytearray(b"".join(bytes(struct) for struct in structs))
        found, start = [], 0
        for struct in structs:
            for at, address in _pointers(struct, start):
                data[at : at + 8] = bytes(8)
                found.append((at, places[address]))
            start += ctypes.sizeof(struct)
        place = self._add(np.frombuffer(bytes(data), np.uint8))
        self.pointers += [(place + at, to) for at, to in found]
        return place

    def add_plan(self, plan: ExecutionPlan, sizes: KernelSizes) -> PlanPlaces:
        """Add the steps and constants of a plan, packed for vectors of other sizes than this machine's if necessary."""
        steps, places = [], dict[int, int]()
        for lowered, choice in zip(plan.steps, plan.choices, strict=True):
            packed = plan.packed(lowered, choice, sizes)
            places |= {array.ctypes.data: self.add_array(array) for array in packed.arrays}
            places[ctypes.addressof(packed.own)] = self.add_structs([packed.own], places)
            steps.append(packed)
        floats = plan.lowering.floats
        constants = [x for b in plan.lowering.memory.buffers for x in b.constants(floats) if x[1].any()]  # others are 0
        rows = np.array([(place, len(row)) for place, row in constants], np.int64).reshape(-1, 2)
        values = np.concatenate([*(row for _, row in constants), np.zeros(0)]).astype(np.float32)
        return PlanPlaces(
            steps=self.add_structs([packed.step for packed in steps], places),
            floats=floats * (plan.lowering.bands if plan.together else 1),
            constant_rows=self.add_array(rows),
            constants=self.add_array(values),
            count=len(steps),
            constant_row_count=len(rows),
        )

    def _add(self, array: np.ndarray) -> int:
        place = self.bytes
        if array.ndim == 2 and array.shape[1] > 1 and array.itemsize == 4:
            # Edges are offsets with weights. Plans of one network differ in their offsets, and share the weights.
            pieces = [(0, array[:, :1]), (1, array[:, 1:])]
            pitch = array.shape[1]
        else:
            pieces, pitch = [(0, array.reshape(1, -1))], 0
        for column, piece in pieces:
            data = piece.tobytes()
            data += bytes(-len(data) % 4)
            columns = len(data) // 4 // max(len(piece), 1)
            if data:
                self.parts.append((self._store(data), place // 4 + column, len(piece), columns, pitch))
        self.bytes += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        return place

    def _store(self, data: bytes) -> int:
        key = _key(data)
        if key not in self._stored:
            self._stored[key] = self._count
            self._words.append(np.frombuffer(data, np.uint32))
            self._count += len(self._words[-1])
        return self._stored[key]


def _pointers(struct: ctypes.Structure, start: int) -> Iterator[tuple[int, int]]:
    """The pointers of a struct, and of those inside of it, that are not null: their places and what they point to."""
    for name, kind in struct._fields_:  # type: ignore[misc]
        at, value = start + getattr(type(struct), name).offset, getattr(struct, name)
        if isinstance(value, ctypes.Structure):
            yield from _pointers(value, at)
        elif kind is ctypes.c_void_p and value:
            yield at, value


def _key(data: bytes, shape: tuple[int, ...] = ()) -> bytes:
    return hashlib.sha256(data).digest() + repr(shape).encode()


def as_text(words: np.ndarray) -> list[str]:
    """Words in base 85, five characters each, in strings that need no escapes; see ``exported_network.h``."""
    alphabet = np.frombuffer(bytes(range(ord("#"), ord("#") + 85)).translate(bytes.maketrans(b"?\\", b"xy")), np.uint8)
    powers = 85 ** np.arange(4, -1, -1)
    texts = []
    for start in range(0, len(words), STRING_WORDS):
        own = words[start : start + STRING_WORDS].astype(np.int64)
        digits = alphabet[own[:, None] // powers % 85].tobytes().decode("ascii")
        starts = np.flatnonzero(np.diff(own, prepend=-1))
        lengths = np.diff(starts, append=len(own))
        made, done = [], 0
        for i in np.flatnonzero(lengths >= MIN_RUN):
            first, length = int(starts[i]), int(lengths[i])
            count = alphabet[(length - 1) // powers % 85].tobytes().decode("ascii")
            made += [digits[5 * done : 5 * (first + 1)], "z", count]
            done = first + length
        texts.append("".join([*made, digits[5 * done :]]))
    return texts
