"""A run of operations that the compiled kernels do: its steps, its memory, and how it is called."""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Iterable, Sequence
from ctypes import POINTER, c_double, c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from wirings.compaction.program import Program
from wirings.engine.lower import Lowering
from wirings.engine.pack import Choice, Machine, Packed
from wirings.engine.parts import Dense, Lowered, Nodes, Sum
from wirings.engine.steps import MAPS, Kind, Step
from wirings.errors import WiringError

NEAR = 24 * 1024
"""Bytes of maps between sums and convolution that stay in the nearest cache."""
RARE, EVEN, COMMON = 0.1, 0.35, 0.7
"""Densities: below the first dense is never faster, from the last on sparse never is, at the second both are alike."""
FLOATS = 2**31 - 2**16
"""Floats of maps, and words of one step's weights, that the kernels can count."""
_pools: dict[int, int] = {}
_pools_lock = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)  # threads do not come along


def pool(library: ctypes.CDLL, threads: int) -> int:
    """The threads that all networks share which run on so many."""
    found = _pools.get(threads)
    if found is None:
        with _pools_lock:
            found = _pools.get(threads) or library.wirings_pool(threads)
            if not found:
                raise MemoryError(f"no memory for {threads:,} threads")
            _pools[threads] = found
    return found


def installed() -> int:
    """Bytes of this machine's memory. The system ends a process that uses more, rather than refuse to give it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not every system tells
        return 2**63


class Arena:
    """Memory of the kernels' own, all zero at first."""

    def __init__(self, library: ctypes.CDLL, floats: int) -> None:
        self.library = library
        self.pointer = library.wirings_memory(max(floats, 1))
        if not self.pointer:
            raise MemoryError(f"no memory for {4 * floats:,} bytes of maps")
        self.address = ctypes.cast(self.pointer, c_void_p).value
        self.values = np.ctypeslib.as_array(self.pointer, (max(floats, 1),))

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            self.library.wirings_free(self.pointer)


