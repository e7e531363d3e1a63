"""Engines: a compact network on a CPU, sparse where that is faster and dense where it is not.

>>> from torch import nn, zeros
>>> fast = compile(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), zeros(1, 3, 16, 16), engine="sparse")
>>> fast(zeros(2, 3, 16, 16)).shape
torch.Size([2, 8, 14, 14])
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from wirings.compaction import CompactModel, compact
from wirings.compaction.file_format import file_errors
from wirings.compaction.program import Program
from wirings.engine.build import kernels
from wirings.engine.module import ENGINES, EngineModel, check_settings
from wirings.engine.report import EngineReport, StepReport
from wirings.errors import WiringError

__all__ = ["ENGINES", "EngineModel", "EngineReport", "StepReport", "available", "compile", "load"]

FEW_THREADS = 8
"""Threads that a file may ask for on any machine; more only where there are as many cores."""


def compile(
    model: nn.Module | Program,
    example_input: Tensor | Sequence[Tensor] | None = None,
    *,
    engine: str = "auto",
    threads: int | None = None,
) -> EngineModel:
    """Compile a network for this machine's CPU, for inputs of one size and any number of images.

    Args:
        model: a compact model or its program; any other model is made compact first (see `wirings.compact`).
        example_input: (batch, …), or a tuple of inputs; needed for a model that is not compact yet.
        engine: "auto" measures for every layer whether sparse or dense is faster here; "sparse" and "dense" take one
            for all; "torch" runs plain PyTorch.
        threads: how many; None: as many as PyTorch takes (`torch.get_num_threads`).

    Returns:
        A module. ``print(fast.report)`` tells where its time goes; ``fast.save(path)`` keeps what was chosen.

    Without a C++ compiler on this machine, or where it fails, a warning says so once and the network runs on PyTorch.
    """
    if isinstance(model, EngineModel):
        model = model.program
    if not isinstance(model, (Program, CompactModel)):
        if not isinstance(model, nn.Module):
            raise WiringError(f"compile takes a model, a compact model or a program, not {type(model).__name__}.")
        if example_input is None:
            raise WiringError(
                "compile needs an example input, (batch, …), to make this model compact first. Give it as the second "
                "argument, or give a compact model."
            )
        model = compact(model, example_input)
    program = model if isinstance(model, Program) else model.program
    return EngineModel(program, engine, threads)


def load(
    path: str | Path, *, engine: str | None = None, threads: int | None = None, max_bytes: float | None = None
) -> EngineModel:
    """A network that `EngineModel.save` or a compact model's ``save`` wrote, compiled for this machine.

    On the kind of machine that it was saved on, with as many threads, what was chosen there is taken; else it is
    measured again. ``engine`` and ``threads`` are as in `compile`; None: as they were saved, unless this machine has
    fewer cores than a file asks for threads. ``max_bytes`` is as in `wirings.load_compact`, and so is what a damaged
    file raises.
    """
    program = Program.load(path, max_bytes)
    check_settings(engine or "auto", threads)  # the caller's mistakes are not the file's
    with file_errors(path):
        saved = program.notes.get("engine")
        if saved is not None:
            if not isinstance(saved, dict) or set(saved) != {"engine", "threads", "processor", "steps"}:
                raise WiringError("expected an engine, its threads, its processor and its steps")
            check_settings(saved["engine"], saved["threads"])
            engine = engine or saved["engine"]
            if threads is None and saved["threads"] <= max(FEW_THREADS, os.cpu_count() or 1):
                threads = saved["threads"]
        return EngineModel(program, engine or "auto", threads, saved)


def available() -> bool:
    """Whether the compiled kernels can be used here; builds them if that was not done yet."""
    return kernels() is not None
