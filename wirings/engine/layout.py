"""Where maps lie: buffers, the zeros around them, and one piece of memory for all.

A tensor of a program is `Maps`: for each of its channels the buffer and the place in it. So taking some channels, or
several tensors' one after the other, moves nothing. A map is flat, ``pitch`` floats a row. Sums over edges run along
flat maps, so what they take and give must have one pitch: buffers that meet in a sum are joined. A convolution that
reaches over the border of a map reads zeros that lie around it, and the zeros to the right of a row are those to the
left of the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

LINE = 16
"""Floats in a cache line; every map starts at one."""
SLACK = 4 * LINE
"""Floats after the last map that may be read, and whose sums are not used."""
ALIAS = 1024
"""Maps this many floats apart compete for the same places in the nearest cache."""
EMPTY = -1
"""The buffer of channels that are all zero."""


@dataclass(eq=False)
class Buffer:
    """Memory for some channels' maps of one size."""

    number: int
    channels: int
    height: int
    width: int
    packed: bool = False
    """Single numbers side by side, as a linear layer reads them."""
    constant: np.ndarray | None = None
    """(channels, height, width): written once."""
    above: int = 0
    below: int = 0
    before: int = 0
    """Zeros that are read around a map: rows above and below it, floats to the left or right of its rows."""
    first: int = 10**9
    last: int = -1
    """The steps that write it first and read it last."""
    own: bool = False
    """Whether there are zeros within its maps, so that nothing else may ever be written there."""
    kept: list[tuple[int, int]] | None = None
    """Where it is cut into bands: the first row and the one after the last that each holds."""
    pitch: int = 0
    lead: int = 0
    stride: int = 1
    """Floats from the start of a channel to its first pixel, and to the next channel."""
    base: int = 0
    """Floats from the start of all memory."""

    @property
    def zeros(self) -> bool:
        return self.own or self.above + self.below + self.before > 0

    def fix(self, pitch: int) -> None:
        """Give it its shape in memory."""
        self.pitch = pitch
        if self.packed:
            self.lead, self.stride = 0, 1
            return
        # The zeros before a map are those after the one before it.
        self.lead = _lines(max(self.above, self.below) * pitch + self.before)
        rows = self.height if self.kept is None else max(last - first for first, last in self.kept)
        size = self.lead + _lines((rows - 1) * pitch + self.width)
        self.stride = size + (LINE if size % ALIAS == 0 and self.channels > 1 else 0)

    def constants(self, floats: int) -> Iterator[tuple[int, np.ndarray]]:
        """What is written once: rows, and where they go; ``floats`` is from a band's memory to the next one's."""
        if self.constant is None:
            return
        for band, (first, last) in enumerate(self.kept or [(0, self.height)]):
            for channel, rows in enumerate(self.constant):
                start = band * floats + self.base + self.lead + channel * self.stride
                for y, row in enumerate(rows[first:last]):
                    yield start + y * self.pitch, row

    @property
    def shape(self) -> tuple[int, ...]:
        """What buffers have in common that may follow each other in one place, zeros and all."""
        return self.height, self.width, self.pitch, self.lead, self.stride

    @property
    def size(self) -> int:
        return _lines(self.channels * self.stride) + (self.lead + SLACK if self.zeros else 0)


@dataclass(eq=False)
class Maps:
    """A tensor: for each channel its buffer, its number there, and where in that map it begins."""

    height: int
    width: int
    buffers: np.ndarray
    channels: np.ndarray
    y: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    x: np.ndarray = field(default_factory=lambda: np.zeros(0, int))

    def __post_init__(self) -> None:
        if len(self.y) != len(self.buffers):
            self.y, self.x = np.zeros(len(self.buffers), int), np.zeros(len(self.buffers), int)

    def __len__(self) -> int:
        return len(self.buffers)

    def take(self, index: np.ndarray) -> Maps:
        """Some of its channels."""
        parts = (self.buffers, self.channels, self.y, self.x)
        return Maps(self.height, self.width, *(part[index] for part in parts))

    @staticmethod
    def joined(pieces: list[Maps]) -> Maps:
        """Several tensors' channels, one after the other."""
        first = pieces[0]
        parts = [np.concatenate([getattr(p, name) for p in pieces]) for name in ("buffers", "channels", "y", "x")]
        return Maps(first.height, first.width, *parts)

    def placed(self, index: np.ndarray, channels: int) -> Maps:
        """Its channels among ``channels``, at ``index``; the others are all zero."""
        made = [np.full(channels, EMPTY), *(np.zeros(channels, int) for _ in range(3))]
        for new, old in zip(made, (self.buffers, self.channels, self.y, self.x), strict=True):
            new[index] = old
        return Maps(self.height, self.width, *made)


