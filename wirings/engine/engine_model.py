"""A module that runs a network with the compiled kernels."""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from wirings.compaction import check_export_path
from wirings.compaction.operations import Operation
from wirings.compaction.program import Program, bind_inputs, check_batch
from wirings.compaction.report import operation_counts
from wirings.engine.build import kernels
from wirings.engine.choices import check_settings, is_valid_choice
from wirings.engine.execution_plan import ExecutionPlan, check_indices
from wirings.engine.export import export_network
from wirings.engine.int8_speed import slower_layers
from wirings.engine.memory_needs import NotEnoughMemoryError, images_that_fit, says_not_enough
from wirings.engine.quantization import Quantization
from wirings.engine.report import EngineReport, StepReport
from wirings.engine.segments import ProgramSegment, run_segments, split_program
from wirings.engine.step import StepChoice
from wirings.engine.tune import fastest_of, step_seconds, tune
from wirings.engine.verification import missing_bytes, run_images_in_turn, verify
from wirings.errors import WiringError
from wirings.utils.compiler import processor

if TYPE_CHECKING:
    from wirings.engine.generation import TokenGenerator

SLOWER = 0.9
"""PyTorch is used if it takes less than this share of the kernels' time; anything closer may be noise."""
CLEARLY_SLOWER = 3.0
"""PyTorch is not measured any further once it takes this many times as long as the kernels."""
REPORT_RUNS = 31
"""Runs of which a report shows the median."""


