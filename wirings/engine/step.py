"""The contract of steps: everything about one kind of step is in its class, beside the operations that use it.

A class declares the name of its kernel in ``source/kernel_table.h``, the struct that the kernel takes, with the same
fields in the same order, which tensors a step reads, and the ways of computing it that are worth measuring. Once the
memory is laid out, a step fills its struct. It checks that everything the kernel will access is inside of the memory,
since the kernels check nothing.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from wirings.engine.bounds import as_int32, expect_inside, expect_int32
from wirings.engine.memory_layout import FeatureMaps, MapMemory

Layout = tuple[tuple[str, Any], ...]
Fields = dict[str, Any]
"""The fields of a struct: numbers, arrays (0 for a null pointer), and mappings for structs inside of it."""

KINDS: dict[str, type[LoweredStep]] = {}
"""The classes of steps by kind."""

RARE, EVEN, COMMON = 0.15, 0.35, 0.7
"""Densities: below the first, dense is never faster; above the last, sparse is never faster; at the second, both are
about equally fast."""
SPEED = 30_000
"""The approximate number of multiply-adds per microsecond and thread, which determines how finely work is divided."""
PIECE = 3.0
"""Microseconds of the smallest piece of work that is worth scheduling."""
PIECES = 8
"""The most pieces of work per thread."""


@dataclass(frozen=True)
class StepChoice:
    """How a step is computed: sparse (edge by edge) or dense, and into how many strips of rows its maps are cut."""

    way: str = "sparse"
    strips: int = 1


@dataclass(frozen=True)
class KernelSizes:
    """The vector and tile sizes that the kernels were compiled with."""

    lanes: int
    block: int
    tile: int
    dense_tile: int
    panel: int

    @staticmethod
    def of(library: ctypes.CDLL) -> KernelSizes:
        return KernelSizes(
            library.wirings_lanes(),
            library.wirings_block(),
            library.wirings_tile(1),
            library.wirings_tile(0),
            library.wirings_panel(),
        )


@dataclass(frozen=True)
class WorkDivision:
    """What the number of strips of a step depends on."""

    bands: int
    """Bands of rows that its maps are cut into, which is the least number of strips."""
    threads: int
    lanes: int
    together: bool
    """Whether all threads work on one image."""


@dataclass(frozen=True)
class StepContext:
    """What a step needs to know when it is packed."""

    memory: MapMemory
    floats: int
    """The size of the memory, or of that of one band."""
    bands: int
    """Bands of rows that maps are cut into."""
    machine: KernelSizes
    threads: int
    choice: StepChoice
    input_sizes: tuple[int, ...]
    """Numbers in each of the caller's inputs, for one example."""
    output_sizes: tuple[int, ...]

    @property
    def lanes(self) -> int:
        """Floats per vector."""
        return self.machine.lanes

    def chunks(self, costs: np.ndarray, strips: int = 1, most: int = PIECES) -> np.ndarray:
        """Divide things into chunks that take about equally long: where each begins, and the end of the last.

        Args:
            costs: what each thing costs, in multiply-adds.
            strips: the number of tasks that each chunk is divided into.
            most: the most pieces of work per thread.
        """
        pieces = float(costs.sum()) / SPEED / PIECE
        pieces = min(max(pieces, self.threads), most * self.threads)
        count = int(np.clip(round(pieces / strips), 1, max(len(costs), 1)))
        bounds = np.searchsorted(np.cumsum(costs), costs.sum() * np.arange(1, count) / count, side="right")
        return np.unique([0, *bounds.tolist(), len(costs)])

    def channel_chunks(self, channels: int, height: int, width: int, strips: int = 1) -> np.ndarray:
        """The chunks of channels whose maps all cost the same."""
        return self.chunks(np.full(channels, 8.0 * height * width), strips)

    def tiles(self, vectors: int, rows: int) -> int:
        """Into how many tasks to divide each row of vectors, so that every thread has some."""
        return max(1, min(vectors, -(-2 * self.threads // max(rows, 1))))

    def extent(self, maps: FeatureMaps) -> int:
        """Floats from the start of a map to its last pixel."""
        return (maps.height - 1) * self.memory.pitch(maps) + maps.width

    def map_fields(self, name: str, source: FeatureMaps, out: FeatureMaps, extent: int | None = None) -> Fields:
        """The fields of a step from maps to maps of their size; raises if it would leave its memory.

        Args:
            name: the tensor that the step computes, for errors.
            source: the maps that it reads.
            out: the maps that it writes.
            extent: floats that it reads of each map, if it reads beyond the last pixel.
        """
        in_, to = self.memory.offsets(source), self.memory.offsets(out)
        expect_inside(name, in_, self.extent(source) if extent is None else extent, self.floats)
        expect_inside(name, to, self.extent(out), self.floats)
        sizes = {"height": source.height, "width": source.width}
        pitches = {"pitch": self.memory.pitch(source), "out_pitch": self.memory.pitch(out)}
        return {"in_": in_, "out": to, **sizes, **pitches}

    def vector_extent(self, maps: FeatureMaps, lanes: int | None = None) -> int:
        """Floats from the start of a map to the end of the last vector of its last row."""
        lanes = self.lanes if lanes is None else lanes
        return (maps.height - 1) * self.memory.pitch(maps) + -(-maps.width // lanes) * lanes


@dataclass(eq=False)
class LoweredStep(ABC):
    """One step, before the memory is laid out. Subclasses are registered by their kind."""

    kind: ClassVar[str]
    """The name of its kernel in ``source/kernel_table.h``."""
    layout: ClassVar[Layout]
    """The fields of the kernel's struct, in order; a pointer to an array is a ``c_void_p``."""
    struct: ClassVar[type[ctypes.Structure]]
    """The struct with these fields."""

    name: str
    """The tensor that it computes."""
    out: FeatureMaps | None
    """Where its result is; None if that is an output of the caller."""
    work: int = field(default=0, kw_only=True)
    """Multiply-adds."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "kind" in cls.__dict__:
            cls.struct = type(cls.__name__, (ctypes.Structure,), {"_fields_": list(cls.layout)})
            KINDS[cls.kind] = cls

    @abstractmethod
    def reads(self) -> list[FeatureMaps]:
        """The tensors that it reads."""

    @abstractmethod
    def fields(self, context: StepContext) -> tuple[Fields, int]:
        """The fields of the struct, and the number of tasks; raises if it would leave its memory."""

    @property
    def words(self) -> int:
        """An upper bound on the 32-bit words of its weights and offsets."""
        return 0

    def ways(self) -> list[str]:
        """The ways that may be the fastest, the most likely first; empty if there is only one."""
        return []

    def strips(self, division: WorkDivision) -> list[int]:
        """The numbers of strips that are worth measuring, the usual one first."""
        return [1]

    def rows_read(self) -> tuple[int, int] | None:
        """The height and the stride of its output, if it can read maps that are cut into bands of rows.

        Row y of the output may read rows stride · y - 1 to stride · y + 1 of its inputs. None if it reads whole maps.
        """
        return None

    @property
    def writes_bands(self) -> bool:
        """Whether it can write maps that are cut into bands of rows."""
        return False

    def chosen(self, choice: StepChoice) -> LoweredStep:
        """The step that computes the same in a chosen way, for steps with a kernel for each way."""
        return self

    def pack(self, context: StepContext) -> tuple[ctypes.Structure, int, list[np.ndarray]]:
        """The struct, the number of tasks, and the arrays that the struct points to."""
        values, tasks = self.fields(context)
        expect_int32(self.name, tasks)
        struct, arrays = self.struct(), list[np.ndarray]()
        _fill(struct, values, arrays, self.name)
        return struct, tasks, arrays


def _fill(struct: ctypes.Structure, values: Fields, arrays: list[np.ndarray], name: str) -> None:
    """Set all fields of a struct; what it points to is added to ``arrays``."""
    kinds: dict[str, Any] = dict(struct._fields_)  # type: ignore[arg-type]
    assert values.keys() == kinds.keys(), f"{name}: {sorted(values.keys() ^ kinds.keys())}"
    for key, value in values.items():
        if isinstance(value, dict):
            _fill(getattr(struct, key), value, arrays, name)
            continue
        if isinstance(value, np.ndarray):
            kept = _as_read(value, name)
            arrays.append(kept)
            value = kept.ctypes.data
        elif kinds[key] is c_int32:
            expect_int32(name, int(value))
            value = int(value)
        setattr(struct, key, value)


def _as_read(values: np.ndarray, name: str) -> np.ndarray:
    """An array as the kernels read it: float32 or int32, unless it consists of bytes or 64-bit masks."""
    if values.dtype in (np.int8, np.uint64):
        kept = np.ascontiguousarray(values)
    elif values.dtype.kind == "f":
        kept = np.ascontiguousarray(values, np.float32)
    else:
        kept = as_int32(values, name)
    return kept if kept.size else np.zeros(1, kept.dtype)


def pointers(*names: str) -> Layout:
    """Fields that point to arrays."""
    return tuple((name, c_void_p) for name in names)


def integers(*names: str) -> Layout:
    """Fields of 32-bit integers."""
    return tuple((name, c_int32) for name in names)


def long_integers(*names: str) -> Layout:
    """Fields of 64-bit integers."""
    return tuple((name, c_int64) for name in names)


def ways_by_density(density: float) -> list[str]:
    """The ways that may be the fastest for a share of weights that are edges, the most likely first."""
    ways = ["sparse", "dense"] if density < EVEN else ["dense", "sparse"]
    return ways if RARE < density < COMMON else ways[:1]
