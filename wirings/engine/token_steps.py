"""Steps on tokens, each with a struct of its own; ``source/token_kernels.h`` has the same fields in the same order.

A step says which tensors it reads and where its result is, and packs its struct once the memory is laid out. It checks
that everything it will access is inside of the memory, since the kernels check nothing.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from ctypes import c_float, c_int32, c_void_p
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import numpy as np

from wirings.engine.bounds import as_int32, expect_inside, expect_int32
from wirings.engine.kernel_step import StepKind
from wirings.engine.memory_layout import LINE, FeatureMaps, MapMemory

VALUE_TILE = 4
"""Vectors of values that are read at a time, as in ``source/token_kernels.h``."""
TILE = 1024
"""Numbers that one task copies, at least."""


@dataclass(frozen=True)
class StepContext:
    """What a step needs to know when it is packed."""

    memory: MapMemory
    floats: int
    """The size of the memory."""
    lanes: int
    threads: int
    input_sizes: tuple[int, ...]
    """Numbers in each of the caller's inputs, for one example."""
    output_sizes: tuple[int, ...]


@dataclass(eq=False)
class OwnStep(ABC):
    """A step that has a struct of its own."""

    kind: ClassVar[StepKind]
    layout: ClassVar[tuple[tuple[str, Any], ...]]
    """The fields of the struct."""
    arrays: list[np.ndarray] = field(default_factory=list, init=False)

    @abstractmethod
    def reads(self) -> list[FeatureMaps]:
        """The tensors that it reads."""

    @abstractmethod
    def fields(self, context: StepContext) -> tuple[dict[str, Any], int]:
        """The fields of the struct, and the number of tasks."""

    def pack(self, name: str, context: StepContext) -> tuple[ctypes.Structure, int, list[np.ndarray]]:
        """The struct, the number of tasks, and the arrays that the struct points to."""
        values, tasks = self.fields(context)
        arrays = []
        struct = structs[self.kind]()
        for key, value in values.items():
            if isinstance(value, np.ndarray):
                floating = value.dtype.kind == "f"
                kept = np.ascontiguousarray(value, np.float32) if floating else as_int32(value, name)
                kept = kept if kept.size else np.zeros(1, kept.dtype)
                arrays.append(kept)
                value = kept.ctypes.data
            elif isinstance(value, (int, np.integer)):
                expect_int32(name, int(value))
            setattr(struct, key, value)
        expect_int32(name, tasks)
        return struct, max(tasks, 1), arrays


