"""Engines: run a compact network on a CPU, sparse where that is faster, and dense where it is not.

>>> from torch import nn, zeros
>>> fast = compile(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), zeros(1, 3, 16, 16), engine="sparse")
>>> fast(zeros(2, 3, 16, 16)).shape
torch.Size([2, 8, 14, 14])
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wirings.compaction import CompactModel, compact
from wirings.compaction.compact import flat_copy
from wirings.compaction.file_format import file_errors
from wirings.compaction.program import Program
from wirings.engine.bfloat16 import restore_slower, round_weights
from wirings.engine.build import kernels
from wirings.engine.choices import ENGINES, check_choices, check_settings
from wirings.engine.engine_model import EngineModel
from wirings.engine.memory_needs import images_that_fit, memory_errors
from wirings.engine.operations import supports
from wirings.engine.quantization import SAMPLE, Quantization, choose_layers, read_batches
from wirings.engine.report import EngineReport, StepReport
from wirings.errors import WiringError, unknown
from wirings.utils.example_input import ExampleInput

__all__ = ["ENGINES", "EngineModel", "EngineReport", "StepReport", "available", "compile", "load"]

DTYPES = ("float32", "bfloat16", "int8")
"""What layers can be computed in."""
FEW_THREADS = 8
"""The threads that a file may ask for on any machine; for more, the machine needs as many cores."""


def compile(
    model: nn.Module | Program,
    example_input: ExampleInput | None = None,
    *,
    engine: str = "auto",
    threads: int | None = None,
    dtype: str | torch.dtype = "float32",
    calibrate: Iterable[Any] | None = None,
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
        dtype: ``"int8"`` computes layers in int8, with inputs that are quantised as the network runs. Layers that lose
            too much stay in float32, which ``fast.report`` lists with the reasons. ``"bfloat16"`` rounds the weights of
            linear layers to bfloat16, and computes in float32: one token or one row of numbers at a time, reading
            weights takes most of the time. Layers that gain nothing stay in float32.
        calibrate: for int8, batches of real inputs: a loader, or a list of tensors. Convolutions with kernels of more
            than one pixel need them, for the ranges of their inputs, and losses are measured on them.

    Returns:
        A module. ``print(fast.report)`` shows where its time goes; ``fast.save(path)`` saves what was chosen.
    """
    check_settings(engine, threads)
    kind = _dtype(dtype, calibrate)
    with memory_errors():
        return _compiled(model, example_input, engine, threads, kind, calibrate)


def _compiled(
    model: nn.Module | Program,
    example_input: ExampleInput | None,
    engine: str,
    threads: int | None,
    kind: str,
    calibrate: Iterable[Any] | None,
) -> EngineModel:
    if isinstance(model, EngineModel):
        model = model.program
    if not isinstance(model, (Program, CompactModel)):
        if not isinstance(model, nn.Module):
            raise WiringError(f"compile expects a model, a compact model or a program, got {type(model).__name__}.")
        program = compact(model, example_input).program
        measured = engine == "auto" or kind == "int8"
        original, inputs = flat_copy(model, example_input) if measured else (None, None)
    else:
        program, original, inputs = model if isinstance(model, Program) else model.program, None, None
    if kind == "bfloat16":
        fast, original = _in_bfloat16(program, engine, threads), None  # the original has other weights
    else:
        fast = EngineModel(program, engine, threads, quantization=quantization_for(program, kind, calibrate, inputs))
    if engine == "auto":
        fast.use_torch_if_faster(inputs, original)
    return fast


def _in_bfloat16(program: Program, engine: str, threads: int | None) -> EngineModel:
    """A network with the weights of layers in bfloat16, except of those that are faster in float32."""
    program = program.to("cpu", torch.float32)
    shapes = program.shapes()
    rounded = round_weights(program, shapes, lambda o: supports(o, shapes))
    fast = EngineModel(rounded.program, engine, threads, floats=rounded.floats)
    if engine != "auto" or not fast.compiled:
        return fast
    kept = restore_slower(rounded, program, fast._segments)
    return fast if kept is rounded else EngineModel(kept.program, engine, threads, floats=kept.floats)


def _dtype(dtype: Any, calibrate: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise unknown("dtype", name[:60], DTYPES)
    if calibrate is not None and name != "int8":
        raise WiringError(f'calibrate is for dtype="int8", got dtype="{name}". Leave it out.')
    return name


def quantization_for(
    program: Program, dtype: str, calibrate: Iterable[Any] | None, inputs: Sequence[Tensor] | None = None
) -> Quantization | None:
    """The layers of a program that are computed in int8, and those that stay in float32; None for another dtype."""
    if dtype != "int8":
        return None
    program = program.to("cpu", torch.float32)
    shapes = program.shapes()
    sample = images_that_fit(program, shapes, [SAMPLE]) or 1
    examples = [inputs or program.example(sample)] if calibrate is None else read_batches(program, calibrate)
    return choose_layers(program, lambda o: supports(o, shapes), examples, calibrate is not None)


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
        several = (threads or torch.get_num_threads()) + 1
        for batch in (1, images_that_fit(program, program.shapes(), [several])):
            program.run(*program.example(batch or 1))
        quantization = Quantization.from_mapping(saved["int8"], program) if saved and "int8" in saved else None
    fast = EngineModel(program, engine or "auto", threads, saved, quantization)
    if fast.engine == "auto":
        fast.use_torch_if_faster()  # unless that was saved on such a machine
    return fast


def available() -> bool:
    """Whether the compiled kernels can be used on this machine. Builds them if necessary."""
    return kernels() is not None
