"""A network compiled for this machine, as a module."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wirings.compaction import check_outputs
from wirings.compaction import check_path
from wirings.compaction.operations import Conv, Linear, Operation
from wirings.compaction.program import Program, check_batch
from wirings.engine.build import kernels, processor
from wirings.engine.measure import timed, tune
from wirings.engine.pack import Choice
from wirings.engine.plan import Plan
from wirings.engine.report import EngineReport, StepReport
from wirings.engine.support import runs
from wirings.errors import WiringError, unknown

ENGINES = ("auto", "sparse", "dense", "torch")
MISTAKE = 1e-3
"""A difference from PyTorch's outputs, as a share of the largest, that rounding cannot explain."""
MOST_THREADS = 1024
"""More than any machine has cores; each takes memory of its own."""
LOOKS = 31
"""Runs that a report is made of."""


@dataclass(eq=False)
class Part:
    """A run of operations, by the kernels or by PyTorch."""

    operations: list[Operation]
    inputs: list[str]
    outputs: list[str]
    plan: Plan | None = None
    """For one image at a time, on all threads."""
    apart: Plan | None = None
    """For many images, each on one thread."""

    def run(self, values: dict[str, Tensor], threads: int) -> None:
        """Add what it gives to the tensors by name."""
        if self.plan is None:
            with torch.no_grad():
                for operation in self.operations:
                    values[operation.output] = operation.run(*(values[name] for name in operation.inputs))
            return
        taken = [self._fitting(values[name], shape) for name, shape in self.plan.program.inputs.items()]
        batch = taken[0].shape[0]
        if any(len(x) != batch for x in taken):
            raise WiringError("tensors with different numbers of images meet in this network; the kernels need one.")
        if batch == 1 or self.apart is None:
            values.update(zip(self.outputs, self.plan.run(taken), strict=True))
            return
        many = batch - batch % threads
        given = [self.apart.run([x[:many] for x in taken])] if many else []
        if many < batch or not many:
            given.append(self.plan.run([x[many:] for x in taken]))
        results = given[0] if len(given) == 1 else [torch.cat(both) for both in zip(*given, strict=True)]
        values.update(zip(self.outputs, results, strict=True))

    @staticmethod
    def _fitting(x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A tensor as the kernels read it, which do not look at its size: PyTorch's operators may have made it."""
        if x.shape[1:] != shape or x.dtype != torch.float32:
            raise WiringError(
                f"a part of this compiled network expects float32 (batch, {', '.join(map(str, shape))}), but got "
                f"{x.dtype} {tuple(x.shape)}. Compile it for this number of images."
            )
        return x.contiguous()


class EngineModel(nn.Module):
    """A network compiled for this machine. Takes and gives what the network does, (batch, …), in float32 on the CPU.

    Made by `wirings.engine.compile` and `wirings.engine.load`.
    """

    def __init__(
        self, program: Program, engine: str = "auto", threads: int | None = None, choices: dict[str, Any] | None = None
    ) -> None:
        super().__init__()
        check_settings(engine, threads)
        self.program = program.to(device="cpu", dtype=torch.float32)
        self.engine, self.threads = engine, threads or torch.get_num_threads()
        library = None if engine == "torch" else kernels()
        self.compiled = library is not None
        """Whether the compiled kernels are used; else it runs on PyTorch."""
        self._shapes, self._like = self.program.shapes(), self.program.zeros(0)
        self._parts = self._make_parts(library)
        self._report: EngineReport | None = None
        if library is not None:
            self._choose(choices)
            self._verify()

    # ---- made once --------------------------------------------------------------------------------------------------

    def _make_parts(self, library: ctypes.CDLL | None) -> list[Part]:
        program = self.program
        pieces = list(runs(program, self._shapes)) if library is not None else [(False, program.operations)]
        if not any(native for native, _ in pieces):
            pieces = [(False, program.operations)]
        parts = []
        for number, (native, operations) in enumerate(pieces):
            made = {o.output for o in operations}
            later = {name for _, rest in pieces[number + 1 :] for o in rest for name in o.inputs} | set(program.outputs)
            taken = list(dict.fromkeys(n for o in operations for n in o.inputs if n not in made))
            given = [o.output for o in operations if o.output in later]
            part = Part(operations, taken, given)
            if native and library is not None and given:
                own = Program({name: self._shapes[name] for name in taken}, operations, tuple(given))
                plan = Plan(library, own, self._shapes, self.threads)
                if not plan.too_large:
                    part.plan = plan
                    if self.threads > 1:
                        apart = Plan(library, own, self._shapes, self.threads, together=False, like=plan)
                        part.apart = None if apart.too_large else apart
            parts.append(part)
        return parts

    def _plans(self) -> list[Plan]:
        return [plan for part in self._parts for plan in (part.plan, part.apart) if plan is not None]

    def _choose(self, saved: dict[str, Any] | None) -> None:
        """Take what was chosen on such a machine before, measure, or do as the user says."""
        plans = self._plans()
        if saved is not None and saved == {**saved, **self._about()} and _fits(saved["steps"], plans):
            for plan, choices in zip(plans, saved["steps"], strict=True):
                plan.choose([Choice(way, strips) for way, strips in choices])
                plan.settle()
            return
        if self.engine != "auto":
            for plan in plans:
                plan.choose([plan.usual(step, self.engine) for step in plan.steps])
                plan.settle()
            return
        for plan in plans:
            images = 1 if plan.together else self.threads
            tune(plan, [torch.zeros(images, *shape) for shape in plan.program.inputs.values()])

    def _verify(self) -> None:
        """Raise unless the kernels give what PyTorch does: for an image a thread, and for one on all threads.

        This is to find mistakes. Sums in another order round differently, which a small output may show.
        """
        images = self.program.example(self.threads + 1)
        found = self(*images)
        found = found if isinstance(found, tuple) else (found,)
        check_outputs(self.program, found, images, self.program.run(*images), "the compiled network", MISTAKE)

    def _about(self) -> dict[str, Any]:
        return {"engine": self.engine, "threads": self.threads, "processor": processor()}

    # ---- running ----------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Tensor) -> Any:
        self._check(inputs)
        values: dict[str, Tensor] = dict(zip(self.program.inputs, inputs, strict=True))
        for part in self._parts:
            part.run(values, self.threads)
        results = tuple(values[name] for name in self.program.outputs)
        return results[0] if self.program.notes.get("one_output", len(results) == 1) else results

    def _check(self, inputs: Sequence[Tensor]) -> None:
        shapes = self.program.inputs
        if len(inputs) != len(shapes):
            raise WiringError(f"this network takes {len(shapes)} inputs, but {len(inputs)} came.")
        for (name, shape), like, x in zip(shapes.items(), self._like, inputs, strict=True):
            if x.shape[1:] != shape or x.dim() != len(shape) + 1:
                raise WiringError(
                    f"{name} is (batch, {', '.join(map(str, shape))}) in this compiled network, but {tuple(x.shape)} "
                    "came. Compile it with an example of this size."
                )
            if x.dtype != like.dtype or not x.is_cpu:
                kind = str(like.dtype).removeprefix("torch.")
                raise WiringError(
                    f"a compiled network takes {kind} on the CPU, but {name} is {x.dtype} on {x.device}; convert it."
                )
            check_batch(self.program.notes, x.shape[0])
        if len({len(x) for x in inputs}) > 1:  # the kernels count on it
            counts = ", ".join(f"{len(x)} of {name}" for name, x in zip(shapes, inputs, strict=True))
            raise WiringError(f"a compiled network takes as many images of one input as of another, but {counts} came.")

    # ---- what can be told, and kept ---------------------------------------------------------------------------------

    @property
    def report(self) -> EngineReport:
        """Each step's way and time for one image; measured when it is first asked for."""
        if self._report is None:
            steps: list[StepReport] = []
            values = dict(zip(self.program.inputs, self.program.example(1), strict=True))
            for part in self._parts:
                steps += self._look(part, values)
                part.run(values, self.threads)
            self._report = EngineReport(self.engine if self.compiled else "torch", self.threads, steps)
        return self._report

    def _look(self, part: Part, values: dict[str, Tensor]) -> list[StepReport]:
        if part.plan is None:
            return [self._look_at(o, values) for o in part.operations]
        inputs = [values[name].contiguous() for name in part.inputs]
        taken = np.array([timed(part.plan, inputs) for _ in range(LOOKS)])
        rows = []
        for step, choice, seconds in zip(part.plan.steps, part.plan.choices, np.median(taken, 0), strict=True):
            way = choice.way if step.pending is not None else ""
            kind = step.kind.name.lower().replace("_", " ")
            rows.append(StepReport(step.name, kind, way, choice.strips, step.work, float(seconds)))
        return rows

    @torch.no_grad()
    def _look_at(self, operation: Operation, values: dict[str, Tensor]) -> StepReport:
        taken = []
        for _ in range(LOOKS):
            start = time.perf_counter()
            values[operation.output] = operation.run(*(values[name] for name in operation.inputs))
            taken.append(time.perf_counter() - start)
        work = 0
        if isinstance(operation, (Conv, Linear)):
            pixels = values[operation.output][0, 0].numel()
            work = int(operation.weight.count_nonzero()) * pixels
        kind = type(operation).__name__.lower()
        return StepReport(operation.output, kind, "torch", 1, work, float(np.median(taken)))

    @property
    def choices(self) -> dict[str, Any]:
        """What was chosen, and where, as JSON can hold it."""
        steps = [[[c.way, c.strips] for c in plan.choices] for plan in self._plans()]
        return {**self._about(), "steps": steps}

    @property
    def bytes(self) -> int:
        """Of memory for maps; weights are not counted."""
        return sum(plan.bytes for plan in self._plans())

    def save(self, path: str | Path) -> Path:
        """Write the network, and what was chosen for it here, to one .safetensors file."""
        place = check_path(path)
        if place.suffix != ".safetensors":
            raise WiringError(
                f"{path} must end in .safetensors: other files cannot hold what was chosen for a compiled network. For "
                "those save the compact model."
            )
        notes = {**self.program.notes, "engine": self.choices}
        Program(self.program.inputs, self.program.operations, self.program.outputs, notes).save(place)
        return place

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """There is none: the weights are compiled in. Without this a network would be saved as an empty dictionary."""
        raise WiringError(
            "a compiled network has no state_dict: its weights are packed for this machine. Write it with save(), and "
            "read it with wirings.engine.load; or keep the model that it was compiled from."
        )

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """See `state_dict`."""
        raise WiringError(
            "a compiled network takes no state_dict: load it into the model that this was compiled from, and compile "
            "that again with wirings.engine.compile."
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"program": self.program, "engine": self.engine, "threads": self.threads, "choices": self.choices}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def extra_repr(self) -> str:
        done = "compiled kernels" if self.compiled else "PyTorch"
        return f"engine={self.engine!r}, threads={self.threads}, {len(self.program.operations)} operations, by {done}"


def check_settings(engine: Any, threads: Any) -> None:
    """Raise unless they are an engine, and a number of threads or None."""
    if engine not in ENGINES:
        raise unknown("engine", str(engine)[:60], ENGINES)
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise WiringError(f"threads must be a whole number, at least 1, not {threads!r}.")
    if threads is not None and threads > MOST_THREADS:
        raise WiringError(f"threads must be at most {MOST_THREADS:,}, not {threads:,}.")


def _fits(saved: Any, plans: list[Plan]) -> bool:
    """Whether what a file says is among what would be measured here; the kernels trust it and look at nothing."""
    if [len(choices) for choices in saved] != [len(plan.steps) for plan in plans]:
        return False
    return all(
        Choice(*choice) in plan.choices_of(step)
        for choices, plan in zip(saved, plans, strict=True)
        for choice, step in zip(choices, plan.steps, strict=True)
    )