def floats_read(maps: FeatureMaps, memory: MapMemory, lanes: int) -> int:
    """Floats from the start of a map to the end of the last vector of its last row."""
    return (maps.height - 1) * memory.pitch(maps) + -(-maps.width // lanes) * lanes


def floats_written(maps: FeatureMaps, memory: MapMemory) -> int:
    """Floats from the start of a map to its last pixel."""
    return (maps.height - 1) * memory.pitch(maps) + maps.width


def _tiles(vectors: int, rows: int, threads: int) -> int:
    """Tasks per row, so that every thread has some."""
    return max(1, min(vectors, -(-2 * threads // max(rows, 1))))


OwnStepT = TypeVar("OwnStepT", bound=OwnStep)


@dataclass(eq=False)
class NormStep(OwnStep):
    """A norm over the channels of each pixel."""

    kind = StepKind.NORM
    layout = (
        *((name, c_void_p) for name in ("in_", "out", "scale", "shift")),
        *((name, c_int32) for name in (
            "channels", "height", "width", "pitch", "out_pitch", "features", "centered", "tiles",
        )),
        ("epsilon", c_float),
    )  # fmt: skip
    source: FeatureMaps
    out: FeatureMaps
    scale: np.ndarray
    shift: np.ndarray
    features: int
    centered: bool
    epsilon: float

    def reads(self) -> list[FeatureMaps]:
        return [self.source]

    def fields(self, context: StepContext) -> tuple[dict[str, Any], int]:
        memory, lanes = context.memory, context.lanes
        in_, out = memory.offsets(self.source), memory.offsets(self.out)
        single = self.source.height == self.source.width == 1
        expect_inside("a norm", in_, 1 if single else floats_read(self.source, memory, lanes), context.floats)
        expect_inside("a norm", out, floats_written(self.out, memory), context.floats)
        tiles = _tiles(-(-self.source.width // lanes), self.source.height, context.threads)
        values = {
            "in_": in_,
            "out": out,
            "scale": self.scale,
            "shift": self.shift,
            "channels": len(in_),
            "height": self.source.height,
            "width": self.source.width,
            "pitch": memory.pitch(self.source),
            "out_pitch": memory.pitch(self.out),
            "features": self.features,
            "centered": int(self.centered),
            "tiles": tiles,
            "epsilon": self.epsilon,
        }
        return values, tiles * self.source.height


@dataclass(eq=False)
class AttentionStep(OwnStep):
    """Attention of tokens to others."""

    kind = StepKind.ATTENTION
    layout = (
        *((name, c_void_p) for name in ("queries", "keys", "values", "out", "heads", "mask", "window_mask")),
        *((name, c_int32) for name in (
            "head_count", "mask_heads", "rows", "tokens", "others", "pitch", "other_pitch", "out_pitch", "tiles",
            "causal", "bias", "bias_heads", "bias_tokens",
        )),
        ("scale", c_float),
    )  # fmt: skip
    queries: FeatureMaps
    keys: FeatureMaps
    values: FeatureMaps
    out: FeatureMaps
    heads: np.ndarray
    """(heads, 6): the first channel of the queries, keys, values and results, and the sizes of keys and values."""
    scale: float
    causal: bool
    mask: np.ndarray | None = None
    window_mask: np.ndarray | None = None
    bias: int = -1
    bias_shape: tuple[int, ...] = (1, 1)

    def reads(self) -> list[FeatureMaps]:
        return [self.queries, self.keys, self.values]

    def fields(self, context: StepContext) -> tuple[dict[str, Any], int]:
        memory, lanes = context.memory, context.lanes
        row = floats_read(self.queries, memory, lanes)
        expect_inside("attention", memory.offsets(self.queries), row, context.floats)
        expect_inside("attention", memory.offsets(self.keys), floats_read(self.keys, memory, LINE), context.floats)
        expect_inside("attention", memory.offsets(self.values), floats_written(self.values, memory), context.floats)
        expect_inside("attention", memory.offsets(self.out), floats_written(self.out, memory), context.floats)
        first, last = self.heads[:, [0, 1, 2, 3]], self.heads[:, [4, 4, 5, 5]]
        limits = np.array([len(x) for x in (self.queries, self.keys, self.values, self.out)])
        expect_inside("attention", np.where((first >= 0) & (first + last <= limits), 0, -1), 1, 1)
        tokens, others, rows = self.queries.width, self.keys.width, self.queries.height
        if self.mask is not None:
            expect_inside("attention", np.array([0]), len(self.mask) * tokens * others, self.mask.size)
            expect_inside("attention", np.array([len(self.mask) - 1]), 1, len(self.heads))
        if self.window_mask is not None:
            expect_inside("attention", np.array([0]), rows * tokens * others, self.window_mask.size)
        if self.bias >= 0:
            size = self.bias_shape[0] * self.bias_shape[1] * others
            expect_inside("attention", np.array([0]), size, context.input_sizes[self.bias])
        tiles = _tiles(-(-tokens // lanes), rows * len(self.heads), context.threads)
        values = {
            "queries": memory.offsets(self.queries),
            "keys": memory.offsets(self.keys),
            "values": memory.offsets(self.values),
            "out": memory.offsets(self.out),
            "heads": self.heads,
            "mask": 0 if self.mask is None else self.mask,
            "head_count": len(self.heads),
            "window_mask": 0 if self.window_mask is None else self.window_mask,
            "mask_heads": 1 if self.mask is None else len(self.mask),
            "rows": rows,
            "tokens": tokens,
            "others": others,
            "pitch": memory.pitch(self.queries),
            "other_pitch": memory.pitch(self.keys),
            "out_pitch": memory.pitch(self.out),
            "tiles": tiles,
            "causal": int(self.causal),
            "bias": self.bias,
            "bias_heads": self.bias_shape[0],
            "bias_tokens": self.bias_shape[1],
            "scale": self.scale,
        }
        return values, tiles * rows * len(self.heads)


@dataclass(eq=False)
class EmbeddingStep(OwnStep):
    """The rows of a table for the caller's tokens."""

    kind = StepKind.EMBEDDING
    layout = (
        ("table", c_void_p),
        ("out", c_void_p),
        *((name, c_int32) for name in ("channels", "tokens", "source", "tiles")),
    )
    out: FeatureMaps
    table: np.ndarray
    source: int
    tokens: int

    def reads(self) -> list[FeatureMaps]:
        return []

    def fields(self, context: StepContext) -> tuple[dict[str, Any], int]:
        out = context.memory.offsets(self.out)
        expect_inside("an embedding", out, floats_written(self.out, context.memory), context.floats)
        expect_inside("an embedding", np.array([0]), self.tokens, context.input_sizes[self.source])
        tiles = max(1, min(self.tokens, 2 * context.threads))
        values = {"table": self.table, "out": out, "channels": len(out), "tokens": self.tokens}
        return {**values, "source": self.source, "tiles": tiles}, tiles


@dataclass(eq=False)
class GatherStep(OwnStep):
    """Copies of single numbers, in another order: between maps, from a caller's input, or to a caller's output."""

    kind = StepKind.GATHER
    layout = (
        ("places", c_void_p),
        ("out", c_void_p),
        *((name, c_int32) for name in ("rows", "length", "source", "give", "tiles")),
    )
    index: np.ndarray
    """(rows, length): for each number of the result, that of its source, counted channel by channel."""
    source: FeatureMaps | int
    """Maps, or the number of a caller's input."""
    out: FeatureMaps | int
    """Maps, or the number of a caller's output."""

    def reads(self) -> list[FeatureMaps]:
        return [self.source] if isinstance(self.source, FeatureMaps) else []

    def fields(self, context: StepContext) -> tuple[dict[str, Any], int]:
        memory = context.memory
        if isinstance(self.source, FeatureMaps):
            source, pitch = self.source, memory.pitch(self.source)
            pixels = source.height * source.width
            y, x = np.divmod(np.arange(pixels), max(source.width, 1))
            flat = (memory.offsets(source)[:, None] + (y * pitch + x)).reshape(-1)
            places = flat[self.index]
            expect_inside("a copy", places, 1, context.floats)
            number = -1
        else:
            number, places = self.source, self.index
            expect_inside("a copy", places, 1, context.input_sizes[number])
        rows, length = self.index.shape
        if isinstance(self.out, FeatureMaps):
            pitch = memory.pitch(self.out)
            out = (memory.offsets(self.out)[:, None] + np.arange(self.out.height) * pitch).reshape(-1)
            expect_inside("a copy", out, length, context.floats)
            give = -1
        else:
            give, out = self.out, np.arange(rows) * length
            expect_inside("a copy", out, length, context.output_sizes[give])
        expect_inside("a copy", np.array([0]), rows, len(out))
        tiles = int(np.clip(rows * length // TILE, 1, min(rows, 4 * context.threads)))
        values = {"places": places, "out": out, "rows": rows, "length": length}
        return {**values, "source": number, "give": give, "tiles": tiles}, tiles


@dataclass(eq=False)
class CachedAttentionStep(OwnStep):
    """Attention of one token to those before it, whose keys and values are in one of the caller's inputs."""

    kind = StepKind.CACHED_ATTENTION
    layout = (
        *((name, c_void_p) for name in ("queries", "keys", "values", "out", "heads")),
        *((name, c_int32) for name in (
            "groups", "sharing", "key_channels", "capacity", "cache", "position",
        )),
        ("scale", c_float),
    )  # fmt: skip
    queries: FeatureMaps
    keys: FeatureMaps
    values: FeatureMaps
    out: FeatureMaps
    heads: np.ndarray
    sharing: int
    capacity: int
    cache: int
    position: int
    scale: float

    def reads(self) -> list[FeatureMaps]:
        return [self.queries, self.keys, self.values]

    def fields(self, context: StepContext) -> tuple[dict[str, Any], int]:
        memory = context.memory
        offsets = {name: memory.offsets(getattr(self, name)) for name in ("queries", "keys", "values", "out")}
        for places in offsets.values():
            expect_inside("attention", places, 1, context.floats)
        needed = (len(self.keys) + len(self.values)) * self.capacity + VALUE_TILE * context.lanes
        expect_inside("attention", np.array([0]), needed, context.input_sizes[self.cache])
        expect_inside("attention", np.array([self.capacity % context.lanes]), 1, 1)
        groups = len(self.heads) // self.sharing
        values = {
            **offsets,
            "heads": self.heads,
            "groups": groups,
            "sharing": self.sharing,
            "key_channels": len(self.keys),
            "capacity": self.capacity,
            "cache": self.cache,
            "position": self.position,
            "scale": self.scale,
        }
        return values, groups


structs: dict[StepKind, type[ctypes.Structure]] = {}
"""The structs by kind of step."""


def register_struct(step: type[OwnStepT]) -> type[OwnStepT]:
    """Make the struct of a kind of step from its ``layout``."""
    structs[step.kind] = type(step.__name__, (ctypes.Structure,), {"_fields_": list(step.layout)})
    return step


for _step in (NormStep, AttentionStep, EmbeddingStep, GatherStep, CachedAttentionStep):
    register_struct(_step)
