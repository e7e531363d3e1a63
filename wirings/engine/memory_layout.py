"""Memory layout: where maps are stored, the zeros around them, and one piece of memory for all.

A tensor of a program is `FeatureMaps`: for each of its channels, the buffer and the place in it. A map is flat, with
``pitch`` floats per row. Sums over edges run along flat maps, so their inputs and outputs must have the same pitch. A
convolution that reads beyond the border of a map reads zeros that are stored around it, and the zeros after one row are
those before the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

LINE = 16
"""Floats in a cache line, to which every map is aligned."""
SLACK = 4 * LINE
"""Floats after the last map that may be read, but whose sums are not used."""
ALIAS = 1024
"""Maps at this distance in floats compete for the same lines of the level-1 cache."""
EMPTY = -1
"""The buffer of channels that are all zero."""


@dataclass(eq=False)
class MapBuffer:
    """Memory for the maps of some channels, all of one size."""

    number: int
    channels: int
    height: int
    width: int
    packed: bool = False
    """Whether it holds single numbers without gaps, as a linear layer reads them."""
    constant: np.ndarray | None = None
    """Constant values, (channels, height, width), which are written once."""
    above: int = 0
    below: int = 0
    before: int = 0
    """Zeros around a map: rows above and below it, and floats before or after each row."""
    first: int = 10**9
    last: int = -1
    """The first and the last step that use it."""
    own: bool = False
    """Whether its maps contain zeros that nothing else may overwrite."""
    kept: list[tuple[int, int]] | None = None
    """If it is cut into bands, the first row of each band and the row after its last."""
    pitch: int = 0
    lead: int = 0
    stride: int = 1
    """Lead and stride: floats from the start of a channel to its first pixel, and to the next channel."""
    base: int = 0
    """Offset in the memory, in floats."""

    @property
    def zeros(self) -> bool:
        return self.own or self.above + self.below + self.before > 0

    def fix(self, pitch: int) -> None:
        """Determine its layout for a pitch (floats from one row to the next)."""
        self.pitch = pitch
        if self.packed:
            self.lead, self.stride = 0, 1
            return
        # The zeros before a map are those after the previous one.
        self.lead = _lines(max(self.above, self.below) * pitch + self.before)
        rows = self.height if self.kept is None else max(last - first for first, last in self.kept)
        size = self.lead + _lines((rows - 1) * pitch + self.width)
        self.stride = size + (LINE if size % ALIAS == 0 and self.channels > 1 else 0)

    def constants(self, floats: int) -> Iterator[tuple[int, np.ndarray]]:
        """The rows of constant maps and their offsets; ``floats`` is the size of the memory of one band."""
        if self.constant is None:
            return
        for band, (first, last) in enumerate(self.kept or [(0, self.height)]):
            for channel, rows in enumerate(self.constant):
                start = band * floats + self.base + self.lead + channel * self.stride
                for y, row in enumerate(rows[first:last]):
                    yield start + y * self.pitch, row

    @property
    def shape(self) -> tuple[int, ...]:
        """Equal for buffers that may use the same memory in turn, with zeros at the same places."""
        return self.height, self.width, self.pitch, self.lead, self.stride

    @property
    def size(self) -> int:
        return _lines(self.channels * self.stride) + (self.lead + SLACK if self.zeros else 0)


@dataclass(eq=False)
class FeatureMaps:
    """A tensor: for each channel, its buffer, its number there, and at which pixel of the map it begins.

    Taking some channels, or those of several tensors, moves nothing.
    """

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

    def take(self, index: np.ndarray) -> FeatureMaps:
        """A tensor of some of its channels."""
        parts = (self.buffers, self.channels, self.y, self.x)
        return FeatureMaps(self.height, self.width, *(part[index] for part in parts))

    @staticmethod
    def joined(pieces: list[FeatureMaps]) -> FeatureMaps:
        """A tensor of the channels of several tensors."""
        first = pieces[0]
        parts = [np.concatenate([getattr(p, name) for p in pieces]) for name in ("buffers", "channels", "y", "x")]
        return FeatureMaps(first.height, first.width, *parts)

    def scattered(self, index: np.ndarray, channels: int) -> FeatureMaps:
        """A tensor with its channels at ``index`` among ``channels``; all others are zero."""
        made = [np.full(channels, EMPTY), *(np.zeros(channels, int) for _ in range(3))]
        for new, old in zip(made, (self.buffers, self.channels, self.y, self.x), strict=True):
            new[index] = old
        return FeatureMaps(self.height, self.width, *made)


class MapMemory:
    """The memory of a network: all of its buffers."""

    def __init__(self) -> None:
        self.buffers: list[MapBuffer] = []
        self._joined: list[int] = []
        self._least: list[int] = []

    def new(self, channels: int, height: int, width: int, packed: bool = False) -> FeatureMaps:
        """Add a buffer; returns it as a tensor."""
        number = len(self.buffers)
        self.buffers.append(MapBuffer(number, channels, height, width, packed))
        self._joined.append(number)
        self._least.append(width)
        return FeatureMaps(height, width, np.full(channels, number), np.arange(channels))

    def constant(self, values: np.ndarray) -> FeatureMaps:
        """Add a buffer with constant values, (channels, height, width)."""
        maps = self.new(values.shape[0], values.shape[1], values.shape[2])
        self.buffers[-1].constant = values
        return maps

    def of(self, maps: FeatureMaps) -> list[MapBuffer]:
        """The buffers of a tensor's channels."""
        return [self.buffers[i] for i in np.unique(maps.buffers) if i != EMPTY]

    def root(self, number: int) -> int:
        while self._joined[number] != number:
            self._joined[number] = self._joined[self._joined[number]]
            number = self._joined[number]
        return number

    def join(self, *tensors: FeatureMaps) -> None:
        """Require the same pitch for tensors that meet in a sum."""
        numbers = [b.number for maps in tensors for b in self.of(maps)]
        for number in numbers[1:]:
            a, b = self.root(numbers[0]), self.root(number)
            if a != b:
                self._joined[b] = a
                self._least[a] = max(self._least[a], self._least[b])

    def reach(self, maps: FeatureMaps, above: int, below: int, before: int, pitch: int) -> None:
        """Require zeros around a tensor, and a minimum pitch."""
        for buffer in self.of(maps):
            buffer.above, buffer.below = max(buffer.above, above), max(buffer.below, below)
            buffer.before = max(buffer.before, before)
            root = self.root(buffer.number)
            self._least[root] = max(self._least[root], pitch)

    def used(self, step: int, *tensors: FeatureMaps) -> None:
        """Record that a step reads or writes tensors."""
        for maps in tensors:
            for buffer in self.of(maps):
                buffer.first, buffer.last = min(buffer.first, step), max(buffer.last, step)

    def plan(self) -> int:
        """Assign an offset to every buffer; returns the size of the memory in floats."""
        for buffer in self.buffers:
            buffer.fix(self._least[self.root(buffer.number)])
        end = LINE * 4  # may be read before the first map
        slots: list[tuple[int, list[MapBuffer]]] = []  # an offset, and the buffers that use it in turn
        kept = [b for b in self.buffers if b.constant is not None]
        for buffer in kept:
            buffer.base, end = end, end + buffer.size
        zeroed = sorted((b for b in self.buffers if b.zeros and b.constant is None), key=lambda b: -b.size)
        for buffer in zeroed:  # the largest first, so that later ones fit
            for place, inside in slots:
                if inside[0].shape == buffer.shape and not (buffer.own or inside[0].own) and _apart(buffer, inside):
                    buffer.base = place
                    inside.append(buffer)
                    break
            else:
                buffer.base = end
                slots.append((end, [buffer]))
                end += buffer.size
        placed: list[MapBuffer] = []
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

    def offsets(self, maps: FeatureMaps) -> np.ndarray:
        """The offset of each channel's first pixel; -1 for channels that are all zero."""
        places = np.array([b.base + b.lead for b in self.buffers] + [-1])
        strides = np.array([b.stride for b in self.buffers] + [0])
        pitches = np.array([b.pitch for b in self.buffers] + [0])
        found = places[maps.buffers] + maps.channels * strides[maps.buffers] + maps.y * pitches[maps.buffers] + maps.x
        return np.where(maps.buffers == EMPTY, -1, found)

    def classes(self) -> dict[int, list[MapBuffer]]:
        """Buffers with the same pitch, by the number of one of them."""
        found: dict[int, list[MapBuffer]] = {}
        for buffer in self.buffers:
            found.setdefault(self.root(buffer.number), []).append(buffer)
        return found

    def pitch(self, maps: FeatureMaps) -> int:
        """The pitch of a tensor."""
        return next((b.pitch for b in self.of(maps)), maps.width)


def _lines(floats: int) -> int:
    return -(-floats // LINE) * LINE


def _apart(buffer: MapBuffer, others: list[MapBuffer]) -> bool:
    """Whether no other buffer is in use at the same time."""
    return all(buffer.last < other.first or other.last < buffer.first for other in others)