class EngineModel(nn.Module):
    """A network compiled for this machine, which `wirings.engine.compile` and `wirings.engine.load` return.

    It takes and returns what the network does, in float32 on the CPU, for images of one size and any batch size.
    """

    def __init__(
        self,
        program: Program,
        engine: str = "auto",
        threads: int | None = None,
        choices: dict[str, Any] | None = None,
        quantization: Quantization | None = None,
        floats: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        check_settings(engine, threads)
        self._floats = dict(floats or {})  # of a network in bfloat16, the layers that stay in float32, and why
        self.quantization = quantization
        """The layers in int8, and those that stay in float32; None if all are in float32."""
        self.program = program.to(device="cpu", dtype=torch.float32)
        self.engine, self.threads = engine, int(threads or torch.get_num_threads())
        library = None if engine == "torch" else kernels()
        self.compiled = library is not None
        """Whether the compiled kernels are used; otherwise the network runs on PyTorch."""
        self._shapes, self._like = self.program.shapes(), self.program.zeros(0)
        numbers = {name: number for number, name in enumerate(self.program.inputs)}
        self._indices = [(numbers[own.name], own) for own in self.program.index_ranges()]
        self._segments = self._make_segments(library)
        self._report: EngineReport | None = None
        self._original: list[nn.Module] = []  # the network in PyTorch if it is used; in a list, it is no submodule
        self._program_on_torch: ProgramSegment | None = None  # the program in PyTorch if it is used
        self._seconds: tuple[float, float] | None = None
        self._compared = False  # whether it is known that the kernels are faster than PyTorch, or not
        if library is not None:
            try:
                self._prepare(choices)
            except Exception as error:
                if engine != "auto" or not says_not_enough(error):
                    raise
                self._segments, self.compiled = self._make_segments(None), False

    # ---- compiling --------------------------------------------------------------------------------------------------

    def _make_segments(self, library: ctypes.CDLL | None) -> list[ProgramSegment]:
        program = self.program
        pieces = list(split_program(program, self._shapes)) if library is not None else [(False, program.operations)]
        if not any(native for native, _ in pieces):
            pieces = [(False, program.operations)]
        segments = []
        for number, (native, operations) in enumerate(pieces):
            made = {o.output for o in operations}
            later = {name for _, rest in pieces[number + 1 :] for o in rest for name in o.inputs} | set(program.outputs)
            taken = list(dict.fromkeys(n for o in operations for n in o.inputs if n not in made))
            given = [o.output for o in operations if o.output in later]
            segment = ProgramSegment(operations, taken, given)
            if native and library is not None and given:
                integers = {o.index_range.name for o in operations if o.index_range is not None}
                integers |= set(program.notes.get("types", ())) & set(taken)  # of constants, for their batch size
                types = dict.fromkeys(integers, "torch.int64")
                own = Program({name: self._shapes[name] for name in taken}, operations, tuple(given), {"types": types})
                plan = ExecutionPlan(library, own, self._shapes, self.threads, quantization=self.quantization)
                if not plan.too_large:
                    segment.plan = plan
                    if self.threads > 1:
                        many = ExecutionPlan(library, own, self._shapes, self.threads, False, plan, self.quantization)
                        segment.batch_plan = None if many.too_large else many
            segments.append(segment)
        return segments

    def _prepare(self, choices: dict[str, Any] | None) -> None:
        try:
            self._choose(choices)
        except NotEnoughMemoryError:
            if not run_images_in_turn(self._segments):
                raise
            self._choose(choices)
        verify(self.program, self._shapes, self._segments, self.threads, self.quantization)

    def _plans(self) -> list[ExecutionPlan]:
        return [p for segment in self._segments for p in (segment.plan, segment.batch_plan) if p is not None]

    def _choose(self, saved: dict[str, Any] | None) -> None:
        """Choose how each step is computed: as saved on such a machine, as the user says, or by measuring."""
        plans = self._plans()
        if saved is not None and saved == {**saved, **self._about()} and is_valid_choice(saved["steps"], plans):
            for plan, choices in zip(plans, saved["steps"], strict=True):
                plan.choose([StepChoice(way, strips) for way, strips in choices])
                plan.settle()
            self._compared = True
            if saved.get("on_torch"):
                self._program_on_torch = self._torch_segment()
            return
        if self.engine != "auto":
            for plan in plans:
                plan.choose([plan.usual(step, self.engine) for step in plan.steps])
                plan.settle()
            return
        self._tune(plans)
        if self.quantization is not None and self._drop_slower_layers():
            self._tune(self._plans())

    def _tune(self, plans: list[ExecutionPlan]) -> None:
        for plan in plans:
            images = 1 if plan.together else self.threads
            tune(plan, plan.program.zeros(images))

    def _drop_slower_layers(self) -> bool:
        """Leave layers in float32 that int8 makes slower; returns whether there are any."""
        assert self.quantization is not None
        found: dict[str, tuple[float, float]] = {}
        for segment in self._segments:
            if segment.plan is not None:
                found |= slower_layers(segment.plan, self._shapes)
        if not found:
            return False
        micro = {name: (1e6 * own, 1e6 * other) for name, (own, other) in found.items()}
        reasons = {name: f"slower in int8: {own:.1f} µs instead of {other:.1f}" for name, (own, other) in micro.items()}
        self.quantization = self.quantization.without(reasons, self.program)
        self._segments = self._make_segments(kernels())
        return True

    def use_torch_if_faster(self, inputs: Sequence[Tensor] | None = None, model: nn.Module | None = None) -> None:
        """Use PyTorch instead if it is faster for a batch like ``inputs``, with PyTorch's own threads.

        Args:
            inputs: an example; by default, a batch of one.
            model: the network in PyTorch, which takes the program's inputs and returns its outputs in a tuple. Without
                it, and in files, the program's operators run on PyTorch.
        """
        if not self.compiled:
            return
        count = 1 if inputs is None else len(inputs[0])
        if not images_that_fit(self.program, self._shapes, [count], missing_bytes(self._segments)):
            return  # the kernels need less memory
        given = self.program.example(1) if inputs is None else inputs
        whole, native = self._torch_segment(), any(segment.plan for segment in self._segments)
        calls = [lambda: run_segments(self.program, self._segments, given, self.threads)]
        if native and not self._compared:
            calls.append(lambda: run_segments(self.program, [whole], given, self.threads))
        if model is not None:
            calls.append(torch.no_grad()(lambda: model(*given)))
        if len(calls) == 1:
            return
        own, *others = fastest_of(*calls, clear=CLEARLY_SLOWER)
        if not native:  # operators one by one take a little longer than the model that has them
            self._original = [model] if model is not None and others[0] < own else []
            return
        self._seconds = own, min(others)
        if not self._compared:
            self._program_on_torch = whole if others[0] < SLOWER * own else None
            self._compared = True
        if model is not None:
            self._original = [model] if others[-1] < SLOWER * own and others[-1] <= min(others) else []

    def _torch_segment(self) -> ProgramSegment:
        return ProgramSegment(self.program.operations, list(self.program.inputs), list(self.program.outputs))

    @property
    def uses_torch(self) -> bool:
        """Whether the network runs on PyTorch: since there are no kernels, or because PyTorch was faster."""
        without_kernels = not any(segment.plan for segment in self._segments)
        return bool(self._original) or self._program_on_torch is not None or without_kernels

    def _about(self) -> dict[str, Any]:
        return {"engine": self.engine, "threads": self.threads, "processor": processor()}

    # ---- running ----------------------------------------------------------------------------------------------------

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """The outputs for a batch. Inputs may be given by keyword, by the names in ``program.inputs``."""
        inputs = bind_inputs(list(self.program.inputs), args, kwargs)
        self._check(inputs)
        if self._original:  # PyTorch would raise an IndexError, or worse
            for number, own in self._indices:
                check_indices(own, inputs[number])
        return self.program.packed(self._run(inputs))

    def _run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs in the program's order."""
        if self._original:
            with torch.no_grad():
                return list(self._original[0](*inputs))
        segments = [self._program_on_torch] if self._program_on_torch else self._segments
        return run_segments(self.program, segments, inputs, self.threads)

    def _check(self, inputs: Sequence[Tensor]) -> None:
        shapes = self.program.inputs
        for (name, shape), like, x in zip(shapes.items(), self._like, inputs, strict=True):
            if x.is_nested:
                raise WiringError(f"{name}: a compiled network expects a dense tensor, got a nested one. Pad it.")
            if x.shape[1:] != shape or x.dim() != len(shape) + 1:
                expected = ", ".join(map(str, ("batch", *shape)))
                raise WiringError(
                    f"{name}: this compiled network expects shape ({expected}), got {tuple(x.shape)}. Compile it with "
                    "an example of this size."
                )
            if x.dtype != like.dtype or not x.is_cpu or x.layout != torch.strided:
                kind, sparse = str(like.dtype).removeprefix("torch."), "" if x.layout == torch.strided else "sparse "
                raise WiringError(
                    f"{name}: a compiled network expects {kind} on the CPU, got {sparse}{x.dtype} on {x.device}. "
                    "Convert it."
                )
            check_batch(self.program.notes, x.shape[0])
        if len(inputs) > 1 and len({len(x) for x in inputs}) > 1:  # the kernels rely on it
            counts = ", ".join(f"{len(x)} for {name}" for name, x in zip(shapes, inputs, strict=True))
            raise WiringError(f"a compiled network expects the same batch size for all inputs, got {counts}.")

    def generator(self) -> TokenGenerator:
        """What generates tokens one at a time, with the keys and values of earlier ones kept.

        Raises:
            WiringError: if the network is no causal language model.
        """
        from wirings.engine.generation import TokenGenerator

        return TokenGenerator(self)

    # ---- reports and files ------------------------------------------------------------------------------------------

    @property
    def report(self) -> EngineReport:
        """How each step is computed and how long it takes for one image; measured on first access."""
        if self._report is None:
            steps: list[StepReport] = []
            values = dict(zip(self.program.inputs, self.program.example(1), strict=True))
            for segment in self._segments:
                steps += self._time_segment(segment, values)
                segment.run(values, self.threads)
            faster = self.compiled and self.uses_torch
            floats = self._floats if self.quantization is None else dict(self.quantization.floats)
            engine = self.engine if self.compiled else "torch"
            self._report = EngineReport(engine, self.threads, steps, self._seconds, faster, floats)
        return self._report

    def _time_segment(self, segment: ProgramSegment, values: dict[str, Tensor]) -> list[StepReport]:
        if segment.plan is None:
            return [self._time_operation(o, values) for o in segment.operations]
        inputs = [values[name].contiguous() for name in segment.inputs]
        taken = np.array([step_seconds(segment.plan, inputs) for _ in range(REPORT_RUNS)])
        rows = []
        for step, choice, seconds in zip(segment.plan.steps, segment.plan.choices, np.median(taken, 0), strict=True):
            way = choice.way if step.ways() else ""
            kind = step.kind.replace("_", " ")
            rows.append(StepReport(step.name, kind, way, choice.strips, step.work, float(seconds)))
        return rows

    @torch.no_grad()
    def _time_operation(self, operation: Operation, values: dict[str, Tensor]) -> StepReport:
        taken = []
        for _ in range(REPORT_RUNS):
            start = time.perf_counter()
            values[operation.output] = operation.run(*(values[name] for name in operation.inputs))
            taken.append(time.perf_counter() - start)
        work = operation_counts(operation, self._shapes).mult_adds
        kind = re.sub(r"(?<!^)(?=[A-Z])", " ", type(operation).__name__).lower()
        return StepReport(operation.output, kind, "torch", 1, work, float(np.median(taken)))

    @property
    def choices(self) -> dict[str, Any]:
        """What was chosen for each step, and on which machine, for JSON."""
        steps = [[[c.way, c.strips] for c in plan.choices] for plan in self._plans()]
        on_torch = {} if self._program_on_torch is None else {"on_torch": True}
        int8 = {} if self.quantization is None else {"int8": self.quantization.as_mapping()}
        return {**self._about(), "steps": steps, **on_torch, **int8}

    @property
    def bytes(self) -> int:
        """Bytes of memory for maps, not counting weights."""
        return sum(plan.bytes for plan in self._plans())

    def save(self, path: str | Path) -> Path:
        """Write the network, and what was chosen for this machine, to one .safetensors file."""
        checked = check_export_path(path)
        if checked.suffix != ".safetensors":
            raise WiringError(
                f"expected a file name that ends in .safetensors, got {path}: other formats cannot store what was "
                "chosen for a compiled network. Save the compact model instead."
            )
        notes = {**self.program.notes, "engine": self.choices}
        Program(self.program.inputs, self.program.operations, self.program.outputs, notes).save(checked)
        return checked

    def export(self, folder: str | Path, *, name: str = "network", target: str | None = None) -> Path:
        """Write the network as C++ source code with a C interface, for programs without Python.

        The folder gets ``network.cpp`` (the kernels and the weights, C++17 without dependencies), ``network.h``,
        ``example.cpp`` and a ``README.md`` with the command that builds the example. On this machine, with the same
        compiler and number of threads, the outputs equal those of this module's kernels bit for bit.

        Args:
            folder: where to write; it is created if necessary, and earlier exports are overwritten.
            name: the name of the file and the prefix of all C functions, so that a program can have several networks.
            target: the vector instructions of the processor that will run it: ``"avx512"``, ``"avx2"``, ``"sse"`` or
                ``"neon"``; by default those of this machine.

        Raises:
            WiringError: if an operator runs on PyTorch, or an argument is invalid.
        """
        if not self.compiled:
            raise WiringError(
                "this network runs on PyTorch, so there are no kernels to export. Compile it with another engine than "
                '"torch", on a machine with g++ or clang++.'
            )
        return export_network(self.program, self._segments, self._shapes, folder, name, target)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Raise, since weights are packed for this machine; otherwise, an empty dictionary would be saved."""
        raise WiringError(
            "a compiled network has no state_dict, since its weights are packed for this machine. Use save() and "
            "wirings.engine.load, or keep the model that it was compiled from."
        )

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Raise; see `state_dict`."""
        raise WiringError(
            "a compiled network has no state_dict. Load it into the model that this was compiled from, and compile "
            "that again with wirings.engine.compile."
        )

    def __getstate__(self) -> dict[str, Any]:
        return {
            "program": self.program,
            "engine": self.engine,
            "threads": self.threads,
            "choices": self.choices,
            "quantization": self.quantization,
            "floats": self._floats,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def extra_repr(self) -> str:
        used = "compiled kernels" if self.compiled else "PyTorch"
        return f"engine={self.engine!r}, threads={self.threads}, {len(self.program.operations)} operations, {used}"
