"""Pack steps, with all their arrays, for the compiled kernels."""

from __future__ import annotations

import ctypes
import math

from wirings.engine.kernel_step import KernelStep
from wirings.engine.lowering import Lowering
from wirings.engine.step import KernelSizes, LoweredStep, StepChoice, StepContext


class PackedStep:
    """A step for the kernels: the struct of its kind, the arrays that this points to, and a `KernelStep`.

    Args:
        lowered: the step.
        lowering: the lowering that it belongs to.
        machine: the sizes that its kernel was, or will be, compiled with.
        kinds: the numbers of the kernels by name (`wirings.engine.build.kernel_kinds`).
        threads: the number of threads.
        choice: how it is computed.
    """

    def __init__(
        self,
        lowered: LoweredStep,
        lowering: Lowering,
        machine: KernelSizes,
        kinds: dict[str, int],
        threads: int,
        choice: StepChoice,
    ) -> None:
        program = lowering.program
        inputs = tuple(math.prod(shape) for shape in program.inputs.values())
        outputs = tuple(math.prod(lowering.shapes[name]) for name in program.outputs)
        chosen = lowered.chosen(choice)
        self.own, tasks, self.arrays = chosen.pack(
            StepContext(lowering.memory, lowering.floats, lowering.bands, machine, threads, choice, inputs, outputs)
        )
        self.step = KernelStep(ctypes.addressof(self.own), kinds[chosen.kind], tasks)
