"""An execution plan: the steps of a segment, its memory, and how the compiled kernels are called."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Iterable, Sequence
from ctypes import addressof, c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from wirings.compaction.operation import IndexRange
from wirings.compaction.program import Program
from wirings.engine.build import kernel_kinds
from wirings.engine.kernel_step import KernelArguments, KernelStep
from wirings.engine.lowering import Lowering
from wirings.engine.memory_needs import expect_available, not_enough
from wirings.engine.operations import lower
from wirings.engine.pack_steps import PackedStep
from wirings.engine.quantization import Quantization
from wirings.engine.step import KernelSizes, LoweredStep, StepChoice, WorkDivision
from wirings.engine.thread_pool import ThreadPool, reset_in_children, shared_pool
from wirings.errors import WiringError
from wirings.utils.memory import available_memory, installed_memory

MAX_FLOATS = 2**31 - 2**16
"""The most floats of maps, and words of the weights of one step, that the kernels can address."""


class KernelMemory:
    """Aligned memory that the kernels allocate, initially zero."""

    def __init__(self, library: ctypes.CDLL, floats: int) -> None:
        self.library = library
        self.pointer = library.wirings_memory(max(floats, 1))
        if not self.pointer:
            raise MemoryError(f"not enough memory for {4 * floats:,} bytes of maps")
        self.address = ctypes.cast(self.pointer, c_void_p).value
        self.values = np.ctypeslib.as_array(self.pointer, (max(floats, 1),))

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            self.library.wirings_free(self.pointer)


class ExecutionPlan:
    """Steps that are ready to run. Concurrent calls are serialized.

    Args:
        library: the compiled kernels.
        program: a program whose operations the kernels support.
        shapes: the shapes of all of its tensors, without the batch dimension.
        threads: the number of threads.
        together: whether all threads work on one image, with its maps cut into bands; otherwise, each thread has images
            of its own.
        like: a plan of the same program, whose packed weights are reused where possible.
        quantization: which layers are computed in int8.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        program: Program,
        shapes: dict[str, tuple[int, ...]],
        threads: int,
        together: bool = True,
        like: ExecutionPlan | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        self.library, self.program, self.threads, self.together = library, program, threads, together
        self.machine, self.kinds = KernelSizes.of(library), kernel_kinds(library)
        whole = like is not None and like.lowering.bands == 1  # then the memory has the same layout
        self.lowering: Lowering = (
            like.lowering
            if like and whole
            else Lowering(program, shapes, threads if together else 1, lower, quantization)
        )
        self.steps = self.lowering.steps
        self.output_shapes = [shapes[name] for name in program.outputs]
        self._kept: dict[tuple[int, StepChoice], PackedStep] = dict(like._kept) if like and whole else {}
        self._arenas: list[KernelMemory] = []
        self._scratch: list[KernelMemory] = []
        self._lock = threading.Lock()
        self._pool: ThreadPool | None = None
        reset_in_children(self)
        # Arguments of a call, allocated once.
        self._inputs, self._outputs = (c_void_p * len(program.inputs))(), (c_void_p * len(program.outputs))()
        integers = program.notes.get("types", {})  # twice as large as floats
        self._input_sizes = _sizes(
            ((2, *shape) if name in integers else shape) for name, shape in program.inputs.items()
        )
        numbers = {name: number for number, name in enumerate(program.inputs)}
        self._indices = [(numbers[own.name], own) for own in program.index_ranges()]
        self._output_sizes = _sizes(self.output_shapes)
        self._arguments = KernelArguments(
            inputs=addressof(self._inputs),
            input_sizes=addressof(self._input_sizes),
            outputs=addressof(self._outputs),
            output_sizes=addressof(self._output_sizes),
            input_count=len(self._inputs),
            output_count=len(self._outputs),
            apart=not together,
        )
        images = 1 if together else threads
        self._besides = (like.missing if like else 0) + 4 * images * (sum(self._input_sizes) + sum(self._output_sizes))
        """Bytes for another plan, and for the images that it is measured with."""
        self.choices: list[StepChoice] = []

    @property
    def too_large(self) -> bool:
        """Whether it exceeds the 32-bit offsets of the kernels, or the memory of this machine."""
        counted = self.lowering.floats > MAX_FLOATS or any(step.words > MAX_FLOATS for step in self.steps)
        return counted or self.bytes > installed_memory() or self._besides + self.bytes > available_memory()

    # ---- how steps are computed --------------------------------------------------------------------------------------

    def usual(self, step: LoweredStep, way: str | None = None) -> StepChoice:
        """The choice without measuring; if ``way`` is given, with the storage of weights that is likely the fastest."""
        ways = step.ways()
        chosen = next((own for own in ways if way is None or own.split()[0] == way), way) if ways else "sparse"
        return StepChoice(chosen or "sparse", step.strips(self._division(step))[0])

    def choices_of(self, step: LoweredStep) -> list[StepChoice]:
        """The choices that are worth measuring, the default first."""
        counts = step.strips(self._division(step))
        found = [StepChoice(way, count) for way in step.ways() for count in counts]
        return list(dict.fromkeys([self.usual(step), *found]))

    def _division(self, step: LoweredStep) -> WorkDivision:
        used = (*step.reads(), *([step.out] if step.out is not None else []))
        banded = any(buffer.kept is not None for maps in used for buffer in self.lowering.memory.of(maps))
        bands = self.lowering.bands if banded else 1
        return WorkDivision(bands, self.threads, self.machine.lanes, self.together)

    def choose(self, choices: Sequence[StepChoice]) -> None:
        """Compute each step as chosen."""
        self.choices = list(choices)
        packed = []
        for i, choice in enumerate(self.choices):
            if (i, choice) not in self._kept:
                self._kept[i, choice] = self.packed(self.steps[i], choice)
            packed.append(self._kept[i, choice])
        self._steps = (KernelStep * len(packed))(*(p.step for p in packed))
        need = max((self.library.wirings_scratch(ctypes.byref(p.step)) for p in packed), default=0)
        wanted = self.bytes + 4 * need * self.threads
        if wanted > installed_memory():
            raise not_enough(wanted, self.threads, installed_memory(), "this machine has")
        if not self._scratch or len(self._scratch[0].values) < need:
            self._scratch = []  # freed before more is allocated
            expect_available(4 * need * self.threads + self.missing, self.threads)
            self._scratch = [KernelMemory(self.library, need) for _ in range(self.threads)]
        self._scratches = _pointers(self._scratch)
        self._arguments.steps, self._arguments.count = addressof(self._steps), len(packed)
        self._arguments.scratches = addressof(self._scratches)

    def packed(self, step: LoweredStep, choice: StepChoice, machine: KernelSizes | None = None) -> PackedStep:
        """One of its steps, packed for this machine or for another one."""
        return PackedStep(step, self.lowering, machine or self.machine, self.kinds, self.threads, choice)

    def settle(self) -> None:
        """Free the weights that were packed for other choices."""
        self._kept = {key: packed for key, packed in self._kept.items() if key[1] == self.choices[key[0]]}

    # ---- running ----------------------------------------------------------------------------------------------------

    def reset_after_fork(self) -> None:
        """In a forked process, forget what other threads were doing: they may have held the lock or written maps."""
        self._lock, self._pool, self._arenas = threading.Lock(), None, []

    def _allocate(self) -> None:
        """Allocate the memory for maps, on the first call."""
        arenas = []
        for _ in range(1 if self.together else self.threads):
            arena = KernelMemory(self.library, self.lowering.floats * self.lowering.bands)
            for buffer in self.lowering.memory.buffers:
                for place, row in buffer.constants(self.lowering.floats):
                    arena.values[place : place + len(row)] = row
            arenas.append(arena)
        self._memories, self._arenas = _pointers(arenas), arenas
        self._arguments.memories = addressof(self._memories)

    @property
    def bytes(self) -> int:
        """Bytes of memory for maps."""
        return 4 * self.lowering.floats * (self.lowering.bands if self.together else self.threads)

    @property
    def missing(self) -> int:
        """Bytes for maps that are allocated with the first call."""
        return 0 if self._arenas else self.bytes

    def run(self, inputs: Sequence[Tensor], times: np.ndarray | None = None) -> list[Tensor]:
        """The outputs for inputs, which are contiguous float32 tensors on the CPU.

        Args:
            inputs: one tensor for each input of the program.
            times: the seconds of each step are added to it.
        """
        batch = inputs[0].shape[0]
        outputs = [torch.empty(batch, *shape) for shape in self.output_shapes]
        if batch == 0:
            return outputs
        for number, own in self._indices:
            check_indices(own, inputs[number])
        try:
            addresses = [x.data_ptr() for x in inputs]
        except RuntimeError:  # as within torch.vmap
            addresses = [0]
        if not all(addresses):  # the kernels would crash
            kinds = ", ".join(f"{type(x).__name__} {tuple(x.shape)}" for x in inputs)
            raise WiringError(
                f"a compiled network expects tensors that hold their numbers, got {kinds} without any, as within "
                "torch.vmap or FakeTensorMode. Pass plain tensors."
            )
        with self._lock:
            if not self._arenas:
                self._allocate()
            if self._pool is None:
                self._pool = shared_pool(self.library, self.threads)
            for i, address in enumerate(addresses):
                self._inputs[i] = address
            for i, x in enumerate(outputs):
                self._outputs[i] = x.data_ptr()
            where = 0 if times is None else times.ctypes.data
            full = self.library.wirings_run(self._pool.pointer, addressof(self._arguments), batch, where)
        if full:
            raise MemoryError(f"not enough memory to run {batch:,} images")
        return outputs


def check_indices(own: IndexRange, integers: Tensor) -> None:
    """Raise unless indices are in their range."""
    taken = own.part(integers)
    if not taken.numel():
        return
    low, high = (int(x) for x in taken.aminmax())
    if low < 0 or high >= own.limit:
        kind = "tokens" if own.length is None else f"indices in {own.name}"
        raise WiringError(f"this network expects {kind} from 0 to {own.limit - 1:,}, got {low:,} to {high:,}.")


def _pointers(arenas: Sequence[KernelMemory]) -> ctypes.Array[c_void_p]:
    return (c_void_p * len(arenas))(*(arena.address for arena in arenas))


def _sizes(shapes: Iterable[tuple[int, ...]]) -> ctypes.Array[c_int64]:
    sizes = [math.prod(shape) for shape in shapes]
    return (c_int64 * len(sizes))(*sizes)