class Plan:
    """Steps, ready to run. Calls from several threads take turns.

    Args:
        threads: how many.
        together: each image is shared out among the threads, and its maps are cut into bands; or else each thread has
            images of its own.
        like: a plan of the same program, whose prepared weights are taken where they fit.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        program: Program,
        shapes: dict[str, tuple[int, ...]],
        threads: int,
        together: bool = True,
        like: Plan | None = None,
    ) -> None:
        self.library, self.program, self.threads, self.together = library, program, threads, together
        self.machine = Machine.of(library)
        whole = like is not None and like.lowering.bands == 1  # then it lies in memory alike
        self.lowering: Lowering = (
            like.lowering if like and whole else Lowering(program, shapes, threads if together else 1)
        )
        self.steps = self.lowering.steps
        self.output_shapes = [shapes[name] for name in program.outputs]
        self._kept: dict[tuple[int, Choice], Packed] = dict(like._kept) if like and whole else {}
        self._arenas: list[Arena] = []
        self._scratch: list[Arena] = []
        self._lock = threading.Lock()
        # What a call hands over, made once.
        self._inputs, self._outputs = (c_void_p * len(program.inputs))(), (c_void_p * len(program.outputs))()
        self._input_sizes = _sizes(program.inputs.values())
        self._output_sizes = _sizes(self.output_shapes)
        self.choices: list[Choice] = []

    @property
    def too_large(self) -> bool:
        """Whether the kernels, which count in 32 bits, cannot run it, or this machine's memory is too small."""
        counted = self.lowering.floats > FLOATS or any(step.words > FLOATS for step in self.steps)
        return counted or self.bytes > installed()

    # ---- how steps are done -----------------------------------------------------------------------------------------

    def usual(self, step: Lowered, way: str | None = None) -> Choice:
        """What is chosen without measuring."""
        way = way or self._ways(step)[0]
        if isinstance(step.pending, Dense):
            return Choice(way)
        if isinstance(step.pending, Sum):
            return Choice(way)
        if isinstance(step.pending, Nodes):
            rows, width = step.pending.height, step.pending.sums.width * step.pending.stride
            shared = self._split(step)
            strips = max(shared, -(-rows * width * 4 * 2 // NEAR))
            return Choice(way, min(-(-strips // shared) * shared, max(rows // 4, 1)))
        if step.kind == Kind.COPY:
            return Choice("sparse", self.threads if self.together else 1)
        return Choice()

    def _ways(self, step: Lowered) -> list[str]:
        """The ways that may be the fastest, the likelier one first."""
        pending = step.pending
        if isinstance(pending, Dense):
            density = float(np.count_nonzero(pending.weight) / max(pending.weight.size, 1))
        elif pending is not None:
            density = (pending.sums if isinstance(pending, Nodes) else pending).density
        else:
            return ["sparse"]
        ways = ["sparse", "dense"] if density < EVEN else ["dense", "sparse"]
        return ways if RARE < density < COMMON or isinstance(pending, Dense) else ways[:1]

    def _split(self, step: Lowered) -> int:
        """Into how many strips a step is cut at the least, so that every thread has one."""
        cut = [
            b.kept for maps in (*step.reads(), *([step.out] if step.out else [])) for b in self.lowering.memory.of(maps)
        ]
        return self.lowering.bands if any(kept is not None for kept in cut) else 1

    def choices_of(self, step: Lowered) -> list[Choice]:
        """The ways that are worth being measured, the usual one first."""
        usual = self.usual(step)
        found = [usual]
        pending = step.pending
        ways = self._ways(step)
        if isinstance(pending, Dense):
            found += [Choice(way) for way in ways]
        elif isinstance(pending, (Sum, Nodes)):
            counts = [usual.strips]
            if isinstance(pending, Nodes):
                least = self._split(step)
                counts += [least * n for n in (1, 2, 4, 8, 16) if least * n <= max(pending.height // 3, least)]
            elif step.numbers["flag"] == MAPS:
                vectors = pending.height * pending.width // self.machine.lanes
                counts += [self.threads * n for n in (1, 2, 4) if self.threads * n <= vectors // 4]
            found += [Choice(way, count) for way in ways for count in counts]
        return list(dict.fromkeys(found))

    def choose(self, choices: Sequence[Choice]) -> None:
        """Do each step as it says there."""
        self.choices = list(choices)
        packed = []
        for i, choice in enumerate(self.choices):
            if (i, choice) not in self._kept:
                self._kept[i, choice] = Packed(self.steps[i], self.lowering, self.machine, self.threads, choice)
            packed.append(self._kept[i, choice])
        self._steps = (Step * len(packed))(*(p.step for p in packed))
        need = max((self.library.wirings_scratch(ctypes.byref(p.step)) for p in packed), default=0)
        wanted = self.bytes + 4 * need * self.threads
        if wanted > installed():
            raise WiringError(
                f"these images need {wanted:,} bytes of memory on {self.threads} threads, "
                f'but this machine has {installed():,}. Use fewer threads, smaller images, or engine="torch".'
            )
        if not self._scratch or len(self._scratch[0].values) < need:
            self._scratch = [Arena(self.library, need) for _ in range(self.threads)]
        self._scratches = _pointers(self._scratch)

    def settle(self) -> None:
        """Forget the ways that were not chosen."""
        self._kept = {key: packed for key, packed in self._kept.items() if key[1] == self.choices[key[0]]}

    # ---- running ----------------------------------------------------------------------------------------------------

    def _remember(self) -> None:
        """Make the memory for maps, when it is first needed."""
        for _ in range(1 if self.together else self.threads):
            arena = Arena(self.library, self.lowering.floats * self.lowering.bands)
            for buffer in self.lowering.memory.buffers:
                for place, row in buffer.constants(self.lowering.floats):
                    arena.values[place : place + len(row)] = row
            self._arenas.append(arena)
        self._memories = _pointers(self._arenas)

    @property
    def bytes(self) -> int:
        """Of memory for maps."""
        return 4 * self.lowering.floats * (self.lowering.bands if self.together else self.threads)

    def run(self, inputs: Sequence[Tensor], times: np.ndarray | None = None) -> list[Tensor]:
        """The outputs for inputs, contiguous float32 tensors on the CPU; ``times`` gets each step's seconds added."""
        batch = inputs[0].shape[0]
        outputs = [torch.empty(batch, *shape) for shape in self.output_shapes]
        if batch == 0:
            return outputs
        with self._lock:
            if not self._arenas:
                self._remember()
            for i, x in enumerate(inputs):
                self._inputs[i] = x.data_ptr()
            for i, x in enumerate(outputs):
                self._outputs[i] = x.data_ptr()
            full = self.library.wirings_run(
                pool(self.library, self.threads),
                self._steps,
                len(self._steps),
                self._memories,
                self._scratches,
                self._inputs,
                self._input_sizes,
                len(inputs),
                self._outputs,
                self._output_sizes,
                len(outputs),
                batch,
                not self.together,
                None if times is None else times.ctypes.data_as(POINTER(c_double)),
            )
        if full:
            raise MemoryError(f"no memory to run {batch:,} images")
        return outputs


def _pointers(arenas: Sequence[Arena]) -> ctypes.Array[c_void_p]:
    return (c_void_p * len(arenas))(*(arena.address for arena in arenas))


def _sizes(shapes: Iterable[tuple[int, ...]]) -> ctypes.Array[c_int64]:
    sizes = [math.prod(shape) for shape in shapes]
    return (c_int64 * len(sizes))(*sizes)