class Memory:
    """All buffers of a network."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._joined: list[int] = []
        self._least: list[int] = []

    def new(self, channels: int, height: int, width: int, packed: bool = False) -> Maps:
        """A buffer, as a tensor of all its channels."""
        number = len(self.buffers)
        self.buffers.append(Buffer(number, channels, height, width, packed))
        self._joined.append(number)
        self._least.append(width)
        return Maps(height, width, np.full(channels, number), np.arange(channels))

    def constant(self, values: np.ndarray) -> Maps:
        """A buffer with these values, (channels, height, width)."""
        maps = self.new(values.shape[0], values.shape[1], values.shape[2])
        self.buffers[-1].constant = values
        return maps

    def of(self, maps: Maps) -> list[Buffer]:
        """The buffers that a tensor's channels lie in."""
        return [self.buffers[i] for i in np.unique(maps.buffers) if i != EMPTY]

    def root(self, number: int) -> int:
        while self._joined[number] != number:
            self._joined[number] = self._joined[self._joined[number]]
            number = self._joined[number]
        return number

    def join(self, *tensors: Maps) -> None:
        """Give tensors one pitch."""
        numbers = [b.number for maps in tensors for b in self.of(maps)]
        for number in numbers[1:]:
            a, b = self.root(numbers[0]), self.root(number)
            if a != b:
                self._joined[b] = a
                self._least[a] = max(self._least[a], self._least[b])

    def reach(self, maps: Maps, above: int, below: int, before: int, pitch: int) -> None:
        """Ask for zeros around a tensor, and for a pitch of at least so much."""
        for buffer in self.of(maps):
            buffer.above, buffer.below = max(buffer.above, above), max(buffer.below, below)
            buffer.before = max(buffer.before, before)
            root = self.root(buffer.number)
            self._least[root] = max(self._least[root], pitch)

    def used(self, step: int, *tensors: Maps) -> None:
        """Note that a step reads or writes tensors."""
        for maps in tensors:
            for buffer in self.of(maps):
                buffer.first, buffer.last = min(buffer.first, step), max(buffer.last, step)

    def plan(self) -> int:
        """Give every buffer its place; the floats of memory in all."""
        for buffer in self.buffers:
            buffer.fix(self._least[self.root(buffer.number)])
        end = LINE * 4  # what is read before the first map
        slots: list[tuple[int, list[Buffer]]] = []  # a place, and what lies there in turn
        kept = [b for b in self.buffers if b.constant is not None]
        for buffer in kept:
            buffer.base, end = end, end + buffer.size
        zeroed = sorted((b for b in self.buffers if b.zeros and b.constant is None), key=lambda b: -b.size)
        for buffer in zeroed:  # the largest first, so that those that follow it fit
            for place, inside in slots:
                if inside[0].shape == buffer.shape and not (buffer.own or inside[0].own) and _apart(buffer, inside):
                    buffer.base = place
                    inside.append(buffer)
                    break
            else:
                buffer.base = end
                slots.append((end, [buffer]))
                end += buffer.size
        placed: list[Buffer] = []
        for buffer in sorted((b for b in self.buffers if not b.zeros and b.constant is None), key=lambda b: -b.size):
            taken = sorted((b.base, b.base + b.size) for b in placed if not _apart(buffer, [b]))
            place = end
            for start, stop in taken:
                if place + buffer.size <= start:
                    break
                place = max(place, stop)
            buffer.base = place
            placed.append(buffer)
        return max([end, *(b.base + b.size for b in placed)]) + 2 * SLACK

    def offsets(self, maps: Maps) -> np.ndarray:
        """Where each channel's first pixel lies in memory; -1 for channels that are all zero."""
        places = np.array([b.base + b.lead for b in self.buffers] + [-1])
        strides = np.array([b.stride for b in self.buffers] + [0])
        pitches = np.array([b.pitch for b in self.buffers] + [0])
        found = places[maps.buffers] + maps.channels * strides[maps.buffers] + maps.y * pitches[maps.buffers] + maps.x
        return np.where(maps.buffers == EMPTY, -1, found)

    def classes(self) -> dict[int, list[Buffer]]:
        """Buffers by what they are joined to."""
        found: dict[int, list[Buffer]] = {}
        for buffer in self.buffers:
            found.setdefault(self.root(buffer.number), []).append(buffer)
        return found

    def pitch(self, maps: Maps) -> int:
        """Of all the buffers that a tensor lies in."""
        return next((b.pitch for b in self.of(maps)), maps.width)


def _lines(floats: int) -> int:
    return -(-floats // LINE) * LINE


def _apart(buffer: Buffer, others: list[Buffer]) -> bool:
    """Whether no step uses it while one of the others is in use."""
    return all(buffer.last < other.first or other.last < buffer.first for other in others)
