"""Engines: run a compact network on a CPU, sparse where that is faster, and dense where it is not.

>>> from torch import nn, zeros
>>> fast = compile(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), zeros(1, 3, 16, 16), engine="sparse")
>>> fast(zeros(2, 3, 16, 16)).shape
torch.Size([2, 8, 14, 14])
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from wirings.compaction import CompactModel, compact
from wirings.compaction.compact import flat_copy
from wirings.compaction.file_format import file_errors
from wirings.compaction.program import Program
from wirings.engine.build import kernels
from wirings.engine.engine_model import ENGINES, EngineModel, check_choices, check_settings
from wirings.engine.report import EngineReport, StepReport
from wirings.errors import WiringError
from wirings.utils.example_input import ExampleInput

__all__ = ["ENGINES", "EngineModel", "EngineReport", "StepReport", "available", "compile", "load"]

FEW_THREADS = 8
"""The threads that a file may ask for on any machine; for more, the machine needs as many cores."""


def compile(
    model: nn.Module | Program,
    example_input: ExampleInput | None = None,
    *,
    engine: str = "auto",
    threads: int | None = None,
) -> EngineModel:
    """Compile a network for this machine's CPU, for images of one size and any batch size.

    Without a working C++ compiler on this machine, the network runs on PyTorch, and a warning says so once.

    Args:
        model: a compact model or its program. Any other model is compacted first (see `wirings.compact`).
        example_input: for a model that is not compact, in any form that `wirings.compact` takes.
        engine: ``"auto"`` measures for every layer whether sparse or dense is faster on this machine, and uses
            PyTorch if that is faster for a batch like the example (a batch of one, for a compact model);
            ``"sparse"`` and ``"dense"`` use one for all layers; ``"torch"`` runs plain PyTorch.
        threads: the number of threads; by default, as many as PyTorch uses (`torch.get_num_threads`).

    Returns:
        A module. ``print(fast.report)`` shows where its time goes; ``fast.save(path)`` saves what was chosen.
    """
    if isinstance(model, EngineModel):
        model = model.program
    if not isinstance(model, (Program, CompactModel)):
        if not isinstance(model, nn.Module):
            raise WiringError(f"compile expects a model, a compact model or a program, got {type(model).__name__}.")
        fast = EngineModel(compact(model, example_input).program, engine, threads)
        if engine == "auto":
            original, inputs = flat_copy(model, example_input)
            fast.use_torch_if_faster(inputs, original)
        return fast
    fast = EngineModel(model if isinstance(model, Program) else model.program, engine, threads)
    if engine == "auto":
        fast.use_torch_if_faster()
    return fast


def load(
    path: str | Path, *, engine: str | None = None, threads: int | None = None, max_bytes: float | None = None
) -> EngineModel:
    """Load a network that `EngineModel.save` or `CompactModel.save` wrote, and compile it for this machine.

    On a machine like the one that it was saved on, with as many threads, the saved choices are used. Otherwise, they
    are measured again.

    Args:
        path: a ``.safetensors`` file.
        engine: as for `compile`; by default, as saved.
        threads: as for `compile`; by default, as saved, unless this machine has fewer cores.
        max_bytes: as for `wirings.load_compact`.

    Raises:
        WiringError: if the file is damaged or invalid, or if the network cannot be compiled for this machine.
    """
    program = Program.load(path, max_bytes)
    check_settings("auto" if engine is None else engine, threads)  # before errors are attributed to the file
    with file_errors(path):
        saved = program.notes.get("engine")
        if saved is not None:
            check_choices(saved)
            engine = engine or saved["engine"]
            if threads is None and saved["threads"] <= max(FEW_THREADS, os.cpu_count() or 1):
                threads = saved["threads"]
        # Run the program as compiling does, on the same batch sizes: what fails after that is not the file's fault.
        program = program.to("cpu", torch.float32)
        for batch in (1, (threads or torch.get_num_threads()) + 1):
            program.run(*program.example(batch))
    fast = EngineModel(program, engine or "auto", threads, saved)
    if fast.engine == "auto":
        fast.use_torch_if_faster()  # unless that was saved on such a machine
    return fast


def available() -> bool:
    """Whether the compiled kernels can be used on this machine. Builds them if necessary."""
    return kernels() is not None
